"""The measurements of `elastic-ring calibrate` for a forecast: products and attention by shape, collectives by group
and level, groups by size, host copies, storage, and the deviation between ranks. No fitting in here.

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
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.forecast.sizing.rates import AttentionRate, Collective, GroupBuild, Product
from elastic_ring.tuning.calibrate import Stopwatch

WIDTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
"""Widths of a layer; a product is TOKENS rows times a matrix of (width, 4 width)."""
TOKENS = {"cuda": 8192, "cpu": 512}
ATTENTION = {"cuda": ((64, 8192), (128, 8192), (128, 32_768)), "cpu": ((64, 1024), (128, 1024), (64, 2048))}
"""(head dimension, tokens) of one causal sequence."""
HEADS = 8
LONGEST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
"""Of a whole collective and of a copy; the shortest collective has a sixteenth."""
WRITTEN_BYTES = 1 << 27
NOT_MEASURED = "not measured"
Kind = Literal["all-gather", "reduce-scatter"]
Level = Literal["host", "network"]
# torch 2.13 has new names for them.
GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Host:
    """Which of `num` hosts this is, each with `ranks` processes; and a folder of the storage to be measured."""

    ranks: int
    num: int = 1
    storage: Path | None = None


@dataclass(frozen=True)
class MachineRates:
    """The record in a calibration's file. `storage`: of all ranks together.

    `stragglers`: the deviation of the log of one product's time, between the ranks' medians and within a rank. A single
    rank has no deviation between ranks: "not measured"."""

    ranks_per_host: int
    matmul: list[Product]
    attention: list[AttentionRate]
    collectives: list[Collective]
    groups: list[GroupBuild]
    host_copies: dict[str, float]
    stragglers: dict[str, float | str]
    storage: dict[str, float | str] | None = None


def measure(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype, host: Host) -> MachineRates:
    groups, products = list(_build_groups(stopwatch, device)), list[Product]()
    for width in WIDTHS[device.type]:
        product_s = stopwatch.median_s(partial(torch.matmul, *_factors(width, device, dtype)))
        tokens = TOKENS[device.type]
        products.append(Product(width=width, tokens=tokens, flops=8.0 * tokens * width**2 / product_s))
    collectives = [row for ranks, group, _ in groups for row in _collectives(stopwatch, device, ranks, group, host)]
    return MachineRates(
        ranks_per_host=host.ranks,
        matmul=products,
        attention=list(_attention(stopwatch, device, dtype)),
        collectives=collectives,
        groups=[GroupBuild(ranks=ranks, s=build_s) for ranks, _, build_s in groups],
        host_copies=_host_copies(stopwatch, device),
        stragglers=_stragglers(stopwatch, device, dtype),
        storage=None if host.storage is None else _storage(stopwatch, host.storage),
    )


def _factors(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    left = torch.randn(TOKENS[device.type], width, device=device, dtype=dtype)
    return left, torch.randn(width, 4 * width, device=device, dtype=dtype)


def _attention(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype) -> Iterator[AttentionRate]:
    """Both passes, counted as 2 and 5 products of half of all pairs."""
    for head_dim, tokens in ATTENTION[device.type]:
        ring = RingAttention(plan(Pattern(), contiguous(tokens, 1)), 0, None, RingOptions())
        shapes = [(1, tokens, heads, head_dim) for heads in (HEADS, HEADS // 4, HEADS // 4)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        grad = torch.ones_like(q)

        def run(inputs: tuple[Tensor, ...] = (q, k, v), ring: Any = ring, grad: Tensor = grad) -> None:
            torch.autograd.grad(ring(*inputs), inputs, grad)

        pairs = HEADS * tokens * (tokens + 1) / 2
        passes_s = stopwatch.median_s(run)
        yield AttentionRate(head_dim=head_dim, tokens=tokens, flops=14.0 * head_dim * pairs / passes_s)


def _build_groups(stopwatch: Stopwatch, device: torch.device) -> Iterator[tuple[int, Any, float]]:
    """(ranks, group, seconds until it has summed one number) for 2, 4, ... of the first ranks, and all of them."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    world, number = dist.get_world_size(), torch.ones(1, device=device)
    for ranks in sorted({*(2**power for power in range(1, 20) if 2**power < world), world}):
        groups: list[Any] = []

        def build(ranks: int = ranks, groups: list[Any] = groups) -> None:
            groups.append(dist.new_group(list(range(ranks))))
            if dist.get_rank() < ranks:
                dist.all_reduce(number, group=groups[0])

        build_s = stopwatch.once_s(build)[0]
        yield ranks, groups[0], build_s


