"""Does the search find the front? Every admitted point trained once and kept as a table, then replayed.

    python benchmarks/quality/check_search.py grid --out benchmarks/quality/grid.json [--long-steps N]
    python benchmarks/quality/check_search.py replay --table benchmarks/quality/grid.json

`replay` is the search that `search_patterns.py` runs, answered from the table, with an eighth of the points, so that
it can be repeated in seconds. Its front's hypervolume is compared with that of the whole grid; beside it random choice
and Optuna's own multi-objective sampler with the same number of points, which know nothing of plans and proxies but
are charged nothing for what the plan rejects.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import optuna
import torch

from benchmarks.harness.arguments import bench_parser
from benchmarks.quality.replay import SHARE, Grid, best_alone, correlations, replay
from elastic_ring.tuning.climb import Climb
from elastic_ring.tuning.fidelity import baseline, tail_loss
from elastic_ring.tuning.space import candidates


def measure_grid(path: Path, climb: Climb, about: str) -> dict[str, Any]:
    """The table that `benchmarks.quality.replay` reads. Written after every point; goes on with one that is there.

    Raises `ValueError` for a table of other settings, and for a training that diverges.
    """
    if path.exists():
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if table["base"]["climb"] != asdict(climb):
            raise ValueError(f"{path} was measured with other settings; name another --out, or give the same")
    else:
        table = {"about": about, "base": baseline(path.with_suffix(".baseline.json"), climb), "losses": {}}
    base = table["base"]
    for candidate in candidates():
        name = candidate.name
        if base["plans"][name]["rejected"] or name in table["losses"]:
            continue
        family = candidate.scaled(climb.seq_len)
        losses = [tail_loss(family, climb, steps)[0] for steps in (climb.short_steps, climb.long_steps)]
        if not math.isfinite(sum(losses)):
            raise ValueError(f"{name} diverged: {losses}; a grid needs a gap of every point")
        table["losses"][name] = losses
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"{name:<30} gap {losses[1] - base['long']:+.4f}", flush=True)
    return table


def show(table: dict[str, Any], seeds: Sequence[int]) -> None:
    grid = Grid(table)
    print(table["about"])
    print(
        f"{len(grid.names)} admitted points, {grid.num_on_front} of them on the grid's front in some layout,"
        f" {len(grid.names) // SHARE} trained; gaps {min(grid.long.values()):+.3f} to {max(grid.long.values()):+.3f}"
    )
    alone, its_share = best_alone(grid)
    print(f"one point alone, {alone}, has {its_share:.1%} of the grid's hypervolume")
    for name, shares in replay(grid, seeds).items():
        mean, listed = sum(shares) / len(shares), " ".join(f"{share:.1%}" for share in shares)
        print(f"{name:<13} least {min(shares):.1%}, mean {mean:.1%} of the grid's hypervolume: {listed}")
    for what, value in correlations(grid).items():
        print(f"rank correlation, {what:<40} {value:+.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = Climb()
    parser = bench_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    grid = commands.add_parser("grid")
    grid.add_argument("--out", type=Path, required=True)
    grid.add_argument("--about", default="", help="machine and date, kept in the table")
    grid.add_argument("--short-steps", type=int, default=defaults.short_steps)
    grid.add_argument("--long-steps", type=int, default=defaults.long_steps)
    again = commands.add_parser("replay")
    again.add_argument("--table", type=Path, required=True)
    again.add_argument("--seeds", default="0,1,2,3,4")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    try:
        if options.command == "grid":
            measure_grid(options.out, Climb(options.short_steps, options.long_steps), options.about)
        else:
            table = json.loads(options.table.read_text(encoding="utf-8"))
            show(table, [int(seed) for seed in options.seeds.split(",")])
    except (ValueError, OSError) as error:
        print(f"check_search: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
