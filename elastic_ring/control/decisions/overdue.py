"""How many intervals have passed in training without a checkpoint that counts, for whatever reason. No clock here."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_INTERVAL_S = 60.0
"""Between checkpoints of a run that has not chosen its interval yet."""
TOLD_AFTER = 3
"""After so many intervals without a checkpoint comes a report; then whenever their number has doubled."""
LEAST_S = 30.0
"""Nothing is overdue before so much training: intervals of a few quick steps are shorter than a write."""


@dataclass
class Overdue:
    """What a run has trained since the newest checkpoint began to count. Only committed steps count as training: a run
    that waits owes no checkpoint."""

    every_steps: int | None
    """Steps between checkpoints; None where `interval_s` says when one is due."""
    interval_s: float
    step: int = 0
    """How many steps the newest checkpoint contains."""
    trained_s: float = 0.0
    _applied: int = 0
    _at_s: float | None = None
    _told: int = 0

    def committed(self, applied: int, now: float) -> None:
        """The shard has `applied` steps."""
        # A pause is one interval at most: the first step after it brings the checkpoint.
        passed_s = 0.0 if self._at_s is None else min(now - self._at_s, self.interval_s)
        self._applied, self._at_s = applied, now
        self.trained_s += passed_s

    def counted(self, step: int) -> None:
        """The checkpoint of `step` counts."""
        self.step, self.trained_s, self._told = step, 0.0, 0

    @property
    def num_intervals(self) -> int:
        if self.every_steps == 0 or self.trained_s < LEAST_S:
            return 0
        if self.every_steps is not None:
            return max(0, self._applied - self.step) // self.every_steps
        return int(self.trained_s / self.interval_s)

    @property
    def overdue_s(self) -> float:
        """For how long of training a checkpoint has been missing: what is longer than two intervals."""
        num = self.num_intervals
        return self.trained_s * (num - 2) / num if num > 2 else 0.0

    def news(self) -> int:
        """The number of intervals if a report is due, else 0."""
        num = self.num_intervals
        if num < max(TOLD_AFTER, 2 * self._told):
            return 0
        self._told = num
        return num
