"""Lowering to rectangles of tokens: of dense schedules, with full or causal covers, for dense kernels, and of sparse
schedules on CPUs, hop by hop, to tiles of gathered tokens, some with a mask.

On a GPU messages leave in place from K and V; on a CPU the keys of a stage are gathered into one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from elastic_ring.attention.comm.exchange import HopExchange, row_frame, token_frame
from elastic_ring.attention.comm.packing import gather_groups_, gather_ranges_, parts_of_groups, parts_of_hops
from elastic_ring.attention.kernels.kernel import Cover, Documents, Kernel
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Scattered, Span
from elastic_ring.attention.lowering.call_plan import Call, CallPlan, OwnPart, Program, StageCalls, SumTypes, one_late
from elastic_ring.attention.lowering.keys import GroupTokens, ScatteredTokens, TokenSpan
from elastic_ring.attention.merge import accumulate_dtype, add_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.rank_plan import Stage, Sum, choose_hops_per_stage, rank_plan, traffic
from elastic_ring.attention.plan.schedule import Schedule, Tile
from elastic_ring.attention.plan.sparse_tiles import SparseTile, num_tokens, tile_exchange, tiles
from elastic_ring.attention.plan.traffic import ExchangePlan, Frame
from elastic_ring.costs import HALVED_FLOPS

GATHER_LIMIT_BYTES = 3 << 29
"""On a GPU, hops share one round of kernels while their K and V together stay below this on every rank."""


@dataclass(frozen=True, eq=False)
class RangeSums:
    """Adds returned partials to ranges of own keys, each key rounded once, in hop order."""

    sums: tuple[tuple[Sum, ...], ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    frame: Frame

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        for index in range(first, last + 1):
            returned, parts = exchange.take_partials(index), self.parts[index]
            if parts:
                both = total.flatten(0, 1)  # dK and dV in one go
                flat = {hop: x.flatten(0, 1) for hop, x in parts_of_hops(returned, parts, self.frame).items()}
                for (start, stop), shares in self.sums[index]:
                    length = stop - start
                    add_(Span(start, stop).take(both), [Span(at, at + length).take(flat[hop]) for hop, at in shares])


@dataclass(frozen=True, eq=False)
class GroupSums:
    """Adds the partials that each hop's reader returned to own keys, head group by head group."""

    schedule: Schedule
    cp_rank: int

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        for index in range(first, last + 1):
            requested = self.schedule.requested(self.cp_rank, index + 1)
            cut = parts_of_groups(exchange.take_partials(index), self.schedule.groups, requested, total[0])
            for group, ranges, parts in zip(self.schedule.groups, requested, cut, strict=True):
                if ranges:
                    ScatteredTokens(Scattered(ranges, group.kv_heads)).put(total, parts, added=True)


