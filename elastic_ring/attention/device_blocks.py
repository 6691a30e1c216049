"""A rank's plan on its device: the tables that its kernels read and the indices by which rows are picked.

Made once for a rank's place in a schedule and kept while there is room, since a run whose sequences are alike asks for
the same again, and one of packed documents never does. No kernels, no hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockTables, tables_between
from elastic_ring.attention.plan_cache import kept_within
from elastic_ring.attention.rules import Positions
from elastic_ring.attention.sparse_blocks import BlockPlan, BlockStage, StageTables, plan_blocks
from elastic_ring.attention.sparse_schedule import SparseSchedule

KEPT_BYTES = 1 << 29
"""What tables of plans that are not in use may hold of a device's memory."""


@dataclass(frozen=True, eq=False)
class DeviceStage:
    """`readers` are the tokens of `StageTables.readers`: a slice, or an index where they do not lie together."""

    plan: BlockStage
    fetched: tuple[BlockTables | None, ...]
    readers: tuple[slice | torch.Tensor, ...]
    served_rows: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """A plan's tables and indices on one device. `own_parts` are the tables of the heads before and from K/V head
    `half` on, for a backward pass in two parts; orders are None where the heads already lie so."""

    plan: BlockPlan
    own: BlockTables
    own_parts: tuple[BlockTables, BlockTables]
    half: int
    stages: tuple[DeviceStage, ...]
    head_order: torch.Tensor | None
    kv_head_order: torch.Tensor | None
    back_order: torch.Tensor | None
    kv_back_order: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of the device's memory, with what kernels have made of the tables so far."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for tables in (self.own, *self.own_parts, *(each for stage in self.stages for each in stage.fetched)):
            if tables is not None:
                yield from tables.tensors()
        for stage in self.stages:
            yield from (stage.served_rows, stage.places)
            yield from (rows for rows in stage.readers if isinstance(rows, torch.Tensor))


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
    stages = tuple(_stage(*each, own.num_q_blocks, device) for each in zip(plan.stages, host.stages, strict=True))
    orders = [_order(order, device) for order in (plan.head_order, plan.kv_head_order)]
    back = [_order(tuple(np.argsort(order).tolist()), device) for order in (plan.head_order, plan.kv_head_order)]
    return DeviceBlocks(plan, own, parts, half, stages, orders[0], orders[1], back[0], back[1])


def forget_plans() -> None:
    """Let go of the tables that nobody uses just now: their device is given back."""
    on_device.cache_clear()


def _stage(plan: BlockStage, host: StageTables, num_own_blocks: int, device: torch.device) -> DeviceStage:
    fetched = tuple(
        tables_between(None, kept, device, all_rows=kept.shape[1] == num_own_blocks) if region.num_tokens else None
        for region, kept in zip(plan.regions, host.kept, strict=True)
    )
    return DeviceStage(
        plan, fetched, tuple(_tokens_of(blocks, device) for blocks in host.readers),
        torch.from_numpy(host.served_rows).to(device), torch.from_numpy(host.places).to(device),
    )  # fmt: skip


def _tokens_of(blocks: Positions, device: torch.device) -> slice | torch.Tensor:
    if len(blocks) and blocks[-1] - blocks[0] + 1 != len(blocks):
        tokens = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return torch.from_numpy(tokens.ravel()).to(device)
    first = int(blocks[0]) if len(blocks) else 0
    return slice(first * BLOCK_TOKENS, (first + len(blocks)) * BLOCK_TOKENS)


def _order(heads: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    return None if heads == tuple(range(len(heads))) else torch.tensor(heads, device=device)