def _collectives(
    stopwatch: Stopwatch, device: torch.device, ranks: int, group: Any, host: Host
) -> Iterator[Collective]:
    for num_bytes in (LONGEST_BYTES[device.type] // 16, LONGEST_BYTES[device.type]):
        part = num_bytes // 4 // ranks
        own, whole = torch.ones(part, device=device), torch.ones(part * ranks, device=device)
        calls: tuple[tuple[Kind, Any, tuple[Tensor, Tensor]], ...]
        calls = (("all-gather", GATHER, (whole, own)), ("reduce-scatter", SCATTER, (own, whole)))
        for kind, collective, tensors in calls:

            def run(collective: Any = collective, tensors: tuple[Tensor, Tensor] = tensors) -> None:
                if dist.get_rank() < ranks:
                    collective(*tensors, group=group)

            level: Level = "host" if ranks <= host.ranks else "network"
            rate = 4.0 * part * (ranks - 1) / stopwatch.median_s(run)
            yield Collective(kind=kind, ranks=ranks, level=level, bytes=4 * part * ranks, bytes_s=rate)


def _host_copies(stopwatch: Stopwatch, device: torch.device) -> dict[str, float]:
    num = LONGEST_BYTES[device.type]
    there = torch.ones(num, dtype=torch.uint8, device=device)
    here = torch.ones(num, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pairs = ((here, there), (there, here))
    to_host_s, from_host_s = (stopwatch.median_s(partial(to.copy_, source, non_blocking=True)) for to, source in pairs)
    return {"to_host_bytes_s": num / to_host_s, "from_host_bytes_s": num / from_host_s}


def _storage(stopwatch: Stopwatch, folder: Path) -> dict[str, float | str]:
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


def _stragglers(stopwatch: Stopwatch, device: torch.device, dtype: torch.dtype) -> dict[str, float | str]:
    (left, right), times = _factors(WIDTHS[device.type][-1], device, dtype), list[float]()

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


def lines(rates: MachineRates) -> list[str]:
    """The text of a measurement."""
    there, back = (rates.host_copies[f"{way}_host_bytes_s"] / 1e9 for way in ("to", "from"))
    between, within = rates.stragglers["between_ranks"], rates.stragglers["within_a_rank"]
    apart = between if isinstance(between, str) else f"{between:.2%}"
    return [
        *(f"product    width {row.width:<6} {row.flops / 1e12:10.4g} TFLOP/s" for row in rates.matmul),
        *(
            f"attention  heads of {row.head_dim:<4} {row.tokens:>6} tokens {row.flops / 1e12:10.4g} TFLOP/s"
            for row in rates.attention
        ),
        *(
            f"{row.kind:<15} {row.ranks:>4} ranks, {row.level:<8} {row.bytes >> 10:>8} KiB "
            f"{row.bytes_s / 1e9:8.4g} GB/s"
            for row in rates.collectives
        ),
        *(f"group of {row.ranks:<5} {row.s:8.4g} s" for row in rates.groups),
        f"copies to the host {there:.4g} GB/s, back {back:.4g}",
        *(f"storage, all ranks together {float(s['write_bytes_s']) / 1e9:.4g} GB/s" for s in [rates.storage] if s),
        f"ranks apart {apart}, a rank's repeats {within:.2%}",
    ]
