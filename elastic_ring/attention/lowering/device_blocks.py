"""A rank's block plan on its device: the tables that kernels read, and the indices that gather rows.

Head groups with equal numbers of heads run in one kernel call, as if their queries and keys were one sequence; the
tables restrict each group to its own keys. Kernels and communication must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockTables, tables_apart, tables_between
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import OneGroup, SeveralGroups
from elastic_ring.attention.lowering.keys import HeadRows
from elastic_ring.attention.patterns.rules import Positions
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import BlockPlan, BlockStage, StageTables, plan_blocks


@dataclass(frozen=True, eq=False)
class StageCall:
    """One kernel call: the fetched keys of all head groups of one size, and the queries that see any of them."""

    keys: HeadRows
    queries: OneGroup | SeveralGroups
    tables: BlockTables


@dataclass(frozen=True, eq=False)
class DeviceStage:
    """A stage's kernel calls, one for each size of head group, and the rows that it serves."""

    plan: BlockStage
    calls: tuple[StageCall, ...]
    served_rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """A plan's tables and indices on one device.

    `own_parts` are the tables of the heads before and from K/V head `half` on, for a backward pass in two parts. Head
    orders are None where the heads are in that order already.

    `last_places` (hops, own rows) int32: for each hop of the last stages in which a rank reads from this one, the inbox
    row with the returned value of an own row, or -1. `places_apart`: the same for each stage that is added earlier,
    relative to its inbox slot.
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
        """Whether any call needs the running sums of queries to be contiguous by row."""
        return any(isinstance(call.queries, SeveralGroups) for stage in self.stages for call in stage.calls)

    def queries_are_contiguous(self, num_heads: int) -> bool:
        """Whether the queries of every call on fetched keys are one contiguous range with all of their heads."""
        return all(call.queries.run(num_heads) is not None for stage in self.stages for call in stage.calls)

    @property
    def num_bytes(self) -> int:
        """Device memory in bytes, including tensors that kernels have derived from the tables so far."""
        calls = [call for stage in self.stages for call in stage.calls]
        tensors = [stage.served_rows for stage in self.stages] + [*self.places_apart, self.last_places]
        for tables in (self.own, *self.own_parts, *(call.tables for call in calls)):
            tensors += tables.tensors()
        for call in calls:
            tensors += [x for x in vars(call.queries).values() if isinstance(x, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())


def on_device(schedule: Schedule, cp_rank: int, device: torch.device, limit_rows: int | None = None) -> DeviceBlocks:
    """The device plan of a rank: `plan_blocks`, whose host masks are then freed, and a few copies to `device`. Raises:
    `ValueError` as `plan_blocks` does."""
    plan, host = plan_blocks(schedule, cp_rank, limit_rows)
    masks = None if host.masks is None else torch.from_numpy(host.masks).to(device)
    own = tables_between(host.own, host.own_earlier, device, masks)
    sharing = schedule.num_heads // schedule.num_kv_heads
    half = schedule.num_kv_heads // 2
    parts = (own.of_heads(0, half * sharing), own.of_heads(half * sharing, schedule.num_heads))
    stages = []
    for stage, tables in zip(plan.stages, host.stages, strict=True):
        calls = tuple(_calls(stage, tables, own.num_q_blocks, schedule.num_heads, device, masks))
        stages.append(DeviceStage(stage, calls, torch.from_numpy(tables.served_rows).to(device)))

    def order(heads: Sequence[int]) -> torch.Tensor | None:
        return None if list(heads) == list(range(len(heads))) else torch.tensor(heads, device=device)

    # The places of each stage that is added apart, then those of all other stages together, by the whole inbox.
    num_apart, exchange = plan.num_added_apart, plan.exchange(schedule.cp, coalesced=False)
    last: list[np.ndarray] = [] if host.stages else [np.empty((0, 0), dtype=np.int32)]
    for index in range(num_apart, len(host.stages)):
        start, places = exchange.inbox_rows(index)[0], host.stages[index].places
        last.append(np.where(places < 0, places, places + np.int32(start)))
    return DeviceBlocks(
        plan,
        own,
        parts,
        half,
        tuple(stages),
        tuple(torch.from_numpy(stage.places).to(device) for stage in host.stages[:num_apart]),
        torch.from_numpy(np.concatenate(last)).to(device),
        order(plan.head_order),
        order(plan.kv_head_order),
        order(np.argsort(plan.head_order).tolist()),
        order(np.argsort(plan.kv_head_order).tolist()),
    )


def _calls(
    plan: BlockStage,
    host: StageTables,
    num_own_blocks: int,
    num_heads: int,
    device: torch.device,
    masks: torch.Tensor | None,
) -> Iterator[StageCall]:
    """A stage's kernel calls, one for each size of head group."""
    groups = zip(plan.regions, host.kept, host.keys, host.readers, strict=True)
    row = 0
    for num_kv_heads, alike in groupby(groups, lambda group: group[0].num_kv_heads):
        of_all = list(alike)
        fetching = [group for group in of_all if group[0].num_tokens]
        if not fetching:
            continue
        regions, kept, keys, readers = zip(*fetching, strict=True)
        first, row = row, row + num_kv_heads * sum(region.num_tokens for region in regions)
        whole = masks is None and all(len(blocks) == num_own_blocks for blocks in readers)
        yield StageCall(
            HeadRows((first, row), num_kv_heads),
            rows_of(readers, [region.heads for region in regions], num_heads, device),
            # The number of groups that fetch anything may change from call to call.
            tables_apart(kept, keys, device, masks, all_rows=whole and len(fetching) in (1, len(of_all))),
        )


def rows_of(
    blocks: Sequence[Positions], heads: Sequence[Range], num_heads: int, device: torch.device
) -> OneGroup | SeveralGroups:
    """The queries in each group's `blocks` (of a rank's slice, ascending) and `heads`, the same number in each group,
    out of `num_heads` heads."""
    if len(blocks) == 1:
        own = blocks[0]
        first = int(own[0]) if len(own) else 0
        tokens: slice | torch.Tensor = slice(first * BLOCK_TOKENS, (first + len(own)) * BLOCK_TOKENS)
        if len(own) and own[-1] - first + 1 != len(own):
            tokens = torch.from_numpy((own[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()).to(device)
        return OneGroup(tokens, slice(*heads[0]))
    together = heads[0][1] - heads[0][0]
    unit = math.gcd(num_heads, together, *(first for first, _ in heads))
    per_token = num_heads // unit
    pairs = zip(blocks, heads, strict=True)
    starts = np.concatenate([some * (BLOCK_TOKENS * per_token) + first // unit for some, (first, _) in pairs])
    # Expanded on the device; on the host this would take longer than making the tables.
    offsets = per_token * torch.arange(BLOCK_TOKENS, device=device).unsqueeze(-1)
    units = torch.arange(together // unit, device=device)
    index = torch.from_numpy(starts).to(device).view(-1, 1, 1) + offsets + units
    return SeveralGroups(index.flatten(), unit, together)
