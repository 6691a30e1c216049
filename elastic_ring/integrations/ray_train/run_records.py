"""The records of a run in Ray Train: an actor beside the driver writes them, as the elastic ring's coordinator does.

`metrics.jsonl` has a line a step, `attempts.jsonl` one for each worker group with its PIDs. Steps of a worker group
since the last checkpoint are repeated by the next one, and both are on record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from elastic_ring.control.facts import GenerationBegan
from elastic_ring.errors import ElasticRingError
from elastic_ring.monitor.goodput import Goodput
from elastic_ring.monitor.journal import Journal, read
from elastic_ring.monitor.metrics import RECOVERY_KEYS, SUMMARY_NAME, Recovery, StepMetrics, Summary, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.monitor.report import recovery_line
from elastic_ring.runtime.coordinator.run_files import samples_digest
from elastic_ring.state.checkpoints.zero3 import age_key

log = logging.getLogger(__name__)

ATTEMPTS_NAME = "attempts.jsonl"
TERM = 1


class Attempt(TypedDict):
    """A worker group: where it begins, and why."""

    step: int
    mesh: dict[str, int]
    reason: str
    resumed_from: str


class Records:
    """Runs as an actor. All times are of its own clock, between the calls that reach it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self._lines = list(read(folder / ATTEMPTS_NAME)) if (folder / ATTEMPTS_NAME).exists() else []
        self._attempts = Journal(folder / ATTEMPTS_NAME)
        self._attempts.open()
        self._metrics = MetricsLog(folder).open()
        self._goodput = Goodput(time.monotonic())
        self._last_s: float | None = None  # of the last recorded step
        self._noticed: tuple[float, str] | None = None
        self._pending: tuple[Recovery, float, float] | None = None  # with the times of its begin and of the last step
        self._error: ElasticRingError | None = None
        self._begun_at: int | None = None  # the step of this submission's first worker group
        self._workers: dict[int, dict[str, int | str]] = {}  # of the worker group that is about to begin

    def join(self, rank: int, pid: int, host: str) -> None:
        """A worker of the next group is ready."""
        self._workers[rank] = {"rank": rank, "pid": pid, "host": host}

    def begin(self, attempt: Attempt, stored: Sequence[str]) -> int:
        """A worker group is about to compute its first step; returns its generation, above those of `stored` folders:
        these records may be younger."""
        now, attempts, step = time.monotonic(), self._of("attempt"), attempt["step"]
        generation = 1 + max([0, *(line["generation"] for line in attempts), *(age_key(name)[0] for name in stored)])
        self._goodput.undone(self._metrics.table.rows.total("step_s", step))
        undone = self._metrics.go_back(step, (TERM, generation)) if attempts else 0
        if gap := self._metrics.begin_at(step):
            log.error("%s", gap)
        if self._begun_at is not None:  # else the run is submitted again, which is no recovery
            noticed_s, cause = self._noticed or (now, "Ray Train changed the number of workers")
            last_s = self._last_s if self._last_s is not None else noticed_s
            recovery = Recovery(
                step=step,
                faults=[],
                cause=cause,
                action="Ray Train started a new worker group",
                detect_s=max(0.0, noticed_s - last_s),
                close_s=now - max(noticed_s, last_s),
                heal_s=0.0,
                steps_undone=undone,
                steps_rerun=undone,
                source="checkpoint",
                survivor_pids_kept=False,
                exact=False,
            )
            self._pending = recovery, now, last_s
        mesh = attempt["mesh"]
        workers = [self._workers[rank] for rank in range(mesh["dp"] * mesh["cp"])]
        self._workers.clear()  # of a larger group that never began
        self._note("attempt", generation=generation, workers=workers, **attempt)
        log.info("generation %d: dp=%d x cp=%d from step %d", generation, mesh["dp"], mesh["cp"], step)
        self._noticed, self._begun_at = None, step if self._begun_at is None else self._begun_at
        return generation

    def step(self, metrics: StepMetrics, remark: str = "") -> None:
        """A step that every rank has applied or skipped."""
        now = time.monotonic()
        if remark:
            log.warning("%s", remark)
            self._note("skipped" if metrics.skipped else "spike", step=metrics.step, told=remark)
        self._metrics.record(metrics)
        self._goodput.committed(metrics.step_s)
        self._last_s = now
        if self._pending is not None:
            recovery, begun_s, last_s = self._pending
            recovery = replace(recovery, rerun_s=now - begun_s, total_s=now - last_s)
            self._pending = None
            self._note("recovery", **{key: getattr(recovery, key) for key in RECOVERY_KEYS})

    def failed(self, cause: str) -> None:
        """Ray Train noticed that a worker failed."""
        if self._noticed is None:
            self._noticed = (time.monotonic(), cause)
            self._note("failed", cause=cause)

    def gave_up(self, error: ElasticRingError) -> None:
        """The worker group has ended the run, which no other could carry on either."""
        self._error = error
        self._note("gave up", error=type(error).__name__, told=error.message)

    def error(self) -> ElasticRingError | None:
        """Why the run was given up, if it was."""
        return self._error

    def news(self) -> tuple[int | None, StepMetrics | None, list[str]]:
        """Where this submission has begun, the newest step that counts, and a line for each recovery."""
        lines = [recovery_line(Recovery.from_json(line)) for line in self._of("recovery")]
        return self._begun_at, self._metrics.newest.step, lines

    def checkpoint(self, step: int, path: str) -> None:
        """A checkpoint is in the storage."""
        self._note("checkpoint", step=step, path=path)

    def finish(self, weights_sha256: str, peak_gpu_bytes: int = 0) -> dict[str, Any]:
        """Write the summary and return it. `peak_gpu_bytes`: of the last worker group."""
        attempts, table = self._of("attempt"), self._metrics.table
        losses = table.losses_hex()
        recoveries, num_failures = self._of("recovery"), len(self._of("failed"))
        begun = next((int(steps[0]) for steps, _ in table.rows.standing()), 0)
        missing = bool(table.rows.missing(begun, self._metrics.last_step + 1))  # none are before another's
        summary = Summary(
            steps=len(losses),
            losses=losses,
            weights_sha256=weights_sha256,
            samples_sha256=None if missing else samples_digest(table.lines()),
            goodput=self._goodput.ratio(time.monotonic()),
            exact=not missing and not recoveries and all(line["mesh"] == attempts[0]["mesh"] for line in attempts),
            generations=[GenerationBegan(TERM, line["generation"], line["mesh"], line["reason"]) for line in attempts],
            recoveries=[Recovery.from_json(line) for line in recoveries],
            skipped_steps=int(table.rows.total("skipped")),
            lost_workers={"worker group failed": num_failures} if num_failures else {},
            resumed_from=[
                {"path": line["resumed_from"], "step": line["step"]} for line in attempts if line["resumed_from"]
            ],
            checkpoints=[{"path": line["path"], "step": line["step"]} for line in self._of("checkpoint")],
            peak_gpu_bytes=peak_gpu_bytes,
            planned_steps=len(losses),
        ).to_json()
        write_json(self._folder / SUMMARY_NAME, summary, durable=True)
        self._metrics.close()
        self._attempts.close()
        return summary

    def _of(self, note: str) -> list[Any]:
        return [line for line in self._lines if line["note"] == note]

    def _note(self, note: str, **facts: object) -> None:
        line = {"note": note, **facts, "unix_s": round(time.time(), 3)}
        self._lines.append(line)
        self._attempts.append(line)
