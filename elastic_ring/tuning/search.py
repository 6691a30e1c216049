"""`elastic-ring tune`: the search, dense under two seeds first; a second seed of patterns in doubt; results.

Each is a `ray.tune.Tuner` of its own in the folder of the search, which the same command restores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import signal
import stat
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from elastic_ring.config import environment
from elastic_ring.files import plain_json, read_small, replace_file
from elastic_ring.runtime.driver.ray_session import cluster
from elastic_ring.runtime.identity import Identity
from elastic_ring.trainer import ElasticRingTrainer
from elastic_ring.tuning.report import (
    NUM_REPORTS,
    TrialResult,
    pattern_results,
    patterns_in_doubt,
    ranks,
    recommend,
    report,
    spread,
    title_of,
    training_terms,
)
from elastic_ring.tuning.sampler import LOSSES, PATTERN, SEED, ProxySampler, search_axes
from elastic_ring.tuning.space import DENSE, PatternCost, PatternCosts, patterns, read_space
from elastic_ring.tuning.trial import MESH, pattern_trainable

log = logging.getLogger(__name__)

METRICS = ["loss", "step_s", "bytes"]
NAME, IDENTITY = "search", "identity"
NO_HANDLER = "TUNE_DISABLE_SIGINT_HANDLER"
"""A variable of Ray Tune's: then Ctrl-C is raised as it is elsewhere."""


class NonDominatedRank(FIFOScheduler):
    """Stops a trial that lies behind `keep` fronts among the trials with as many reports, once `least` have them.

    Ray Tune's own schedulers take one metric. Compares with the results that Tune itself keeps of all trials, so that a
    restored search compares with earlier ones, too.
    """

    def __init__(self, keep: int = 2, least: int = 6) -> None:
        super().__init__()
        self._keep, self._least = keep, least

    def on_trial_result(self, tune_controller: Any, trial: Any, result: TrialResult) -> str:
        part = len(result["losses"])
        if result["rejected"] or result["done"] or result["pattern"] == DENSE:
            return str(TrialScheduler.CONTINUE)
        latest = {each.trial_id: each.last_result for each in tune_controller.get_trials()} | {trial.trial_id: result}
        points = {
            name: (own["losses"][part - 1], own["step_s"], own["bytes"])
            for name, own in latest.items()
            if own and len(own.get("losses", ())) >= part
        }
        rank = dict(zip(points, ranks(list(points.values())), strict=True))[trial.trial_id]
        stops = len(points) >= self._least and rank >= self._keep
        return str(TrialScheduler.STOP if stops else TrialScheduler.CONTINUE)


@dataclass
class Progress(ray_tune.Callback):
    """A line for each report: trials, tokens, time left. Tokens that stopped trials did not train are not counted."""

    phase: str
    num_trials: int
    tokens_of_trial: int
    begun: float = 0.0
    _tokens: dict[str, int] = field(default_factory=dict)
    _first: int | None = None

    def setup(self, **info: Any) -> None:
        self.begun = time.monotonic()  # of this process, also in a search that was restored

    def on_trial_result(self, *, trials: list[Any], trial: Any, result: TrialResult, **info: Any) -> None:
        if self._first is None:  # a restored search has trained before
            self._first = sum(int((each.last_result or {}).get("tokens", 0)) for each in trials if each is not trial)
        self._tokens |= {each.trial_id: int((each.last_result or {}).get("tokens", 0)) for each in trials}
        self._tokens[trial.trial_id] = int(result["tokens"])
        ended = [each for each in trials if each.is_finished() or (each is trial and result["done"])]
        tokens, spent_s = sum(self._tokens.values()), time.monotonic() - self.begun
        stopped = sum(self.tokens_of_trial - self._tokens.get(each.trial_id, 0) for each in ended)
        left = self.num_trials * self.tokens_of_trial - stopped - tokens
        left_s = spent_s * left / max(1, tokens - self._first)
        outcome = result["rejected"] or f"loss {result['loss']:.4f}, step {result['step_s']:.4f} s"
        log.info(
            "%s: %d of %d trials ended, %.3g M tokens of at most %.3g M, about %.1f min left; %s, %d of %d: %s",
            *(self.phase, len(ended), self.num_trials),
            *(tokens / 1e6, self.num_trials * self.tokens_of_trial / 1e6, left_s / 60),
            *(result["pattern"], len(result["losses"]), NUM_REPORTS, outcome),
        )


class CurveSearch(OptunaSearch):
    """Optuna's search; also stores a finished trial's losses at each report."""

    def on_trial_complete(self, trial_id: str, result: TrialResult | None = None, error: bool = False) -> None:
        trial = self._ot_trials.get(trial_id)
        if trial is not None and result and trial_id not in self._completed_trials:
            trial.set_user_attr(LOSSES, result.get("losses"))
        super().on_trial_complete(trial_id, result, error)


