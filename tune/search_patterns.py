"""Search sparse patterns for the best trade between quality, time and bytes, with Ray Tune and Optuna.

    python tune/search_patterns.py --out runs/search [--trials 24] [--cpus-per-trial 0.5]
    ray job submit --working-dir . -- python tune/search_patterns.py --address auto --out /shared/search

Every trial is one pattern that climbs the rungs of `tune.rungs`; one that falls behind two fronts of the others
at a rung is stopped there. The same command goes on where a killed one stopped: finished trials are kept. Leaves
in `--out`: front.md (the table), front.png, pattern-1.json ... for `jobs/train_1t.py --pattern`, trials.jsonl
(every rung that was measured), baseline.json. Gaps are to dense after the same steps from the same seed; "step" is CPU
time of one attention call over dense's on the same path, "bytes" a ring's over the dense ring's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a checkout, where the package may not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import torch
from ray import tune as ray_tune
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from elastic_ring.attention.machine import Machine
from tune.pareto import front, rank_correlation
from tune.rungs import Climb, baseline
from tune.sampler import Cheap, ProxySampler
from tune.space import Candidate, candidates
from tune.trial import OBJECTIVES, NonDominatedRank, PatternTrial, distributions

NAME = "search"


def cheap_of(base: dict[str, Any]) -> Cheap:
    """What the sampler knows of every point before anything is trained."""
    features, costs = {}, {}
    for candidate in candidates():
        plan, proxy = base["plans"][candidate.name], base["proxies"][candidate.name]
        if plan["rejected"]:
            continue
        features[candidate.name] = (proxy["mass"], -proxy["error"], plan["density"], float(candidate.mix != "all"))
        costs[candidate.name] = (base["kernels"][candidate.name], plan["bytes"])
    return Cheap(features, costs)


def search(options: argparse.Namespace, base: dict[str, Any]) -> list[dict[str, Any]]:
    """The last result of every trial, in the order of trials. Goes on with an earlier search in `--out`."""
    shared = {
        "climb": base["climb"], "plans": base["plans"], "proxies": base["proxies"], "short": base["short"],
        "long": base["long"], "kernels": base["kernels"], "log": str(options.out / "trials.jsonl"),
    }  # fmt: skip
    trainable: Any = ray_tune.with_resources(
        ray_tune.with_parameters(PatternTrial, shared=shared), {"cpu": options.cpus_per_trial}
    )
    stored = options.out / NAME
    if ray_tune.Tuner.can_restore(str(stored)):
        logging.info("going on with the search in %s", stored)
        tuner = ray_tune.Tuner.restore(str(stored), trainable, resume_unfinished=True, restart_errored=True)
    else:
        sampler = ProxySampler(cheap_of(base), options.seed)
        searcher = OptunaSearch(
            distributions(), metric=list(OBJECTIVES), mode=["min"] * len(OBJECTIVES), sampler=sampler
        )
        tuner = ray_tune.Tuner(
            trainable,
            tune_config=ray_tune.TuneConfig(
                search_alg=ConcurrencyLimiter(searcher, options.concurrent), scheduler=NonDominatedRank(),
                num_samples=options.trials, reuse_actors=True,
            ),
            run_config=ray_tune.RunConfig(
                name=NAME, storage_path=str(options.out.absolute()), verbose=1,
                checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )  # fmt: skip
    results = tuner.fit()
    for error in results.errors:
        logging.error("a trial failed: %s", error)
    return [dict(result.metrics) for result in results if result.metrics and "name" in result.metrics]


def report(trials: list[dict[str, Any]], options: argparse.Namespace, base: dict[str, Any]) -> str:
    """Writes the table, the picture and the patterns; returns the table."""
    trained = [t for t in trials if t.get("long_gap") is not None]
    chosen = sorted((trained[i] for i in front([objectives(t) for t in trained])), key=lambda t: t["gap"])
    lines = [
        f"{len(trials)} trials, {len(trained)} climbed all rungs, {len(chosen)} on the front; gaps in nats on the"
        " trailing tokens, step and bytes as shares of dense's",
        "",
        "| file | pattern | density | gap | step | bytes |",
        "|---|---|---|---|---|---|",
    ]
    by_name = {candidate.name: candidate for candidate in candidates()}
    for number, trial in enumerate(chosen, 1):
        candidate: Candidate = by_name[trial["name"]]
        path = options.out / f"pattern-{number}.json"
        measured = {key: float(trial[key]) for key in ("density", *OBJECTIVES)}
        path.write_text(candidate.file(options.pattern_len, measured) + "\n", encoding="utf-8")
        lines.append(
            f"| {path.name} | `{candidate.text(options.pattern_len)}` | {trial['density']:.3f} |"
            f" {trial['gap']:+.4f} | {trial['step_s']:.3f} | {trial['bytes']:.3f} |"
        )
    lines += ["", "Rank correlation of what a rung says with the gap of the last:", ""]
    lines += [f"- {what}: {value:.2f} over {num}" for what, value, num in correlations(trained)]
    text = "\n".join(lines) + "\n"
    (options.out / "front.md").write_text(text, encoding="utf-8")
    draw(trials, chosen, options.out / "front.png")
    return text


def objectives(trial: dict[str, Any]) -> tuple[float, ...]:
    return tuple(float(trial[key]) for key in OBJECTIVES)


def correlations(trained: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Only trials that reached the last rung can say; those stopped before are the ones a rung thought bad."""
    last = [float(t["long_gap"]) for t in trained]
    rows = {
        "plan, density (more is better)": [-float(t["density"]) for t in trained],
        "plan, attention mass of a dense model": [-float(t["mass"]) for t in trained],
        "kernel, step time (slower is better)": [-float(t["step_s"]) for t in trained],
        "short training, gap": [float(t["short_gap"]) for t in trained],
    }
    return [(what, rank_correlation(values, last), len(trained)) for what, values in rows.items()]


def draw(trials: list[dict[str, Any]], chosen: list[dict[str, Any]], path: Path) -> None:
    """Gap over step time, the front's points larger, bytes as colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [t for t in trials if not t["rejected"]]
    names = {t["name"] for t in chosen}
    dots = axes.scatter(
        [t["step_s"] for t in shown], [t["gap"] for t in shown], c=[t["bytes"] for t in shown],
        s=[90 if t["name"] in names else 25 for t in shown], cmap="viridis", edgecolors="black", linewidths=0.5,
    )  # fmt: skip
    for trial in chosen:
        place = (trial["step_s"], trial["gap"])
        axes.annotate(trial["name"], place, fontsize=6, xytext=(4, 4), textcoords="offset points")
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set_xlabel("CPU time of an attention call, share of dense")
    axes.set_ylabel("gap to dense on trailing tokens, nats")
    figure.colorbar(dots, label="bytes, share of the dense ring")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = Climb()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--pattern-len", type=int, default=2048, help="tokens that the JSON patterns are for (2048)")
    parser.add_argument("--machine", type=Path, help="figures for the plans, a file of jobs/calibrate.py (an H200's)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    climb = Climb(options.short_steps, options.long_steps, options.seq_len, options.cost_len)
    try:
        if options.machine is not None:
            climb = replace(climb, machine=json.dumps(asdict(Machine.read(options.machine))))
        base = baseline(options.out / "baseline.json", climb)
    except ValueError as error:
        print(f"search_patterns: {error}", file=sys.stderr)
        return 2
    assert Climb(**base["climb"]) == climb
    ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    print(report(search(options, base), options, base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
