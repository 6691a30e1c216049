"""`elastic-ring tune`: the search, dense under two seeds first; a second seed of what is in doubt; results.

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
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import tune as ray_tune
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from elastic_ring.config import environment
from elastic_ring.files import plain_json, read_small, replace_file
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.identity import Identity
from elastic_ring.trainer import ElasticRingTrainer
from elastic_ring.tuning.cost import Costs
from elastic_ring.tuning.report import Trial, advised, as_trained, found, in_doubt, report, spread
from elastic_ring.tuning.sampler import LOSSES, PATTERN, SEED, Cheap, ProxySampler, axes
from elastic_ring.tuning.space import DENSE, patterns, read_space
from elastic_ring.tuning.trial import MESH, METRICS, NUM_REPORTS, NonDominatedRank, pattern_trainable

log = logging.getLogger(__name__)

NAME, IDENTITY = "search", "identity"
NO_HANDLER = "TUNE_DISABLE_SIGINT_HANDLER"
"""A variable of Ray Tune's: then Ctrl-C is raised as it is elsewhere."""


@dataclass
class Progress(ray_tune.Callback):
    """A line for each report: trials, tokens, time left. Tokens of trials that are stopped early count as left out."""

    what: str
    num_trials: int
    tokens_of_trial: int
    begun: float = 0.0
    _tokens: dict[str, int] = field(default_factory=dict)
    _first: int | None = None

    def setup(self, **info: Any) -> None:
        self.begun = time.monotonic()  # of this process, also in a search that was restored

    def on_trial_result(self, *, trials: list[Any], trial: Any, result: Trial, **info: Any) -> None:
        if self._first is None:  # a restored search has trained before
            self._first = sum(int((each.last_result or {}).get("tokens", 0)) for each in trials if each is not trial)
        self._tokens |= {each.trial_id: int((each.last_result or {}).get("tokens", 0)) for each in trials}
        self._tokens[trial.trial_id] = int(result["tokens"])
        ended = [each for each in trials if each.is_finished() or (each is trial and result["done"])]
        tokens, spent_s = sum(self._tokens.values()), time.monotonic() - self.begun
        stopped = sum(self.tokens_of_trial - self._tokens.get(each.trial_id, 0) for each in ended)
        left = self.num_trials * self.tokens_of_trial - stopped - tokens
        left_s = spent_s * left / max(1, tokens - self._first)
        told = result["rejected"] or f"loss {result['loss']:.4f}, step {result['step_s']:.4f} s"
        log.info(
            "%s: %d of %d trials ended, %.3g M tokens of at most %.3g M, about %.1f min left; %s, %d of %d: %s",
            self.what,
            len(ended),
            self.num_trials,
            tokens / 1e6,
            self.num_trials * self.tokens_of_trial / 1e6,
            left_s / 60,
            result["pattern"],
            len(result["losses"]),
            NUM_REPORTS,
            told,
        )


