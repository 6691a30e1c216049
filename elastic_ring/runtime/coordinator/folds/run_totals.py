"""The inputs of a run's status, metrics and summary besides its recoveries: sums of its facts, its committed steps in
order, and one live reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from elastic_ring.control.facts import (
    CheckpointMissed,
    CheckpointWritten,
    CompiledLate,
    Fact,
    GenerationBegan,
    ReliefsChanged,
    ResumedFrom,
)
from elastic_ring.monitor.metrics import CheckpointEvent, ResumePoint
from elastic_ring.runtime.agent.messages import NodeHealth, WorkerReading
from elastic_ring.runtime.notices import Copied, StepRecord


@dataclass(frozen=True)
class Live:
    """Measurements that no journal holds, as the agents and the newest steps last reported them.

    `now`: of the coordinator's clock. `workers`: activity and memory by worker. `pressure`: of the node that waits most
    for memory. `health`: network counters and GPUs by a node's address. `gpu_memory`: of global rank 0, in bytes by
    kind. `work_s`: of each rank for one sequence. `copied`: the newest complete copies in peers' memory.
    """

    now: float = 0.0
    driver_silent_s: float = 0.0
    checkpoint_failing_s: float = 0.0
    workers: Mapping[str, WorkerReading] = field(default_factory=dict)
    pressure: Mapping[str, float] = field(default_factory=dict)
    health: Mapping[str, NodeHealth] = field(default_factory=dict)
    gpu_memory: Mapping[str, int] = field(default_factory=dict)
    peak_gpu_bytes: int = 0
    work_s: Sequence[float] = ()
    copied: Copied | None = None


class RunTotals:
    """Folds facts: counts each kind, and keeps those that status and summary list."""

    def __init__(self) -> None:
        self.num: Counter[type[Fact]] = Counter()
        self.num_compiled_late = 0  # after step 0, by all workers
        self.checkpoints: list[CheckpointEvent] = []
        self.checkpoint_unix_s: float | None = None
        self.last_checkpoint_missed = ""  # why
        self.generations: list[GenerationBegan] = []
        self.reliefs: list[ReliefsChanged] = []  # each change of the memory ladder
        self.resumed_from: Sequence[ResumePoint] = []

    @property
    def newest_checkpoint_step(self) -> int:
        return self.checkpoints[-1]["step"] if self.checkpoints else -1

    def saw(self, fact: Fact) -> None:
        self.num[type(fact)] += 1
        match fact:
            case CompiledLate():
                self.num_compiled_late += len(fact.compiled)
            case CheckpointWritten():
                self.checkpoints.append(cast("CheckpointEvent", fact.checkpoint))
                self.checkpoint_unix_s = fact.unix_s
            case CheckpointMissed():
                self.last_checkpoint_missed = fact.why
            case GenerationBegan():
                self.generations.append(fact)
            case ReliefsChanged():
                self.reliefs.append(fact)
            case ResumedFrom():
                self.resumed_from = cast("Sequence[ResumePoint]", fact.checkpoints)


class PublishedSteps:
    """Puts the records of committed steps in order: calls of one worker may overtake each other, and a record of a step
    that was given up may come late."""

    def __init__(self) -> None:
        self._waiting: dict[int, StepRecord] = {}
        self._builds: list[tuple[int, tuple[int, int]]] = []

    def begun(self, step: int, membership_id: tuple[int, int]) -> bool:
        """The members `membership_id`, (term, generation), were ordered to begin at `step`. Returns whether that is
        new."""
        if self._builds and self._builds[-1] == (step, membership_id):
            return False
        self._builds.append((step, membership_id))
        return True

    def went_back(self) -> None:
        self._waiting.clear()

    def take(self, steps: Iterable[StepRecord], last_step: int) -> Iterator[StepRecord]:
        """The records, of `steps` and of earlier calls, that follow `last_step` without a gap."""
        self._waiting.update({record.metrics.step: record for record in steps if self._counts(record)})
        self._waiting = {step: record for step, record in self._waiting.items() if step > last_step}
        while (record := self._waiting.pop(last_step + 1, None)) is not None and self._counts(record):
            last_step += 1
            yield record

    def _counts(self, record: StepRecord) -> bool:
        return self.counts(record.metrics.step, record.outcome.vote.membership_id)

    def counts(self, step: int, membership_id: tuple[int, int]) -> bool:
        """Whether these members are those that do `step`: the last that began at it or before."""
        ids = [own_id for first_step, own_id in self._builds if first_step <= step]
        return bool(ids) and membership_id == ids[-1]
