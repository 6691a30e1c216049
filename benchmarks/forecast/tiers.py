"""Hold tier 1 (the control core on a virtual clock) against tier 2 (the renewal simulation) on random scenarios.

    python benchmarks/forecast/tiers.py [--scenarios 50] [--walks 6] [--seed 0] [--save]
    python benchmarks/forecast/tiers.py --outcomes      one loss of each kind: from where, and the seconds it costs

Both walk the same losses, of the same scopes and with the same repairs, so that their difference is not chance. Every
third scenario has spot capacity. Prints each difference in points, the worst, and GPU-years a minute of one core's own
time. Exits 1 beyond 0.3 points. A walk of tier 1 is as long as one of tier 2: both begin whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.results import RESULTS, show, table
from elastic_ring.forecast.goodput import DAY, HOUR, Array, Failures, RunShape, Spot
from elastic_ring.forecast.renewal import MOST_LOSSES, CommonRandomNumbers, rates_of, simulate_goodput
from tests.sim.simulator.tier1 import Tier1

MOST_POINTS = 0.3
LOSSES = 24
SPOT_HOURS = ((24, 240), (0.2, 4), (100, 1000))
"""Until a host is taken back, until it comes back, until all are."""


def scenario(rng: np.random.Generator, *, is_spot: bool = False) -> tuple[RunShape, Failures]:
    """Rings of whole hosts, up to 32 of them, with and without spares."""
    cp = int(rng.choice([8, 16, 32]))
    dp = int(rng.choice([1, 2, 4, 8]))
    shape = RunShape(
        dp,
        cp,
        int(rng.choice([0, 8, 16, 32])),
        8,
        int(rng.choice([2, 4, 8])),
        16,
        float(rng.uniform(1, 60)),
        heal_s=float(rng.uniform(0.2, 20)),
        rebuild_s=float(rng.uniform(0.5, 10)),
        detect_s=float(rng.uniform(1, 10)),
        interval_s=float(rng.uniform(300, 3600)),
        wait_s=0.05,
        restore_s=float(rng.uniform(30, 600)),
    )
    repair = (float(rng.uniform(1, 24)), float(rng.uniform(0.2, 0.8)))
    hours = float(np.exp(rng.uniform(np.log(2e3), np.log(5e4))))
    if is_spot:
        on_s, off_s, dry_s = (np.exp(rng.uniform(np.log(low), np.log(high))) * HOUR for low, high in SPOT_HOURS)
        shape = dataclasses.replace(shape, spot=Spot(float(on_s), float(off_s), float(dry_s)))
    return shape, Failures(gpu_hours=(hours,) * 3, repair_hours=repair, planned_per_day=0.0)


class OneLoss(CommonRandomNumbers):
    """Of this scope, in each draw at another time between two checkpoints; no other follows."""

    def __init__(self, rates: Mapping[str, float], scope: str, interval_s: float) -> None:
        super().__init__(np.random.default_rng(0), LOSSES)
        until = dict(zip(rates, np.cumsum(list(rates.values())) / sum(rates.values()), strict=True))
        self._pick = until[scope] - 1e-9
        at_s = 10 * interval_s + interval_s * (np.arange(LOSSES) + 0.5) / LOSSES
        self._gaps = at_s * float(sum(rates.values()))

    def row(self, index: int) -> tuple[Array, Array, Array, Array]:
        one = np.ones(LOSSES)
        return self._gaps if index == 0 else 1e12 * one, self._pick * one, 0.99 * one, 0.0 * one


def outcomes() -> str:
    """Of the kinds of loss, with and without spares and other holders, on a mesh of two hosts a ring."""
    rows: list[list[Any]] = []
    failures = Failures(gpu_hours=(4e4,) * 3, repair_hours=(0.5, 1e-3), planned_per_day=0.0)
    for dp, spares in itertools.product((1, 4), (0, 16)):
        base, _ = scenario(np.random.default_rng(1))
        shape = dataclasses.replace(base, dp=dp, cp=16, spares=spares, hosts_per_switch=2, step_s=10.0)
        shape = dataclasses.replace(shape, hosts_per_power=64, spot=Spot(1e6, 1800.0, 1e7))
        rates = {scope: float(rate) for scope, rate in rates_of(shape, failures, 4e4).items()}
        for scope in rates:
            luck = OneLoss(rates, scope, float(shape.interval_s))
            walks = [Tier1(shape, failures, 4e4, DAY, luck, draw).run() for draw in range(LOSSES)]
            walked = simulate_goodput(shape, failures, np.full(LOSSES, 4e4), DAY, luck)
            beside = 1.0 + float(shape.wait_s / shape.interval_s)
            means = (np.mean([walk.goodput for walk in walks]), walked.mean())
            lost = [DAY * (1.0 - float(goodput) * beside) for goodput in means]
            actions = sum((walk.actions for walk in walks), Counter[str]())
            places = ", ".join(name for name in sorted(actions) if name != "own shards") or "own shards"
            rows.append([scope, f"{dp} x 16 + {spares}", places, *lost])
    return table(["lost", "mesh", "from", "s of tier 1", "s of tier 2"], rows)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--scenarios", type=int, default=50)
    parser.add_argument("--walks", type=int, default=6, help="of tier 1, each of 400 losses")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/forecast/tiers.txt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outcomes", action="store_true", help="one loss of each kind in place of scenarios")
    asked = parser.parse_args()
    if asked.outcomes:
        show(outcomes())
        return 0
    rng = np.random.default_rng(asked.seed)
    rows: list[list[Any]] = []
    years, used_s = 0.0, 0.0
    for index in range(asked.scenarios):
        shape, failures = scenario(rng, is_spot=index % 3 == 2)
        hours = failures.gpu_hours[1]
        duration_s = MOST_LOSSES / float(sum(rates_of(shape, failures, hours).values()))
        luck = CommonRandomNumbers(np.random.default_rng((asked.seed, index)), asked.walks)
        begun = time.process_time()
        walks = [Tier1(shape, failures, hours, duration_s, luck, draw).run() for draw in range(asked.walks)]
        used_s += time.process_time() - begun
        years += sum(walk.gpu_years for walk in walks)
        walked = simulate_goodput(shape, failures, np.full(asked.walks, hours), duration_s, luck)
        goodput = float(np.mean([walk.goodput for walk in walks]))
        points = 100 * (goodput - float(walked.mean()))
        kind = "spot" if shape.spot else ""
        rows.append([index, f"{shape.dp} x {shape.cp} + {shape.spares}", kind, goodput, points])
    told = table(["scenario", "mesh", "", "tier 1", "points to tier 2"], rows)
    off = np.abs([row[4] for row in rows])
    told += (
        f"\n{np.sum(off <= MOST_POINTS)} of {len(off)} within {MOST_POINTS} points, worst {off.max():.2f}, mean "
        f"{off.mean():.3f}; tier 1: {years / used_s * 60:,.0f} GPU-years a minute of one core"
    )
    show(told)
    if asked.save:
        head = f"python benchmarks/forecast/tiers.py --walks {asked.walks}, {time.strftime('%Y-%m-%d')}"
        (RESULTS / "forecast" / "tiers.txt").write_text(f"{head}\n\n{told}\n", encoding="utf-8")
    return int(off.max() > MOST_POINTS)


if __name__ == "__main__":
    sys.exit(main())
