"""A coordinator's constructor arguments, and what follows from them alone: options, clock, folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.options import ControlOptions
from elastic_ring.monitor.callbacks import CALLBACKS_NAME
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
        run=run.name, dp=scaling.dp, cp=scaling.cp, total_steps=run_spec.task.step.steps, spares=scaling.spares,
        min_dp=scaling.min_dp, max_dp=scaling.max_dp, report_s=timeouts.report_s, build_s=timeouts.build_s,
        start_s=timeouts.start_s, start_max_s=timeouts.start_max_s, hello_s=timeouts.hello_s,
        boundary_s=timeouts.boundary_s,
        finalize_s=timeouts.finalize_s, grow_delay_s=run.grow_delay_s, crash_loop_limit=run.crash_loop_limit,
        user_error_limit=run.user_error_limit,
    )  # fmt: skip


def set_aside(folder: Path) -> None:
    """Move the records of an earlier attempt out of the way; they are kept."""
    number = 1 + len(list(folder.glob("attempt-*")))
    old = folder / f"attempt-{number:03d}"
    old.mkdir()
    for name in (
        "journal.jsonl", "metrics.jsonl", "status.json", "summary.json", "loss.png", "weights.safetensors",
        CALLBACKS_NAME,
    ):  # fmt: skip
        if (folder / name).exists():
            (folder / name).rename(old / name)
