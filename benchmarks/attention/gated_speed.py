"""Measure time and memory of gated sparse attention by length: the one-process definition, and the ring's path.

    python benchmarks/attention/gated_speed.py [--tokens 2048,4096,8192] [--block N] [--top-k N] [--window N]

Forward and backward of one `GatedSparseAttention` in fp32 on one thread and one process, queries, keys and values
given. "masks" is the module as it is called without a ring, "ring" the path of a ring of one rank, choice and planning
included. Seconds are CPU seconds of the process, the least of `--repeats`; memory is the resident peak above the
inputs, each row in a process of its own.
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
from experiments.gated import GatedSparseAttention
from experiments.gated_ring import GatedRing

FORMS = ("masks", "ring")


def measure(form: str, seq_len: int, options: argparse.Namespace) -> dict[str, Any]:
    """One form and length in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, shape = options.heads * options.head_dim, (1, seq_len, options.heads, options.head_dim)
    made = GatedSparseAttention(width, options.heads, block=options.block, top_k=options.top_k, window=options.window)
    x, *heads, dout = torch.randn(1, seq_len, width), *torch.randn(4, *shape)
    leaves = [tensor.requires_grad_() for tensor in (x, *heads)]

    def other_choice() -> None:
        with torch.no_grad():
            heads[0].normal_()  # the same choice would find its plan in a cache

    def run() -> None:
        ring = GatedRing(contiguous(seq_len, 1), 0, None) if form == "ring" else None
        made(*leaves, ring=ring).backward(dout)

    return cpu_cost(run, options.repeats, other_choice)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="2048,4096,8192", help="lengths (2048,4096,8192)")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"({','.join(FORMS)})")
    parser.add_argument("--heads", type=int, default=4, help="query and K/V heads (4)")
    parser.add_argument("--head-dim", type=int, default=64, help="(64)")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block (64)")
    parser.add_argument("--top-k", type=int, default=16, help="blocks that a block of queries sees (16)")
    parser.add_argument("--window", type=int, default=512, help="tokens of the window (512)")
    parser.add_argument("--repeats", type=int, default=2, help="(2)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(options.one, int(options.tokens), options)))
        return 0
    names = ("heads", "head_dim", "block", "top_k", "window", "repeats")
    sizes = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    print(
        f"{options.heads} heads of {options.head_dim}, blocks of {options.block}, {options.top_k} chosen, window"
        f" {options.window}, fp32, both passes, one thread"
    )
    print(f"{'tokens':>8} {'form':>6} {'CPU s':>8} {'extra MiB':>10}")
    for tokens in options.tokens.split(","):
        for form in options.forms.split(","):
            found = in_own_process(__file__, [*sizes, f"--tokens={tokens}", f"--one={form}"])
            print(f"{int(tokens):>8,} {form:>6} {found['cpu_s']:>8.3f} {found['extra_mib']:>10.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
