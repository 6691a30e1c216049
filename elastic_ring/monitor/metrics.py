"""The numbers of a run: one line per committed step, and the summary at the end.

Only final results are written: a step's line appears once the next step is under way. Plots and texts belong to `plot`
and `report`; sending metrics to a store must not enter this module.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Required, TypedDict

from elastic_ring.control.facts import GenerationBegan, ReliefsChanged
from elastic_ring.errors import RecordDamaged
from elastic_ring.files import replace_file
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.json_files import json_bytes, read_json

log = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
STATUS_NAME = "status.json"
JOURNAL_NAME = "journal.jsonl"
CONFIG_NAME = "config.json"
WENT_BACK, AGAIN, BEGINS, OF_RUN = "went back", "again", "begins", "run"
"""Notes in metrics.jsonl: the run begins at this step again; the step ran again with the same result; the lines before
this step are missing; whose lines these are, by the run's identity, and a new attempt counts its builds anew."""


class MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl, as far as its readers use it: a step, a validation with `val_` keys, or a note."""

    step: Required[int]
    note: str
    identity: str
    build: list[int]
    loss: float | None
    loss_hex: str
    replaces_loss_hex: str
    step_s: float
    skipped: bool
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    exposed_hop_wait_s: float | None
    expert_load_max: float | None
    generation: int
    mesh: dict[str, int]
    samples: str
    val_loss: float | None
    unix_s: float


class ResumePoint(TypedDict):
    """The checkpoint at which an attempt began."""

    step: int
    path: str


class CheckpointEvent(ResumePoint, total=False):
    """A checkpoint that counts: steps, path, size, for how long training waited, and how long it took."""

    bytes: int
    blocked_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A recovery; seconds are None for phases that did not happen. The journal and status.json have all fields,
    summary.json those before `kind`.

    `kind`: the cause, one of `metrics_table.CAUSES`. `broken_off_s`: time of attempts at a step that broke off.
    `phases`: seconds and bytes of each part of building and healing. `lost`: how many members, by reason.
    """

    step: int
    faults: Sequence[str]
    cause: str
    action: str
    detect_s: float | None
    close_s: float | None
    heal_s: float | None
    rerun_s: float | None = None
    total_s: float | None = None
    steps_undone: int
    steps_rerun: int
    source: str | None
    survivor_pids_kept: bool
    exact: bool
    kind: str = ""
    broken_off_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, object]) -> Recovery:
        """The inverse of `to_json`. Raises: TypeError for a missing field or one of another type."""
        return cls(**_field_values(cls, line))

    def seconds(self, part: str) -> float:
        """Of detect, close, heal, rerun or total; 0 where it did not happen."""
        return float(getattr(self, f"{part}_s") or 0.0)

    def merge(self, later: Recovery) -> Recovery:
        """One recovery of two, where `later` began before a step had been committed after this one."""
        return replace(
            later,
            faults=[*self.faults, *later.faults],
            cause=f"{self.cause}; {later.cause}",
            kind=self.kind,
            detect_s=self.seconds("detect") + later.seconds("detect"),
            close_s=self.seconds("close") + later.seconds("close"),
            heal_s=self.seconds("heal") + later.seconds("heal"),
            broken_off_s=self.broken_off_s + later.broken_off_s,
            steps_undone=max(self.steps_undone, later.steps_undone),
            steps_rerun=max(self.steps_rerun, later.steps_rerun),
            source=min(self.source or "", later.source or ""),  # beginning before checkpoint before copy before replica
            survivor_pids_kept=self.survivor_pids_kept and later.survivor_pids_kept,
            exact=self.exact and later.exact,
            lost=dict(Counter(self.lost) + Counter(later.lost)),
        )


RECOVERY_KEYS = tuple(part.name for part in fields(Recovery))[: [p.name for p in fields(Recovery)].index("kind")]


