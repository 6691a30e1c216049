"""Patterns that cut blocks of 128 tokens beside their forms in whole blocks: forward + backward and the host's part.

    python benchmarks/attention/cut_blocks_on_gpu.py --tokens 32K,128K

A window of 4,096 tokens exactly and rounded up to whole blocks; documents that begin anywhere and at multiples of 128
tokens; a length that is no multiple. All cases of a length take turns in one NCCL group over the GPUs of this host.
Pairs are those that count; `first s` is the first pass, which plans and compiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.attention.content_on_gpu import inputs
from benchmarks.harness.arguments import bench_parser, list_of, num_heads, num_tokens
from benchmarks.harness.gpu_ranks import host_s, interleaved, maximum, run_ranks, timed_s
from benchmarks.harness.results import show, table
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import SparsePattern

WINDOW_TOKENS = 4096
MEAN_DOCUMENT_TOKENS = 3000


class Case(NamedTuple):
    name: str
    text: str
    seq_len: int
    starts: tuple[int, ...] = (0,)


def cases(tokens: int) -> list[Case]:
    exact, rounded = f"window:{WINDOW_TOKENS}", f"bigbird:{WINDOW_TOKENS // 128 + 1},0,0"
    drawn = np.random.default_rng(0).choice(tokens - 1, tokens // MEAN_DOCUMENT_TOKENS, replace=False) + 1
    anywhere = (0, *sorted(drawn.tolist()))
    aligned = (0, *sorted({int(start) // 128 * 128 for start in drawn} - {0}))
    return [
        Case("window, whole blocks", rounded, tokens),
        Case("window, by tokens", exact, tokens),
        Case("documents at multiples of 128", rounded, tokens, aligned),
        Case("documents anywhere", rounded, tokens, anywhere),
        Case("40 tokens less", rounded, tokens - 40),
    ]


def time_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    for tokens in options.tokens:
        runs: dict[tuple[str, str], Callable[[], None]] = {}
        firsts: dict[tuple[str, str], float] = {}
        for case in cases(tokens):
            for kernel in options.kernels:
                run = _pass(case, kernel, cp_rank, cp, options)
                begun_s = time.perf_counter()
                run()
                torch.cuda.synchronize()
                firsts[case.name, kernel] = maximum(time.perf_counter() - begun_s)
                runs[case.name, kernel] = run
                run()
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        hosts: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for key in interleaved(list(runs), options.repeats):
            times[key].append(timed_s(runs[key]))
        for key in interleaved(list(runs), options.repeats):
            hosts[key].append(host_s(runs[key]))
        for case in cases(tokens):
            pairs = SparsePattern(parse_pattern(case.text).groups[0].rules, 128, case.starts).row_pairs(case.seq_len)
            for kernel in options.kernels:
                key = (case.name, kernel)
                ms, host_ms = (1e3 * statistics.median(each[key]) for each in (times, hosts))
                rows.append(
                    [
                        f"{tokens // 1024}K",
                        case.name,
                        kernel,
                        f"{pairs.sum() / 1e6:.1f}",
                        f"{ms:.2f}",
                        f"{host_ms:.2f}",
                        f"{firsts[key]:.1f}",
                    ]
                )
    if cp_rank == 0:
        heads = f"{options.heads[0]}:{options.heads[1]} heads"
        show(f"cp={cp}, {heads}\n" + table(["tokens", "case", "kernel", "M pairs", "ms", "host ms", "first s"], rows))


def _pass(case: Case, kernel: str, cp_rank: int, cp: int, options: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of one sequence; plans are kept between sequences, as in training."""
    pattern, layout, plans = parse_pattern(case.text), zigzag(case.seq_len, cp), PlanCache()
    group = dist.group.WORLD if cp > 1 else None
    *leaves, dout = inputs(layout.num_tokens(cp_rank), options.heads, cp_rank)
    leaves = [x.requires_grad_() for x in leaves]

    def run() -> None:
        attention = PatternedAttention(
            pattern,
            layout,
            cp_rank,
            group,
            RingOptions(deterministic=False, kernel=kernel),
            document_starts=case.starts,
            plans=plans,
        )
        torch.autograd.grad(attention(*leaves), leaves, dout)

    return run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="32K,128K", type=list_of(num_tokens))
    parser.add_argument("--heads", default="16:4", type=num_heads)
    parser.add_argument("--kernels", default="flash-attn-4-sparse,flex-sparse", type=list_of(str))
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_ranks("cut_blocks_on_gpu", time_rank, parse())
