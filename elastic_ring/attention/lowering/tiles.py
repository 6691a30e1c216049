"""Lowering of sparse schedules for CPUs: hop by hop, tiles of gathered tokens of any shape, some with a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic_ring.attention.comm.exchange import HopExchange, row_frame
from elastic_ring.attention.comm.packing import gather_groups_, parts_of_groups
from elastic_ring.attention.kernels.kernel import Cover, Kernel
from elastic_ring.attention.layouts.rows import Scattered
from elastic_ring.attention.lowering.call_plan import (
    Call,
    CallPlan,
    OwnPart,
    Program,
    StageCalls,
    SumTypes,
    one_late,
)
from elastic_ring.attention.lowering.keys import GroupTokens, ScatteredTokens
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_tiles import SparseTile, num_tokens, tile_exchange, tiles


@dataclass(frozen=True, eq=False)
class GroupSums:
    """Own keys grow, head group by head group, by what the reader of each hop returned."""

    schedule: Schedule
    cp_rank: int

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        for index in range(first, last + 1):
            requested = self.schedule.requested(self.cp_rank, index + 1)
            cut = parts_of_groups(exchange.take_partials(index), self.schedule.groups, requested, total[0])
            for group, ranges, parts in zip(self.schedule.groups, requested, cut, strict=True):
                if ranges:
                    ScatteredTokens(Scattered(ranges, group.kv_heads)).put(total, parts, added=True)


def lower_tiles(schedule: Schedule, cp_rank: int, k: torch.Tensor, kernel: Kernel, *, ahead: int) -> CallPlan:
    """The plan of calls with keys like k (B, S_local, Hkv, D); `ahead` hops are posted before their kernels run."""
    by_hop = tiles(schedule, cp_rank)
    stages = tuple(_stage(schedule, cp_rank, hop, own, k) for hop, own in enumerate(by_hop))
    exact = accumulate_dtype(k.dtype)

    def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        gather_groups_(packed, k, v, schedule.groups, schedule.requested(cp_rank, index + 1))

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


def _stage(schedule: Schedule, cp_rank: int, hop: int, own: tuple[SparseTile, ...], k: torch.Tensor) -> StageCalls:
    starts, shapes, at = [], [], 0
    for group, ranges in zip(schedule.groups, schedule.hops[cp_rank][hop].fetch, strict=True):
        shape = (k.size(0), num_tokens(ranges), len(group.kv_heads), k.size(3))
        starts.append(at)
        shapes.append(shape)
        at += 2 * shape[0] * shape[1] * shape[2] * shape[3]

    def call(tile: SparseTile) -> Call:
        keys: GroupTokens | ScatteredTokens
        if hop:
            keys = GroupTokens(starts[tile.group], shapes[tile.group], tile.k)
        else:
            keys = ScatteredTokens(Scattered(tile.k, schedule.groups[tile.group].kv_heads))
        cover: Cover = "causal" if tile.causal else "full" if tile.mask is None else torch.from_numpy(tile.mask)
        return Call(Scattered(tile.q, tile.heads), keys, cover)

    calls = tuple(map(call, own))
    return StageCalls((hop,), calls, calls, once=False)
