"""Progress for the drivers that follow a run, and the lease that their calls renew. No decisions here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ring.control.state import State

KEPT_STEPS = 256


class DriverFeed:
    """Written by the deciding thread, read by the threads in which drivers call.

    Values are replaced, never changed in place, so that readers can iterate without a lock.
    """

    def __init__(self) -> None:
        self._renewed_at = time.monotonic()
        self._steps: tuple[Mapping[str, Any], ...] = ()
        self._outline: dict[str, Any] = {}

    def renew(self) -> None:
        """Renew the lease: a driver has called."""
        self._renewed_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since a driver last called."""
        return time.monotonic() - self._renewed_at

    def publish(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add committed steps; the newest KEPT_STEPS are kept."""
        self._steps = (*self._steps, *records)[-KEPT_STEPS:]

    def outline(self, state: State) -> None:
        """Where the run stands now."""
        self._outline = {
            "phase": type(state.phase).__name__.lower(),
            "generation": state.generation,
            "term": state.term,
            "awaited": state.callbacks.awaited,
        }

    def news(self, after_step: int) -> dict[str, Any]:
        """The steps after `after_step`, and where the run stands."""
        return {"steps": [record for record in self._steps if record["step"] > after_step], **self._outline}
