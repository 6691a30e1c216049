"""Lowering of sparse schedules to tables of whole blocks of 128 tokens, which GPUs run: stages of hops, one kernel call
for each size of head group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.comm.exchange import HopExchange, row_frame
from elastic_ring.attention.comm.packing import gather_rows_
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.layouts.rows import MOST_AT_ONCE, Places, Span
from elastic_ring.attention.lowering.call_plan import (
    Call,
    CallPlan,
    HeadOrder,
    Op,
    OwnPart,
    Program,
    StageCalls,
    SumTypes,
)
from elastic_ring.attention.lowering.device_blocks import DeviceBlocks, on_device
from elastic_ring.attention.lowering.keys import TokenSpan
from elastic_ring.attention.merge import accumulate_dtype, add_placed_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.caches import LRUCache
from elastic_ring.attention.plan.padded_blocks import padded_rows
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import NUM_TURNS

LINK_BYTES_PER_S = 3e11
"""One-way NCCL bandwidth between two H200s for messages of this size."""
KERNEL_FLOPS = 4e14
"""FLOP/s of a block-sparse backward kernel on an H200 at a density of a few percent."""
HALVING_S = 2e-4
"""Cost in seconds of computing the own keys' gradients in two halves: one more round of launches and two kernel tails.
"""


@dataclass(frozen=True, eq=False)
class PlacedSums:
    """Own keys grow by what their readers returned, row by row of the inbox as tables of places say: the first stages
    one by one, where a later one reuses their slot, and all others in one pass over memory."""

    blocks: DeviceBlocks

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        num_apart = self.blocks.plan.num_added_apart
        if first < num_apart:
            inbox, places = exchange.take_partials(first), self.blocks.places_apart[first]
            if not len(inbox):
                return
        else:
            if not sum(len(exchange.take_partials(index)) for index in range(first, last + 1)):
                return
            inbox, places = exchange.inbox, self.blocks.last_places
        for kind in range(2):
            add_placed_(total[kind].flatten(1, 2), inbox[:, :, kind].transpose(0, 1), places)


def lower_blocks(
    schedule: Schedule,
    cp_rank: int,
    q: torch.Tensor,
    kernel: Kernel,
    options: RingOptions,
    tables: LRUCache,
    latent: int = 0,
) -> CallPlan:
    """The plan of calls with queries like q (B, S_local, H, D); `tables` are kept by device and rows in a stage.
    `latent`: the width of half a latent, if these are what is sent.

    Raises `ValueError` for patterns and layouts that cut blocks, unless the schedule is `padded`, and if `keep_keys`
    asks for keys that do not fit one stage."""
    dtype, exact = q.dtype, accumulate_dtype(q.dtype)
    partials = options.partials or (dtype if kernel.keeps_type else exact)
    row_bytes = 2 * q.size(0) * q.size(3) * max(dtype, partials, key=lambda each: each.itemsize).itemsize
    row_bytes *= q.size(2) if latent else 1  # once projected up
    key = (q.device, options.stage_bytes // max(1, row_bytes))
    blocks: DeviceBlocks = tables.get(key, lambda: on_device(schedule, cp_rank, *key))
    num_stages, num_kv = len(blocks.stages), schedule.num_kv_heads
    half = _first_heads(blocks, q, partials)
    at_once = num_stages <= MOST_AT_ONCE and blocks.queries_are_contiguous(q.size(2))
    running = dtype if at_once or blocks.plan.num_row_visits <= 2 else exact
    apart = any(stage.plan.num_served_rows for stage in blocks.stages[: blocks.plan.num_added_apart])
    whole = Call(Span(0, q.size(1)), TokenSpan(Span(0, q.size(1))), blocks.own)
    own = StageCalls((0,), (whole,), (whole,), once=True)
    fetched = tuple(_stage_calls(blocks, index) for index in range(num_stages))
    halves = _halves(blocks, q, num_kv, half) if half < num_kv else (OwnPart(None, (whole,), once=True),)
    last = (Op("add", blocks.plan.num_added_apart, num_stages - 1),) if num_stages else ()
    coalesced = q.is_cuda if options.coalesced is None else options.coalesced
    keeps = _keeps(blocks, options)

    def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        gather_rows_(packed, k, v, blocks.stages[index].served_rows)

    return CallPlan(
        kernel,
        (own, *fetched),
        Program((*_fetching(blocks, len(halves)), *last), halves, fetches=True),
        blocks.plan.exchange(schedule.cp, coalesced=coalesced),
        row_frame(q.new_empty((q.size(0), 0, num_kv, latent or q.size(3)))),
        pack,
        partials,
        SumTypes(running, running, exact if apart else dtype, blocks.by_rows, at_once, half < num_kv and apart),
        PlacedSums(blocks),
        _head_order(blocks),
        # Fetched keys run first, so that the one call on all own keys hides the partials' return.
        Program((Op("hold", 0), Op("own", 0), Op("release", 0), *last), (OwnPart(None, (whole,), once=True),), False)
        if keeps
        else None,
        keeps,
    )


def lower_padded(schedule: Schedule, whole: Schedule, cp_rank: int, q: torch.Tensor, *how: Any) -> CallPlan:
    """The same for a schedule whose blocks are cut: the plan of `whole`, its padded form."""
    inner, num_tokens = padded_rows(schedule, cp_rank), whole.layout.num_tokens(cp_rank)
    if len(inner) == num_tokens:  # rules cut blocks, nothing else does
        return lower_blocks(whole, cp_rank, q, *how)
    outer = np.full(num_tokens, -1)
    outer[inner] = np.arange(len(inner))
    indices = (inner, np.maximum(outer, 0), np.flatnonzero(outer < 0))
    places = Places(*(torch.from_numpy(each).to(q.device) for each in indices))
    wide = q[:, :1].expand(-1, num_tokens, -1, -1)
    return replace(lower_blocks(whole, cp_rank, wide, *how), places=places)


def _keeps(blocks: DeviceBlocks, options: RingOptions) -> bool:
    num_stages = len(blocks.stages)
    if options.keep_keys and num_stages > 1:
        raise ValueError(
            f"keep_keys=True, but what is fetched is {num_stages} stages of at most stage_bytes={options.stage_bytes}:"
            " keys are kept where they are one; raise stage_bytes, or leave keep_keys out"
        )
    kept = blocks.plan.small if options.keep_keys is None else options.keep_keys
    return kept and num_stages == 1


def _stage_calls(blocks: DeviceBlocks, index: int) -> StageCalls:
    stage = blocks.stages[index]
    calls = tuple(Call(call.queries, call.keys, call.tables) for call in stage.calls)
    return StageCalls(stage.plan.hops, calls, calls, once=True)


def _halves(blocks: DeviceBlocks, q: torch.Tensor, num_kv: int, half: int) -> tuple[OwnPart, ...]:
    sharing, num_tokens = q.size(2) // num_kv, q.size(1)

    def part(number: int, first: int, last: int) -> OwnPart:
        rows = Span(0, num_tokens, (first * sharing, last * sharing))
        call = Call(rows, TokenSpan(Span(0, num_tokens)), blocks.own_parts[number])
        return OwnPart((first, last), (call,), once=True)

    return part(0, 0, half), part(1, half, num_kv)


def _fetching(blocks: DeviceBlocks, num_own: int) -> list[Op]:
    """Own keys are computed while the first stage arrives; a second part of their heads runs later, to hide the return
    of the last stages' partials. Partials are added as late as possible, to give slow readers time."""
    num_stages, hiding = len(blocks.stages), _hiding_stage(blocks)
    ops = [Op("own", 0)]
    for index in range(num_stages):
        if num_own > 1 and index == hiding:
            ops.append(Op("own", 1))
        if index >= NUM_TURNS:
            ops.append(Op("add", index - NUM_TURNS, index - NUM_TURNS))
        ops.append(Op("fetched", index))
    if num_own > 1 and hiding == num_stages:
        ops.append(Op("own", 1))
    return ops


