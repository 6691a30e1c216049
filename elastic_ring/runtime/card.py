"""What a worker is born with: its name, its place in the cluster, its task and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.train.task import TrainingTask


@dataclass(frozen=True)
class WorkerCard:
    """What a worker is born with."""

    worker: str
    node: str
    address: str
    stamp_path: str
    task: TrainingTask
    scaling: ScalingConfig
    run: RunConfig
