"""Facts of a run besides the events that the core decides on: frozen data, each one line of the journal.

A fact enters by `advance` like an event, but changes no state and leads to no command. Views of a run (totals,
recoveries) are folds over facts: a coordinator that starts anew shows its folds the facts of the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from elastic_ring.errors import JournalDamaged


@dataclass(frozen=True)
class Fact:
    note: ClassVar[str]
    """The kind of its lines in the journal."""
    cause: ClassVar[str] = "fact"

    def __init_subclass__(cls, note: str) -> None:
        cls.note = note


@dataclass(frozen=True)
class FaultFired(Fact, note="fault"):
    """A planned fault hit `worker`, which may be the coordinator."""

    index: int
    worker: str
    now: float


@dataclass(frozen=True)
class WorkerStarted(Fact, note="worker"):
    """`environment`: versions and hardware on which the bits of a result depend (`runtime.worker.env_fingerprint`)."""

    worker: str
    pid: int
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class StartStage(Fact, note="stage"):
    """`process` (driver, coordinator, run or a worker's name) spent `took_s` from `unix_s` on with the work `stage` on
    its way to the first step."""

    process: str
    stage: str
    unix_s: float
    took_s: float


@dataclass(frozen=True)
class FirstEnvironment(Fact, note="environment"):
    """The environment of the first member, which later ones are compared with."""

    environment: Mapping[str, Any]


@dataclass(frozen=True)
class PlacesKnown(Fact, note="places"):
    """The GPU of each rank of a generation."""

    places: list[str]


@dataclass(frozen=True)
class BitsUnequal(Fact, note="unequal"):
    """From here on the run promises the same samples, not the same bits."""

    why: str


@dataclass(frozen=True)
class RingClosed(Fact, note="resumed"):
    """The ring has closed again; the recovery ends with the first step that commits."""

    recovery: Mapping[str, Any]


@dataclass(frozen=True)
class RecoveryEnded(Fact, note="recovery"):
    """`closes`: it ends the open recovery."""

    recovery: Mapping[str, Any]
    closes: bool


@dataclass(frozen=True)
class CheckpointWritten(Fact, note="checkpoint"):
    checkpoint: Mapping[str, Any]
    unix_s: float


@dataclass(frozen=True)
class CheckpointMissed(Fact, note="no checkpoint"):
    """A checkpoint of `step` was due and could not be written."""

    step: int
    why: str


@dataclass(frozen=True)
class LossSpiked(Fact, note="spike"):
    """`verdict`: skip, log or back."""

    step: int
    verdict: str
    text: str


@dataclass(frozen=True)
class StepSkipped(Fact, note="skipped"):
    """A step whose gradient or loss is not finite changed nothing."""

    step: int
    text: str


@dataclass(frozen=True)
class BatchesLeftOut(Fact, note="left out"):
    """The order leaves out batches from `step` on."""

    step: int
    num_batches: int
    sequences: list[int]
    text: str


@dataclass(frozen=True)
class RankStraggled(Fact, note="straggler"):
    """`ratio`: how much longer than its peers the rank works for a sequence."""

    worker: str
    node: str
    rank: int
    ratio: float
    step: int
    text: str


@dataclass(frozen=True)
class DataAwaited(Fact, note="data wait"):
    """Global rank 0 waited for data during `share` of the time of the last steps."""

    share: float
    step: int
    text: str


@dataclass(frozen=True)
class MemoryNearlyFull(Fact, note="tight"):
    """`place`: "device" or "host"; `worker` is empty for a host."""

    place: str
    share: float
    worker: str
    step: int
    text: str


@dataclass(frozen=True)
class WrongResult(Fact, note="wrong"):
    """Ranks that must agree do not. `workers`: those that computed wrongly and are replaced."""

    text: str
    workers: list[str]


@dataclass(frozen=True)
class CompiledLate(Fact, note="compiled"):
    """A worker compiled `compiled` in a step, and `before` kernels before it."""

    step: int
    worker: str
    compiled: list[str]
    before: int


@dataclass(frozen=True)
class GenerationBegan(Fact, note="generation"):
    term: int
    generation: int
    mesh: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class ReliefsChanged(Fact, note="memory"):
    """The reliefs of the memory ladder that hold from `step` on."""

    step: int
    generation: int
    shortages: int
    reliefs: list[str]
    why: str


@dataclass(frozen=True)
class CorpusLengthened(Fact, note="corpus"):
    """From `first_step` on the run uses the corpus of the manifest `uri`."""

    first_step: int
    uri: str
    digest: str


@dataclass(frozen=True)
class ResumedFrom(Fact, note="resumed from"):
    """The checkpoints at which this lineage's attempts began, oldest first, each with its step and path."""

    checkpoints: list[Mapping[str, Any]]


@dataclass(frozen=True)
class ForecastSeen(Fact, note="forecast"):
    """The forecast (`ElasticRingTrainer.planned`) beside what a whole run measured (`monitor.goodput.seen_of`)."""

    forecast: Mapping[str, float]
    seen: Mapping[str, float]


_KINDS = {kind.note: kind for kind in Fact.__subclasses__()}
_KEYS = {"text": "told", "process": "who", "stage": "what", "place": "what"}
"""Field -> its key on disk, where they differ."""


def line_of(fact: Fact) -> dict[str, Any]:
    """The journal's line. `fact_of` is the inverse."""
    return {"note": fact.note, **{_KEYS.get(name, name): value for name, value in vars(fact).items()}}


def fact_of(line: Mapping[str, Any]) -> Fact | None:
    """The fact of a journal's line; None for a line of another kind. Raises: JournalDamaged if a key is missing."""
    kind = _KINDS.get(str(line.get("note")))
    if kind is None:
        return None
    keys = {part.name: _KEYS.get(part.name, part.name) for part in fields(kind)}
    if missing := [key for key in keys.values() if key not in line]:
        raise JournalDamaged(f"a note {line['note']!r} of the journal lacks {', '.join(missing)}")
    fact: Fact = kind(**{name: line[key] for name, key in keys.items()})
    return fact
