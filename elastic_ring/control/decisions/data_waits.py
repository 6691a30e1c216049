"""Whether training waits for its data, step by step. Pure: no clock, no I/O. The core decides nothing for it."""

from __future__ import annotations

from collections import deque

NUM_STEPS = 20
LIMIT = 0.2
"""Of the time of NUM_STEPS steps in a row; data that is read ahead in time is waited for in no step."""
SLACK = 0.1
"""How far the share must fall below the limit before a wait is found again."""


class DataWatch:
    """The newest committed steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=NUM_STEPS)
        self._is_armed = True

    def saw(self, step_s: float, data_wait_s: float) -> bool:
        """A committed step: how long it took, and waited. Returns whether to report a wait: once, until it is over."""
        self._steps.append((step_s, data_wait_s))
        found = self._is_armed and self.share >= LIMIT
        self._is_armed = not found and (self._is_armed or self.share < LIMIT - SLACK)
        return found

    @property
    def share(self) -> float:
        """Of the time of the last NUM_STEPS steps that was waited; 0 before there are so many."""
        if len(self._steps) < NUM_STEPS:
            return 0.0
        return sum(waited_s for _, waited_s in self._steps) / max(sum(step_s for step_s, _ in self._steps), 1e-9)
