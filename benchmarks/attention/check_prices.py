"""Do plans order layouts and exchanges as the clock does? Prices beside measured times, for a handful of patterns.

    python benchmarks/attention/check_prices.py --tokens 4096 --out benchmarks/prices.json
    python benchmarks/attention/check_prices.py --machine machine.json            with figures measured before

One process for each rank, on CPUs over gloo. Every layout that is weighed runs hop by hop (`hops`): at cp 2, with
one hop, the other exchange runs the same code. Times are the slowest rank's,
medians over repeats that are interleaved in a new order each; the price is of the forward pass. *Regret* is how much
longer the one that the plan ranks first takes than the fastest. Nothing else should run on the host meanwhile; where
that cannot be had, `--clock cpu` takes the slowest rank's CPU time, copies included and waits left out, for the
calibration as well.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.arguments import bench_parser, list_of
from benchmarks.harness.results import write_json
from elastic_ring.attention.autolayout import LayoutPrice, Sizes, layouts_for, price, rank
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.cli.operate import heads
from elastic_ring.costs import CostModel
from elastic_ring.tuning.calibrate import Stopwatch, calibrate
from elastic_ring.tuning.calibrate_host import join, report
from elastic_ring.tuning.timed_cases import TimingBudget

PATTERNS = ("window:128", "sinks:64+window:512", "longnet:256/1,1024/4,4096/16,unit=128", "bigbird:2,1,6", "random:8")
FP32_BYTES = 4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Row:
    """One layout with one exchange. Times in seconds."""

    pattern: str
    density: float
    candidate: str
    predicted_s: float
    all_bytes: int
    work_max_over_mean: float
    forward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.forward_s), statistics.median(self.both_s)


class System:
    """A row's attention on this rank."""

    def __init__(self, row: Row, schedule: Schedule, cp_rank: int, group: Any, sizes: Sizes) -> None:
        self.row = row
        self._ring = RingAttention(schedule, cp_rank, group)
        generator = torch.Generator().manual_seed(cp_rank)
        length = schedule.layout.num_tokens(cp_rank)
        shapes = [(1, length, n, sizes.head_dim) for n in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)]
        self._leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def forward(self) -> None:
        with torch.no_grad():
            self._ring(*self._leaves)

    def both(self) -> None:
        out = self._ring(*self._leaves)
        torch.autograd.grad(out, self._leaves, torch.ones_like(out))


def systems_of(
    text: str, options: argparse.Namespace, cost_model: CostModel, cp_rank: int, group: Any
) -> tuple[list[System], list[LayoutPrice]]:
    sizes = Sizes(options.heads[0], options.heads[1], options.head_dim, FP32_BYTES)
    patterns = parse_pattern(text)
    pattern = SparsePattern(patterns.of_layer(0).heads(*options.heads), patterns.block)
    found, candidates = [], []
    for layout in layouts_for(pattern, options.tokens, options.ranks):
        exact = plan_sparse(pattern, layout, *options.heads)
        candidate = price(exact, sizes, cost_model)
        row = Row(
            text,
            pattern.density(options.tokens),
            f"{layout.name}/hops",
            candidate.forward_s,
            candidate.all_bytes,
            candidate.work_max_over_mean,
        )
        found.append(System(row, exact, cp_rank, group, sizes))
        candidates.append(candidate)
    return found, candidates


def measure(systems: list[System], stopwatch: Stopwatch, repeats: int) -> None:
    for repeat in range(repeats + 1):
        for system in random.Random(repeat).sample(systems, len(systems)):
            taken = stopwatch.once_s(system.forward)[0], stopwatch.once_s(system.both)[0]
            if repeat:
                system.row.forward_s.append(taken[0])
                system.row.both_s.append(taken[1])


def compare(rows: list[Row], candidates: list[LayoutPrice]) -> tuple[list[str], dict[str, Any]]:
    """The lines of one pattern, and how well its plans agree with the clock."""
    predicted = [row.predicted_s for row in rows]
    forward, both = ([row.medians[i] for row in rows] for i in (0, 1))
    first = candidates.index(rank(candidates)[0][0])
    quickest = predicted.index(min(predicted))
    agreement = {
        "pattern": rows[0].pattern,
        "num": len(rows),
        "forward": rank_correlation(predicted, forward),
        "both": rank_correlation(predicted, both),
        "chosen": rows[first].candidate,
        "regret_of_chosen": both[first] / min(both) - 1,
        "regret_of_quickest": both[quickest] / min(both) - 1,
    }
    lines = [
        f"{row.pattern:<38} {row.candidate:<24} {row.all_bytes / 2**20:>7.2f} {row.work_max_over_mean:>8.3f}"
        f" {1e3 * row.predicted_s:>9.2f} {1e3 * f:>9.2f} {1e3 * b:>9.2f}{'  chosen' if i == first else ''}"
        for i, (row, f, b) in enumerate(zip(rows, forward, both, strict=True))
    ]
    lines.append(
        f"    rank correlation with forward {agreement['forward']:.2f}, with both passes {agreement['both']:.2f};"
        f" regret of the chosen {agreement['regret_of_chosen']:.1%}, of the quickest by the plan"
        f" {agreement['regret_of_quickest']:.1%}"
    )
    return lines, agreement


