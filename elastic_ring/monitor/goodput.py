"""The share of a run's time that went into steps that stayed committed, and the parts of the rest. Pure: the caller
passes all times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ring.monitor.metrics import Recovery

CLOCK_PARTS = ("idle", "forward", "backward", "reduce", "vote", "apply", "other", "data")
"""Parts of a step on one rank; `other` has the rare ones: validating, saving, compiling, rebuilding. Waits for
data lie within the other parts."""


class Goodput:
    """Time of steps that stayed committed ÷ total time. The caller passes all times, on one clock."""

    def __init__(
        self,
        start_s: float,
        step_times_s: Mapping[int, float] | None = None,
        lost_s: Mapping[str, float] | None = None,
    ) -> None:
        """`lost_s`: as an earlier coordinator counted it."""
        self._start_s, self.lost = start_s, LossLedger(lost_s)
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
        undone = [step for step in self._kept_s if step >= first_step]
        for step in undone:
            self.kept_s -= self._kept_s.pop(step)
        return len(undone)

    def undone_s(self, first_step: int) -> float:
        """Time of `first_step` and of all later steps."""
        return math.fsum(s for step, s in self._kept_s.items() if step >= first_step)

    def ratio(self, now_s: float) -> float:
        """Goodput at `now_s`, between 0 and 1; 0 before any time has passed."""
        total_s = self.total_s(now_s)
        return min(1.0, self.kept_s / total_s) if total_s > 0 else 0.0


LOSS_CAUSES = ("startup", "waiting", "stalled", "frozen", "validation", "undone", "resize")
"""Causes of lost time: before the first step; waiting for workers, without and with state; the host of rank 0 did not
run; held-out sequences; committed steps that were given up; planned changes of the mesh, but for drains."""


class LossLedger:
    """Seconds of a run that no step got, by cause."""

    def __init__(self, counted_s: Mapping[str, float] | None = None) -> None:
        """`counted_s`: by an earlier coordinator."""
        self.lost_s = {cause: float((counted_s or {}).get(cause, 0.0)) for cause in LOSS_CAUSES}
        self._now_in: tuple[str, float] = ("", 0.0)

    def add(self, cause: str, seconds: float) -> None:
        self.lost_s[cause] += max(0.0, seconds)

    def look(self, cause: str, now_s: float) -> None:
        """From now on the run loses its time to `cause`; empty for none."""
        before, since_s = self._now_in
        if before:
            self.add(before, now_s - since_s)
        self._now_in = (cause, now_s)


def time_by_part(
    kept_s: float,
    total_s: float,
    lost_s: Mapping[str, float],
    blocked_s: float,
    recoveries: Sequence[Recovery],
) -> dict[str, float]:
    """A run's time by part. `blocked_s`: waits for checkpoints. A wait for workers within a recovery, which would count
    twice, is subtracted from the recovery."""
    closing_s = {True: 0.0, False: 0.0}  # without steps, by whether a recovery was a drain
    for recovery in recoveries:
        closing_s[recovery.kind == "drained"] += math.fsum(map(recovery.seconds, ("detect", "close", "heal")))
    parts = {
        "steps": kept_s,
        "startup": lost_s["startup"],
        "waiting": lost_s["waiting"] + lost_s["stalled"] + lost_s["frozen"],
        "validation": lost_s["validation"],
        "checkpoint": blocked_s,
        "recovery": max(0.0, closing_s[False] - lost_s["stalled"]),
        "rerun": math.fsum(recovery.broken_off_s for recovery in recoveries),
        "undone": lost_s["undone"],
        "resize": lost_s["resize"] + closing_s[True],
    }
    return {**parts, "other": max(0.0, total_s - math.fsum(parts.values()))}


TIME_PARTS = tuple(time_by_part(0.0, 0.0, dict.fromkeys(LOSS_CAUSES, 0.0), 0.0, ()))


WARM_STEPS = 3
"""First steps of a run, which compile and pin memory; no forecast covers them."""
NEVER_FORECAST = ("startup", "waiting", "validation", "other")
"""Parts of a run's time that a forecast's goodput does not count as lost."""


def seen_of(steps_s: Sequence[float], summary: Mapping[str, Any]) -> dict[str, float]:
    """The measured figures of an ended run that a forecast has, too, as far as they are on record. `step_s`: the median
    of the steps after the first; `gpu_bytes`: the peak of a rank's tensors; `goodput`: steps' share of the time from
    the first one to the last, held-out sequences aside."""
    seen: dict[str, float] = {}
    if steps_s:
        seen["step_s"] = statistics.median(steps_s[WARM_STEPS:] or steps_s)
    if peak := summary.get("peak_gpu_bytes"):
        seen["gpu_bytes"] = float(peak)
    parts = {name: s for name, s in (summary.get("time_s") or {}).items() if name not in NEVER_FORECAST}
    if parts.get("steps"):
        seen["goodput"] = parts["steps"] / math.fsum(parts.values())
    return seen
