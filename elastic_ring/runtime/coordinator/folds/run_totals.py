"""What a run's facts add up to: counters, checkpoints, generations and reliefs, for its status, metrics and summary;
and where the seconds of its start went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    StartStage,
    WrongResult,
)


class RunTotals:
    """A fold: only `saw` changes it."""

    def __init__(self) -> None:
        self.num_spikes = self.num_stragglers = self.num_tight = self.num_wrong = 0
        self.num_compiled_late = 0  # after step 0, by all workers
        self.checkpoints: list[Mapping[str, Any]] = []
        self.checkpoint_unix_s: float | None = None
        self.num_checkpoints_missed, self.last_checkpoint_missed = 0, ""  # how many, and why the last one
        self.generations: list[dict[str, Any]] = []
        self.reliefs: list[Mapping[str, Any]] = []  # each change of the memory ladder
        self.num_versions = 0  # later manifests of the corpus that are on record
        self.resumed_from: Sequence[Mapping[str, Any]] = []

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
                self.checkpoints.append(fact.checkpoint)
                self.checkpoint_unix_s = fact.unix_s
            case CheckpointMissed():
                self.num_checkpoints_missed += 1
                self.last_checkpoint_missed = fact.why
            case GenerationBegan():
                self.generations.append(dict(vars(fact)))
            case ReliefsChanged():
                self.reliefs.append(dict(vars(fact)))
            case CorpusLengthened():
                self.num_versions += 1
            case ResumedFrom():
                self.resumed_from = fact.checkpoints


_ALONE = ("driver", "coordinator", "run")
"""Those beside workers; `run` is all of them together."""
_WIDTHS = (8, 8, 12)
_LEAST_S = 0.05


class StartTimes:
    """A fold: only `saw` changes it. Times are of the hosts' clocks."""

    def __init__(self) -> None:
        self.stages: list[StartStage] = []

    def saw(self, fact: Fact) -> None:
        if isinstance(fact, StartStage):
            self.stages.append(fact)

    @property
    def shown(self) -> list[StartStage]:
        """In the order of time; of the workers the one that was in its place last, which the others wait for."""
        last_s: dict[str, float] = {}
        for stage in self.stages:
            if stage.process not in _ALONE:
                last_s[stage.process] = max(last_s.get(stage.process, 0.0), stage.unix_s + stage.took_s)
        built = {stage.process for stage in self.stages if stage.stage == "wraps the model"} or set(last_s)
        slowest = max(built, key=lambda who: last_s[who], default="")
        kept = [one for one in self.stages if one.process in (*_ALONE, slowest) and one.took_s >= _LEAST_S]
        return sorted(kept, key=lambda stage: stage.unix_s)

    def lines(self) -> list[str]:
        """A table: since the command, seconds, who, what. One line where no stage is known."""
        if not self.stages:
            return ["no stage of this run's start is on record"]
        shown = self.shown
        begun = shown[0].unix_s
        rows = [("at s", "took s", "who", "what")]
        rows += [(f"{one.unix_s - begun:.1f}", f"{one.took_s:.1f}", one.process, one.stage) for one in shown]
        workers = {one.process for one in self.stages} - {one.process for one in shown}
        text = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, _WIDTHS, strict=False)), row[-1]]) for row in rows]
        return [*text, f"{len(workers)} other worker(s) beside it"] if workers else text