class CurveSearch(OptunaSearch):
    """Optuna's search; also stores a finished trial's losses at each report."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
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
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> str:
        """The table of the front. Raises ValueError where dense cannot be trained, or nothing else."""
        seed = self.trainer.task.step.seed
        self._search(seed)
        found(self.trials)  # or it raises
        asked = set[str]()
        while doubt := [one for one in in_doubt(found(self.trials), spread(self.trials)[0]) if one not in asked]:
            asked |= set(doubt)
            self._phase(f"seeds-{len(asked)}", {PATTERN: ray_tune.grid_search(doubt), SEED: seed + 1})
        step = self.trainer.task.step
        title = (
            f"{step.steps} steps of {step.global_batch} x {step.context_tokens} tokens; bytes: K and V that a ring of"
        )
        mesh = self.trainer.scaling_config.mesh if self.on_mesh else MESH
        title = f"{title} {self.trainer.scaling_config.cp} receives in a forward pass."
        trained = as_trained(step, mesh, self.trainer.scaling_config.device, self.trainer.measured_on)
        return report(self.trials, self.out, title, trained)

    @property
    def advice(self) -> str:
        return advised(found(self.trials), spread(self.trials)[0]).pattern

    def _search(self, seed: int) -> None:
        costs = Costs(self.trainer.task, self.trainer.scaling_config.cp, self.trainer.scaling_config.device)
        about: dict[str, dict[str, Any]] = {}
        for text in self.points:
            try:
                about[text] = costs.of(text)
            except ValueError as error:
                log.info("left out: %s: %s", text, error)
        about.pop(DENSE, None)
        if not about:
            raise ValueError("the space has no pattern that fits the model beside dense; give others")
        cheap = Cheap(
            {text: one["features"] for text, one in about.items()},
            {text: (one["density"], one["bytes"]) for text, one in about.items()},
        )
        searcher = CurveSearch(
            axes(list(about), seed),
            metric=list(METRICS),
            mode=["min"] * len(METRICS),
            points_to_evaluate=[{PATTERN: DENSE, SEED: seed}, {PATTERN: DENSE, SEED: seed + 1}],
            sampler=ProxySampler(cheap, seed),
        )
        how = {"search_alg": ConcurrencyLimiter(searcher, self.concurrent), "scheduler": NonDominatedRank()}
        self._phase("patterns", {}, 2 + min(self.num_trials, len(about)), **how)

    def _phase(self, name: str, param_space: dict[str, Any], num_samples: int = 1, **how: Any) -> None:
        """Run or restore one Tuner, and keep what its trials reported last."""
        stored, runs = self.out / NAME / name, str(self.out / NAME / "runs") if self.on_mesh else ""
        trainable = pattern_trainable(self.trainer, self.num_cpus, runs)
        step = self.trainer.task.step
        num = num_samples
        for axis in param_space.values():
            num *= len(axis["grid_search"]) if isinstance(axis, dict) else 1
        if ray_tune.Tuner.can_restore(str(stored)):
            tuner = ray_tune.Tuner.restore(str(stored), trainable, resume_unfinished=True, restart_errored=True)
        else:
            tuner = ray_tune.Tuner(
                trainable,
                param_space=param_space,
                tune_config=ray_tune.TuneConfig(
                    num_samples=num_samples,
                    max_concurrent_trials=None if how else self.concurrent,
                    reuse_actors=True,
                    **how,
                ),
                run_config=ray_tune.RunConfig(
                    name=name,
                    storage_path=str(stored.parent),
                    verbose=0,
                    failure_config=ray_tune.FailureConfig(max_failures=3),
                    checkpoint_config=ray_tune.CheckpointConfig(num_to_keep=1, checkpoint_at_end=False),
                    callbacks=[Progress(name, num, step.steps * step.global_batch * step.context_tokens)],
                ),
            )
        with redirect_stdout(sys.stderr):  # ours has the table alone
            results = _uninterrupted(tuner)
        for error in results.errors:
            log.error("a trial failed: %s", error)
        told = [dict(result.metrics) for result in results if result.metrics and PATTERN in result.metrics]
        self.trials += told
        if runs:
            from elastic_ring.tuning.mesh_trial import remove_stopped

            failed = {result.metrics["trial_id"] for result in results if result.error and result.metrics}
            remove_stopped(self.trainer.run_config, runs, {one["trial_id"] for one in told} - failed)


def _uninterrupted(tuner: ray_tune.Tuner) -> ray_tune.ResultGrid:
    """`fit`, which after Ctrl-C stores its state and returns as if all trials had ended. Raises KeyboardInterrupt then.
    Tune puts the handler that was there back only where it was interrupted."""
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


def store_settings(out: Path, given: Mapping[str, Any], identity: Identity) -> None:
    """Store what defines the search next to its results: its settings, and the contents behind them, which may have
    changed under the same names.

    Raises: ValueError where a search is continued with others.
    """
    _be_own(out)
    path = out / "options.json"
    if not path.exists():
        replace_file(path, (json.dumps({**given, IDENTITY: dict(identity.what)}) + "\n").encode(), durable=True)
        return
    try:
        begun = plain_json(read_small(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; give another --out") from error
    if not isinstance(begun, dict):
        raise ValueError(f"{path} does not say with what the search was begun; give another --out")
    if IDENTITY not in begun:  # of an earlier version
        begun.pop("--from", None)
    contents = begun.pop(IDENTITY, identity.what)
    other = [name for name in {**begun, **given} if begun.get(name) != given.get(name)]
    said = [f"{name} {begun.get(name)}, not {given.get(name)}" for name in other]
    said = said or ["other contents: " + "; ".join(identity.differences(contents))] * (contents != identity.what)
    if said:
        raise ValueError(f"the search in {out} was begun with {'; '.join(said)}; give the same, or another --out")


def _be_own(out: Path) -> None:
    """Ray Tune unpickles the search's state, which runs what is in it: make `out` and the folder of that state, or
    raise ValueError where somebody else may have written there."""
    out.mkdir(mode=0o755, parents=True, exist_ok=True)
    (out / NAME).mkdir(mode=0o700, exist_ok=True)
    for folder, others in ((out, 0o022), (out / NAME, 0o077)):
        about = folder.lstat()
        is_own = stat.S_ISDIR(about.st_mode) and about.st_uid in (os.geteuid(), 0)
        if not is_own or (about.st_mode & others and not _closed(folder, about, others)):
            raise ValueError(
                f"--out {out}: {folder} is a link, another user's, or open to others, who could leave code there that "
                f"the search runs (it unpickles its state): give a folder of your own or, if you trust what is in it, "
                f"chmod {0o755 if folder == out else 0o700:o} {folder}"
            )


def _closed(folder: Path, about: os.stat_result, others: int) -> bool:
    """Take `others`' permissions away, as an earlier version or a umask of 002 gave them, where nobody has used them:
    each entry is this user's or root's and, in the folder that is unpickled, could not be written by anybody else."""
    if about.st_uid != os.geteuid():
        return False
    folder.chmod(stat.S_IMODE(about.st_mode) & ~others)  # first, so that nobody adds one meanwhile
    is_state = others == 0o077
    entries, writable = (folder.rglob("*"), 0o022) if is_state else (folder.iterdir(), 0)
    for entry in map(Path.lstat, entries):
        if entry.st_uid not in (about.st_uid, 0) or (entry.st_mode & writable and not stat.S_ISLNK(entry.st_mode)):
            folder.chmod(stat.S_IMODE(about.st_mode))
            return False
    logging.warning("%s was open to others (%s), who left nothing there: closed", folder, stat.filemode(about.st_mode))
    return True


def run_name_of(out: Path) -> str:
    """For the run of what the search has found, where the user names none."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", out.name).strip("-._")[:80] or "found"


