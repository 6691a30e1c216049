"""Messages between the workers and the coordinator beside the core's events: committed steps, notices, checkpoints.

Frozen data only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.state.checkpoints.manifest import Described
from elastic_ring.state.header import ShardMeta
from elastic_ring.state.storage.backend import StoredFile
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
    """Metrics of the held-out sequences after `step`, by name, as the members of a build, (term, generation), have
    them."""

    step: int
    measured: Mapping[str, float]
    took_s: float
    membership_id: tuple[int, int]


@dataclass(frozen=True)
class NotRepeatable(Notice):
    """Why the bits of `step` would not come again."""

    step: int
    reason: str


@dataclass(frozen=True)
class LeftOut(Notice):
    """Sequences that the order leaves out from `step` on; of many only the first are named."""

    step: int
    num_batches: int
    sequences: Sequence[int]


@dataclass(frozen=True)
class Copied(Notice):
    """An exchange of copies in peers' memory that is complete. `skipped`: how many snapshots were left out so far."""

    step: int
    bytes: int
    num_holders: int
    blocked_s: float
    total_s: float
    skipped: int


@dataclass(frozen=True)
class Compiled(Notice):
    """Kernels that a worker compiled in a step after step 0, and how many before its first step or in step 0."""

    step: int
    worker: str
    names: Sequence[str]
    num_before: int


@dataclass(frozen=True)
class CheckpointPart:
    """A rank's part of the checkpoint of `step`, whose `file` is written, or an `error` instead.

    Global rank 0's part also has the `tensors` and `meta` of the checkpoint, and a remark on the `interval` where the
    run has chosen another. `is_repeated`: sent again to a new coordinator, as the one before may not have committed it.
    """

    step: int
    membership_id: tuple[int, int]
    lineage: int
    folder: str
    mesh: Mesh
    dp_rank: int
    cp_rank: int
    file: StoredFile | None = None
    blocked_s: float = 0.0
    total_s: float = 0.0
    tensors: Mapping[str, Described] | None = None
    meta: ShardMeta | None = None
    interval: str = ""
    error: str = ""
    is_repeated: bool = False


@dataclass(frozen=True)
class CheckpointLeftOut:
    """No rank saves the checkpoint of `step`, which was due."""

    step: int
    membership_id: tuple[int, int]
    reason: str
