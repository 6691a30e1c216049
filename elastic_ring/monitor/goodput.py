"""Where a run's time goes: steps that stayed committed, the parts of the rest, and the stages of its start.

Goodput is pure: the caller passes all times. No I/O."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from elastic_ring.control.facts import StartStage

if TYPE_CHECKING:
    from elastic_ring.monitor.metrics import Recovery

CLOCK_PARTS = ("idle", "forward", "backward", "reduce", "vote", "update", "apply", "other", "data")
"""Parts of a step on one rank; `other` has the rare ones: validating, saving, compiling, rebuilding. Waits for
data lie within the other parts."""


class Goodput:
    """Time of steps that stayed committed ÷ total time. The caller passes all times, on one clock."""

    def __init__(
        self,
        start_s: float | None,
        kept_s: float = 0.0,
        lost_s: Mapping[str, float] | None = None,
    ) -> None:
        """`start_s`: None if unknown. `kept_s`, of the steps that stayed committed, and `lost_s`: as an earlier
        coordinator counted them."""
        self._start_s, self.kept_s, self.lost = start_s, kept_s, LossLedger(lost_s)

    def total_s(self, now_s: float) -> float | None:
        """Time since the start; None if unknown."""
        return None if self._start_s is None else max(0.0, now_s - self._start_s)

    def committed(self, step_s: float) -> None:
        """A step took `step_s` in the attempt that was committed; failed attempts count as lost time."""
        self.kept_s += step_s

    def undone(self, steps_s: float) -> None:
        """Committed steps that took `steps_s` are to run again."""
        self.kept_s = max(0.0, self.kept_s - steps_s)

    def ratio(self, now_s: float) -> float | None:
        """Goodput at `now_s`, between 0 and 1; 0 before any time has passed; None if unknown."""
        total_s = self.total_s(now_s)
        if total_s is None:
            return None
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
    total_s: float | None,
    lost_s: Mapping[str, float],
    blocked_s: float,
    recoveries: Sequence[Recovery],
) -> dict[str, float]:
    """A run's time by part; without `other` where `total_s` is unknown. `blocked_s`: waits for checkpoints. A wait for
    workers within a recovery, which would count twice, is subtracted from the recovery."""
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
    return {**parts, "other": 0.0 if total_s is None else max(0.0, total_s - math.fsum(parts.values()))}


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


Stage = tuple[str, float, float]
"""Its text, when it began in Unix seconds, and how many seconds it took."""
BUILD_PARTS = (
    ("free_s", "frees what an earlier place took"),
    ("device_s", "takes its device"),
    ("meet_s", "meets the others"),
    ("world_s", "connects to them"),
    ("wrap_s", "wraps the model"),
    ("values_s", "first values"),
    ("restore_s", "reads the checkpoint"),
    ("join_s", "waits for its groups, tests them"),
    ("heal_s", "heals"),
    ("check_s", "checks the model"),
)
"""Keys of a member's timings of a build, in their order, and the text of each stage."""
_ALONE = ("driver", "coordinator", "run")
"""Not workers; `run` is all workers together."""
_WIDTHS = (8, 8, 12)
_LEAST_S = 0.05


class Stages:
    """Stages of one process, one after another. `ended` may be read by any thread."""

    def __init__(self, first: str) -> None:
        """`first`: the stage that began when this process began."""
        self._stage, self._unix_s = first, process_unix_s()
        self._since_s = time.monotonic() - max(0.0, time.time() - self._unix_s)
        self.ended: list[Stage] = []

    def begin(self, stage: str) -> None:
        """End the present stage and begin another; an empty text begins none."""
        now = time.monotonic()
        if self._stage:
            self.ended.append((self._stage, self._unix_s, now - self._since_s))
        self._stage, self._unix_s, self._since_s = stage, time.time(), now


def process_unix_s() -> float:
    """When this process began."""
    return float(psutil.Process().create_time())


def build_stages(timings: Mapping[str, float | str]) -> list[Stage]:
    """The stages of a build from a member's timings; parts that took no time are left out."""
    stages, since_unix_s = list[Stage](), float(timings["begun_unix_s"])
    for key, text in BUILD_PARTS:
        if (seconds := float(timings.get(key, 0.0))) > 0:
            stages.append((text, since_unix_s, seconds))
            since_unix_s += seconds
    return stages


def start_table(facts: Iterable[object]) -> list[str]:
    """The stages among a run's facts as a table by time: seconds since the command, duration, process, stage.

    Of the workers only the last to be built is shown, which the others wait for. One line where no stage is known.
    """
    stages = [fact for fact in facts if isinstance(fact, StartStage)]
    if not stages:
        return ["no stage of this run's start is on record"]
    last_s: dict[str, float] = {}
    for stage in stages:
        if stage.process not in _ALONE:
            last_s[stage.process] = max(last_s.get(stage.process, 0.0), stage.unix_s + stage.took_s)
    built = {stage.process for stage in stages if stage.stage == "wraps the model"} or set(last_s)
    slowest = max(built, key=lambda worker: last_s[worker], default="")
    shown = [stage for stage in stages if stage.process in (*_ALONE, slowest) and stage.took_s >= _LEAST_S]
    shown.sort(key=lambda stage: stage.unix_s)
    rows = [("at s", "took s", "who", "what")]
    rows += [
        (f"{stage.unix_s - shown[0].unix_s:.1f}", f"{stage.took_s:.1f}", stage.process, stage.stage) for stage in shown
    ]
    hidden = {stage.process for stage in stages} - {stage.process for stage in shown}
    text = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, _WIDTHS, strict=False)), row[-1]]) for row in rows]
    return [*text, f"{len(hidden)} other worker(s) beside it"] if hidden else text
