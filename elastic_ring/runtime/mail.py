"""A worker's mail to its coordinator: answers, committed steps, and the question whether a planned fault may strike.

Nothing here waits for the coordinator but that question; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_ring.control.messages import DrainRequested, to_json
from elastic_ring.runtime.card import WorkerCard
from elastic_ring.runtime.injection import Injector


class Mail:
    """To the coordinator that speaks now: a generation may outlive the term that built it. `term` is asked for each
    letter; `coordinator` is the actor's handle, known once the worker starts."""

    def __init__(self, card: WorkerCard, term: Callable[[], int]) -> None:
        self._card, self._term = card, term
        self.coordinator: Any = None
        self._causes = 0

    def cause(self) -> str:
        """A new cause id, which the coordinator's commands and log lines repeat."""
        self._causes += 1
        return f"{self._card.worker}#{self._causes}"

    def answer(self, event: Any, extra: dict[str, Any] | None = None) -> None:
        """Send an event; `extra` travels beside it and is no part of the decision."""
        if hasattr(event, "term"):
            event = replace(event, term=self._term())
        self.coordinator.notify.remote(to_json(event), extra or {})

    def publish(self, records: list[dict[str, Any]]) -> None:
        """Send records of committed steps."""
        self.coordinator.publish.remote(self._card.worker, records)

    def injector(self) -> Injector:
        """Planned faults, each of which the coordinator grants once."""
        import ray

        timeout_s = self._card.run.timeouts.hello_s

        def ask(index: int) -> bool:
            return bool(ray.get(self.coordinator.fault.remote(index, self._card.worker), timeout=timeout_s))

        def notify(kind: str) -> None:
            if kind == "drain":
                self.answer(DrainRequested(self.cause(), self._card.worker))

        return Injector(self._card.run.faults, ask, notify)
