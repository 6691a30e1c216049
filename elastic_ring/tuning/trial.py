"""A trial of the search under Ray Tune, its early stopping, and what the sampler gets. The fidelities are in
`tuning.fidelity`.
"""

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

from elastic_ring.files import plain_json, read_small
from elastic_ring.tuning.climb import Climb
from elastic_ring.tuning.fidelity import REJECTED_GAP, handiest, places, tail_loss
from elastic_ring.tuning.sampler import LONG, SHORT
from elastic_ring.tuning.space import AXES, Candidate
from elastic_ring.tuning.stopping import is_behind, objectives_in_layouts

OBJECTIVES = ("gap", "step_s", "bytes")
NUM_FIDELITIES = 4
SHORT_FIDELITY = 2


class PatternTrial(ray_tune.Trainable):
    """One pattern; every `step` is one fidelity. Actors are reused, so that imports and corpus are loaded once.

    Every measurement is appended to a log at once, because Tune saves its state only now and then and a SIGKILL may
    lose the last trials; logged measurements are not repeated.
    """

    def setup(self, config: dict[str, Any], shared: dict[str, Any] | None = None) -> None:
        if shared is not None:
            self._shared = shared
        torch.set_num_threads(1)
        self._climb = Climb(**self._shared["base"]["climb"])
        self._candidate = Candidate.of(config)
        self._fidelity, self._found = 0, dict[str, Any]()
        log = read_log(Path(self._shared["log"]))
        self._measured = {line["fidelity"]: line["found"] for line in log if line["name"] == self._candidate.name}

    def step(self) -> dict[str, Any]:
        start = time.process_time()
        if self._fidelity in self._measured:
            self._found = self._measured[self._fidelity]
        else:
            self._measure()
            self._note()
        done = bool(self._found["rejected"]) or self._fidelity == NUM_FIDELITIES - 1
        result = {
            "name": self._candidate.name,
            "fidelity": self._fidelity,
            "fidelity_cpu_s": time.process_time() - start,
        }
        self._fidelity += 1
        return {**self._found, **result, "done": done}

    def _measure(self) -> None:
        """Run the current fidelity and add its results."""
        name, base = self._candidate.name, self._shared["base"]
        if self._fidelity == 0:
            plan = base["plans"][name]
            self._found = {key: plan[key] for key in ("density", "reach", "rejected")}
            # Defaults until measured: dense's cost, so that a rejected pattern never looks good.
            self._found.update(gap=REJECTED_GAP, step_s=1.0, bytes=1.0, short_gap=None, long_gap=None)
            self._found["mass"] = base["proxies"][name]["mass"]
        elif self._fidelity == 1:
            found = places(base, self._candidate)
            layout = handiest(found)
            self._found.update(places=found, layout=layout, step_s=found[layout][0], bytes=found[layout][1])
        else:
            kind, key = ("short", SHORT) if self._fidelity == SHORT_FIDELITY else ("long", LONG)
            steps = self._climb.short_steps if self._fidelity == SHORT_FIDELITY else self._climb.long_steps
            loss, _ = tail_loss(self._candidate.scaled(self._climb.seq_len), self._climb, steps)
            self._found.update(judged(loss - base[kind], key))

    def _note(self) -> None:
        line = {"name": self._candidate.name, "fidelity": self._fidelity, "pid": os.getpid(), "found": self._found}
        with Path(self._shared["log"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"fidelity": self._fidelity, "found": self._found}
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        state = plain_json(read_small(Path(checkpoint, "state.json")))
        self._fidelity, self._found = state["fidelity"], state["found"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


def judged(gap: float, key: str) -> dict[str, Any]:
    """What a training run adds to a trial's result.

    Optuna refuses a gap that is not finite, so a diverged training counts as rejected: the trial ends, off the front.
    """
    if math.isfinite(gap):
        return {"gap": gap, key: gap}
    return {"gap": REJECTED_GAP, "short_gap": None, "long_gap": None, "rejected": f"diverged: {key} {gap}"}


def read_log(path: Path) -> list[dict[str, Any]]:
    """All measurements so far, of all processes; skips an incomplete line."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = plain_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"name", "fidelity", "found"} <= line.keys():
            found.append(line)
    return found


class NonDominatedRank(FIFOScheduler):
    """Stops a trial that lies behind `keep` fronts of those seen at the same fidelity, once `least` were seen.

    Ray Tune's own schedulers take one metric. Fidelities before the first training are not compared: without the gap
    the sparsest pattern would always win. Reads the log, so a continued search compares with all earlier results.
    """

    def __init__(self, log: Path, keep: int = 2, least: int = 6) -> None:
        super().__init__()
        self._log, self._keep, self._least = log, keep, least

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if int(result["fidelity"]) != SHORT_FIDELITY or result["rejected"]:
            return TrialScheduler.CONTINUE
        seen = {
            line["name"]: objectives_in_layouts(line["found"])
            for line in read_log(self._log)
            if line["fidelity"] == SHORT_FIDELITY and not line["found"]["rejected"]
        }
        stopped = result["name"] in seen and is_behind(result["name"], seen, self._keep, self._least)
        return TrialScheduler.STOP if stopped else TrialScheduler.CONTINUE


class GapSearch(OptunaSearch):
    """Optuna's search; also stores a finished trial's gaps after short and long training."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        trial = self._ot_trials.get(trial_id)
        if trial is not None and result and trial_id not in self._completed_trials:
            for key in (SHORT, LONG):
                trial.set_user_attr(key, result.get(key))
        super().on_trial_complete(trial_id, result, error)


def distributions() -> dict[str, Any]:
    """The axes as Optuna distributions."""
    from optuna.distributions import CategoricalDistribution

    return {axis: CategoricalDistribution(values) for axis, values in AXES.items()}
