"""Lowering of dense schedules: rectangles of whole tokens with full or causal covers, for dense kernels.

On a GPU messages leave from where they lie in K and V; on a CPU the keys of a stage are gathered into one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from elastic_ring.attention.comm.exchange import Frame, HopExchange, token_frame
from elastic_ring.attention.comm.packing import gather_ranges_, parts_of_hops
from elastic_ring.attention.kernels.kernel import Documents, Kernel
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Span
from elastic_ring.attention.lowering.call_plan import Call, CallPlan, OwnPart, Program, StageCalls, SumTypes, one_late
from elastic_ring.attention.lowering.keys import TokenSpan
from elastic_ring.attention.merge import accumulate_dtype, add_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.rank_plan import RankPlan, Stage, Sum, choose_hops_per_stage, rank_plan, traffic
from elastic_ring.attention.plan.schedule import Schedule, Tile
from elastic_ring.attention.plan.sparse_tiles import num_tokens
from elastic_ring.attention.plan.traffic import ExchangePlan

GATHER_LIMIT_BYTES = 3 << 29
"""On a GPU, hops share one round of kernels while their K and V together stay below this on every rank."""

HALVED_FLOPS = 1e12
"""Where the own tile has fewer than these (two milliseconds of an H100), one launch more costs more than it hides."""


@dataclass(frozen=True, eq=False)
class RangeSums:
    """Ranges of own keys grow by what their readers returned, each key rounded once, in hop order."""

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
    exchange = ExchangePlan(
        schedule.cp,
        traffic(plan, k.size(0), k.size(2) * k.size(3) // unit, packed=packed),
        packed=packed,
        coalesced=coalesced,
    )
    frame, fetched = token_frame(k, unit), plan.stages[1:]
    own_calls = _own_calls(plan.stages[0], k, kernel)
    own = _own_parts(own_calls, plan.stages[0].keys_once, q, k, len(plan.stages))
    visits, exact = plan.row_visits, accumulate_dtype(k.dtype)

    def running(num_parts: int) -> torch.dtype:
        # Two already rounded parts are summed in registers and rounded once, as a wider sum would be, too.
        return k.dtype if kernel.keeps_type and num_parts <= 2 else exact

    return CallPlan(
        kernel,
        (StageCalls(plan.stages[0].hops, own_calls, (), False), *map(_stage_calls, fetched)),
        Program(one_late(len(fetched), len(own)), own, fetches=True),
        exchange,
        frame,
        partial(_pack, plan, frame) if packed else None,
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
        alone=_alone(own_calls, k) if not fetched and len(own) == 1 and seen is k else None,
    )


def _alone(calls: tuple[Call, ...], k: torch.Tensor) -> Call | None:
    whole = Span(0, k.size(1))
    (call, *others) = calls or (None,)
    return call if call is not None and not others and (call.rows, call.keys) == (whole, TokenSpan(whole)) else None


def _stage_calls(stage: Stage) -> StageCalls:
    by_rows, by_keys = (tuple(map(_call, tiles)) for tiles in (stage.by_rows, stage.by_keys))
    return StageCalls(stage.hops, by_rows, by_keys if stage.num_tokens else (), stage.keys_once)


def _call(tile: Tile) -> Call:
    return Call(Span(*tile.q), TokenSpan(Span(*tile.k)), "causal" if tile.causal else "full")


def _own_calls(stage: Stage, k: torch.Tensor, kernel: Kernel) -> tuple[Call, ...]:
    """The calls on the own keys, forward and backward: one on all documents, which lie end to end, where the kernel
    serves that, and one for each other tile. A call a document would keep the host busier than the GPU."""
    squares = [tile for tile in stage.by_rows if tile.causal and tile.q == tile.k]
    end_to_end = all(before.q[1] == after.q[0] for before, after in pairwise(squares))
    if "documents" not in kernel.covers or k.size(0) != 1 or len(squares) < 2 or not end_to_end:
        return tuple(map(_call, stage.by_rows))
    first, last = squares[0].q[0], squares[-1].q[1]
    cuts = torch.tensor([0, *(tile.q[1] - first for tile in squares)], dtype=torch.int32, device=k.device)
    documents = Documents(cuts, max(tile.q[1] - tile.q[0] for tile in squares))
    others = (_call(tile) for tile in stage.by_rows if tile not in squares)
    return (Call(Span(first, last), TokenSpan(Span(first, last)), documents), *others)


def _own_parts(
    calls: tuple[Call, ...], once: bool, q: torch.Tensor, k: torch.Tensor, num_stages: int
) -> tuple[OwnPart, ...]:
    """On a GPU, where there are hops to hide, half of the own heads run before the stages, behind the first keys'
    arrival, and half after them, behind the last partials' return."""
    num_heads = k.size(2)
    if k.is_cuda and num_stages > 1 and num_heads > 1 and 5 * q.numel() * q.size(1) >= HALVED_FLOPS:
        return own_halves(calls, once, num_heads, q.size(2) // num_heads)
    return (OwnPart(None, calls, once),)


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


def _pack(plan: RankPlan, frame: Frame, index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Gather what others fetch in stage `index`: one part for each hop."""
    asked = {hop: plan.schedule.requested(plan.cp_rank, hop)[0] for hop in plan.stages[index + 1].hops}
    sizes = tuple((hop, num_tokens(ranges)) for hop, ranges in asked.items() if ranges)
    for hop, part in parts_of_hops(packed, sizes, frame).items():
        gather_ranges_(part, k, v, asked[hop])
