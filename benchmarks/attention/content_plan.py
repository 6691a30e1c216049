"""What a rank's host does in each call whose blocks content chooses: planning what was chosen. CPU seconds, no ring.

    python benchmarks/attention/content_plan.py --tokens 131072 --cp 4

Choices are drawn at random, which is what planning likes least: every rank then needs something of every other.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.lowering.call_plan import RingPlans
from elastic_ring.attention.lowering.device_blocks import on_device
from elastic_ring.attention.patterns.content import Chosen, TopK
from elastic_ring.attention.patterns.rules import Rule, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.routing.plan import RoutingPlan, plan_routing

REPEATS = 3


def chosen_at_random(rule: TopK, plan: RoutingPlan, seed: int) -> Rule:
    """What `rule` could have chosen for one head of one document."""
    generator = np.random.default_rng(seed)
    choices = plan.few.copy()
    for rows in plan.rows:
        for row in rows:
            choices[row] = np.sort(generator.choice(row, rule.width, replace=False))
    return Chosen(plan.num_blocks, choices.tobytes(), rule.unit_tokens)


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=131_072, help="of the sequence (131072)")
    parser.add_argument("--cp", type=int, default=4, help="ranks of the ring (4)")
    parser.add_argument("--heads", type=int, default=16, help="query heads, each of which chooses (16)")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=32, help="of topk (32)")
    parser.add_argument("--unit", type=int, default=128, help="tokens of a unit that is chosen (128)")
    parser.add_argument("--window", type=int, default=0, help="tokens of a window beside what is chosen (0: none)")
    options = parser.parse_args(argv)
    layout, rule = zigzag(options.tokens, options.cp), TopK(options.blocks, unit_tokens=options.unit)
    routing = plan_routing(layout, ((0, options.tokens),), rule)
    rules = tuple(chosen_at_random(rule, routing, head) for head in range(options.heads))
    rules = tuple(own | Window(options.window) for own in rules) if options.window else rules
    hops, tables = [], []
    for _ in range(REPEATS):
        begun = time.process_time()
        plans = RingPlans(
            plan_sparse(SparsePattern(rules, min(128, options.unit)), layout, options.heads, options.kv_heads)
        )
        planned = time.process_time()
        on_device(plans.in_blocks, options.cp - 1, torch.device("cpu"))
        hops.append(planned - begun)
        tables.append(time.process_time() - planned)
    print(
        f"{options.tokens:,} tokens, cp {options.cp}, {options.heads}:{options.kv_heads} heads, {rule}"
        f"{f'+window:{options.window}' if options.window else ''}:"
        f" hops of all ranks {min(hops) * 1e3:.0f} ms, a rank's tables {min(tables) * 1e3:.0f} ms,"
        f" both {min(map(sum, zip(hops, tables, strict=True))) * 1e3:.0f} ms of CPU, the least of {REPEATS}"
    )
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
