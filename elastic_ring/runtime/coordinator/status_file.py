"""status.json of a run: where it stands, written by its coordinator while it lives, and how it has ended. No decisions.

Training does not need it: a disk that is full costs a line of the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.monitor.metrics import STATUS_NAME, overwrite_json, read_status, storage_error, write_json

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0


class StatusFile:
    """Once it says how the run ended, nothing that comes later takes that back: workers publish on until they are
    killed."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._written_at, self._has_end = run, 0.0, False
        self.alive_at_s: float | None = None
        """When an earlier coordinator wrote it last, in Unix seconds."""

    def open(self) -> dict[str, Any]:
        """What an earlier coordinator left there."""
        known = read_status(self._run.folder) or {}
        self.alive_at_s = known.get("updated_unix_s")
        return known

    def write(self, status: Callable[[], Mapping[str, Any]], force: bool, end: Mapping[str, Any] | None) -> None:
        """At most every STATUS_PERIOD_S without `force`. `end`: how the run ended, once it has."""
        now = time.monotonic()
        if end is None and (self._has_end or (not force and now - self._written_at < STATUS_PERIOD_S)):
            return
        self._written_at, self._has_end = now, end is not None
        _replace_status(self._run.folder, {**status(), **(over(end) if end is not None else {})})

    def write_bare_end(self, end: Mapping[str, Any]) -> None:
        """The end alone, where the rest could not be made."""
        self._has_end = True
        write_end(self._run, end)


def over(end: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of status.json that a run's end changes. Nobody is a member then, in whatever phase it came: all are
    being killed."""
    told = {key: end[key] for key in ("error", "message", "facts", "attempt")}
    return {
        "phase": "ended",
        "mesh": {"dp": 0, "cp": 0},
        "members": [],
        "spares": [],
        "updated_unix_s": time.time(),
        "ended": True,
        "error": told["message"] if told["error"] else "",
        "end": told,
    }


def write_end(run: RunConfig, end: Mapping[str, Any]) -> None:
    """The end of a run whose coordinator could not open it, a damaged journal for example: fields that an earlier one
    left in status.json stay, except its members. An end of the same attempt that is there already stays as it is."""
    known: dict[str, Any] = {}
    with suppress(OSError):  # the end is then all that is known
        known = read_status(run.folder) or {}
    if (known.get("end") or {}).get("attempt") != end["attempt"]:
        _replace_status(run.folder, {**known, "run": run.name, **over(end)})


def _replace_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Where a disk is full, an end still goes into the space of the last status."""
    try:
        write_json(folder / STATUS_NAME, status)
        return
    except OSError as error:
        log.warning("%s", storage_error(folder, error))
    if not status["ended"]:
        return
    bare = {key: value for key, value in status.items() if key not in ("recoveries", "story")}
    try:
        overwrite_json(folder / STATUS_NAME, {**bare, "recoveries": [], "story": []})
    except OSError as error:
        log.error("could not record the end in %s: %s", folder / STATUS_NAME, error)
