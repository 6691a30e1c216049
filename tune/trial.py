"""One trial of the search as Ray Tune sees it, and who is stopped early. The rungs themselves are in `rungs`."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tune.pareto import ranks
from tune.rungs import REJECTED_GAP, Climb, tail_loss
from tune.space import AXES, Candidate

OBJECTIVES = ("gap", "step_s", "bytes")
NUM_RUNGS = 4


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
        self._climb = Climb(**self._shared["climb"])
        self._candidate = Candidate.of(config)
        self._rung, self._found = 0, dict[str, Any]()
        self._measured = self._logged()

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
        name, shared = self._candidate.name, self._shared
        if self._rung == 0:
            plan = shared["plans"][name]
            self._found = {**plan, "mass": shared["proxies"][name]["mass"], "gap": REJECTED_GAP}
            # What was not measured is told as dense's, so that a rejected pattern never looks good.
            self._found.update(step_s=1.0, short_gap=None, long_gap=None)
        elif self._rung == 1:
            self._found["step_s"] = shared["kernels"][name]
        else:
            kind = "short" if self._rung == 2 else "long"
            steps = self._climb.short_steps if self._rung == 2 else self._climb.long_steps
            loss, _ = tail_loss(self._candidate.scaled(self._climb.seq_len), self._climb, steps)
            self._found["gap"] = self._found[f"{kind}_gap"] = loss - shared[kind]

    def _note(self) -> None:
        line = {"name": self._candidate.name, "rung": self._rung, "pid": os.getpid(), "found": self._found}
        with Path(self._shared["log"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _logged(self) -> dict[int, dict[str, Any]]:
        """What earlier processes measured of this pattern, by rung. A line that a kill cut short is no line."""
        found: dict[int, dict[str, Any]] = {}
        log = Path(self._shared["log"])
        for text in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["name"] == self._candidate.name:
                found[line["rung"]] = line["found"]
        return found

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"rung": self._rung, "found": self._found}
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        state = json.loads(Path(checkpoint, "state.json").read_text(encoding="utf-8"))
        self._rung, self._found = state["rung"], state["found"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


class NonDominatedRank(FIFOScheduler):
    """Stops a trial that lies behind `keep` fronts of those seen at the same rung, once `least` were seen there.

    Ray Tune's own schedulers take one metric. Rungs before the first training are not compared: without the
    gap a pattern that sees little would always win.
    """

    def __init__(self, keep: int = 2, least: int = 6) -> None:
        super().__init__()
        self._keep, self._least = keep, least
        self._seen: dict[int, dict[str, tuple[float, ...]]] = defaultdict(dict)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        rung = int(result["rung"])
        if rung < 2 or rung == NUM_RUNGS - 1:
            return TrialScheduler.CONTINUE
        seen = self._seen[rung]
        seen[trial.trial_id] = tuple(float(result[key]) for key in OBJECTIVES)
        if len(seen) < self._least:
            return TrialScheduler.CONTINUE
        place = ranks(list(seen.values()))[list(seen).index(trial.trial_id)]
        return TrialScheduler.STOP if place >= self._keep else TrialScheduler.CONTINUE


def distributions() -> dict[str, Any]:
    """The axes as Optuna names them."""
    from optuna.distributions import CategoricalDistribution

    return {axis: CategoricalDistribution(values) for axis, values in AXES.items()}