@dataclass
class Search:
    """The search of `trainer`'s patterns in the folder `out`, in trials of `num_cpus` and a GPU where it has one, or
    `on_mesh` in trials that are runs on the trainer's mesh."""

    trainer: ElasticRingTrainer
    out: Path
    points: Sequence[str]
    num_trials: int = 24
    concurrent: int = 1
    num_cpus: float = 1.0
    on_mesh: bool = False
    trials: list[TrialResult] = field(default_factory=list)

    def run(self) -> tuple[str, str]:
        """(the table of the front with a line on the recommended pattern, that pattern). Raises ValueError where dense
        cannot be trained, or nothing else."""
        scaling, step = self.trainer.scaling_config, self.trainer.task.step
        calculator, costs = PatternCosts(self.trainer.task, scaling.cp, scaling.device), dict[str, PatternCost]()
        for text in self.points:
            try:
                costs[text] = calculator.cost(text)
            except ValueError as error:
                log.info("left out: %s: %s", text, error)
        costs.pop(DENSE, None)
        if not costs:
            raise ValueError("the space has no pattern that fits the model beside dense; give others")
        searcher = CurveSearch(
            search_axes(list(costs), step.seed),
            metric=METRICS,
            mode=["min"] * len(METRICS),
            points_to_evaluate=[{PATTERN: DENSE, SEED: step.seed}, {PATTERN: DENSE, SEED: step.seed + 1}],
            sampler=ProxySampler(costs, step.seed),
        )
        num_samples = 2 + min(self.num_trials, len(costs))
        self._phase("patterns", num_samples, ConcurrencyLimiter(searcher, self.concurrent))
        repeated, results = list[str](), pattern_results(self.trials)
        while doubt := [each for each in patterns_in_doubt(results, spread(self.trials)[0]) if each not in repeated]:
            repeated += doubt
            self._phase(f"seeds-{len(repeated)}", len(doubt), repeated=doubt)
            results = pattern_results(self.trials)
        mesh = scaling.mesh if self.on_mesh else MESH
        trained = training_terms(step, mesh, scaling.device, self.trainer.measured_on)
        table = report(self.trials, self.out, title_of(step, scaling.cp), trained)
        recommended, reason = recommend(results, spread(self.trials)[0])
        return f"{table}\n{reason}", recommended.pattern

    def _phase(self, name: str, num_trials: int, searcher: Any = None, repeated: Sequence[str] = ()) -> None:
        """Run or restore one Tuner, and keep the last report of each trial: patterns of the `searcher`, or the patterns
        `repeated` under the next seed."""
        stored, runs = self.out / NAME / name, str(self.out / NAME / "runs") if self.on_mesh else ""
        trainable = pattern_trainable(self.trainer, self.num_cpus, runs)
        step = self.trainer.task.step
        if ray_tune.Tuner.can_restore(str(stored)):
            tuner = ray_tune.Tuner.restore(str(stored), trainable, resume_unfinished=True, restart_errored=True)
        else:
            grid = {PATTERN: ray_tune.grid_search(list(repeated)), SEED: step.seed + 1} if repeated else {}
            tuner = ray_tune.Tuner(
                trainable,
                param_space=grid,
                tune_config=ray_tune.TuneConfig(
                    num_samples=1 if repeated else num_trials,
                    max_concurrent_trials=self.concurrent if repeated else None,
                    reuse_actors=True,
                    search_alg=searcher,
                    scheduler=None if repeated else NonDominatedRank(),
                ),
                run_config=ray_tune.RunConfig(
                    name=name,
                    storage_path=str(stored.parent),
                    verbose=0,
                    failure_config=ray_tune.FailureConfig(max_failures=3),
                    checkpoint_config=ray_tune.CheckpointConfig(num_to_keep=1, checkpoint_at_end=False),
                    callbacks=[Progress(name, num_trials, step.steps * step.tokens_per_step)],
                ),
            )
        with redirect_stdout(sys.stderr):  # stdout has the table alone
            results = _fit(tuner)
        for error in results.errors:
            log.error("a trial failed: %s", error)
        reports = [cast("TrialResult", each.metrics) for each in results if each.metrics and PATTERN in each.metrics]
        self.trials += reports
        if runs:
            from elastic_ring.tuning.mesh_trial import remove_stopped

            failed = {result.metrics["trial_id"] for result in results if result.error and result.metrics}
            remove_stopped(self.trainer.run_config, runs, {trial["trial_id"] for trial in reports} - failed)


def _fit(tuner: ray_tune.Tuner) -> ray_tune.ResultGrid:
    """`fit`, which after Ctrl-C stores its state and returns as if all trials had ended. Raises KeyboardInterrupt then.
    Tune restores the earlier handler only where it was interrupted."""
    if threading.current_thread() is not threading.main_thread() or environment().get(NO_HANDLER, "0") != "0":
        return tuner.fit()
    before = signal.getsignal(signal.SIGINT)
    try:
        results = tuner.fit()
        if signal.getsignal(signal.SIGINT) is before:
            raise KeyboardInterrupt("stopped; the same command goes on with this search")
    finally:
        signal.signal(signal.SIGINT, before)
    return results


