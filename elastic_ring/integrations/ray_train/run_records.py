"""The records of a run in Ray Train: an actor beside the driver writes them, as the elastic ring's coordinator does.

`metrics.jsonl` has a line a step, `attempts.jsonl` one for each worker group with its PIDs. Worker groups come and go;
what one has done since the last checkpoint is done again by the next, and both are on record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ring.control.facts import GenerationBegan
from elastic_ring.errors import ElasticRingError
from elastic_ring.monitor.goodput import Goodput
from elastic_ring.monitor.journal import Journal, read
from elastic_ring.monitor.metrics import (
    SUMMARY_NAME,
    MetricsLog,
    Recovery,
    StepMetrics,
    Summary,
    missing_steps,
    read_metrics,
    write_json,
)
from elastic_ring.runtime.coordinator.run_files import samples_digest

log = logging.getLogger(__name__)

ATTEMPTS_NAME = "attempts.jsonl"
TERM = 1


class Records:
    """Runs as an actor. All times are of its own clock, between the calls that reach it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = list(read(folder / ATTEMPTS_NAME)) if (folder / ATTEMPTS_NAME).exists() else []
        self._attempts = Journal(folder / ATTEMPTS_NAME)
        self._attempts.open()
        self._metrics = MetricsLog(folder).open()
        self._goodput = Goodput(time.monotonic(), self._metrics.step_times_s())
        self._last_s: float | None = None  # of the last recorded step
        self._noticed: tuple[float, str] | None = None
        self._recovery: dict[str, Any] | None = None
        self._error: ElasticRingError | None = None
        self._begun = False  # a worker group of this submission

    def begin(self, attempt: Mapping[str, Any]) -> int:
        """A worker group is about to compute its first step; returns its generation. `attempt` has step, mesh, pids,
        resumed_from."""
        now, generation = time.monotonic(), 1 + len(self._of("attempt"))
        step = int(attempt["step"])
        undone = self._metrics.go_back(step, (TERM, generation))
        self._metrics.begin_at(step)
        self._goodput.undone(step)
        if self._begun:  # else the run is submitted again, which is no recovery
            noticed_s, cause = self._noticed or (now, "Ray Train changed the number of workers")
            last_s = self._last_s if self._last_s is not None else noticed_s
            self._recovery = {
                "step": step,
                "faults": [],
                "cause": cause,
                "action": "Ray Train started a new worker group",
                "detect_s": max(0.0, noticed_s - last_s),
                "close_s": now - max(noticed_s, last_s),
                "heal_s": 0.0,
                "steps_undone": undone,
                "steps_rerun": undone,
                "source": "checkpoint",
                "survivor_pids_kept": False,
                "exact": False,
                "_begun_s": now,
                "_last_s": last_s,
            }
        self._note({"note": "attempt", "generation": generation, **attempt})
        mesh = attempt["mesh"]
        log.info("generation %d: dp=%d x cp=%d from step %d", generation, mesh["dp"], mesh["cp"], step)
        self._noticed, self._begun = None, True
        return generation

    def step(self, metrics: StepMetrics, remark: str = "") -> None:
        """A step that every rank has applied or skipped."""
        now = time.monotonic()
        if remark:
            log.warning("%s", remark)
            self._note({"note": "skipped" if metrics.skipped else "spike", "step": metrics.step, "told": remark})
        self._metrics.record(metrics)
        self._goodput.committed(metrics.step, metrics.step_s)
        self._last_s = now
        if self._recovery is not None:
            known = {key: value for key, value in self._recovery.items() if not key.startswith("_")}
            known |= {"rerun_s": now - self._recovery["_begun_s"], "total_s": now - self._recovery["_last_s"]}
            self._recovery = None
            self._note({"note": "recovery", **known})

    def failed(self, cause: str) -> None:
        """Ray Train noticed that a worker failed."""
        if self._noticed is None:
            self._noticed = (time.monotonic(), cause)
            self._note({"note": "failed", "cause": cause})

    def gave_up(self, error: ElasticRingError) -> None:
        """The worker group has ended the run, which no other could carry on either."""
        self._error = error
        self._note({"note": "gave up", "error": type(error).__name__, "told": error.message})

    def error(self) -> ElasticRingError | None:
        """Why the run was given up, if it was."""
        return self._error

    def checkpoint(self, step: int, path: str) -> None:
        """A checkpoint is in the storage."""
        self._note({"note": "checkpoint", "step": step, "path": path})

    def finish(self, weights_sha256: str, peak_gpu_bytes: int = 0) -> dict[str, Any]:
        """Write the summary and return it. `peak_gpu_bytes`: of the last worker group."""
        attempts, losses, lines = self._of("attempt"), self._metrics.losses_hex(), read_metrics(self._folder)
        recoveries, num_failures = self._of("recovery"), len(self._of("failed"))
        begun = lines[0]["step"] if lines else 0  # a run that begins at another's checkpoint has no lines before
        missing = any(step >= begun for step in missing_steps(lines, self._metrics.last_step + 1))
        summary = Summary(
            steps=len(losses),
            losses=losses,
            weights_sha256=weights_sha256,
            samples_sha256=None if missing else samples_digest(lines),
            goodput=self._goodput.ratio(time.monotonic()),
            exact=not missing and not recoveries and all(line["mesh"] == attempts[0]["mesh"] for line in attempts),
            generations=[GenerationBegan(TERM, a["generation"], a["mesh"], a["reason"]) for a in attempts],
            recoveries=[Recovery.from_json(line) for line in recoveries],
            skipped_steps=sum(bool(line["skipped"]) for line in lines),
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

    def _of(self, note: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if line["note"] == note]

    def _note(self, line: dict[str, Any]) -> None:
        line = {**line, "unix_s": round(time.time(), 3)}
        self._lines.append(line)
        self._attempts.append(line)
