"""Which share of a run's time went into steps that stayed committed. Pure: the caller passes all times."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Goodput:
    """Time of steps that stayed committed ÷ total time. The caller passes all times, on one clock."""

    def __init__(self, start_s: float, step_times_s: Mapping[int, float] | None = None) -> None:
        self._start_s = start_s
        self._kept_s: dict[int, float] = dict(step_times_s or {})
        self.kept_s = math.fsum(self._kept_s.values())
        """Time of the steps that stayed committed."""

    def total_s(self, now_s: float) -> float:
        """Time since the start."""
        return max(0.0, now_s - self._start_s)

    def committed(self, step: int, step_s: float) -> None:
        """`step` took `step_s` in the attempt that was committed; failed attempts count as lost time."""
        self.kept_s += step_s - self._kept_s.get(step, 0.0)
        self._kept_s[step] = step_s

    def undone(self, first_step: int) -> int:
        """Remove `first_step` and all later steps; returns how many committed steps that undid."""
        gone = [step for step in self._kept_s if step >= first_step]
        for step in gone:
            self.kept_s -= self._kept_s.pop(step)
        return len(gone)

    def ratio(self, now_s: float) -> float:
        """Goodput at `now_s`, between 0 and 1; 0 before any time has passed."""
        total_s = self.total_s(now_s)
        return min(1.0, self.kept_s / total_s) if total_s > 0 else 0.0
