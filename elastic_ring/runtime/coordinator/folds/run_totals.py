"""Sums a run's facts up: counters, checkpoints, generations and reliefs, for its status, metrics and summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from elastic_ring.control.facts import (
    CheckpointMissed,
    CheckpointWritten,
    CompiledLate,
    CorpusLengthened,
    Fact,
    GenerationBegan,
    LossSpiked,
    MemoryNearlyFull,
    RankStraggled,
    ReliefsChanged,
    ResumedFrom,
    WrongResult,
)
from elastic_ring.monitor.metrics import CheckpointEvent, ResumePoint


class RunTotals:
    """A fold: only `saw` changes it."""

    def __init__(self) -> None:
        self.num_spikes = self.num_stragglers = self.num_tight = self.num_wrong = 0
        self.num_compiled_late = 0  # after step 0, by all workers
        self.checkpoints: list[CheckpointEvent] = []
        self.checkpoint_unix_s: float | None = None
        self.num_checkpoints_missed, self.last_checkpoint_missed = 0, ""  # how many, and why the last one
        self.generations: list[GenerationBegan] = []
        self.reliefs: list[ReliefsChanged] = []  # each change of the memory ladder
        self.num_versions = 0  # later manifests of the corpus that are on record
        self.resumed_from: Sequence[ResumePoint] = []

    def saw(self, fact: Fact) -> None:
        match fact:
            case LossSpiked():
                self.num_spikes += 1
            case RankStraggled():
                self.num_stragglers += 1
            case MemoryNearlyFull():
                self.num_tight += 1
            case WrongResult():
                self.num_wrong += 1
            case CompiledLate():
                self.num_compiled_late += len(fact.compiled)
            case CheckpointWritten():
                self.checkpoints.append(cast("CheckpointEvent", fact.checkpoint))
                self.checkpoint_unix_s = fact.unix_s
            case CheckpointMissed():
                self.num_checkpoints_missed += 1
                self.last_checkpoint_missed = fact.why
            case GenerationBegan():
                self.generations.append(fact)
            case ReliefsChanged():
                self.reliefs.append(fact)
            case CorpusLengthened():
                self.num_versions += 1
            case ResumedFrom():
                self.resumed_from = cast("Sequence[ResumePoint]", fact.checkpoints)
