"""Does the search find the front? Measured once on a small space, then replayed on the table.

    python tune/check_search.py grid --out tune/grid_64.json [--long-steps N]     every point, trained; resumable
    python tune/check_search.py replay --table tune/grid_64.json [--seeds 0,1,2,3,4]

`replay` lets the search's sampler ask for an eighth of the points and answers from the table, so that it can be
repeated in seconds. Its front's hypervolume is compared with that of the whole grid; beside it random choice and
Optuna's own multi-objective sampler, which know nothing of plans and proxies, with the same number of points.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a checkout, where the package may not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import optuna
import torch
from optuna.distributions import CategoricalDistribution

from tune.pareto import front, hypervolume, rank_correlation
from tune.rungs import Climb, baseline, kernel_s, tail_loss
from tune.sampler import MARGIN, Cheap, ProxySampler, scaled
from tune.space import AXES, Candidate, candidates

OBJECTIVES = ("gap", "step_s", "bytes")
SHARE = 8
"""One point in so many is trained."""


def measure_grid(path: Path, climb: Climb, workers: int) -> dict[str, Any]:
    """The table: by name of the point its objectives and what was cheap to know. Written after every point."""
    base = baseline(path.with_suffix(".baseline.json"), climb)
    table: dict[str, Any] = {"climb": asdict(climb), "dense": {"long": base["long"]}, "points": {}}
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["climb"] != asdict(climb):
            raise ValueError(f"{path} was measured with other settings; name another --out, or give the same")
    missing = [candidate for candidate in candidates() if candidate.name not in table["points"]]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        trained = {candidate.name: pool.submit(train_point, candidate, climb) for candidate in missing}
        for candidate in missing:
            plan, proxy = base["plans"][candidate.name], base["proxies"][candidate.name]
            # Timed here, one after the other, while the others train.
            step = kernel_s(candidate.scaled(climb.cost_len), climb) / base["step_s"]
            short, loss = trained[candidate.name].result()
            found = {
                "gap": loss - base["long"], "short_gap": short - base["short"], "step_s": step,
                "bytes": plan["bytes"], "density": plan["density"], "reach": plan["reach"],
                "mass": proxy["mass"], "error": proxy["error"],
            }  # fmt: skip
            table["points"][candidate.name] = {key: round(float(value), 6) for key, value in found.items()}
            path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
            print(f"{candidate.name:<28} gap {found['gap']:+.4f} step {step:.3f} bytes {plan['bytes']:.3f}", flush=True)
    return table


def train_point(candidate: Candidate, climb: Climb) -> tuple[float, float]:
    """Trailing loss after the short and after the long training."""
    torch.set_num_threads(1)
    family = candidate.scaled(climb.seq_len)
    return tail_loss(family, climb, climb.short_steps)[0], tail_loss(family, climb, climb.long_steps)[0]


def cheap_of(points: dict[str, dict[str, float]]) -> Cheap:
    """What the search may know without training, as `search_patterns.cheap_of` has it."""
    features = {
        name: (p["mass"], -p["error"], p["density"], float(not name.endswith("/all"))) for name, p in points.items()
    }
    return Cheap(features, {name: (p["step_s"], p["bytes"]) for name, p in points.items()})


class Grid:
    """The table as scaled objectives, and the share of its hypervolume that some points have."""

    def __init__(self, points: dict[str, dict[str, float]]) -> None:
        self.points = points
        values = scaled(np.array([[p[key] for key in OBJECTIVES] for p in points.values()]))
        self.place = dict(zip(points, map(tuple, values.tolist()), strict=True))
        self.whole = hypervolume(list(self.place.values()), [MARGIN] * len(OBJECTIVES))

    def share(self, names: Sequence[str]) -> float:
        return hypervolume([self.place[name] for name in names], [MARGIN] * len(OBJECTIVES)) / self.whole


def asked_by(sampler: Any, grid: Grid, num: int) -> list[str]:
    """The first `num` points that a sampler asks for, answered from the table."""
    study = optuna.create_study(directions=["minimize"] * len(OBJECTIVES), sampler=sampler)
    distributions: dict[str, Any] = {axis: CategoricalDistribution(values) for axis, values in AXES.items()}
    found: list[str] = []
    for _ in range(num):
        trial = study.ask(distributions)
        name = Candidate.of(trial.params).name
        study.tell(trial, [grid.points[name][key] for key in OBJECTIVES])
        found.append(name)
    return found


def replay(table: dict[str, Any], seeds: Sequence[int]) -> dict[str, list[float]]:
    """By sampler the share of the grid's hypervolume, seed by seed."""
    grid = Grid(table["points"])
    num = len(grid.points) // SHARE
    shares: dict[str, list[float]] = {"proxy (this search)": [], "random": [], "TPE": []}
    for seed in seeds:
        samplers = (
            ProxySampler(cheap_of(grid.points), seed),
            optuna.samplers.RandomSampler(seed=seed),
            optuna.samplers.TPESampler(seed=seed),
        )
        for name, sampler in zip(shares, samplers, strict=True):
            shares[name].append(grid.share(asked_by(sampler, grid, num)))
    return shares


def correlations(points: dict[str, dict[str, float]]) -> dict[str, float]:
    """Of each rung with the gap of the last, over the whole grid; and of density with the time it stands for."""
    gaps = [p["gap"] for p in points.values()]
    found = {
        "plan: density": rank_correlation([-p["density"] for p in points.values()], gaps),
        "plan: attention mass of a dense model": rank_correlation([-p["mass"] for p in points.values()], gaps),
        "short training": rank_correlation([p["short_gap"] for p in points.values()], gaps),
    }
    found["density with step time"] = rank_correlation(
        [p["density"] for p in points.values()], [p["step_s"] for p in points.values()]
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = Climb()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    grid = commands.add_parser("grid")
    grid.add_argument("--out", type=Path, required=True)
    grid.add_argument("--short-steps", type=int, default=defaults.short_steps)
    grid.add_argument("--long-steps", type=int, default=defaults.long_steps)
    grid.add_argument("--workers", type=int, default=1, help="points that are trained at a time (1)")
    again = commands.add_parser("replay")
    again.add_argument("--table", type=Path, required=True)
    again.add_argument("--seeds", default="0,1,2,3,4")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.command == "grid":
            measure_grid(options.out, Climb(options.short_steps, options.long_steps), options.workers)
            return 0
        table = json.loads(options.table.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        print(f"check_search: {error}", file=sys.stderr)
        return 2
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    points = table["points"]
    values = [[p[key] for key in OBJECTIVES] for p in points.values()]
    print(f"{len(points)} points, {len(front(values))} on the grid's front, {len(points) // SHARE} asked for")
    for name, shares in replay(table, seeds).items():
        listed = " ".join(f"{share:.1%}" for share in shares)
        print(f"{name:<22} {min(shares):.1%} at least, seeds {listed} of the grid's hypervolume")
    for what, value in correlations(points).items():
        print(f"rank correlation, {what:<40} {value:+.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
