"""What `elastic-ring calibrate` measures for a forecast: products and attention by shape, collectives by group and
level, groups by size, host copies, storage, and how far ranks are apart. No fitting in here.

Every rank calls `measure`; a figure is the slowest rank's.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.tuning.calibrate import Stopwatch

WIDTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
"""Of a layer; a product is of so many tokens with a matrix of (width, 4 width)."""
TOKENS = {"cuda": 8192, "cpu": 512}
ATTENTION = {"cuda": ((64, 8192), (128, 8192), (128, 32_768)), "cpu": ((64, 1024), (128, 1024), (64, 2048))}
"""(head dimension, tokens) of one causal sequence."""
HEADS = 8
LONGEST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
"""Of a collective in all, of a copy and of a file; the shortest collective has a sixteenth."""
WRITTEN_BYTES = 1 << 27
NOT_MEASURED = "not measured"
# torch 2.13 has new names for them.
GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Host:
    """Which of `num` hosts this is, each with `ranks` processes; and a folder of the storage to be measured."""

    ranks: int
    num: int = 1
    storage: Path | None = None


def measure(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype, host: Host) -> dict[str, Any]:
    """{"ranks_per_host", "matmul", "attention", "collectives", "groups", "host_copies", "storage", "stragglers"}, as
    JSON takes them."""
    groups = list(_groups(stopwatch, device, host))
    found: dict[str, Any] = {
        "ranks_per_host": host.ranks,
        "matmul": list(_products(stopwatch, device, dtype)),
        "attention": list(_attention(stopwatch, device, dtype)),
        "collectives": [
            row for ranks, group, _ in groups for row in _collectives(stopwatch, device, ranks, group, host)
        ],
        "groups": [{"ranks": ranks, "s": taken} for ranks, _, taken in groups],
        "host_copies": _copies(stopwatch, device),
        "stragglers": _stragglers(stopwatch, device, dtype),
    }
    if host.storage is not None:
        found["storage"] = _storage(stopwatch, host.storage)
    return found


def _products(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, float]]:
    tokens = TOKENS[device.type]
    for width in WIDTHS[device.type]:
        left = torch.randn(tokens, width, device=device, dtype=dtype)
        right = torch.randn(width, 4 * width, device=device, dtype=dtype)
        taken = stopwatch.median_s(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        yield {"width": width, "tokens": tokens, "flops": 8.0 * tokens * width**2 / taken}


def _attention(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, float]]:
    """Both passes, counted as 2 and 5 products of half of all pairs."""
    for head_dim, tokens in ATTENTION[device.type]:
        ring = RingAttention(plan(Pattern(), contiguous(tokens, 1)), 0, None, RingOptions())
        shapes = [(1, tokens, heads, head_dim) for heads in (HEADS, HEADS // 4, HEADS // 4)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        grad = torch.ones_like(q)

        def run(inputs: tuple[Tensor, ...] = (q, k, v), ring: Any = ring, grad: Tensor = grad) -> None:
            torch.autograd.grad(ring(*inputs), inputs, grad)

        pairs = HEADS * tokens * (tokens + 1) / 2
        taken = stopwatch.median_s(run)
        yield {"head_dim": head_dim, "tokens": tokens, "flops": 14.0 * head_dim * pairs / taken}


def _groups(stopwatch: Stopwatch, device: torch.device, host: Host) -> Iterator[tuple[int, Any, float]]:
    """(ranks, group, seconds until it has summed one number) for 2, 4, ... of the first ranks, and all of them."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    world = dist.get_world_size()
    one = torch.ones(1, device=device)
    for ranks in sorted({*(2**power for power in range(1, 20) if 2**power < world), world}):
        made: list[Any] = []

        def build(ranks: int = ranks, made: list[Any] = made) -> None:
            made.append(dist.new_group(list(range(ranks))))
            if dist.get_rank() < ranks:
                dist.all_reduce(one, group=made[0])

        yield ranks, made, stopwatch.once_s(build)[0]


