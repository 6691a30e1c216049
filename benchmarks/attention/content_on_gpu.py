"""Blocks that content chooses, planned by the host or on the device: forward + backward, and the host's part of it.

    python benchmarks/attention/content_on_gpu.py --tokens 32K,128K

`topk:N` fetches what was chosen, and the host reads the choices and plans anew in each call. `topk:N,fetch_all=1`
fetches all past keys, and the tables are made on the device. Both take turns in one NCCL group over the GPUs of this
host, and their results must agree. Host time is that of one pass's launches, on the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks.harness.arguments import bench_parser, list_of, num_heads, num_tokens
from benchmarks.harness.gpu_ranks import host_s, interleaved, run_ranks, timed_s
from benchmarks.harness.results import show, table
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern

ALLOWED = 2e-2
"""Relative difference of two results in bf16."""


def inputs(num_local: int, heads: tuple[int, int], cp_rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator("cuda").manual_seed(cp_rank)
    return [
        torch.randn((1, num_local, num, 128), generator=generator, device="cuda", dtype=torch.bfloat16)
        for num in (heads[0], heads[1], heads[1], heads[0])
    ]


def time_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    for tokens in options.tokens:
        *leaves, dout = inputs(tokens // cp, options.heads, cp_rank)
        leaves = [x.requires_grad_() for x in leaves]
        runs: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {}
        ledgers = {text: HopLedger() for text in (f"topk:{options.blocks}", f"topk:{options.blocks},fetch_all=1")}
        for text, ledger in ledgers.items():
            runs[text] = _pass(text, tokens, cp_rank, cp, ledger, leaves, dout)
        check_alike(*(run() for run in runs.values()))
        received = [sum(ledger.received_bytes.values()) for ledger in ledgers.values()]
        for run in [*runs.values()] * 2:
            run()
        times: dict[str, list[float]] = {text: [] for text in runs}
        hosts: dict[str, list[float]] = {text: [] for text in runs}
        for text in interleaved(list(runs), options.repeats):
            times[text].append(timed_s(runs[text]))
        for text in interleaved(list(runs), options.repeats):
            hosts[text].append(host_s(runs[text]))
        for (text, found), num_bytes in zip(times.items(), received, strict=True):
            ms, host_ms = (1e3 * statistics.median(each) for each in (found, hosts[text]))
            rows.append([f"{tokens // 1024}K", text, f"{ms:.2f}", f"{host_ms:.2f}", f"{num_bytes / 1e6:.1f}"])
    if cp_rank == 0:
        heads = f"{options.heads[0]}:{options.heads[1]} heads"
        show(f"cp={cp}, {heads}\n" + table(["tokens", "pattern", "ms", "host ms", "MB received by rank 0"], rows))


def check_alike(chosen: tuple[torch.Tensor, ...], all_fetched: tuple[torch.Tensor, ...]) -> None:
    for name, one, other in zip(("out", "dq", "dk", "dv"), chosen, all_fetched, strict=True):
        difference = float((one - other).float().norm() / one.float().norm())
        if not difference <= ALLOWED:
            raise SystemExit(f"{name} of both ways differs by {difference:.1e}, more than {ALLOWED:.0e}")


def _pass(
    text: str, tokens: int, cp_rank: int, cp: int, ledger: HopLedger, leaves: list[torch.Tensor], dout: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward of one sequence; plans are kept between sequences, as in training."""
    pattern, layout, plans = parse_pattern(text), zigzag(tokens, cp), PlanCache()
    group = dist.group.WORLD if cp > 1 else None

    def run() -> tuple[torch.Tensor, ...]:
        attention = PatternedAttention(
            pattern, layout, cp_rank, group, RingOptions(ledger=ledger, deterministic=False), plans=plans
        )
        out = attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="32K,128K", type=list_of(num_tokens))
    parser.add_argument("--heads", default="16:4", type=num_heads)
    parser.add_argument("--blocks", default=16, type=int, help="of topk (16)")
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_ranks("content_on_gpu", time_rank, parse())