def run(options: Any, train_arguments: Sequence[str], trainer: ElasticRingTrainer, *, is_named: bool = False) -> int:
    """One search of the command; returns its exit status: 2 for settings that do not fit. `is_named`: the arguments
    name the run."""
    step = trainer.task.step
    costs = Costs(trainer.task, 1, trainer.scaling_config.device)
    space = {} if options.space is None else read_space(options.space)
    whole = trainer.scaling_config.device == "cuda"
    points = patterns(space, step.context_tokens, costs.num_layers, whole_blocks=whole)
    digest = hashlib.sha256("\n".join(points).encode()).hexdigest()[:16]
    given = {"--trials": options.trials, "patterns": digest, "arguments": shlex.join(train_arguments)}
    if options.concurrent != 1:  # the Tuner that is restored keeps its own
        given["--concurrent"] = options.concurrent
    if options.on_mesh:
        given["--on-mesh"] = True
    store_settings(options.out, given, Identity(trainer.measured_on))
    if options.address == "local":
        access.start(logging_level="ERROR", include_dashboard=False)
    else:
        access.connect(options.address, logging_level="ERROR")
    access.warn_if_open(ray.get_runtime_context().gcs_address)
    how = (options.trials, options.concurrent, options.cpus_per_trial, options.on_mesh)
    search = Search(trainer, options.out, points, *how)
    print(search.run())
    validates = [] if step.validates else ["--val-every", str(step.steps)]
    name = [] if is_named else ["--run-name", run_name_of(options.out)]
    found = ["--pattern", search.advice, "--search", os.path.relpath(options.out)]
    command = ["elastic-ring", "train", *train_arguments, *validates, *found, *name]
    print(f"{options.out}: front.md, front.png, front.json. Next:\n{shlex.join(command)}")
    return 0
