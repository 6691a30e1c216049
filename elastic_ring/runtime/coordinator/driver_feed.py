"""Committed steps: which of the published ones count, in which order, and what drivers that follow a run are shown of
them; and the lease that the drivers' calls renew. No decisions here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elastic_ring.control.state import State
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.runtime.notices import StepRecord

KEPT_STEPS = 256


class PublishedSteps:
    """Calls of one worker may overtake each other on their way, and one of a step that was given up may come late."""

    def __init__(self) -> None:
        self._waiting: dict[int, StepRecord] = {}
        self._builds: list[tuple[int, tuple[int, int]]] = []

    def begun(self, step: int, membership_id: tuple[int, int]) -> bool:
        """The members `membership_id`, (term, generation), were ordered to begin at `step`; whether that is new."""
        if self._builds and self._builds[-1] == (step, membership_id):
            return False
        self._builds.append((step, membership_id))
        return True

    def went_back(self) -> None:
        self._waiting.clear()

    def take(self, steps: Iterable[StepRecord], last_step: int) -> Iterator[StepRecord]:
        """Those of `steps` and of earlier calls that follow `last_step` without a gap."""
        self._waiting.update({record.metrics.step: record for record in steps if self.counts(record)})
        self._waiting = {step: record for step, record in self._waiting.items() if step > last_step}
        while (found := self._waiting.pop(last_step + 1, None)) is not None and self.counts(found):
            last_step += 1
            yield found

    def counts(self, record: StepRecord) -> bool:
        """Whether a step's record is of the members that committed it: the last that began at it or before."""
        ids = [known for first_step, known in self._builds if first_step <= record.metrics.step]
        return bool(ids) and record.outcome.vote.membership_id == ids[-1]


class DriverFeed:
    """Written by the deciding thread, read by the threads in which drivers call.

    Values are replaced, never changed in place, so that readers can iterate without a lock.
    """

    def __init__(self) -> None:
        self.ended: dict[str, Any] | None = None
        """How the run has ended."""
        self.stopping = math.inf, ""
        """A checkpoint of a later step ends the run, for this reason: a driver waits for it."""
        self._renewed_at = time.monotonic()
        self._steps: tuple[StepMetrics, ...] = ()
        self._outline: dict[str, Any] = {"phase": "starting"}

    def renew(self) -> None:
        """Renew the lease: a driver has called."""
        self._renewed_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since a driver last called."""
        return time.monotonic() - self._renewed_at

    def publish(self, steps: Sequence[StepMetrics]) -> None:
        """Add committed steps; the newest KEPT_STEPS are kept."""
        self._steps = (*self._steps, *steps)[-KEPT_STEPS:]

    def outline(self, state: State) -> None:
        """Where the run stands now."""
        self._outline = {
            "phase": type(state.phase).__name__.lower(),
            "generation": state.generation,
            "term": state.term,
            "awaited": state.callbacks.awaited,
        }

    def news(self, after_step: int) -> dict[str, Any]:
        """The steps after `after_step`, where the run stands, and how it has ended."""
        ended = self.ended  # first: what comes with it is then complete
        steps = [metrics for metrics in self._steps if metrics.step > after_step]
        return {"steps": steps, **self._outline, "ended": ended}
