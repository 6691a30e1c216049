"""status.json and summary.json of a run: folds over its records and one live reading. No decisions.

Training does not need the status: a full disk costs a line of the log.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.facts import ForecastSeen
from elastic_ring.control.placement.coverage import covered
from elastic_ring.control.state import State, end_step, members, mesh_of, phase_name, spares
from elastic_ring.errors import OtherFormat
from elastic_ring.monitor.goodput import seen_of
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import (
    STATUS_NAME,
    SUMMARY_NAME,
    MetricsLine,
    Summary,
    overwrite_json,
    read_status,
    storage_error,
    write_json,
)
from elastic_ring.monitor.metrics_log import StepTable
from elastic_ring.monitor.plot import draw_run
from elastic_ring.runtime.coordinator.inbox import End
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.state.storage.backend import Retries

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
MOST_RECOVERIES = 20
"""Of a status: the newest."""


class RunFiles:
    """Writes the status of a run while it lives, its end, and its summary. An end is never overwritten: workers publish
    until they are killed. `num_journalled()` brings the journal's lines to disk: so many."""

    def __init__(self, run: RunConfig, recorder: RunRecorder, num_journalled: Callable[[], int] = int) -> None:
        self._run, self._recorder, self._num_journalled = run, recorder, num_journalled
        self._written_at, self._has_end = 0.0, False

    def is_status_due(self) -> bool:
        return not self._has_end and time.monotonic() - self._written_at >= STATUS_PERIOD_S

    def write_status(self, state: State, end: End | None = None) -> None:
        """`end`: how the run ended, once it has."""
        if end is None and self._has_end:
            return
        self._written_at, self._has_end = time.monotonic(), end is not None
        status = {**self.status(state), "journal_lines": self._num_journalled()}
        _replace_status(self._run.folder, {**status, **(_end_fields(end) if end is not None else {})})

    def write_bare_end(self, end: End) -> None:
        """The end alone, where the rest could not be made."""
        self._has_end = True
        write_end(self._run, end)

    def status(self, state: State) -> dict[str, Any]:
        recorder, mesh, validation = self._recorder, mesh_of(state), self._recorder.metrics.newest.validation
        nodes = {worker.worker: worker.node for worker in state.workers.values()}

        def described(worker: str) -> dict[str, Any]:
            process = {"worker": worker, "node": nodes.get(worker, ""), "pid": recorder.recoveries.bits.pid_of(worker)}
            return {**process, **recorder.live.workers.get(worker, {})}

        return {
            "run": self._run.name,
            "phase": phase_name(state),
            "term": state.term,
            "generation": state.generation,
            "mesh": {"dp": mesh.dp, "cp": mesh.cp} if mesh else {"dp": 0, "cp": 0},
            "step": recorder.metrics.last_step + 1,
            "total_steps": end_step(state),
            "validation": validation.to_json() if validation else {},
            "resumed_from": list(recorder.totals.resumed_from),
            "members": [{"global_rank": rank, **described(worker)} for rank, worker in enumerate(members(state))],
            "spares": [described(worker) for worker in spares(state)],
            "covered": covered(state),
            "recoveries": [recovery.to_json() for recovery in recorder.recoveries.records[-MOST_RECOVERIES:]],
            "updated_unix_s": time.time(),
            "updated_at": recorder.now(),
            "ended": False,
            **recorder.detectors.status(),
            "lost_s": {cause: round(s, 3) for cause, s in recorder.goodput.lost.lost_s.items()},
            "error": "",
            "end": {},
            "peak_gpu_bytes": recorder.live.peak_gpu_bytes,
            "story": [list(pair) for pair in state.story],
        }

    def write_summary(
        self, weights_sha256: str, exact: bool, stopped: str = "", planned_steps: int | None = None
    ) -> dict[str, Any]:
        """Write the summary and the plot; a summary that is there, of an earlier coordinator of this attempt, stays.

        `exact`: whether every change of the mesh so far kept its promise of the same bits. `stopped`: why a callback
        has stopped the run. `planned_steps`: those of the settings.
        """
        path, recorder, folder = self._run.folder / SUMMARY_NAME, self._recorder, self._run.folder
        if summary := readable_json(path):
            return summary
        recoveries, totals, now = recorder.recoveries, recorder.totals, recorder.now()
        recoveries.finish(now)
        num_steps, uri = recorder.metrics.last_step + 1, self._run.storage_uri.rstrip("/")
        elsewhere = [point["step"] for point in totals.resumed_from if not point["path"].startswith(f"{uri}/")]
        begun = max(elsewhere, default=0)  # what another run's folder has, this one need not have
        with StepTable.load(recorder.metrics.path) as table:
            losses, missing = table.losses_hex(), table.rows.missing(begun, num_steps)
            samples_sha256 = None if missing else samples_digest(table.lines())
            steps_s = table.rows.values("step_s") if recorder.begin.planned else []
        if missing:
            recoveries.say(
                f"{recorder.metrics.path} has no lines of {len(missing)} step(s), {missing[0]} to {missing[-1]}, that "
                "this run has trained: samples_sha256 and exact are null"
            )
        exact = exact and not missing and recoveries.bits.are_promised
        summary = Summary(
            steps=num_steps,
            losses=losses,
            weights_sha256=weights_sha256,
            samples_sha256=samples_sha256,
            goodput=recorder.goodput.ratio(now),
            exact=exact and all(recovery.exact for recovery in recoveries.records),
            generations=totals.generations,
            recoveries=recoveries.records,
            compilations_after_step_0=totals.num_compiled_late,
            skipped_steps=recorder.metrics.newest.num_skipped,
            lost_workers=recoveries.num_lost(),
            resumed_from=totals.resumed_from,
            checkpoints=totals.checkpoints,
            memory=totals.reliefs,
            peak_gpu_bytes=recorder.live.peak_gpu_bytes,
            time_s=recorder.time_s(now),
            identity=recorder.begin.identity,
            stopped=stopped,
            planned_steps=num_steps if planned_steps is None else planned_steps,
            validation=recorder.metrics.newest.validation,
        ).to_json()
        # Beside the deciding thread, and no longer than a checkpoint's files are waited for.
        retries = Retries(self._run.timeouts.storage_s, lambda text: recoveries.say(f"the summary {text}"))
        retries(lambda: write_json(path, summary, durable=True), lambda error: not isinstance(error, OSError))
        if planned := recorder.begin.planned:
            recorder.tell(ForecastSeen(dict(planned), seen_of(steps_s, summary)))
        draw_run(folder, recoveries.records, [point["step"] for point in totals.resumed_from])
        return summary


