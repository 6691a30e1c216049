"""Search sparse patterns for the best trade between quality, time and bytes, with Ray Tune and Optuna.

    python tune/search_patterns.py --out runs/search [--trials 24] [--cpus-per-trial 0.5]
    ray job submit --working-dir . -- python tune/search_patterns.py --address auto --out /shared/search

Every trial evaluates one pattern at rising fidelities (`tuning.fidelity`); one that is dominated by two fronts of the
others is stopped early. The same command continues a killed search: finished trials are kept. Writes to `--out`:
front.md (the table), front.png, pattern-1.json ... for `jobs/train_1t.py --pattern`, trials.jsonl (every fidelity that
was measured), baseline.json. Gaps are to dense after the same steps from the same seed; "step" is CPU time of one
attention call relative to dense, times the busiest rank's work over the mean; "bytes" are relative to the dense ring.
Every trained pattern counts in each layout of `LAYOUTS`. `--for-gpus` proposes only patterns that keep whole blocks of
128 tokens at `--pattern-len`. Exits with 1 when no trial reached the last fidelity.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a checkout, where the package may not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch
from ray import tune as ray_tune
from ray.tune.search import ConcurrencyLimiter

from elastic_ring.tuning.fidelity import NUM_LAYERS, Climb, baseline
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


def remembered(options: argparse.Namespace) -> None:
    """Store the settings that define the search next to its results.

    Raises: ValueError where a search is continued with other settings.
    """
    path = options.out / "options.json"
    names = ("trials", "concurrent", "seed", "for_gpus")
    given = {name: getattr(options, name) for name in names}
    if options.for_gpus:
        given |= {"pattern_len": options.pattern_len, "pattern_layers": options.pattern_layers}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(given) + "\n", encoding="utf-8")
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name in {**begun, **given} if begun.get(name) != given.get(name)]
    if other:
        said = ", ".join(f"--{name.replace('_', '-')} {begun.get(name)}, not {given.get(name)}" for name in other)
        raise ValueError(f"the search in {options.out} was begun with {said}; give the same, or another --out")


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
                search_alg=ConcurrencyLimiter(searcher, options.concurrent), scheduler=NonDominatedRank(log),
                num_samples=options.trials, reuse_actors=True,
            ),
            run_config=ray_tune.RunConfig(
                name=NAME, storage_path=str(options.out), verbose=1,
                checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )  # fmt: skip
    results = tuner.fit()
    for error in results.errors:
        logging.error("a trial failed: %s", error)
    return [dict(result.metrics) for result in results if result.metrics and "name" in result.metrics]


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = Climb()
    parser = argparse.ArgumentParser(
        prog="elastic-ring tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the search; the same one goes on")
    parser.add_argument("--trials", type=int, default=24, help="(24)")
    parser.add_argument("--concurrent", type=int, default=2, help="trials at a time (2)")
    parser.add_argument("--cpus-per-trial", type=float, default=0.5, help="(0.5)")
    parser.add_argument("--address", default="local", help="of Ray: local starts one, auto attaches (local)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")
    parser.add_argument("--short-steps", type=int, default=defaults.short_steps, help=f"({defaults.short_steps})")
    parser.add_argument("--long-steps", type=int, default=defaults.long_steps, help=f"({defaults.long_steps})")
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len, help=f"tokens trained on ({defaults.seq_len})")
    parser.add_argument("--cost-len", type=int, default=defaults.cost_len, help=f"tokens timed ({defaults.cost_len})")
    parser.add_argument("--pattern-len", type=int, default=8192, help="tokens that the JSON patterns are for (8192)")
    parser.add_argument("--pattern-layers", type=int, default=NUM_LAYERS, help=f"and layers ({NUM_LAYERS})")
    parser.add_argument("--for-gpus", action="store_true", help="propose whole blocks of 128 tokens only")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()  # trials run in their own folders
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    climb = Climb(options.short_steps, options.long_steps, options.seq_len, options.cost_len)
    try:
        asked = asked_for(options, climb)
        asked[0].text(options.pattern_len, options.pattern_layers)
        remembered(options)
        base = baseline(options.out / "baseline.json", climb)
    except ValueError as error:
        print(f"elastic-ring tune: {error}", file=sys.stderr)
        return 2
    ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    trials = search(options, base, asked)
    if not any(trial.get("long_gap") is not None for trial in trials):
        print(f"elastic-ring tune: none of {options.trials} trials reached the last fidelity, so there is no front; why"
              " is logged above", file=sys.stderr)  # fmt: skip
        return 1
    print(report(trials, base, options.out, options.pattern_len, options.pattern_layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
