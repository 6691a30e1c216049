"""Where the seconds from the command to the first committed step went: a fold over the stages of a start."""

from __future__ import annotations

from elastic_ring.control.facts import Fact, StartStage

_ALONE = ("driver", "coordinator", "run")
"""Those beside workers; `run` is all of them together."""
_WIDTHS = (8, 8, 12)
_LEAST_S = 0.05


class StartTimes:
    """A fold: only `saw` changes it. Times are of the hosts' clocks."""

    def __init__(self) -> None:
        self.stages: list[StartStage] = []

    def saw(self, fact: Fact) -> None:
        if isinstance(fact, StartStage):
            self.stages.append(fact)

    @property
    def shown(self) -> list[StartStage]:
        """In the order of time; of the workers the one that was in its place last, which the others wait for."""
        last_s: dict[str, float] = {}
        for stage in self.stages:
            if stage.who not in _ALONE:
                last_s[stage.who] = max(last_s.get(stage.who, 0.0), stage.unix_s + stage.took_s)
        built = {stage.who for stage in self.stages if stage.what == "wraps the model"} or set(last_s)
        slowest = max(built, key=lambda who: last_s[who], default="")
        kept = [one for one in self.stages if one.who in (*_ALONE, slowest) and one.took_s >= _LEAST_S]
        return sorted(kept, key=lambda stage: stage.unix_s)

    def lines(self) -> list[str]:
        """A table: since the command, seconds, who, what. One line where no stage is known."""
        if not self.stages:
            return ["no stage of this run's start is on record"]
        shown = self.shown
        begun = shown[0].unix_s
        rows = [("at s", "took s", "who", "what")]
        rows += [(f"{one.unix_s - begun:.1f}", f"{one.took_s:.1f}", one.who, one.what) for one in shown]
        workers = {one.who for one in self.stages} - {one.who for one in shown}
        text = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, _WIDTHS, strict=False)), row[-1]]) for row in rows]
        return [*text, f"{len(workers)} other worker(s) beside it"] if workers else text
