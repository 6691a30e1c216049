"""What a worker publishes: records of its committed steps, and notices. Frozen data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.train.vote import Outcome


@dataclass(frozen=True)
class Notice:
    """All are published in one list, in order."""


@dataclass(frozen=True)
class StepRecord(Notice):
    """A committed step: its metrics, and what only the coordinator uses.

    `remark`: what the driver shows of a loss spike or a skipped step. `gpu_memory`: of global rank 0, in bytes by kind.
    `frozen_s`: for how long its host ran nothing.
    """

    metrics: StepMetrics
    outcome: Outcome
    checkpoint_interval_s: float
    remark: str = ""
    frozen_s: float = 0.0
    gpu_memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StorageAwaited(Notice):
    """A worker waits for storage."""

    text: str


@dataclass(frozen=True)
class Validated(Notice):
    """What held-out sequences gave after `step`, by metric."""

    step: int
    measured: Mapping[str, float]
    took_s: float


@dataclass(frozen=True)
class NotRepeatable(Notice):
    """Why the bits of `step` would not come again."""

    step: int
    what: str


@dataclass(frozen=True)
class LeftOut(Notice):
    """Sequences that the order leaves out from `step` on; of many only the first are named."""

    step: int
    num_batches: int
    sequences: Sequence[int]


@dataclass(frozen=True)
class Copied(Notice):
    """Figures of copies in peers' memory that are complete."""

    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Compiled(Notice):
    """What a worker compiled in a step after step 0, and how many kernels before its first step or in step 0."""

    step: int
    worker: str
    names: Sequence[str]
    num_before: int