HEAD = f"{'pattern':<38} {'layout/exchange':<24} {'MiB':>7} {'max/mean':>8} {'plan ms':>9} {'forward':>9} {'both':>9}"


def _rank(cp_rank: int, cp: int, store: str, options: argparse.Namespace) -> None:
    device = join(cp_rank, cp, store, on_gpus=False)
    group, effort = dist.group.WORLD, TimingBudget(options.limit_s)
    lines: list[str] = []
    if options.machine is None:
        sizes = Sizes(options.heads[0], options.heads[1], options.head_dim, FP32_BYTES)
        found = calibrate(group, device, sizes, effort=effort, clock=CLOCKS[options.clock])
        cost_model = found.cost_model
        lines += [report(found), ""]
    else:
        cost_model = CostModel.read(options.machine)
    stopwatch = Stopwatch(group, device, effort, CLOCKS[options.clock])
    lines += [
        f"{options.tokens} tokens, cp {cp}, {options.heads[0]}:{options.heads[1]} heads of {options.head_dim},"
        f" fp32, one thread a rank, {options.clock} time",
        HEAD,
    ]
    rows: list[Row] = []
    agreements: list[dict[str, Any]] = []
    for text in options.patterns:
        systems, candidates = systems_of(text, options, cost_model, cp_rank, group)
        measure(systems, stopwatch, options.repeats)
        own = [system.row for system in systems]
        of_pattern, agreement = compare(own, candidates)
        lines += of_pattern
        rows += own
        agreements.append(agreement)
        if cp_rank == 0:
            print("\n".join(lines), flush=True)
        lines = []
    if cp_rank == 0:
        _end(rows, agreements, cost_model, options)
    dist.destroy_process_group()


def _end(rows: list[Row], agreements: list[dict[str, Any]], cost_model: CostModel, options: argparse.Namespace) -> None:
    predicted = [row.predicted_s for row in rows]
    print(f"load average of the host {os.getloadavg()[0]:.1f} at the end, {options.load:.1f} at the start")
    over_all = [rank_correlation(predicted, [row.medians[i] for row in rows]) for i in (0, 1)]
    print(f"all {len(rows)}: rank correlation with forward {over_all[0]:.2f}, with both passes {over_all[1]:.2f}")
    if options.out is not None:
        load = {"start": options.load, "end": os.getloadavg()[0]}
        record = {
            "load": load,
            "clock": options.clock,
            "machine": asdict(cost_model),
            "agreement": agreements,
            "rows": [asdict(row) for row in rows],
        }
        write_json(options.out, record)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="(4096)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, and cp (2)")
    parser.add_argument("--heads", default="4:4", type=heads, help="query:K/V heads (4:4)")
    parser.add_argument("--head-dim", default=64, type=int, help="(64)")
    parser.add_argument("--patterns", default=";".join(PATTERNS), type=list_of(str, ";"), help="by ;")
    parser.add_argument("--repeats", type=int, default=7, help="(7)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="(wall)")
    parser.add_argument("--limit-s", default=60.0, type=float, help="of the calibration (60)")
    parser.add_argument("--machine", help="figures measured before: a file of jobs/calibrate.py; default: measure now")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every time there, as JSON")
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.machine is not None:
            CostModel.read(options.machine)
        for text in options.patterns:
            parse_pattern(text)
    except ValueError as error:
        print(f"check_prices: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(options.ranks, f"{folder}/store", options), nprocs=options.ranks)
    return 0


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    Nan for fewer than three pairs, or where one side is constant.
    """
    if len(a) < 3:
        return float("nan")
    x, y = _places(a), _places(b)
    mean = (len(a) - 1) / 2
    covariance = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    spread = sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y)
    return covariance / spread**0.5 if spread else float("nan")


def _places(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            places[i] = (start + stop - 1) / 2
        start = stop
    return places


if __name__ == "__main__":
    sys.exit(main())
