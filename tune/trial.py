"""One trial of the search as Ray Tune sees it, who is stopped early, and what the sampler is told. The rungs
themselves are in `rungs`."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from tune.rungs import REJECTED_GAP, Climb, handiest, places, tail_loss
from tune.sampler import LONG, SHORT
from tune.space import AXES, Candidate
from tune.stopping import is_behind, objectives_in_layouts

OBJECTIVES = ("gap", "step_s", "bytes")
NUM_RUNGS = 4
SHORT_RUNG = 2


class PatternTrial(ray_tune.Trainable):
    """One pattern; every `step` is one rung. An actor is reused for the next pattern, so that imports and the
    corpus are paid once.

    Every measured rung is a line of the log at once. Tune writes its own record only now and then, so after a
    SIGKILL it may have forgotten the last trials; what the log has of a pattern is not measured again.
    """

    def setup(self, config: dict[str, Any], shared: dict[str, Any] | None = None) -> None:
        if shared is not None:
            self._shared = shared
        torch.set_num_threads(1)
        self._climb = Climb(**self._shared["base"]["climb"])
        self._candidate = Candidate.of(config)
        self._rung, self._found = 0, dict[str, Any]()
        log = read_log(Path(self._shared["log"]))
        self._measured = {line["rung"]: line["found"] for line in log if line["name"] == self._candidate.name}

    def step(self) -> dict[str, Any]:
        start = time.process_time()
        if self._rung in self._measured:
            self._found = self._measured[self._rung]
        else:
            self._measure()
            self._note()
        done = bool(self._found["rejected"]) or self._rung == NUM_RUNGS - 1
        result = {"name": self._candidate.name, "rung": self._rung, "rung_cpu_s": time.process_time() - start}
        self._rung += 1
        return {**self._found, **result, "done": done}

    def _measure(self) -> None:
        """Add what the present rung says to what is known of the pattern."""
        name, base = self._candidate.name, self._shared["base"]
        if self._rung == 0:
            plan = base["plans"][name]
            self._found = {key: plan[key] for key in ("density", "reach", "rejected")}
            # What was not measured is told as dense's, so that a rejected pattern never looks good.
            self._found.update(gap=REJECTED_GAP, step_s=1.0, bytes=1.0, short_gap=None, long_gap=None)
            self._found["mass"] = base["proxies"][name]["mass"]
        elif self._rung == 1:
            found = places(base, self._candidate)
            layout = handiest(found)
            self._found.update(places=found, layout=layout, step_s=found[layout][0], bytes=found[layout][1])
        else:
            kind, key = ("short", SHORT) if self._rung == SHORT_RUNG else ("long", LONG)
            steps = self._climb.short_steps if self._rung == SHORT_RUNG else self._climb.long_steps
            loss, _ = tail_loss(self._candidate.scaled(self._climb.seq_len), self._climb, steps)
            self._found.update(judged(loss - base[kind], key))

    def _note(self) -> None:
        line = {"name": self._candidate.name, "rung": self._rung, "pid": os.getpid(), "found": self._found}
        with Path(self._shared["log"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"rung": self._rung, "found": self._found}
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        state = json.loads(Path(checkpoint, "state.json").read_text(encoding="utf-8"))
        self._rung, self._found = state["rung"], state["found"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


def judged(gap: float, key: str) -> dict[str, Any]:
    """What a training adds to a trial's result. A gap that is no number would be dominated by nothing and is refused
    by Optuna, so a diverged training is told as a rejection, which ends the trial and keeps it off the front."""
    if math.isfinite(gap):
        return {"gap": gap, key: gap}
    return {"gap": REJECTED_GAP, "short_gap": None, "long_gap": None, "rejected": f"diverged: {key} {gap}"}


def read_log(path: Path) -> list[dict[str, Any]]:
    """What was measured so far, by all processes. A line that a kill cut short is no line."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


class NonDominatedRank(FIFOScheduler):
    """Stops a trial that lies behind `keep` fronts of those seen at the same rung, once `least` were seen there.

    Ray Tune's own schedulers take one metric. Rungs before the first training are not compared: without the gap a
    pattern that sees little would always win. What was seen is what the log says, so a search that goes on after a
    kill compares with all that was measured before it.
    """

    def __init__(self, log: Path, keep: int = 2, least: int = 6) -> None:
        super().__init__()
        self._log, self._keep, self._least = log, keep, least

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if int(result["rung"]) != SHORT_RUNG or result["rejected"]:
            return TrialScheduler.CONTINUE
        seen = {
            line["name"]: objectives_in_layouts(line["found"])
            for line in read_log(self._log)
            if line["rung"] == SHORT_RUNG and not line["found"]["rejected"]
        }
        stopped = result["name"] in seen and is_behind(result["name"], seen, self._keep, self._least)
        return TrialScheduler.STOP if stopped else TrialScheduler.CONTINUE


class GapSearch(OptunaSearch):
    """Optuna's search, which keeps beside the objectives of a finished trial how long it was trained for its gap."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        trial = self._ot_trials.get(trial_id)
        if trial is not None and result and trial_id not in self._completed_trials:
            for key in (SHORT, LONG):
                trial.set_user_attr(key, result.get(key))
        super().on_trial_complete(trial_id, result, error)


def distributions() -> dict[str, Any]:
    """The axes as Optuna names them."""
    from optuna.distributions import CategoricalDistribution

    return {axis: CategoricalDistribution(values) for axis, values in AXES.items()}
