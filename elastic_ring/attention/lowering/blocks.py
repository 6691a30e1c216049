"""Lowering of sparse schedules to tables of whole blocks of 128 tokens, which GPUs run: stages of hops, one kernel call
for each size of head group."""

from __future__ import annotations

from dataclasses import dataclass

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
from elastic_ring.costs import HALVING_S, LINK_BYTES_PER_S, SPARSE_BACKWARD_FLOPS


@dataclass(frozen=True, eq=False)
class PlacedSums:
    """Adds returned partials to own keys, row by row of the inbox as tables of places say: the first stages one by one,
    if a later one reuses their slot, and all other stages in one pass over memory."""

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
    whole: Schedule,
    cp_rank: int,
    q: torch.Tensor,
    kernel: Kernel,
    options: RingOptions,
    tables: LRUCache,
    latent: int = 0,
) -> CallPlan:
    """The plan of calls with queries like q (B, S_local, H, D). `whole`: the schedule, padded where something cuts its
    blocks; `tables` are cached by device and rows in a stage; `latent`: the width of half a latent, if latents are
    sent.

    Raises `ValueError` for patterns and layouts that cut blocks, unless `whole` is padded, and if `keep_keys` asks for
    keys that do not fit one stage."""
    places = None if whole is schedule else _padded_places(schedule, whole, cp_rank, q.device)
    if places is not None:
        q = q[:, :1].expand(-1, whole.layout.num_tokens(cp_rank), -1, -1)
    dtype, exact = q.dtype, accumulate_dtype(q.dtype)
    partials = options.partials or (dtype if kernel.keeps_type else exact)
    row_bytes = 2 * q.size(0) * q.size(3) * max(dtype, partials, key=lambda each: each.itemsize).itemsize
    row_bytes *= q.size(2) if latent else 1  # once projected up
    key = (q.device, options.stage_bytes // max(1, row_bytes))
    blocks: DeviceBlocks = tables.get(key, lambda: on_device(whole, cp_rank, *key))
    plan, num_stages, num_kv = blocks.plan, len(blocks.stages), whole.num_kv_heads
    at_once = num_stages <= MOST_AT_ONCE and blocks.queries_are_contiguous(q.size(2))
    running = dtype if at_once or plan.num_row_visits <= 2 else exact
    apart = any(stage.plan.num_served_rows for stage in blocks.stages[: plan.num_added_apart])
    keys = TokenSpan(Span(0, q.size(1)))
    own_call = Call(keys.span, keys, blocks.own)
    stages = [StageCalls((0,), (own_call,), (own_call,), once=True)]
    for stage in blocks.stages:
        calls = tuple(Call(call.queries, call.keys, call.tables) for call in stage.calls)
        stages.append(StageCalls(stage.plan.hops, calls, calls, once=True))
    own = _own_parts(blocks, q, num_kv, partials)
    last = (Op("add", plan.num_added_apart, num_stages - 1),) if num_stages else ()
    keeps = plan.small if options.keep_keys is None else options.keep_keys
    if options.keep_keys and num_stages > 1:
        raise ValueError(
            f"keep_keys=True, but what is fetched is {num_stages} stages of at most stage_bytes={options.stage_bytes}:"
            " keys are kept where they are one; raise stage_bytes, or leave keep_keys out"
        )
    kept = None
    if keeps and num_stages == 1:
        # Fetched keys run first, so that the one call on all own keys hides the partials' return.
        ops = (Op("hold", 0), Op("own", 0), Op("release", 0), *last)
        kept = Program(ops, (OwnPart(None, (own_call,), once=True),), fetches=False)
    coalesced = q.is_cuda if options.coalesced is None else options.coalesced
    order = HeadOrder(blocks.head_order, blocks.kv_head_order, blocks.back_order, blocks.kv_back_order)

    def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        gather_rows_(packed, k, v, blocks.stages[index].served_rows)

    return CallPlan(
        kernel,
        tuple(stages),
        Program((*_fetching(blocks, len(own)), *last), own, fetches=True),
        plan.exchange(whole.cp, coalesced=coalesced),
        row_frame(q.new_empty((q.size(0), 0, num_kv, latent or q.size(3)))),
        pack,
        partials,
        SumTypes(running, running, exact if apart else dtype, blocks.by_rows, at_once, len(own) > 1 and apart),
        PlacedSums(blocks),
        None if order == (None, None, None, None) else order,
        kept,
        kept is not None,
        places=places,
    )


def _padded_places(schedule: Schedule, whole: Schedule, cp_rank: int, device: torch.device) -> Places | None:
    """The places of a rank's tokens among those of the padded schedule `whole`; None if they are the same."""
    inner, num_tokens = padded_rows(schedule, cp_rank), whole.layout.num_tokens(cp_rank)
    if len(inner) == num_tokens:  # rules alone cut blocks
        return None
    outer = np.full(num_tokens, -1)
    outer[inner] = np.arange(len(inner))
    indices = (inner, np.maximum(outer, 0), np.flatnonzero(outer < 0))
    return Places(*(torch.from_numpy(each).to(device) for each in indices))


def _own_parts(blocks: DeviceBlocks, q: torch.Tensor, num_kv: int, partials: torch.dtype) -> tuple[OwnPart, ...]:
    """Backward on the own keys: at once, or in two halves of the heads, if the second hides more than it costs."""
    num_tokens, sharing, half = q.size(1), q.size(2) // num_kv, blocks.half
    keys = TokenSpan(Span(0, num_tokens))
    hidden_s = 0.0
    if blocks.stages and half:
        num_rows = max(max(stage.plan.num_fetched_rows, stage.plan.num_served_rows) for stage in blocks.stages)
        row_bytes = 2 * q.size(0) * q.size(3) * partials.itemsize
        flops = 10.0 * q.size(0) * q.size(3) * blocks.plan.num_own_pairs
        hidden_s = min(num_rows * row_bytes / LINK_BYTES_PER_S, flops / 2 / SPARSE_BACKWARD_FLOPS)
    if not hidden_s > HALVING_S:
        return (OwnPart(None, (Call(keys.span, keys, blocks.own),), once=True),)
    parts = []
    for heads, tables in zip(((0, half), (half, num_kv)), blocks.own_parts, strict=True):
        rows = Span(0, num_tokens, (heads[0] * sharing, heads[1] * sharing))
        parts.append(OwnPart(heads, (Call(rows, keys, tables),), once=True))
    return tuple(parts)


def _fetching(blocks: DeviceBlocks, num_own: int) -> list[Op]:
    """Own keys are computed while the first stage arrives; a second part of their heads runs later, to hide the return
    of the last stages' partials: before the first stage that would wait for partials, if neither it nor any later stage
    has kernels to run. Partials are added as late as possible, to give slow readers time."""
    num_stages = len(blocks.stages)
    last = max((index for index, stage in enumerate(blocks.stages) if stage.plan.fetched), default=-1)
    hiding = min(max(last + 1, NUM_TURNS), num_stages)
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
