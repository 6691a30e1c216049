"""What is known of a run besides the core's events: each fact is frozen data and one line of the journal.

Views of a run (totals, recoveries) are folds over facts: only `saw(fact)` changes them. A coordinator that starts anew
shows its folds the facts of the journal, and they stand where those of its predecessor did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_args

from elastic_ring.errors import JournalDamaged


@dataclass(frozen=True)
class FaultFired:
    """A planned fault hit `worker`, which may be the coordinator."""

    note: ClassVar = "fault"
    index: int
    worker: str
    now: float


@dataclass(frozen=True)
class WorkerStarted:
    """`environment`: what the bits of a result depend on besides its inputs (`runtime.worker.env_fingerprint`)."""

    note: ClassVar = "worker"
    worker: str
    pid: int
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class StartStage:
    """`who` (driver, coordinator, a worker, run) did `what` on the way to the first step, from `unix_s` on."""

    note: ClassVar = "stage"
    who: str
    what: str
    unix_s: float
    took_s: float


@dataclass(frozen=True)
class FirstEnvironment:
    """The environment of the first member, which later ones are compared with."""

    note: ClassVar = "environment"
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class PlacesKnown:
    """The GPU of each rank of a generation."""

    note: ClassVar = "places"
    places: list[str]


@dataclass(frozen=True)
class BitsUnequal:
    """From here on the run promises the same samples, not the same bits."""

    note: ClassVar = "unequal"
    why: str


@dataclass(frozen=True)
class RingClosed:
    """The ring has closed again; the recovery ends with the first step that commits."""

    note: ClassVar = "resumed"
    recovery: Mapping[str, Any]


@dataclass(frozen=True)
class RecoveryEnded:
    """`closes`: this is the end of the recovery that was open."""

    note: ClassVar = "recovery"
    recovery: Mapping[str, Any]
    closes: bool


@dataclass(frozen=True)
class CheckpointWritten:
    note: ClassVar = "checkpoint"
    checkpoint: Mapping[str, Any]
    unix_s: float


@dataclass(frozen=True)
class CheckpointMissed:
    """A checkpoint of `step` was due, and does not count."""

    note: ClassVar = "no checkpoint"
    step: int
    why: str


@dataclass(frozen=True)
class LossSpiked:
    """`verdict`: skip, log or back."""

    note: ClassVar = "spike"
    step: int
    verdict: str
    told: str


@dataclass(frozen=True)
class StepSkipped:
    """A step whose gradient or loss is not finite changed nothing."""

    note: ClassVar = "skipped"
    step: int
    told: str


@dataclass(frozen=True)
class BatchesLeftOut:
    """The order leaves out batches from `step` on."""

    note: ClassVar = "left out"
    step: int
    num_batches: int
    sequences: list[int]
    told: str


@dataclass(frozen=True)
class RankStraggled:
    """`ratio`: how much longer than its peers the rank works for a sequence."""

    note: ClassVar = "straggler"
    worker: str
    node: str
    rank: int
    ratio: float
    step: int
    told: str


@dataclass(frozen=True)
class MemoryNearlyFull:
    """`what`: "device" or "host"; `worker` is empty for a host."""

    note: ClassVar = "tight"
    what: str
    share: float
    worker: str
    step: int
    told: str


@dataclass(frozen=True)
class WrongResult:
    """Ranks that must agree do not. `workers`: who computed wrongly and is replaced."""

    note: ClassVar = "wrong"
    told: str
    workers: list[str]


@dataclass(frozen=True)
class CompiledLate:
    """A worker compiled `compiled` in a step, and `before` kernels before it."""

    note: ClassVar = "compiled"
    step: int
    worker: str
    compiled: list[str]
    before: int


@dataclass(frozen=True)
class GenerationBegan:
    note: ClassVar = "generation"
    term: int
    generation: int
    mesh: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class ReliefsChanged:
    """The reliefs of the memory ladder that are in force from `step` on."""

    note: ClassVar = "memory"
    step: int
    generation: int
    shortages: int
    reliefs: list[str]
    why: str


@dataclass(frozen=True)
class CorpusLengthened:
    """From `first_step` on the run uses the corpus of the manifest `uri`."""

    note: ClassVar = "corpus"
    first_step: int
    uri: str
    digest: str


@dataclass(frozen=True)
class ResumedFrom:
    """The checkpoints at which this lineage's attempts began, oldest first, each with its step and path."""

    note: ClassVar = "resumed from"
    checkpoints: list[Mapping[str, Any]]


@dataclass(frozen=True)
class ForecastSeen:
    """At the end of a run: what was forecast (`ElasticRingTrainer.planned`) and what was seen (`monitor.seen`)."""

    note: ClassVar = "forecast"
    forecast: Mapping[str, float]
    seen: Mapping[str, float]


Fact = (
    FaultFired
    | WorkerStarted
    | StartStage
    | FirstEnvironment
    | PlacesKnown
    | BitsUnequal
    | RingClosed
    | RecoveryEnded
    | CheckpointWritten
    | CheckpointMissed
    | LossSpiked
    | StepSkipped
    | BatchesLeftOut
    | RankStraggled
    | MemoryNearlyFull
    | WrongResult
    | CompiledLate
    | GenerationBegan
    | ReliefsChanged
    | CorpusLengthened
    | ResumedFrom
    | ForecastSeen
)

_KINDS: dict[str, type] = {kind.note: kind for kind in get_args(Fact)}


def line_of(fact: Fact) -> dict[str, Any]:
    """The journal's line. `fact_of` is the inverse."""
    return {"note": fact.note, **vars(fact)}


def fact_of(line: Mapping[str, Any]) -> Fact | None:
    """The fact of a journal's line; None for a line of another kind. Raises: JournalDamaged if it lacks a part."""
    kind = _KINDS.get(str(line.get("note")))
    if kind is None:
        return None
    lacking = [part.name for part in fields(kind) if part.default is MISSING and part.name not in line]
    if lacking:
        raise JournalDamaged(f"a note {line['note']!r} of the journal lacks {', '.join(lacking)}")
    fact: Fact = kind(**{part.name: line[part.name] for part in fields(kind)})
    return fact
