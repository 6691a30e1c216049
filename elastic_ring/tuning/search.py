"""The search over sparse patterns with Ray Tune and Optuna: stored settings, trials, the results."""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune as ray_tune
from ray.tune.search import ConcurrencyLimiter

from elastic_ring.files import plain_json, read_small
from elastic_ring.runtime.driver import access
from elastic_ring.tuning.climb import Climb
from elastic_ring.tuning.fidelity import baseline
from elastic_ring.tuning.report import report
from elastic_ring.tuning.sampler import ProxySampler, cheap_of
from elastic_ring.tuning.space import Candidate, candidates
from elastic_ring.tuning.trial import OBJECTIVES, GapSearch, NonDominatedRank, PatternTrial, distributions

NAME = "search"


def asked_for(options: argparse.Namespace, climb: Climb) -> list[Candidate]:
    """The points that may be proposed. Raises: ValueError where GPUs can run none, with the last reason."""
    every = list(candidates())
    if not options.for_gpus:
        return every
    why = {c: c.refused_by_gpus(options.pattern_len, options.pattern_layers, climb.cp) for c in every}
    kept = [candidate for candidate in every if not why[candidate]]
    if not kept:
        last = f"--pattern-len {options.pattern_len}: {why[every[-1]]}"
        raise ValueError(f"--for-gpus: GPUs refuse every pattern at {last}")
    return kept


def store_settings(options: argparse.Namespace) -> None:
    """Store the settings that define the search next to its results.

    Raises: ValueError where a search is continued with other settings.
    """
    _be_own(options.out)
    path = options.out / "options.json"
    names = ("trials", "concurrent", "seed", "for_gpus")
    given = {name: getattr(options, name) for name in names}
    if options.for_gpus:
        given |= {"pattern_len": options.pattern_len, "pattern_layers": options.pattern_layers}
    if not path.exists():
        path.write_text(json.dumps(given) + "\n", encoding="utf-8")
        return
    begun = _begun(path)
    other = [name for name in {**begun, **given} if begun.get(name) != given.get(name)]
    if other:
        said = ", ".join(f"--{name.replace('_', '-')} {begun.get(name)}, not {given.get(name)}" for name in other)
        raise ValueError(f"the search in {options.out} was begun with {said}; give the same, or another --out")


def _begun(path: Path) -> dict[str, Any]:
    try:
        found = plain_json(read_small(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; give another --out") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not say with what the search was begun; give another --out")
    return found


def _be_own(out: Path) -> None:
    """Ray Tune unpickles the search's state, which runs what is in it: make `out` and the folder of that state, or
    raise ValueError where somebody else may have written there."""
    out.mkdir(mode=0o755, parents=True, exist_ok=True)
    (out / NAME).mkdir(mode=0o700, exist_ok=True)
    for folder, others in ((out, 0o022), (out / NAME, 0o077)):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)
        if not is_own or (found.st_mode & others and not _closed(folder, found, others)):
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
    for found in map(Path.lstat, entries):
        if found.st_uid not in (about.st_uid, 0) or (found.st_mode & writable and not stat.S_ISLNK(found.st_mode)):
            folder.chmod(stat.S_IMODE(about.st_mode))
            return False
    logging.warning("%s was open to others (%s), who left nothing there: closed", folder, stat.filemode(about.st_mode))
    return True


def search(options: argparse.Namespace, base: dict[str, Any], asked: list[Candidate]) -> list[dict[str, Any]]:
    """The last result of every trial, in the order of trials. Continues an earlier search in `--out`."""
    log = options.out / "trials.jsonl"
    trainable: Any = ray_tune.with_resources(
        ray_tune.with_parameters(PatternTrial, shared={"base": base, "log": str(log)}), {"cpu": options.cpus_per_trial}
    )
    stored = options.out / NAME
    if ray_tune.Tuner.can_restore(str(stored)):
        logging.info("going on with the search in %s", stored)
        tuner = ray_tune.Tuner.restore(str(stored), trainable, resume_unfinished=True, restart_errored=True)
    else:
        sampler = ProxySampler(cheap_of(base, asked), options.seed)
        searcher = GapSearch(distributions(), metric=list(OBJECTIVES), mode=["min"] * len(OBJECTIVES), sampler=sampler)
        tuner = ray_tune.Tuner(
            trainable,
            tune_config=ray_tune.TuneConfig(
                search_alg=ConcurrencyLimiter(searcher, options.concurrent),
                scheduler=NonDominatedRank(log),
                num_samples=options.trials,
                reuse_actors=True,
            ),
            run_config=ray_tune.RunConfig(
                name=NAME,
                storage_path=str(options.out),
                verbose=1,
                checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
    results = tuner.fit()
    for error in results.errors:
        logging.error("a trial failed: %s", error)
    return [dict(result.metrics) for result in results if result.metrics and "name" in result.metrics]


def run(options: argparse.Namespace) -> int:
    """One search; returns the command's exit status: 2 for settings that do not fit, 1 where there is no front."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    climb = Climb(options.short_steps, options.long_steps, options.seq_len, options.cost_len)
    try:
        asked = asked_for(options, climb)
        asked[0].text(options.pattern_len, options.pattern_layers)
        store_settings(options)
        base = baseline(options.out / "baseline.json", climb)
    except ValueError as error:
        print(f"elastic-ring tune: {error}", file=sys.stderr)
        return 2
    if options.address == "local":
        access.start(logging_level="ERROR")
    else:
        access.connect(options.address, logging_level="ERROR")
    access.warn_if_open(ray.get_runtime_context().gcs_address)
    trials = search(options, base, asked)
    if not any(trial.get("long_gap") is not None for trial in trials):
        print(
            f"elastic-ring tune: none of {options.trials} trials reached the last fidelity, so there is no front; why"
            " is logged above",
            file=sys.stderr,
        )
        return 1
    print(report(trials, base, options.out, options.pattern_len, options.pattern_layers))
    return 0
