"""A coordinator's constructor arguments, and what follows from them alone: options, clock, folder."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.decisions.memory_ladder import reliefs_on
from elastic_ring.control.options import ControlOptions
from elastic_ring.monitor.callbacks import CALLBACKS_NAME, kept_places
from elastic_ring.monitor.metrics import METRICS_NAME, SUMMARY_NAME, write_json
from elastic_ring.runtime.coordinator.resume import Resume
from elastic_ring.runtime.identity import Identity
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_FOLDER, WEIGHTS_INDEX
from elastic_ring.train.task import TrainingTask


@dataclass(frozen=True)
class RunSpec:
    """A coordinator's constructor arguments. `attempt` tells a restart of the same run from a new submission."""

    run: RunConfig
    scaling: ScalingConfig
    task: TrainingTask
    attempt: str
    digest: str
    submitted_unix_s: float
    fingerprint: str  # of the corpus as the driver reads it
    identity: Identity = field(default_factory=Identity)
    """What may not change when a run is resumed."""
    resume: Resume = field(default_factory=Resume)
    start_dp: int | None = None
    """With how many rings it begins where there was no room for `scaling.dp` in time."""


class Clock:
    """Seconds: monotonic within a process, comparable across processes."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


def control_options(run_spec: RunSpec) -> ControlOptions:
    """The core's options from the user's settings."""
    scaling, run, timeouts = run_spec.scaling, run_spec.run, run_spec.run.timeouts
    return ControlOptions(
        run=run.name, dp=run_spec.start_dp or scaling.dp, cp=scaling.cp, total_steps=run_spec.task.step.steps,
        spares=scaling.spares, min_dp=scaling.min_dp, max_dp=scaling.most_rings, report_s=timeouts.report_s,
        build_s=timeouts.build_s, start_s=timeouts.start_s, start_max_s=timeouts.start_max_s,
        hello_s=timeouts.hello_s, boundary_s=timeouts.boundary_s, finalize_s=timeouts.finalize_s,
        restore_s=timeouts.restore_s, grow_delay_s=run.grow_delay_s,
        grow_interval_s=run.grow_interval_s, grow_cost_s=run.grow_cost_s, crash_loop_limit=run.crash_loop_limit,
        user_error_limit=run.user_error_limit, rollback_limit=run.rollback_limit,
        takes_checkpoints=run.checkpoint_config.is_on,
        copies=run.copies, copy_every_steps=run.copy_every_steps,
        memory_reliefs=reliefs_on(scaling.device, run_spec.task.step.sequences_per_pass),
        memory_relax_steps=run.memory_relax_steps,
    )  # fmt: skip


def is_finished(run: RunConfig, folder: Path, steps: int) -> bool:
    """Whether the run's folder, or a copy of it, has the summary of all `steps`. A submission that asks for a
    beginning begins again."""
    path = folder / SUMMARY_NAME
    return run.resume == "auto" and path.exists() and int(json.loads(path.read_text())["steps"]) >= steps


def checkpoint_facts(run_spec: RunSpec) -> dict[str, Any]:
    """What a manifest says of the run that wrote it, for its readers."""
    return {
        "name": run_spec.run.name, "settings": dict(run_spec.identity.what),
        "places": dict(run_spec.identity.places), "total_steps": run_spec.task.step.steps,
        "versions": versions(run_spec.scaling.device),
    }  # fmt: skip


def set_aside(folder: Path, *, keep_metrics: bool) -> None:
    """Move the records of an earlier attempt out of the way; they are kept. A resumed run goes on with its metrics."""
    number = 1 + len(list(folder.glob("attempt-*")))
    old = folder / f"attempt-{number:03d}"
    old.mkdir()
    if keep_metrics:  # they never leave their place: a copy that a power cut left half done would lose steps
        for name in (METRICS_NAME, CALLBACKS_NAME):
            if (folder / name).exists():
                shutil.copyfile(folder / name, old / name)
        _keep_places(old / CALLBACKS_NAME, folder / CALLBACKS_NAME)
    for name in (
        "journal.jsonl", METRICS_NAME, "status.json", "summary.json", "loss.png", WEIGHTS_INDEX, WEIGHTS,
        WEIGHTS_FOLDER, CALLBACKS_NAME,
    ):  # fmt: skip
        if (folder / name).exists() and not (keep_metrics and name in (METRICS_NAME, CALLBACKS_NAME)):
            (folder / name).rename(old / name)


def _keep_places(old: Path, new: Path) -> None:
    if old.exists():
        write_json(new, kept_places(json.loads(old.read_text(encoding="utf-8"))))