def _end_fields(end: End) -> dict[str, Any]:
    """The fields of status.json that a run's end changes. It has no members then: all are being killed."""
    return {
        "phase": "ended",
        "mesh": {"dp": 0, "cp": 0},
        "members": [],
        "spares": [],
        "updated_unix_s": time.time(),
        "ended": True,
        "error": end["message"] if end["error"] else "",
        "end": {key: end[key] for key in ("error", "message", "facts", "attempt")},
    }


def write_end(run: RunConfig, end: End) -> None:
    """Write the end of a run whose coordinator could not open it, for example with a damaged journal. Other fields that
    an earlier coordinator left in status.json stay, and so does an end of the same attempt."""
    status: dict[str, Any] = {}
    with suppress(OSError, OtherFormat):  # then only the end is known
        status = read_status(run.folder) or {}
    if (status.get("end") or {}).get("attempt") != end["attempt"]:
        _replace_status(run.folder, {**status, "run": run.name, **_end_fields(end)})


def _replace_status(folder: Path, status: dict[str, Any]) -> None:
    """Where a disk is full, an end still goes into the space of the last status."""
    try:
        write_json(folder / STATUS_NAME, status)
        return
    except OSError as error:
        log.warning("%s", storage_error(folder, error))
    if not status["ended"]:
        return
    try:
        overwrite_json(folder / STATUS_NAME, {**status, "recoveries": [], "story": []})
    except OSError as error:
        log.error("could not record the end in %s: %s", folder / STATUS_NAME, error)


def samples_digest(lines: Iterable[MetricsLine]) -> str:
    """sha256 over the consumed-samples digests of all committed steps, in order."""
    total = hashlib.sha256()
    for line in lines:
        total.update(f"{line['step']}:{line['samples']}\n".encode())
    return total.hexdigest()
