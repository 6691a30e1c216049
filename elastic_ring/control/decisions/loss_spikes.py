"""Loss spikes: the limit above which a step's loss is one, and the action. Pure: no clock, no torch, no I/O.

All ranks must come to the same result. So the limit for a step's loss and the action beyond it are part of the step's
vote: taken from the rank with the longest loss history.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["clip", "skip", "back", "stop"]
VERDICTS = ("", "log", "clip", "skip", "stop", "back")
"""Verdicts on a loss above the limit, by their number in the vote."""

WINDOW = 64
"""Losses before a step with which its own is compared; also for how many steps a spike counts in the escalation."""
MIN_LOSSES = 32
"""Fewer say too little of their spread."""
DEVIATIONS = 8.0
LEAST_DEVIATION = 0.01
"""The least deviation, as a share of the median: losses that hardly differ give no measure of noise."""
UPPER, UPPER_FACTOR = 0.85, 3.0
"""The limit is also this often the distance from the median to this quantile above it: batches of two kinds have two
levels, and the deviations from one say nothing of the other."""
TREND, RISEN = 8, 3
"""A loss is also compared with the median of so many before it, as the first losses of a curve that falls say little of
the present ones. So many of the window's largest rises above that trend do not count: they may be spikes."""
CLIP_STEPS = 10
"""For how many steps, from the spike on, gradients are clipped harder."""
CLIP_SHARE = 0.1
"""A clipped step's share of the usual bound on the gradient's norm."""
OF_NORMAL_NOISE = 1.4826
"""The standard deviation of normal noise by its median absolute deviation."""


def limit_of(losses: Sequence[float]) -> float:
    """The limit for the next loss: DEVIATIONS robust deviations above the median of `losses`, or more.

    Less on a curve that falls. Infinity as long as there are fewer than MIN_LOSSES.
    """
    if len(losses) < MIN_LOSSES:
        return math.inf
    middle = statistics.median(losses)
    deviation = OF_NORMAL_NOISE * statistics.median(abs(loss - middle) for loss in losses)
    upper = sorted(losses)[math.ceil(UPPER * len(losses)) - 1] - middle
    limit = middle + max(DEVIATIONS * deviation, DEVIATIONS * LEAST_DEVIATION * abs(middle), UPPER_FACTOR * upper)
    trend = statistics.median(losses[-TREND:])
    if limit <= trend + abs(trend):
        return limit
    rises = sorted(loss - statistics.median(losses[at - TREND : at]) for at, loss in enumerate(losses) if at >= TREND)
    deviation = OF_NORMAL_NOISE * statistics.median(map(abs, rises))
    return min(limit, trend + max(DEVIATIONS * deviation, abs(trend), UPPER_FACTOR * rises[-1 - RISEN]))


@dataclass(frozen=True)
class SpikeBallot:
    """One rank's proposal for a step. `num_seen`: consecutive steps that it has seen; the rank with most decides.
    `limit`: as `limit_of`, 0 for none. `verdict`: an index of VERDICTS, for a loss above it. `clips_harder`: a
    spike within the last CLIP_STEPS steps requires it."""

    num_seen: int = 0
    limit: float = 0.0
    verdict: int = 0
    clips_harder: bool = False


class SpikeWatch:
    """One rank's memory of the newest steps. `actions`: for the first, second, ... spike within WINDOW steps, the last
    for all later ones; none: spikes are only reported."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self._actions = tuple(actions)
        self._num_seen = 0
        self._next = -1
        self._losses: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._spikes: deque[tuple[int, str]] = deque(maxlen=WINDOW)

    @property
    def goes_back(self) -> bool:
        """Whether going back is an action; too many skipped steps then lead to it, too."""
        return "back" in self._actions

    def ballot(self, step: int) -> SpikeBallot:
        """This rank's proposal for the vote of `step`."""
        self._expect(step)
        limit = limit_of([loss for _, loss in self._losses])
        recent = [verdict for at, verdict in self._spikes if at >= step - WINDOW]
        action = self._actions[min(len(recent), len(self._actions) - 1)] if self._actions else "log"
        clips = any(at > step - CLIP_STEPS and verdict == "clip" for at, verdict in self._spikes)
        return SpikeBallot(self._num_seen, limit if math.isfinite(limit) else 0.0, VERDICTS.index(action), clips)

    def saw(self, step: int, loss: float, verdict: str) -> None:
        """The result of `step`, once it is applied. A loss above the limit is one of the window, too: a level that
        lasts is no spike. A loss that is not finite is no spike."""
        self._expect(step)
        self._num_seen, self._next = self._num_seen + 1, step + 1
        if math.isfinite(loss):
            self._losses.append((step, loss))
        if verdict:
            self._spikes.append((step, verdict))

    def _expect(self, step: int) -> None:
        """Forget steps that run again, and all where this rank missed a step."""
        if step == self._next:
            return
        kept = step < self._next
        num_undone = self._next - step
        self._num_seen = max(0, self._num_seen - num_undone) if kept else 0
        self._losses = deque([entry for entry in self._losses if kept and entry[0] < step], WINDOW)
        self._spikes = deque([entry for entry in self._spikes if kept and entry[0] < step], WINDOW)
        self._next = step
