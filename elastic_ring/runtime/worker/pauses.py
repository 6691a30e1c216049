"""Notices when this process did not run at all: its host was paused or suspended, or it was stopped.

Such time is no training, although the clock of a step goes on. Whether a process hangs is decided elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LEAST_S = 5.0
"""Less is a busy machine."""
CPU_SHARE = 0.1
"""Who used more of the CPU than this share of a silence ran: a compiler that kept the GIL."""


class PauseWatch:
    """`beat` is called several times a second by one thread, `within_s` by any."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._cpu_s = clock, cpu_s
        self._last = clock(), cpu_s()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=64)

    def beat(self) -> None:
        pause = self._since_last()
        if pause is not None:
            self._pauses.append(pause)
        self._last = self._clock(), self._cpu_s()

    def within_s(self, begun_s: float) -> float:
        """For how many seconds this process did not run since `begun_s`."""
        pauses, now = list(self._pauses), self._since_last()  # the thread that beats may wake up after this one
        found = {begin: end for begin, end in (*pauses, *([now] if now else []))}
        return sum(max(0.0, end - max(begin, begun_s)) for begin, end in found.items())

    def _since_last(self) -> tuple[float, float] | None:
        (before_s, cpu_before_s), now_s = self._last, self._clock()
        silent_s = now_s - before_s
        if silent_s < LEAST_S or self._cpu_s() - cpu_before_s > CPU_SHARE * silent_s:
            return None
        return before_s, now_s
