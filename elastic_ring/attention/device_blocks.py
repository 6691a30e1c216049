"""A rank's plan on its device: the tables that its kernels read and the indices by which rows are picked.

Head groups of equally many heads run together, as if their queries and keys were of one sequence, in which the tables
let each group see its own.

Made once for a rank's place in a schedule and kept while there is room, since a run whose sequences are alike asks for
the same again, and one of packed documents never does. No kernels, no hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import BlockTables, tables_apart, tables_between
from elastic_ring.attention.layout import Range
from elastic_ring.attention.plan_cache import kept_within
from elastic_ring.attention.readers import OneGroup, SeveralGroups, readers_of
from elastic_ring.attention.sparse_blocks import BlockPlan, BlockStage, HostTables, StageTables, plan_blocks
from elastic_ring.attention.sparse_schedule import SparseSchedule

KEPT_BYTES = 1 << 29
"""What tables of plans that are not in use may hold of a device's memory."""


@dataclass(frozen=True, eq=False)
class StageCall:
    """One kernel call: the fetched keys of all head groups of `num_kv_heads` K/V heads, which are `rows` of the stage's
    buffer, and the queries that see any of them."""

    rows: Range
    num_kv_heads: int
    readers: OneGroup | SeveralGroups
    tables: BlockTables

    def of(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, or dK and dV, (B, n, num_kv_heads, D) in a packed buffer (rows, B, 2, D): views."""
        rows = buffer[slice(*self.rows)].unflatten(0, (-1, self.num_kv_heads))
        return rows[:, :, :, 0].permute(2, 0, 1, 3), rows[:, :, :, 1].permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class DeviceStage:
    """A stage's kernel calls, one for each number of heads that a head group has, and what it serves."""

    plan: BlockStage
    calls: tuple[StageCall, ...]
    served_rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """A plan's tables and indices on one device. `own_parts` are the tables of the heads before and from K/V head
    `half` on, for a backward pass in two parts; orders are None where the heads already lie so.

    `last_places` (hops, own rows) int32 says where in the inbox each of the hops that read from this rank in the last
    stages has what it returned for a row, or -1; `places_apart` the same of each stage that is added before, counted in
    its part of the inbox.
    """

    plan: BlockPlan
    own: BlockTables
    own_parts: tuple[BlockTables, BlockTables]
    half: int
    stages: tuple[DeviceStage, ...]
    places_apart: tuple[torch.Tensor, ...]
    last_places: torch.Tensor
    head_order: torch.Tensor | None
    kv_head_order: torch.Tensor | None
    back_order: torch.Tensor | None
    kv_back_order: torch.Tensor | None

    @property
    def by_rows(self) -> bool:
        """Whether some call needs what queries add up row by row in memory."""
        return any(isinstance(call.readers, SeveralGroups) for stage in self.stages for call in stage.calls)

    def readers_are_runs(self, num_heads: int) -> bool:
        """Whether in every call the queries that meet fetched keys are neighbours, with all of their heads."""
        return all(call.readers.run(num_heads) is not None for stage in self.stages for call in stage.calls)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory, with what kernels have made of the tables so far."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        calls = [call for stage in self.stages for call in stage.calls]
        for tables in (self.own, *self.own_parts, *(call.tables for call in calls)):
            yield from tables.tensors()
        yield from (stage.served_rows for stage in self.stages)
        yield from (*self.places_apart, self.last_places)
        for call in calls:
            yield from (x for x in vars(call.readers).values() if isinstance(x, torch.Tensor))


def _weight(blocks: DeviceBlocks) -> int:
    return blocks.num_bytes


@kept_within(KEPT_BYTES, _weight)
def on_device(
    schedule: SparseSchedule, cp_rank: int, device: torch.device, limit_rows: int | None = None
) -> DeviceBlocks:
    """One pass over the host's masks, which are then let go, and a few copies. As `plan_blocks`."""
    plan, host = plan_blocks(schedule, cp_rank, limit_rows)
    own = tables_between(host.own, host.own_earlier, device)
    sharing = schedule.num_heads // schedule.num_kv_heads
    half = schedule.num_kv_heads // 2
    parts = (own.of_heads(0, half * sharing), own.of_heads(half * sharing, schedule.num_heads))
    size = (own.num_q_blocks, schedule.num_heads)
    stages = tuple(_stage(*each, *size, device) for each in zip(plan.stages, host.stages, strict=True))
    orders = [_order(order, device) for order in (plan.head_order, plan.kv_head_order)]
    back = [_order(tuple(np.argsort(order).tolist()), device) for order in (plan.head_order, plan.kv_head_order)]
    places = [torch.from_numpy(each).to(device) for each in _places(plan, host)]
    return DeviceBlocks(
        plan, own, parts, half, stages, tuple(places[:-1]), places[-1], orders[0], orders[1], back[0], back[1]
    )


def forget_plans() -> None:
    """Let go of the tables that nobody uses just now: their device is given back."""
    on_device.cache_clear()


def _places(plan: BlockPlan, host: HostTables) -> list[np.ndarray]:
    """Of each stage that is added apart, and of all others together."""
    of_stages = [stage.places for stage in host.stages]
    last: list[np.ndarray] = [np.empty((0, 0), dtype=np.int32)] if not of_stages else []
    for index in range(plan.num_added_apart, len(of_stages)):
        start, places = plan.inbox_rows(index)[0], of_stages[index]
        last.append(np.where(places < 0, places, places + np.int32(start)))
    return [*of_stages[: plan.num_added_apart], np.concatenate(last)]


def _stage(
    plan: BlockStage, host: StageTables, num_own_blocks: int, num_heads: int, device: torch.device
) -> DeviceStage:
    return DeviceStage(
        plan, tuple(_calls(plan, host, num_own_blocks, num_heads, device)),
        torch.from_numpy(host.served_rows).to(device),
    )  # fmt: skip


def _calls(
    plan: BlockStage, host: StageTables, num_own_blocks: int, num_heads: int, device: torch.device
) -> Iterator[StageCall]:
    groups = zip(plan.regions, host.kept, host.keys, host.readers, strict=True)
    row = 0
    for num_kv_heads, alike in groupby(groups, lambda group: group[0].num_kv_heads):
        of_all = list(alike)
        fetching = [group for group in of_all if group[0].num_tokens]
        if not fetching:
            continue
        regions, kept, keys, readers = zip(*fetching, strict=True)
        first, row = row, row + num_kv_heads * sum(region.num_tokens for region in regions)
        whole = all(len(blocks) == num_own_blocks for blocks in readers)
        yield StageCall(
            (first, row), num_kv_heads, readers_of(readers, [region.heads for region in regions], num_heads, device),
            # How many groups fetch anything may be another number in every call.
            tables_apart(kept, keys, device, all_rows=whole and len(fetching) in (1, len(of_all))),
        )  # fmt: skip


def _order(heads: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    return None if heads == tuple(range(len(heads))) else torch.tensor(heads, device=device)
