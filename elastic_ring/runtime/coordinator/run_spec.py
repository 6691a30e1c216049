"""A coordinator's constructor arguments, and what follows from them alone: options, clock, folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.decisions.memory_ladder import reliefs_on
from elastic_ring.control.options import ControlOptions
from elastic_ring.errors import RecordDamaged
from elastic_ring.monitor.callbacks import CALLBACKS_NAME, kept_places
from elastic_ring.monitor.goodput import Stage
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME, write_json
from elastic_ring.runtime.coordinator.resume import Resume
from elastic_ring.runtime.identity import Identity
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_FOLDER, WEIGHTS_INDEX
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

RECORDS = (
    JOURNAL_NAME,
    METRICS_NAME,
    STATUS_NAME,
    SUMMARY_NAME,
    "loss.png",
    WEIGHTS_INDEX,
    WEIGHTS,
    WEIGHTS_FOLDER,
    CALLBACKS_NAME,
)
"""What one attempt writes into the run's folder."""


@dataclass(frozen=True)
class RunSpec:
    """A coordinator's constructor arguments. `attempt` distinguishes a restart of the same submission from a new
    one."""

    run: RunConfig
    scaling: ScalingConfig
    task: TrainingTask
    attempt: str
    digest: str
    fingerprint: str  # of the corpus as the driver reads it
    identity: Identity = field(default_factory=Identity)
    """What may not change when a run is resumed."""
    resume: Resume = field(default_factory=Resume)
    start_dp: int | None = None
    """With how many rings it begins where there was no room for `scaling.dp` in time."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """What was forecast of it, as `ElasticRingTrainer.planned`."""
    stages: tuple[Stage, ...] = ()
    """The driver's stages, up to this submission."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code, by part."""
    follows: str = ""
    """The attempt whose journal the driver saw in the run's folder; empty for none."""


class TimedLine(TypedDict, total=False):
    """A line of the journal: the writer's time, or what the note of a term says of its clock."""

    now: float
    boot: str
    offset_s: float


MOST_HOLDS = 1000
"""Waits whose moment is known; what began before the oldest of them is not asked for any more."""


class Clock:
    """Seconds on the host's monotonic clock, from an origin that the coordinators of a run share: setting the wall
    clock changes no duration. Waits of `hold`, in which nobody could act, do not count; in `whole` they do."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, offset_s: float | None = None) -> None:
        self._monotonic = monotonic
        self._offset_s = time.time() - monotonic() if offset_s is None else offset_s
        self._holds: list[tuple[float, float]] = []  # (when by this clock, how long), the newest MOST_HOLDS
        self._held_s = 0.0
        self.is_continuous = True
        """Whether all coordinators of this run had the same monotonic clock."""

    def __call__(self) -> float:
        return self.whole() - self._held_s

    def whole(self) -> float:
        return self._offset_s + self._monotonic()

    def whole_of(self, at: float) -> float:
        """The moment `at` of this clock in seconds of `whole`."""
        return at + self._held_s - sum(for_s for since, for_s in self._holds if since >= at)

    def hold(self, for_s: float) -> None:
        """The last seconds do not count: who waits by this clock has not been able to act in them."""
        self._holds = [*self._holds[-MOST_HOLDS + 1 :], (self() - for_s, for_s)]
        self._held_s += for_s

    def origin(self) -> TimedLine:
        """What a note of the journal says of this clock."""
        return {"boot": boot_id(), "offset_s": self._offset_s}

    def go_on(self, lines: Sequence[TimedLine]) -> None:
        """As the clocks of the earlier coordinators that wrote `lines`; on another boot or host from their last line,
        or from the wall clock, whichever is later."""
        origins = [line for line in lines if "offset_s" in line]
        self._holds.clear()
        self._held_s = 0.0
        self.is_continuous = all(line["boot"] == boot_id() for line in origins)
        if origins and origins[-1]["boot"] == boot_id():
            self._offset_s = origins[-1]["offset_s"]
        elif last := [line["now"] for line in lines if "now" in line][-1:]:
            self._offset_s += max(0.0, last[0] - self.whole())


def boot_id() -> str:
    """The boot of this host, whose processes have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()}"


def control_options(run_spec: RunSpec) -> ControlOptions:
    scaling, step = run_spec.scaling, run_spec.task.step
    if run_spec.start_dp is not None:
        scaling = replace(scaling, dp=run_spec.start_dp, max_dp=scaling.most_rings)
    reliefs = reliefs_on(scaling.device, step.micro_batch)
    # Planned faults are planned for a mesh with its spares. A spare's warm-up on a member's GPU would run beside its
    # first steps.
    waits_for_spares = bool(run_spec.run.faults) or scaling.device == "cuda"
    return ControlOptions(run_spec.run, scaling, step.steps, reliefs, waits_for_spares=waits_for_spares)


def is_finished(run: RunConfig, folder: Path, steps: int, identity: str) -> bool:
    """Whether the run's folder, or a copy of it, has a summary of all `steps`; of the planned steps where a callback
    stopped the run. False if `resume` is not auto, and for a summary that is damaged or another run's."""
    try:
        summary = summary_of(folder, identity)
        num_steps = summary.get("planned_steps" if summary.get("stopped") else "steps", -1)
        return run.resume == "auto" and int(num_steps) >= steps
    except RecordDamaged:
        return False


def summary_of(folder: Path, identity: str) -> dict[str, Any]:
    """The summary of the run with this identity's digest; empty where there is none. Raises RecordDamaged, also for
    another run's."""
    path = folder / SUMMARY_NAME
    summary = read_json(path) or {}
    if summary.get("identity") and summary["identity"] != identity:
        raise RecordDamaged(f"{path} is another run's", path=str(path))
    if summary and not isinstance(summary.get("steps"), int):
        raise RecordDamaged(f"{path} is no summary", path=str(path))
    return summary


def checkpoint_facts(run_spec: RunSpec) -> dict[str, object]:
    """Facts of the run for the readers of a checkpoint's manifest."""
    return {
        "name": run_spec.run.name,
        "settings": dict(run_spec.identity.entries),
        "places": dict(run_spec.identity.places),
        "total_steps": run_spec.task.step.steps,
        "sequences_per_pass": run_spec.task.step.micro_batch,
        "versions": versions(run_spec.scaling.device),
    }


def set_aside(folder: Path, *, keep_metrics: bool) -> None:
    """Move the records of an earlier attempt out of the way; they are kept. A resumed run goes on with its metrics."""
    matches = [re.fullmatch(r"attempt-(\d+)", path.name) for path in folder.iterdir()]
    numbers = [int(match[1]) for match in matches if match]
    old = folder / f"attempt-{1 + max(numbers, default=0):03d}"
    old.mkdir()
    if keep_metrics:  # they never leave their place: a copy that a power cut left half done would lose steps
        for name in (METRICS_NAME, CALLBACKS_NAME):
            if (folder / name).exists():
                shutil.copyfile(folder / name, old / name)
        try:
            if (record := read_json(old / CALLBACKS_NAME)) is not None:
                was_finished = (folder / SUMMARY_NAME).exists()
                write_json(folder / CALLBACKS_NAME, kept_places(record, was_finished=was_finished))
        except (RecordDamaged, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: %s; the driver that runs callbacks sets it aside", old / CALLBACKS_NAME, error)
    for name in RECORDS:
        if (folder / name).exists() and not (keep_metrics and name in (METRICS_NAME, CALLBACKS_NAME)):
            (folder / name).rename(old / name)