def _hiding_stage(blocks: DeviceBlocks) -> int:
    """The stage before which the remaining own heads run: the first that would wait for partials, where neither it nor
    any later stage has kernels to run; the number of stages if there is none."""
    stages = blocks.stages
    last = max((index for index, stage in enumerate(stages) if stage.plan.fetched), default=-1)
    return min(max(last + 1, NUM_TURNS), len(stages))


def _first_heads(blocks: DeviceBlocks, q: torch.Tensor, partials: torch.dtype) -> int:
    """The number of own K/V heads that run before the fetched keys."""
    stages, num_heads = blocks.stages, len(blocks.plan.kv_head_order)
    if not stages or not blocks.half:
        return num_heads
    num_rows = max(max(stage.plan.num_fetched_rows, stage.plan.num_served_rows) for stage in stages)
    row_bytes = 2 * q.size(0) * q.size(3) * partials.itemsize
    flops = 10.0 * q.size(0) * q.size(3) * blocks.plan.num_own_pairs
    hidden_s = min(num_rows * row_bytes / LINK_BYTES_PER_S, flops / 2 / KERNEL_FLOPS)
    return blocks.half if hidden_s > HALVING_S else num_heads


def _head_order(blocks: DeviceBlocks) -> HeadOrder | None:
    order = HeadOrder(blocks.head_order, blocks.kv_head_order, blocks.back_order, blocks.kv_back_order)
    return None if order == (None, None, None, None) else order