# ------------------------------------------------------------ the folder


def store_settings(out: Path, settings: Mapping[str, str | int], identity: Identity) -> None:
    """Store the settings of the search next to its results, with the contents behind them, which may change under the
    same names.

    Raises: ValueError where a search is continued with others.
    """
    _make_private(out)
    path = out / "options.json"
    if not path.exists():
        replace_file(path, (json.dumps({**settings, IDENTITY: dict(identity.entries)}) + "\n").encode(), durable=True)
        return
    try:
        begun = plain_json(read_small(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; give another --out") from error
    if not isinstance(begun, dict) or IDENTITY not in begun:
        raise ValueError(f"{path} does not have the settings of the search; give another --out")
    contents = begun.pop(IDENTITY)
    changed = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
    reasons = [f"{name} {begun.get(name)}, not {settings.get(name)}" for name in changed]
    if not reasons and contents != identity.entries:
        reasons = ["other contents: " + "; ".join(identity.differences(contents))]
    if reasons:
        raise ValueError(f"the search in {out} was begun with {'; '.join(reasons)}; give the same, or another --out")


def _make_private(out: Path) -> None:
    """Make `out` and the folder of the search's state, which Ray Tune unpickles, so that its content is executed.
    Raises ValueError where another user may have written there."""
    out.mkdir(mode=0o755, parents=True, exist_ok=True)
    (out / NAME).mkdir(mode=0o700, exist_ok=True)
    for folder, forbidden in ((out, 0o022), (out / NAME, 0o077)):
        about = folder.lstat()
        is_own = stat.S_ISDIR(about.st_mode) and about.st_uid in (os.geteuid(), 0)
        if not is_own or (about.st_mode & forbidden and not _close(folder, about, forbidden)):
            raise ValueError(
                f"--out {out}: {folder} is a link, another user's, or open to others, who could leave code there that "
                f"the search runs (it unpickles its state): give a folder of your own or, if you trust what is in it, "
                f"chmod {0o755 if folder == out else 0o700:o} {folder}"
            )


def _close(folder: Path, about: os.stat_result, forbidden: int) -> bool:
    """Remove the `forbidden` permissions, as a umask of 002 gives them, where they were not used: each entry is this
    user's or root's and, in the folder that is unpickled, not writable by other users."""
    if about.st_uid != os.geteuid():
        return False
    folder.chmod(stat.S_IMODE(about.st_mode) & ~forbidden)  # first, so that no entry is added meanwhile
    is_state = forbidden == 0o077
    entries, writable = (folder.rglob("*"), 0o022) if is_state else (folder.iterdir(), 0)
    for entry in map(Path.lstat, entries):
        if entry.st_uid not in (about.st_uid, 0) or (entry.st_mode & writable and not stat.S_ISLNK(entry.st_mode)):
            folder.chmod(stat.S_IMODE(about.st_mode))
            return False
    log.warning("%s was open to others (%s), who left nothing there: closed", folder, stat.filemode(about.st_mode))
    return True


def run_name_of(out: Path) -> str:
    """The name of the run with the recommended pattern, where the user names none."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", out.name).strip("-._")[:80] or "found"


def run(options: Namespace, train_arguments: Sequence[str], trainer: ElasticRingTrainer, *, is_named: bool) -> int:
    """One search of the command; returns its exit status: 2 for settings that do not fit. `is_named`: the arguments
    name the run."""
    step, device = trainer.task.step, trainer.scaling_config.device
    space = {} if options.space is None else read_space(options.space)
    num_layers = PatternCosts(trainer.task, 1, device).num_layers
    points = patterns(space, step, num_layers, whole_blocks=device == "cuda")
    digest = hashlib.sha256("\n".join(points).encode()).hexdigest()[:16]
    settings = {"--trials": options.trials, "patterns": digest, "arguments": shlex.join(train_arguments)}
    if options.concurrent != 1:  # the Tuner that is restored keeps its own
        settings["--concurrent"] = options.concurrent
    if options.on_mesh:
        settings["--on-mesh"] = True
    store_settings(options.out, settings, Identity(trainer.measured_on))
    if options.address:
        environment()["RAY_ADDRESS"] = options.address
    limits = (options.trials, options.concurrent, options.cpus_per_trial, options.on_mesh)
    with cluster(None):
        table, pattern = Search(trainer, options.out, points, *limits).run()
    print(table)
    validates = [] if step.validates else ["--val-every", str(step.steps)]
    name = [] if is_named else ["--run-name", run_name_of(options.out)]
    recommended = ["--pattern", pattern, "--search", os.path.relpath(options.out)]
    command = ["elastic-ring", "train", *train_arguments, *validates, *recommended, *name]
    print(f"{options.out}: front.md, front.png, front.json. Next:\n{shlex.join(command)}")
    return 0