@dataclass(frozen=True)
class Validation:
    """Metrics of the held-out sequences after `step`, by name (`val_loss`, ...); None where not finite."""

    step: int
    values: Mapping[str, float | None]

    def to_json(self) -> dict[str, float | None]:
        return {"step": self.step, **self.values}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """summary.json: its keys in their order.

    `losses`: those on record, by `float.hex`. `samples_sha256`: None where records of steps are missing. `exact`:
    whether equal bits are promised; where they are not, the file says null, as they may be equal all the same.
    `stopped`: why a callback has stopped the run, empty if none has. `planned_steps`: those of the settings.
    `validation`: the newest one. `goodput`: None where the run's coordinators had different clocks.
    """

    steps: int
    losses: list[str]
    weights_sha256: str
    samples_sha256: str | None
    goodput: float | None
    exact: bool
    mesh_changed: bool = field(init=False)
    generations: Sequence[GenerationBegan]
    recoveries: Sequence[Recovery]
    compilations_after_step_0: int = 0
    skipped_steps: int = 0
    lost_workers: Mapping[str, int] = field(default_factory=dict)
    resumed_from: Sequence[ResumePoint] = field(default_factory=list)
    checkpoints: Sequence[CheckpointEvent] = field(default_factory=list)
    memory: Sequence[ReliefsChanged] = field(default_factory=list)
    peak_gpu_bytes: int = 0
    time_s: Mapping[str, float] = field(default_factory=dict)
    identity: str = ""
    stopped: str = ""
    planned_steps: int
    validation: Validation | None = None

    def __post_init__(self) -> None:
        meshes = [generation.mesh for generation in self.generations]
        object.__setattr__(self, "mesh_changed", any(mesh != meshes[0] for mesh in meshes))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "exact": self.exact or None,
            "recoveries": [{key: getattr(recovery, key) for key in RECOVERY_KEYS} for recovery in self.recoveries],
            "time_s": {part: round(seconds, 3) for part, seconds in self.time_s.items()},
            "validation": self.validation.to_json() if self.validation else {},
        }


class StatusOfWorker(TypedDict, total=False):
    """A member or a spare in status.json, as its last news has it. `global_rank`: of a member."""

    global_rank: int
    worker: str
    node: str
    pid: int
    clock: Mapping[str, float]
    peak_rss_bytes: int


class StatusFile(TypedDict, total=False):
    """status.json, as its readers use it; a damaged or older one may lack keys."""

    run: str
    phase: str
    term: int
    generation: int
    mesh: Mapping[str, int]
    step: int
    total_steps: int
    validation: Mapping[str, float | None]
    resumed_from: Sequence[ResumePoint]
    members: Sequence[StatusOfWorker]
    spares: Sequence[StatusOfWorker]
    covered: Mapping[str, str]
    recoveries: Sequence[Mapping[str, object]]
    updated_unix_s: float
    journal_lines: int
    updated_at: float
    ended: bool
    checkpoint_step: int
    checkpoint_intervals_missed: int
    data_wait_share: float
    lost_s: Mapping[str, float]
    error: str
    end: Mapping[str, object]
    peak_gpu_bytes: int
    story: Sequence[Sequence[object]]


class SummaryFile(TypedDict, total=False):
    """summary.json, as its readers use it: `Summary.to_json`. A damaged or older one may lack keys.

    `generations` have term, generation and mesh.
    """

    steps: int
    weights_sha256: str
    goodput: float | None
    exact: bool | None
    mesh_changed: bool
    generations: Sequence[StatusFile]
    recoveries: Sequence[Mapping[str, object]]
    resumed_from: Sequence[ResumePoint]
    peak_gpu_bytes: int
    time_s: Mapping[str, float]


@dataclass(frozen=True)
class StepMetrics:
    """One committed step. `loss` is the mean over its tokens; `step_s` is measured on global rank 0, and so is
    `data_wait_s`, how long the step waited for its data.

    K/V exchange of that rank: `hop_bytes` is what it sent, `far_hop_bytes` of it to other nodes; `exposed_hop_wait_s`
    is the time in which nothing was left to compute (on CPUs the host's, on GPUs the kernel stream's);
    `hop_latency_mean_s` and `hop_latency_p99_s` cover the step's exchanges, from ready to start until arrived, on GPUs
    only. GPUs measure these three times in one step of ten (`attention.comm.ledger.EVENT_STEPS`); None where nothing
    was measured.

    A step with a non-finite gradient or without a target is `skipped`; its loss may be nan. `samples` is the digest of
    the consumed data, `val_loss` the loss of the held-out sequences where validated, `committed_monotonic_s` the commit
    time on the monotonic clock of the publishing rank's host. `expert_load_max`: how many times its fair share of a
    ring's tokens the fullest expert of a layer got; None without experts. `expert_parts`: passes of layers whose tokens
    came to experts in parts, since one rank would have had too many; of the ring of global rank 0.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    tokens_per_s: float
    step_s: float
    skipped: bool
    generation: int
    mesh: Mesh
    num_members: int
    hop_bytes: int = 0
    far_hop_bytes: int = 0
    exposed_hop_wait_s: float | None = None
    hop_latency_mean_s: float | None = None
    hop_latency_p99_s: float | None = None
    samples: str = ""
    val_loss: float | None = None
    committed_monotonic_s: float = 0.0
    data_wait_s: float = 0.0
    expert_load_max: float | None = None
    expert_parts: int = 0

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: a non-finite float becomes null; `loss_hex` keeps the exact loss."""
        flat = asdict(self)
        flat["loss_hex"] = float(self.loss).hex()
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in flat.items()
        }

    @classmethod
    def from_json(cls, line: Mapping[str, object]) -> StepMetrics:
        """The inverse of `to_json`, with the loss bit for bit. Raises: KeyError, TypeError, ValueError."""
        values = _field_values(cls, line)
        return cls(**{**values, "loss": float.fromhex(str(line["loss_hex"])), "mesh": Mesh(**values["mesh"])})


