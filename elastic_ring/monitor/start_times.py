"""The stages of a run's start: when each began and how long it took, noted by the process that starts. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import psutil

from elastic_ring.control.facts import StartStage

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

    def __init__(self, first: str, since_unix_s: float | None = None) -> None:
        """`first`: the stage that began at `since_unix_s`, by default when this process began."""
        self._stage, self._since_s = first, process_unix_s() if since_unix_s is None else since_unix_s
        self.ended: list[Stage] = []

    def begin(self, stage: str) -> None:
        """End the present stage and begin another; an empty text begins none."""
        now = time.time()
        if self._stage:
            self.ended.append((self._stage, self._since_s, now - self._since_s))
        self._stage, self._since_s = stage, now


def process_unix_s() -> float:
    """When this process began."""
    return float(psutil.Process().create_time())


def build_stages(timings: Mapping[str, float]) -> list[Stage]:
    """The stages of a build from a member's timings; parts that took no time are left out."""
    stages, since_unix_s = list[Stage](), timings["begun_unix_s"]
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
