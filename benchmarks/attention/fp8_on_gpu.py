"""Keys and values sent in 8 bits beside bf16: forward + backward of dense attention, bytes received, and the error.

    python benchmarks/attention/fp8_on_gpu.py --tokens 8K,32K,128K

Both take turns in one NCCL group over the GPUs of this host. Errors are relative to bf16 keys, by norm, on rank 0.
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

from benchmarks.attention.content_on_gpu import inputs
from benchmarks.harness.arguments import bench_parser, list_of, num_heads, num_tokens
from benchmarks.harness.gpu_ranks import interleaved, run_ranks, timed_s
from benchmarks.harness.results import show, table
from elastic_ring.attention.comm.exchange import Wire
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention

KINDS: tuple[Wire, ...] = ("native", "fp8")


def time_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    rows: list[list[object]] = []
    for tokens in options.tokens:
        for heads in options.heads:
            *leaves, dout = inputs(tokens // cp, heads, cp_rank)
            leaves = [x.requires_grad_() for x in leaves]
            ledgers = {wire: HopLedger() for wire in KINDS}
            runs = {wire: _pass(wire, tokens, cp_rank, cp, ledgers[wire], leaves, dout) for wire in KINDS}
            want, found = (runs[wire]() for wire in KINDS)
            errors = [float((a - b).float().norm() / a.float().norm()) for a, b in zip(want, found, strict=True)]
            received = {wire: sum(ledgers[wire].received_bytes.values()) for wire in KINDS}
            times: dict[Wire, list[float]] = {wire: [] for wire in KINDS}
            for wire in interleaved(KINDS, options.repeats + 2):
                times[wire].append(timed_s(runs[wire], num_passes=2))
            for wire in KINDS:
                ms = 1e3 * statistics.median(times[wire][2:])
                error = " ".join(f"{each:.1e}" for each in errors) if wire == "fp8" else ""
                megabytes = f"{received[wire] / 1e6:.1f}"
                rows.append([f"{tokens // 1024}K", f"{heads[0]}:{heads[1]}", wire, f"{ms:.3f}", megabytes, error])
    if cp_rank == 0:
        columns = ["tokens", "heads", "wire", "ms", "MB received by rank 0", "error of out, dq, dk, dv"]
        show(f"cp={cp}, dense\n" + table(columns, rows))


def _pass(
    wire: Wire, tokens: int, cp_rank: int, cp: int, ledger: HopLedger, leaves: list[torch.Tensor], dout: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    group = dist.group.WORLD if cp > 1 else None
    schedule = plan(Pattern(), zigzag(tokens, cp))
    ring = RingAttention(schedule, cp_rank, group, RingOptions(deterministic=False, ledger=ledger, kv_wire=wire))

    def run() -> tuple[torch.Tensor, ...]:
        out = ring(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="8K,32K,128K", type=list_of(num_tokens))
    parser.add_argument("--heads", default="8:8,28:4", type=lambda text: [num_heads(x) for x in text.split(",") if x])
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_ranks("fp8_on_gpu", time_rank, parse())
