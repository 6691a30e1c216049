"""Measure how a sparse pattern's CPU time and memory on one process fall with its density.

    python benchmarks/attention/pattern_speed.py [--tokens N] [--heads N] [--head-dim N] [--densities 1,0.5,0.1]

Forward and backward of one attention call in fp32 on one thread; planning is left out, gathering is in.
Seconds are CPU seconds of the process, the least of `--repeats`; memory is the resident peak above the inputs,
each density in a process of its own. "of 1/density" is the speed-up over the dense rule on the same path,
over its ideal; "against aten" is the same over torch's own causal kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.own_process import cpu_cost, in_own_process
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.plan.sparse_tiles import tiles
from elastic_ring.attention.ring import RingAttention

BLOCK_TOKENS = 128


def rule_of_density(density: float, seq_len: int) -> Rule:
    """Half a window and half random blocks: no run of kept blocks is long."""
    if density >= 1:
        return Dense()
    num_blocks = seq_len // BLOCK_TOKENS
    num_kept = max(2, round(density * num_blocks / 2))
    return BigBird(window=(num_kept + 1) // 2, globals=0, randoms=num_kept // 2)


def measure(density: float, options: argparse.Namespace) -> dict[str, Any]:
    """One density in this process; -1 is torch's own causal kernel through the dense ring."""
    torch.set_num_threads(1)
    seq_len, layout = options.tokens, contiguous(options.tokens, 1)
    found: dict[str, Any] = {"density": 1.0}
    if density < 0:
        ring: Any = RingAttention(plan(Pattern(), layout), 0, None)
    else:
        pattern = SparsePattern((rule_of_density(density, seq_len),), BLOCK_TOKENS)
        schedule = plan_sparse(pattern, layout, options.heads, options.heads)
        tiles(schedule, 0)
        found["density"] = pattern.density(seq_len)
        ring = RingAttention(schedule, 0, None)
    shape = (1, seq_len, options.heads, options.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(4))
    return {**found, **cpu_cost(lambda: ring(q, k, v).backward(dout), options.repeats)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="length of the sequence (16384)")
    parser.add_argument("--heads", type=int, default=4, help="query and K/V heads (4)")
    parser.add_argument("--head-dim", type=int, default=64, help="(64)")
    parser.add_argument("--densities", default="1,0.5,0.25,0.1,0.03", help="(1,0.5,0.25,0.1,0.03)")
    parser.add_argument("--repeats", type=int, default=2, help="(2)")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(options.one, options)))
        return 0
    sizes = f"--tokens={options.tokens} --heads={options.heads} --head-dim={options.head_dim}".split()
    rows = []
    for density in (-1.0, *map(float, options.densities.split(","))):
        arguments_of_one = [*sizes, f"--repeats={options.repeats}", f"--one={density}"]
        rows.append((density, in_own_process(__file__, arguments_of_one)))
    aten, dense = rows[0][1], rows[1][1]
    print(f"{options.tokens:,} tokens, {options.heads} heads of {options.head_dim}, fp32, both passes, one thread")
    print(f"{'density':>8} {'CPU s':>8} {'of 1/density':>13} {'against aten':>13} {'extra MiB':>10}")
    for density, found in rows:
        name = "aten" if density < 0 else f"{found['density']:.4f}"
        share = found["density"] / found["cpu_s"]
        print(
            f"{name:>8} {found['cpu_s']:>8.3f} {dense['cpu_s'] * share:>13.1%} {aten['cpu_s'] * share:>13.1%}"
            f" {found['extra_mib']:>10.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
