"""From a sparse schedule to what one rank of a ring of GPUs runs and sends, in whole blocks of 128 tokens.

A rank computes twice: on its own keys, and on all keys that it fetched, which lie packed side by side. Inside, heads
are in the order of the schedule's head groups, so that each group's are neighbours. *Rows* are the vectors of single
(token, K/V head) pairs: what is sent are rows, whatever group they belong to. numpy until `on_device`; nothing that
waits or sends may enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import (
    BLOCK_TOKENS,
    BlockTables,
    check_documents,
    check_whole_blocks,
    kept_between,
    tables_between,
)  # fmt: skip
from elastic_ring.attention.layout import Layout, Range
from elastic_ring.attention.remembered import remembered
from elastic_ring.attention.rules import Mask, Positions
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_schedule import SparseSchedule

WORTH_COPYING = 0.75
"""Queries are gathered for the fetched keys only where at most so many of a rank's blocks see any of them."""


@dataclass(frozen=True)
class Message:
    """Rows [start, stop) of a packed buffer that go to `peer`, or come from it, in `hop`."""

    hop: int
    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """One head group: its K/V heads and query heads as ranges of the inner order, and its rows in the buffer of
    fetched keys, which hold `num_tokens` tokens."""

    kv_heads: Range
    heads: Range
    rows: Range
    num_tokens: int


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Of one rank. `head_order` and `kv_head_order` are the heads in the inner order.

    `fetched` are the messages that fill the buffer of `num_fetched_rows` rows, group by group, so that each group's
    keys lie together in hop order; `served` those of the buffer of `num_served_rows`, hop by hop, whose rows are the
    own rows `served_rows` (token * K/V heads + inner K/V head). `readers` are for each group the own blocks whose
    queries see any fetched key, and `kept` says which of these keys each of them sees. `places[i]` says for each own
    row where the i-th of the hops that read from this rank has it among the served rows, or -1.
    """

    head_order: tuple[int, ...]
    kv_head_order: tuple[int, ...]
    regions: tuple[Region, ...]
    fetched: tuple[Message, ...]
    served: tuple[Message, ...]
    num_fetched_rows: int
    num_served_rows: int
    num_own_pairs: int
    own: Mask = field(repr=False)
    own_earlier: Mask = field(repr=False)
    kept: tuple[Mask, ...] = field(repr=False)
    readers: tuple[Positions, ...] = field(repr=False)
    served_rows: Positions = field(repr=False)
    places: np.ndarray = field(repr=False)

    @property
    def any_moved(self) -> bool:
        return bool(self.num_fetched_rows or self.num_served_rows)


def check_blocks(pattern: SparsePattern, layout: Layout) -> None:
    """Raises `ValueError` for what the block-sparse kernels cannot run on a ring, by name and with a way out."""
    check_documents(pattern.document_starts)
    for rule in dict.fromkeys(pattern.heads):
        check_whole_blocks(rule, layout.seq_len)
    for own in layout.segments:
        for segment in own:
            if segment[0] % BLOCK_TOKENS or segment[1] % BLOCK_TOKENS:
                raise ValueError(
                    f"layout {layout.name} of {layout.seq_len} tokens over cp={layout.cp} cuts at {segment}, inside a"
                    f" block of {BLOCK_TOKENS} tokens, which block-sparse kernels cannot; take a length that is a"
                    f" multiple of {_whole_length(layout)} tokens"
                )


@remembered(maxsize=64)
def plan_blocks(schedule: SparseSchedule, cp_rank: int) -> BlockPlan:
    """Pure, so cached. Raises `ValueError` as `check_blocks` does."""
    check_blocks(schedule.pattern, schedule.layout)
    kv_order = [head for group in schedule.groups for head in group.kv_heads]
    sharing = schedule.num_heads // schedule.num_kv_heads
    order = [head * sharing + i for head in kv_order for i in range(sharing)]
    rules = schedule.pattern.rules(schedule.num_heads)
    seq_len, own_blocks = schedule.layout.seq_len, _blocks_of(schedule.layout, cp_rank)
    kept = kept_between(tuple(rules[head] for head in order), seq_len, own_blocks, own_blocks)
    at = np.arange(len(own_blocks))
    own = kept[:, at, at]
    kept[:, at, at] = False
    regions, fetched, of_groups, readers = _fetched(schedule, cp_rank, own_blocks)
    served, served_rows = _served(schedule, cp_rank, kv_order)
    whole = int(kept.sum()) * BLOCK_TOKENS**2 + int(own.sum()) * BLOCK_TOKENS * (BLOCK_TOKENS + 1) // 2
    num_own_rows = schedule.layout.num_tokens(cp_rank) * schedule.num_kv_heads
    return BlockPlan(
        head_order=tuple(order), kv_head_order=tuple(kv_order), regions=regions, fetched=fetched, served=served,
        num_fetched_rows=regions[-1].rows[1], num_served_rows=len(served_rows),
        num_own_pairs=whole * (schedule.num_heads // len(kept)), own=own, own_earlier=kept, kept=of_groups,
        readers=readers, served_rows=served_rows, places=_places(served, served_rows, num_own_rows),
    )  # fmt: skip


def _whole_length(layout: Layout) -> int:
    return BLOCK_TOKENS * sum(len(own) for own in layout.segments)


def _blocks_of(layout: Layout, cp_rank: int) -> Positions:
    """The blocks that a rank holds, in local order."""
    spans = [np.arange(start, stop, dtype=np.int64) for start, stop in layout.segments[cp_rank]]
    positions = np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
    return positions[::BLOCK_TOKENS] // BLOCK_TOKENS


def _fetched(
    schedule: SparseSchedule, cp_rank: int, own_blocks: Positions
) -> tuple[tuple[Region, ...], tuple[Message, ...], tuple[Mask, ...], tuple[Positions, ...]]:
    """Where the fetched keys lie, what fills them, and for each group which of them its queries keep, and whose."""
    regions: list[Region] = []
    messages: list[Message] = []
    kept: list[Mask] = []
    readers: list[Positions] = []
    sharing = schedule.num_heads // schedule.num_kv_heads
    first_head = row = 0
    for number, group in enumerate(schedule.groups):
        begun, num_heads = row, len(group.kv_heads)
        blocks: list[Positions] = []
        for hop, own in enumerate(schedule.hops[cp_rank]):
            num_rows = own.num_fetched_tokens(number) * num_heads
            if num_rows:
                there = _blocks_of(schedule.layout, own.source)
                blocks += [there[_as_block(start) : _as_block(stop)] for start, stop in own.fetch[number]]
                messages.append(Message(hop, own.source, row, row + num_rows))
                row += num_rows
        keys = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)
        seen = kept_between(group.rules * num_heads, schedule.layout.seq_len, own_blocks, keys)
        # Where content chooses, their number would be another in every call, and some kernels compile for each.
        seeing = np.asarray(seen.any(axis=(0, 2))) | (schedule.for_one_call and bool(keys.size))
        readers.append(_worth_taking(seeing))
        kept.append(seen[:, readers[-1]])
        last_head = first_head + num_heads
        heads = (first_head * sharing, last_head * sharing)
        regions.append(Region((first_head, last_head), heads, (begun, row), len(keys) * BLOCK_TOKENS))
        first_head = last_head
    return tuple(regions), tuple(messages), tuple(kept), tuple(readers)


def _worth_taking(seeing: Mask) -> Positions:
    """The blocks that see something; all of them where leaving the others out would cost copies for little."""
    found = np.flatnonzero(seeing)
    scattered = len(found) > 0 and found[-1] - found[0] + 1 != len(found)
    return np.arange(len(seeing)) if scattered and len(found) > WORTH_COPYING * len(seeing) else found


def _served(schedule: SparseSchedule, cp_rank: int, kv_order: list[int]) -> tuple[tuple[Message, ...], Positions]:
    """What others fetch from this rank, as messages and as the own rows that make them up."""
    messages: list[Message] = []
    rows: list[Positions] = []
    at = 0
    for hop in range(1, schedule.cp):
        first_head = 0
        for group, ranges in zip(schedule.groups, schedule.requested(cp_rank, hop), strict=True):
            heads = np.arange(first_head, first_head + len(group.kv_heads), dtype=np.int64)
            first_head += len(group.kv_heads)
            tokens = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
            if tokens:
                found = (np.concatenate(tokens)[:, None] * len(kv_order) + heads[None, :]).ravel()
                messages.append(Message(hop, schedule.reader(cp_rank, hop), at, at + len(found)))
                rows.append(found)
                at += len(found)
    return tuple(messages), np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


def _places(served: tuple[Message, ...], served_rows: Positions, num_own_rows: int) -> np.ndarray:
    """(hops that read, own rows) int32. No hop reads a row twice: groups share no K/V head."""
    hops = sorted({message.hop for message in served})
    places = np.full((len(hops), num_own_rows), -1, dtype=np.int32)
    for message in served:
        rows = served_rows[message.start : message.stop]
        places[hops.index(message.hop), rows] = np.arange(message.start, message.stop, dtype=np.int32)
    return places


def _as_block(position: int) -> int:
    assert position % BLOCK_TOKENS == 0, position
    return position // BLOCK_TOKENS


# ------------------------------------------------------------ on the device


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """A plan's tables and indices on one device. `own_parts` are the tables of the heads before and from K/V head
    `half` on, for a backward pass in two parts; orders are None where the heads already lie so. `readers` are the
    tokens of `BlockPlan.readers`: a slice, or an index where they do not lie together."""

    plan: BlockPlan
    own: BlockTables
    own_parts: tuple[BlockTables, BlockTables]
    half: int
    fetched: tuple[BlockTables | None, ...]
    readers: tuple[slice | torch.Tensor, ...]
    served_rows: torch.Tensor
    places: torch.Tensor
    head_order: torch.Tensor | None
    kv_head_order: torch.Tensor | None
    back_order: torch.Tensor | None
    kv_back_order: torch.Tensor | None


@remembered(maxsize=32)
def on_device(schedule: SparseSchedule, cp_rank: int, device: torch.device) -> DeviceBlocks:
    """Made once for a rank's place in a schedule; one pass over the host's tables and a few copies."""
    plan = plan_blocks(schedule, cp_rank)
    own = tables_between(plan.own, plan.own_earlier, device)
    sharing = schedule.num_heads // schedule.num_kv_heads
    half = schedule.num_kv_heads // 2
    parts = (own.of_heads(0, half * sharing), own.of_heads(half * sharing, schedule.num_heads))
    fetched = tuple(
        tables_between(None, kept, device) if region.num_tokens else None
        for region, kept in zip(plan.regions, plan.kept, strict=True)
    )
    orders = [_order(order, device) for order in (plan.head_order, plan.kv_head_order)]
    back = [_order(tuple(np.argsort(order).tolist()), device) for order in (plan.head_order, plan.kv_head_order)]
    return DeviceBlocks(
        plan, own, parts, half, fetched, tuple(_tokens_of(blocks, device) for blocks in plan.readers),
        torch.from_numpy(plan.served_rows).to(device),
        torch.from_numpy(plan.places).to(device), orders[0], orders[1], back[0], back[1],
    )  # fmt: skip


def _tokens_of(blocks: Positions, device: torch.device) -> slice | torch.Tensor:
    if len(blocks) and blocks[-1] - blocks[0] + 1 != len(blocks):
        tokens = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return torch.from_numpy(tokens.ravel()).to(device)
    first = int(blocks[0]) if len(blocks) else 0
    return slice(first * BLOCK_TOKENS, (first + len(blocks)) * BLOCK_TOKENS)


def _order(heads: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    return None if heads == tuple(range(len(heads))) else torch.tensor(heads, device=device)
