"""The drivers of a run, as its coordinator sees them: their lease, and what they are told. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ring.control.state import State

KEPT_STEPS = 256


class Audience:
    """Written by the deciding thread, read by the threads in which drivers call."""

    def __init__(self) -> None:
        self._heard_at = time.monotonic()
        self._steps: list[Mapping[str, Any]] = []
        self._outline: dict[str, Any] = {}

    def renew(self) -> None:
        """A driver lives; its lease begins anew."""
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """For how long no driver has been heard of."""
        return time.monotonic() - self._heard_at

    def publish(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Committed steps that drivers may ask for; the newest KEPT_STEPS are kept."""
        self._steps += records
        del self._steps[:-KEPT_STEPS]

    def outline(self, state: State) -> None:
        """Where the run stands now."""
        self._outline = {
            "phase": type(state.phase).__name__.lower(), "generation": state.generation, "term": state.term,
        }  # fmt: skip

    def news(self, after_step: int) -> dict[str, Any]:
        """The steps after `after_step`, and where the run stands."""
        return {"steps": [record for record in self._steps if record["step"] > after_step], **self._outline}
