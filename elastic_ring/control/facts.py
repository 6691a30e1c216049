"""What is known of a run besides the core's events: each fact is frozen data and one line of the journal.

Views of a run (totals, recoveries) are folds over facts: only `saw(fact)` changes them. A coordinator that starts anew
shows its folds the facts of the journal, and they stand where those of its predecessor did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from elastic_ring.errors import JournalDamaged


@dataclass(frozen=True)
class Fact:
    note: ClassVar[str]
    """What its lines in the journal are called."""

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
    """`environment`: what the bits of a result depend on besides its inputs (`runtime.worker.env_fingerprint`)."""

    worker: str
    pid: int
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class StartStage(Fact, note="stage"):
    """`who` (driver, coordinator, a worker, run) did `what` on the way to the first step, from `unix_s` on."""

    who: str
    what: str
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
    """`closes`: this is the end of the recovery that was open."""

    recovery: Mapping[str, Any]
    closes: bool


@dataclass(frozen=True)
class CheckpointWritten(Fact, note="checkpoint"):
    checkpoint: Mapping[str, Any]
    unix_s: float


@dataclass(frozen=True)
class CheckpointMissed(Fact, note="no checkpoint"):
    """A checkpoint of `step` was due, and does not count."""

    step: int
    why: str


@dataclass(frozen=True)
class LossSpiked(Fact, note="spike"):
    """`verdict`: skip, log or back."""

    step: int
    verdict: str
    told: str


@dataclass(frozen=True)
class StepSkipped(Fact, note="skipped"):
    """A step whose gradient or loss is not finite changed nothing."""

    step: int
    told: str


@dataclass(frozen=True)
class BatchesLeftOut(Fact, note="left out"):
    """The order leaves out batches from `step` on."""

    step: int
    num_batches: int
    sequences: list[int]
    told: str


@dataclass(frozen=True)
class RankStraggled(Fact, note="straggler"):
    """`ratio`: how much longer than its peers the rank works for a sequence."""

    worker: str
    node: str
    rank: int
    ratio: float
    step: int
    told: str


@dataclass(frozen=True)
class DataAwaited(Fact, note="data wait"):
    """`share`: of the time of the last steps that global rank 0 waited for its data."""

    share: float
    step: int
    told: str


@dataclass(frozen=True)
class MemoryNearlyFull(Fact, note="tight"):
    """`what`: "device" or "host"; `worker` is empty for a host."""

    what: str
    share: float
    worker: str
    step: int
    told: str


@dataclass(frozen=True)
class WrongResult(Fact, note="wrong"):
    """Ranks that must agree do not. `workers`: who computed wrongly and is replaced."""

    told: str
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
    """The reliefs of the memory ladder that are in force from `step` on."""

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
    """At the end of a run: what was forecast (`ElasticRingTrainer.planned`) and what was seen (`monitor.seen`)."""

    forecast: Mapping[str, float]
    seen: Mapping[str, float]


_KINDS = {kind.note: kind for kind in Fact.__subclasses__()}


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