def _collectives(
    stopwatch: Stopwatch, device: torch.device, ranks: int, made: list[Any], host: Host
) -> Iterator[dict[str, Any]]:
    """Bytes a second that each rank receives, or sends, of a collective's whole."""
    level = "host" if ranks <= host.ranks else "network"
    for num_bytes in (LONGEST_BYTES[device.type] // 16, LONGEST_BYTES[device.type]):
        part = num_bytes // 4 // ranks
        own, whole = torch.ones(part, device=device), torch.ones(part * ranks, device=device)

        def gather(own: Tensor = own, whole: Tensor = whole) -> None:
            if dist.get_rank() < ranks:
                GATHER(whole, own, group=made[0])

        def scatter(own: Tensor = own, whole: Tensor = whole) -> None:
            if dist.get_rank() < ranks:
                SCATTER(own, whole, group=made[0])

        for kind, run in (("all-gather", gather), ("reduce-scatter", scatter)):
            moved = 4.0 * part * (ranks - 1)
            rate = moved / stopwatch.median_s(run)
            yield {"kind": kind, "ranks": ranks, "level": level, "bytes": 4 * part * ranks, "bytes_s": rate}


def _copies(stopwatch: Stopwatch, device: torch.device) -> dict[str, float]:
    num = LONGEST_BYTES[device.type]
    there = torch.ones(num, dtype=torch.uint8, device=device)
    here = torch.ones(num, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy(to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    to_host, from_host = (stopwatch.median_s(partial(copy, *pair)) for pair in ((here, there), (there, here)))
    return {"to_host_bytes_s": num / to_host, "from_host_bytes_s": num / from_host}


def _storage(stopwatch: Stopwatch, folder: Path) -> dict[str, Any]:
    """What all ranks together write and bring to the disk at the same time, each a file of its own."""
    content = os.urandom(1 << 20) * (WRITTEN_BYTES >> 20)
    path = folder / f"calibrate-{uuid4().hex}"

    def write() -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    try:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return {"write_bytes_s": ranks * WRITTEN_BYTES / stopwatch.once_s(write)[0], "path": str(folder)}
    finally:
        path.unlink(missing_ok=True)


def _stragglers(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The deviation of log of one and the same product's time, between ranks of their medians and within a rank. One
    rank alone is apart from nothing: that is not measured."""
    width, times = WIDTHS[device.type][-1], list[float]()
    left = torch.randn(TOKENS[device.type], width, device=device, dtype=dtype)
    right = torch.randn(width, 4 * width, device=device, dtype=dtype)

    def run() -> None:
        begun = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)

    for _ in range(12):
        stopwatch.once_s(run)
    kept = times[2:]
    own = torch.tensor([math.log(statistics.median(kept)), statistics.stdev(map(math.log, kept))], dtype=torch.float64)
    rows = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        own = own.to(device)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
    medians, within = zip(*(row.tolist() for row in rows), strict=True)
    between = statistics.stdev(medians) if len(medians) > 1 else NOT_MEASURED
    return {"between_ranks": between, "within_a_rank": statistics.fmean(within), "ranks": len(rows)}


def lines(rates: dict[str, Any]) -> list[str]:
    """The text of a measurement."""
    told = [f"product    width {row['width']:<6} {row['flops'] / 1e12:10.4g} TFLOP/s" for row in rates["matmul"]]
    told += [
        f"attention  heads of {row['head_dim']:<4} {row['tokens']:>6} tokens {row['flops'] / 1e12:10.4g} TFLOP/s"
        for row in rates["attention"]
    ]
    told += [
        f"{row['kind']:<15} {row['ranks']:>4} ranks, {row['level']:<8} {row['bytes'] >> 10:>8} KiB "
        f"{row['bytes_s'] / 1e9:8.4g} GB/s"
        for row in rates["collectives"]
    ]
    told += [f"group of {row['ranks']:<5} {row['s']:8.4g} s" for row in rates["groups"]]
    copies, apart = rates["host_copies"], rates["stragglers"]
    there, back = copies["to_host_bytes_s"] / 1e9, copies["from_host_bytes_s"] / 1e9
    told.append(f"copies to the host {there:.4g} GB/s, back {back:.4g}")
    if "storage" in rates:
        told.append(f"storage, all ranks together {rates['storage']['write_bytes_s'] / 1e9:.4g} GB/s")
    between = apart["between_ranks"]
    share = between if between == NOT_MEASURED else f"{between:.2%}"
    told.append(f"ranks apart {share}, a rank's repeats {apart['within_a_rank']:.2%}")
    return told
