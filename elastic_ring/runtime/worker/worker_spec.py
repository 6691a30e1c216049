"""The constructor argument of a worker: its name, node, task and settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.train.task import TrainingTask


@dataclass(frozen=True)
class WorkerSpec:
    """Constructor argument of `Worker`."""

    worker: str
    node: str
    address: str
    stamp_path: str
    task: TrainingTask
    scaling: ScalingConfig
    run: RunConfig