_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, NoneType),
    "Mesh": (dict,),
    "Sequence[str]": (list, tuple),
    "Mapping[str, float]": (dict,),
    "Mapping[str, int]": (dict,),
}


def _field_values(kind: type[StepMetrics | Recovery], line: Mapping[str, object]) -> dict[str, Any]:
    """The fields of `kind` as JSON has them, null for a float as nan. Raises: TypeError for another type."""
    values: dict[str, Any] = {}
    for part in fields(kind):
        default = part.default if part.default_factory is MISSING else part.default_factory()
        value = line.get(part.name, default)
        value = math.nan if value is None and part.type == "float" else value
        if not isinstance(value, _TYPES[str(part.type)]):
            raise TypeError(f"{part.name} is {value!r}, no {part.type}")
        values[part.name] = value
    return values


def read_metrics(directory: str | os.PathLike[str]) -> list[MetricsLine]:
    """One mapping per committed step, in order, with `val_loss` and metrics where validated: all of them in memory.
    `metrics_log.StepTable` reads some. Raises: JournalDamaged."""
    from elastic_ring.monitor.metrics_log import StepTable  # with numpy, for which no command's --help waits

    with StepTable.load(Path(directory) / METRICS_NAME) as table:
        return list(table.lines())


WATCHED_S, WATCH_AGAIN_S = 4.0, 0.2
"""How long a status is watched for a change, which a live coordinator makes every second, and between two looks."""


def changed_status(before: Mapping[str, Any], look: Callable[[], Path]) -> dict[str, Any] | None:
    """The status that a live coordinator writes after `before`, in the folder that `look` brings up to date; None if
    none comes."""
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        time.sleep(WATCH_AGAIN_S)
        now = read_status(look())
        if now is not None and now.get("updated_unix_s") != before.get("updated_unix_s"):
            return now
    return None


def read_status(folder: Path) -> dict[str, Any] | None:
    """The content of a run's status.json; None where there is none.

    A damaged file counts as missing: it is written without fsync, so a power loss may leave it empty, and it holds
    nothing that a run needs to resume.
    """
    try:
        status = read_json(folder / STATUS_NAME) or None
        if status and not (
            isinstance(status.get("updated_unix_s", 0.0), (int, float)) and isinstance(status.get("end") or {}, dict)
        ):
            raise RecordDamaged(f"{folder / STATUS_NAME} is no status of a run")
        return status
    except RecordDamaged as error:
        log.warning("%s; it counts as missing", error)
        return None


def cut_at_its_end(journal: str | os.PathLike[str], num_lines: int, status: Mapping[str, object] | None) -> str:
    """Why a journal that ends after `num_lines` lines lacks some, by its run's status; empty where it lacks none that
    the status knows of: a chain does not show where its end was."""
    num_known = (status or {}).get("journal_lines")
    if not isinstance(num_known, int) or num_known <= num_lines:
        return ""
    return f"{os.fspath(journal)} ends after line {num_lines}, and {num_known} had been written: it was cut"


def overwrite_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write into a JSON file's existing blocks, for a full disk that has none for a new file.

    A reader may see a half-written file. Raises: OSError where the file is missing or the content needs more room.
    """
    text = json_bytes(content)
    with Path(path).open("r+b", buffering=0) as file:
        if file.write(text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.truncate()


def storage_error(folder: Path, error: OSError) -> str:
    """The message for a run folder that cannot be written to."""
    cause = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "nothing can be written there"
    return f"run folder {str(folder)!r}: {cause} ({error}). Free space there, or give another folder"


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace a JSON file by rename, so that a reader sees either the old or the new content.

    With `durable` it is on disk when this returns. Raises: OSError.
    """
    replace_file(path, json_bytes(content), durable=durable)