def lower_rectangles(
    schedule: Schedule,
    cp_rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    kernel: Kernel,
    options: RingOptions,
    seen: torch.Tensor,
) -> CallPlan:
    """The plan of calls with tensors like q (B, S_local, H, D) and k (B, S_local, Hkv, D), which kernels see as
    `seen`. Keys that are encoded for the wire are gathered, and pieces count in whole vectors of a head."""
    coalesced = k.is_cuda if options.coalesced is None else options.coalesced
    encoded = options.kv_wire != "native"
    plan = rank_plan(schedule, cp_rank, hops_together(schedule, seen, options.hops_per_stage))
    packed, unit = encoded or not coalesced, k.size(3) if encoded else 1
    of_stages = traffic(plan, k.size(0), k.size(2) * k.size(3) // unit, packed=packed)
    exchange = ExchangePlan(schedule.cp, of_stages, packed=packed, coalesced=coalesced)
    frame, own_stage, fetched = token_frame(k, unit), plan.stages[0], plan.stages[1:]
    own_calls = _own_calls(own_stage, k, kernel)
    own: tuple[OwnPart, ...] = (OwnPart(None, own_calls, own_stage.keys_once),)
    if k.is_cuda and fetched and k.size(2) > 1 and 5 * q.numel() * q.size(1) >= HALVED_FLOPS:
        # Half of the own heads run before the stages, behind the first keys' arrival, and half after them, behind the
        # last partials' return.
        own = own_halves(own_calls, own_stage.keys_once, k.size(2), q.size(2) // k.size(2))
    visits, exact = plan.row_visits, accumulate_dtype(k.dtype)
    whole, alone = Span(0, k.size(1)), None
    if not fetched and len(own) == 1 and seen is k:
        is_whole = [(call.rows, call.keys) for call in own_calls] == [(whole, TokenSpan(whole))]
        alone = own_calls[0] if is_whole else None

    def running(num_parts: int) -> torch.dtype:
        # Two already rounded parts are summed in registers and rounded once, as a wider sum would be, too.
        return k.dtype if kernel.keeps_type and num_parts <= 2 else exact

    def stage_calls(stage: Stage) -> StageCalls:
        by_rows, by_keys = (tuple(map(_call, tiles)) for tiles in (stage.by_rows, stage.by_keys))
        return StageCalls(stage.hops, by_rows, by_keys if stage.num_tokens else (), stage.keys_once)

    def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        requested = {hop: schedule.requested(cp_rank, hop)[0] for hop in plan.stages[index + 1].hops}
        sizes = tuple((hop, num_tokens(ranges)) for hop, ranges in requested.items() if ranges)
        for hop, part in parts_of_hops(packed, sizes, frame).items():
            gather_ranges_(part, k, v, requested[hop])

    return CallPlan(
        kernel,
        (StageCalls(own_stage.hops, own_calls, (), False), *map(stage_calls, fetched)),
        Program(one_late(len(fetched), len(own)), own, fetches=True),
        exchange,
        frame,
        pack if packed else None,
        k.dtype if kernel.keeps_type else exact,  # widening rounded values would only add bytes
        SumTypes(
            running(visits[0]),
            running(visits[1]),
            running(len(plan.stages)),
            zeroed=len(own) > 1 and len(plan.stages) > 2,
        ),
        RangeSums(plan.sums[1:], tuple(stage.inbox for stage in exchange.stages), frame),
        every_row_sees=plan.every_row_sees,
        pairs=True,
        alone=alone,
    )


def _call(tile: Tile) -> Call:
    return Call(Span(*tile.q), TokenSpan(Span(*tile.k)), "causal" if tile.causal else "full")


def _own_calls(stage: Stage, k: torch.Tensor, kernel: Kernel) -> tuple[Call, ...]:
    """The calls on the own keys, forward and backward: one on all documents, which lie end to end, if the kernel serves
    that, and one for each other tile. A call a document would keep the host busier than the GPU."""
    squares = [tile for tile in stage.by_rows if tile.causal and tile.q == tile.k]
    end_to_end = all(before.q[1] == after.q[0] for before, after in pairwise(squares))
    if "documents" not in kernel.covers or k.size(0) != 1 or len(squares) < 2 or not end_to_end:
        return tuple(map(_call, stage.by_rows))
    first, last = squares[0].q[0], squares[-1].q[1]
    cuts = torch.tensor([0, *(tile.q[1] - first for tile in squares)], dtype=torch.int32, device=k.device)
    documents = Documents(cuts, max(tile.q[1] - tile.q[0] for tile in squares))
    rest = (_call(tile) for tile in stage.by_rows if tile not in squares)
    return (Call(Span(first, last), TokenSpan(Span(first, last)), documents), *rest)


def own_halves(calls: tuple[Call, ...], once: bool, num_kv_heads: int, sharing: int) -> tuple[OwnPart, OwnPart]:
    """The own keys' calls on the first half of the K/V heads, each shared by `sharing` query heads, and on the rest."""

    def of_heads(first: int, last: int) -> OwnPart:
        heads: Range = (first * sharing, last * sharing)
        spans = [(call, call.rows) for call in calls if isinstance(call.rows, Span)]
        assert len(spans) == len(calls)
        return OwnPart(
            (first, last), tuple(call._replace(rows=replace(rows, heads=heads)) for call, rows in spans), once
        )

    half = num_kv_heads // 2
    return of_heads(0, half), of_heads(half, num_kv_heads)


def hops_together(schedule: Schedule, k: torch.Tensor, hops_per_stage: int | None) -> int:
    """How many hops share a stage: equal on all ranks, since their K and V differ in length only."""
    if hops_per_stage is not None:
        return hops_per_stage
    if not k.is_cuda:
        return 1
    bytes_per_token = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size()
    return choose_hops_per_stage(schedule, bytes_per_token, GATHER_LIMIT_BYTES)


def lower_tiles(schedule: Schedule, cp_rank: int, k: torch.Tensor, kernel: Kernel, *, ahead: int) -> CallPlan:
    """The plan of sparse calls on a CPU with keys like k (B, S_local, Hkv, D); `ahead` hops are posted before their
    kernels run."""
    exact = accumulate_dtype(k.dtype)

    def stage_calls(hop: int, own: tuple[SparseTile, ...]) -> StageCalls:
        starts, shapes, at = [], [], 0
        for group, ranges in zip(schedule.groups, schedule.hops[cp_rank][hop].fetch, strict=True):
            shape = (k.size(0), num_tokens(ranges), len(group.kv_heads), k.size(3))
            starts.append(at)
            shapes.append(shape)
            at += 2 * shape[0] * shape[1] * shape[2] * shape[3]
        calls = []
        for tile in own:
            keys: GroupTokens | ScatteredTokens
            if hop:
                keys = GroupTokens(starts[tile.group], shapes[tile.group], tile.k)
            else:
                keys = ScatteredTokens(Scattered(tile.k, schedule.groups[tile.group].kv_heads))
            cover: Cover = "causal" if tile.causal else "full" if tile.mask is None else torch.from_numpy(tile.mask)
            calls.append(Call(Scattered(tile.q, tile.heads), keys, cover))
        return StageCalls((hop,), tuple(calls), tuple(calls), once=False)

    def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        gather_groups_(packed, k, v, schedule.groups, schedule.requested(cp_rank, index + 1))

    stages = tuple(stage_calls(hop, own) for hop, own in enumerate(tiles(schedule, cp_rank)))
    return CallPlan(
        kernel,
        stages,
        Program(one_late(len(stages) - 1, 1), (OwnPart(None, stages[0].backward, once=False),), fetches=True),
        tile_exchange(schedule, cp_rank, ahead),
        row_frame(k),
        pack,
        exact,
        SumTypes(exact, exact, exact, by_rows=True),
        GroupSums(schedule, cp_rank),
    )
