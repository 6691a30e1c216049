"""One GPU rank's plan of a sparse schedule, in whole blocks of 128 tokens: stages, messages, index arrays, masks.

A rank computes on its own keys first, then stage by stage on fetched keys, which are packed contiguously; small fetches
form a single stage. Internally, heads are ordered by head group, and groups with equal numbers of heads are adjacent so
that one kernel call can serve them. A *row* is the vector of one (token, K/V head) pair; messages are ranges of rows of
any group. numpy only: `device_blocks` makes the tensors. Waiting and sending must not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from elastic_ring.attention.kernels.block_tables import (
    BLOCK_TOKENS,
    WHOLE,
    Kept,
    MaskNumbers,
    check_documents,
    check_whole_blocks,
    kept_between,
)
from elastic_ring.attention.layouts.layout import Layout, Range
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Mask, Positions
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import HeadGroup
from elastic_ring.attention.plan.traffic import ContiguousCopy, ExchangePlan, PeerTransfer, Traffic

WORTH_COPYING = 0.75
"""Queries are gathered for a call on fetched keys only if at most this share of a rank's blocks sees any of the keys.
"""

NUM_TURNS = 3
"""Number of stages whose dK and dV may be in flight at once; the number of send buffers and of inbox slots. The results
of the last NUM_TURNS stages are added in one pass over memory at the end."""

KEPT_SHARE = 0.25
"""Fetched keys are kept for backward if they are at most this share of a rank's own keys, which are kept anyway."""


@dataclass(frozen=True)
class Region:
    """A head group: its K/V heads and query heads as ranges of the internal order, and its number of fetched tokens."""

    kv_heads: Range
    heads: Range
    num_tokens: int

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]


@dataclass(frozen=True)
class BlockStage:
    """The keys of one or more hops, packed contiguously and computed on together.

    `fetched` are the transfers that fill a buffer of `num_fetched_rows` rows, ordered by size of head group and then by
    hop: the keys of all groups of one size are adjacent, and each hop sends them as one message. `served` are the
    transfers from a buffer of `num_served_rows` rows, ordered by hop. Pieces count in rows of the own buffer.
    """

    hops: tuple[int, ...]
    regions: tuple[Region, ...]
    fetched: tuple[PeerTransfer, ...]
    served: tuple[PeerTransfer, ...]
    num_fetched_rows: int
    num_served_rows: int

    @property
    def traffic(self) -> Traffic:
        """Keys one way, dK and dV back the same way."""
        return Traffic(
            self.fetched, self.served, self.fetched, self.served, self.num_fetched_rows, self.num_served_rows
        )


@dataclass(frozen=True)
class BlockPlan:
    """The plan of one rank. `head_order` and `kv_head_order` are the heads in the internal order.

    `num_row_visits` is the largest number of kernel rounds, own keys included, in which any query takes part. `small`:
    all fetches form one stage, and any rank's fetches are at most `KEPT_SHARE` of any rank's own keys.
    """

    head_order: tuple[int, ...]
    kv_head_order: tuple[int, ...]
    stages: tuple[BlockStage, ...]
    num_own_pairs: int
    num_row_visits: int
    small: bool

    def exchange(self, cp: int, *, coalesced: bool) -> ExchangePlan:
        """Buffers: 2 for K/V, `NUM_TURNS` for dK/dV, `NUM_TURNS` inbox slots, 1 for sends."""
        return ExchangePlan(
            cp,
            tuple(stage.traffic for stage in self.stages),
            ahead=2 if coalesced else 1,
            late=coalesced,
            packed=True,
            send_slots=1,
            turns=NUM_TURNS,
            coalesced=coalesced,
        )

    @property
    def num_added_apart(self) -> int:
        """Number of leading stages whose returned dK and dV are added before the end, because a later stage reuses
        their slot."""
        return max(0, len(self.stages) - NUM_TURNS)


@dataclass(frozen=True, eq=False)
class StageTables:
    """The index arrays of one stage on one rank.

    `readers`: for each group the own blocks whose queries see any key of the stage. `kept`: which keys each of them
    sees. `keys`: the positions of the keys' blocks among the blocks of all groups of the same size, in the order of
    `kept`. `served_rows`: the own rows (token * K/V heads + internal K/V head) that are sent. `places[i]`: for each own
    row its index among the rows that the i-th hop reading from this rank returns, or -1.
    """

    kept: tuple[Kept, ...]
    keys: tuple[Positions, ...]
    readers: tuple[Positions, ...]
    served_rows: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class HostTables:
    """Inputs of a plan's device tables, not needed afterwards: the kept pairs of blocks, and the masks (m, 128, 4)
    int32 of pairs kept in part (None: all are whole)."""

    own: Mask
    own_earlier: Kept
    stages: tuple[StageTables, ...]
    masks: np.ndarray | None


def check_blocks(pattern: SparsePattern, layout: Layout) -> None:
    """Raises: `ValueError` for patterns and layouts that cut blocks of 128 tokens, with a way out."""
    for check in _checks(pattern, layout):
        check()


def check_layer_blocks(patterns: LayerPatterns, layout: Layout) -> None:
    """The same for all sparse layers."""
    for group in patterns.groups:
        if set(group.rules) != {Dense()}:
            check_blocks(SparsePattern(group.rules, patterns.block), layout)


def cut_blocks(pattern: SparsePattern, layout: Layout) -> Iterator[str]:
    """The errors of all checks of `check_blocks`."""
    for check in _checks(pattern, layout):
        try:
            check()
        except ValueError as error:
            yield str(error)


def _checks(pattern: SparsePattern, layout: Layout) -> Iterator[Callable[[], None]]:
    def check_segments() -> None:
        for segment in (segment for own in layout.segments for segment in own):
            if segment[0] % BLOCK_TOKENS or segment[1] % BLOCK_TOKENS:
                raise ValueError(
                    f"layout {layout.name} of {layout.seq_len} tokens over cp={layout.cp} cuts at {segment}, inside a"
                    f" block of {BLOCK_TOKENS} tokens; take a length that is a multiple of"
                    f" {BLOCK_TOKENS * sum(len(own) for own in layout.segments)} tokens"
                )

    yield partial(check_documents, pattern.document_starts)
    for rule in dict.fromkeys(pattern.heads):
        for number, (start, stop) in enumerate(pattern.documents(layout.seq_len)):
            yield partial(check_whole_blocks, rule.of_document(number), stop - start, pattern.causal)
    yield check_segments


def group_hops(schedule: Schedule, limit_rows: int | None) -> tuple[tuple[int, ...], ...]:
    """The hops of each stage, the same on every rank: as many consecutive hops as keep both the rows fetched and the
    rows served by any rank within `limit_rows` (None: all hops); at least one."""
    cp = schedule.cp
    if limit_rows is None:
        return (tuple(range(1, cp)),) if cp > 1 else ()
    groups: list[tuple[int, ...]] = []
    fetched = served = np.zeros(cp, dtype=np.int64)
    for hop in range(1, cp):
        rows = np.array([schedule.num_head_tokens(rank, hop) for rank in range(cp)])
        rows_out = np.array([rows[schedule.reader(rank, hop)] for rank in range(cp)])
        if groups and max((fetched + rows).max(), (served + rows_out).max()) <= limit_rows:
            groups[-1] += (hop,)
            fetched, served = fetched + rows, served + rows_out
        else:
            groups.append((hop,))
            fetched, served = rows, rows_out
    return tuple(groups)


def plan_blocks(schedule: Schedule, cp_rank: int, limit_rows: int | None = None) -> tuple[BlockPlan, HostTables]:
    """The plan of a rank in stages of at most `limit_rows` rows (None: one stage), and the inputs of its tables. Pure.
    Raises: `ValueError` as `check_blocks` does, except for blocks that the schedule keeps `in_part`."""
    masks = MaskNumbers() if schedule.in_part else None
    if masks is None:
        check_blocks(schedule.sparse, schedule.layout)
    kv_order = [head for alike in _by_size(schedule) for _, group in alike for head in group.kv_heads]
    sharing = schedule.num_heads // schedule.num_kv_heads
    order = [head * sharing + i for head in kv_order for i in range(sharing)]
    rules = schedule.sparse.rules(schedule.num_heads)
    documents, causal = schedule.sparse.documents(schedule.layout.seq_len), schedule.sparse.causal
    own_blocks = blocks_of(schedule.layout, cp_rank)
    kept = kept_between(tuple(rules[head] for head in order), documents, own_blocks, own_blocks, causal, masks)
    at = np.arange(len(own_blocks))
    own = (kept[:, at, at] == WHOLE) & causal  # else diagonal blocks are as whole as others
    kept[:, at, at] *= ~own
    hops = group_hops(schedule, limit_rows)
    stages = [_stage(schedule, cp_rank, group, own_blocks, masks) for group in hops]
    whole = int((kept != 0).sum()) * BLOCK_TOKENS**2 + int(own.sum()) * BLOCK_TOKENS * (BLOCK_TOKENS + 1) // 2
    visits = [np.zeros(len(own_blocks), dtype=np.int64) for _ in schedule.groups]
    tables = tuple(of_stage for _, of_stage in stages)
    for of_stage in tables:
        for of_group, readers in zip(visits, of_stage.readers, strict=True):
            of_group[readers] += 1
    ranks = range(schedule.cp)
    most_fetched = max(sum(schedule.num_head_tokens(rank, hop) for hop in ranks) for rank in ranks)
    least_held = min(schedule.layout.num_tokens(rank) for rank in ranks) * schedule.num_kv_heads
    plan = BlockPlan(
        tuple(order),
        tuple(kv_order),
        tuple(stage for stage, _ in stages),
        num_own_pairs=whole * (schedule.num_heads // len(kept)),
        num_row_visits=1 + max(int(of_group.max(initial=0)) for of_group in visits),
        small=len(hops) < 2 and most_fetched <= KEPT_SHARE * least_held,
    )
    return plan, HostTables(own, kept, tables, None if masks is None else masks.array())


_Numbered = tuple[int, HeadGroup]
"""A head group with its number in the schedule."""


def _by_size(schedule: Schedule) -> list[list[_Numbered]]:
    """The head groups in the internal order, as lists of groups with equal numbers of heads."""

    def size(group: _Numbered) -> int:
        return len(group[1].kv_heads)

    return [list(alike) for _, alike in groupby(sorted(enumerate(schedule.groups), key=size), size)]


def _stage(
    schedule: Schedule, cp_rank: int, hops: tuple[int, ...], own_blocks: Positions, masks: MaskNumbers | None
) -> tuple[BlockStage, StageTables]:
    blocks, keys, fetched = _packed(schedule, cp_rank, hops)
    regions, kept, readers = _regions(schedule, own_blocks, blocks, masks)
    served, served_rows = _served(schedule, cp_rank, hops)
    # Groups share no K/V head, so no hop reads a row twice.
    reading = sorted({hop for hop, *_ in served})
    num_own_rows = schedule.layout.num_tokens(cp_rank) * schedule.num_kv_heads
    places = np.full((len(reading), num_own_rows), -1, dtype=np.int32)
    for hop, _, start, stop in served:
        places[reading.index(hop), served_rows[start:stop]] = np.arange(start, stop, dtype=np.int32)
    num_fetched_rows = sum(region.num_tokens * region.num_kv_heads for region in regions)
    incoming, outgoing = (_transfers(messages, joined=len(hops) == 1) for messages in (fetched, served))
    stage = BlockStage(hops, regions, incoming, outgoing, num_fetched_rows, len(served_rows))
    return stage, StageTables(kept, keys, readers, served_rows, places)


_Rows = tuple[int, int, int, int]
"""The hop, the peer, and the rows [start, stop) of the own buffer."""


def _transfers(messages: list[_Rows], *, joined: bool) -> tuple[PeerTransfer, ...]:
    """One transfer for each hop. With `joined`, as for a stage of one hop, whose groups are contiguous on both sides,
    in one piece."""
    by_hop: dict[tuple[int, int], list[Range]] = {}
    for hop, peer, start, stop in messages:
        by_hop.setdefault((hop, peer), []).append((start, stop))
    if joined:
        by_hop = {key: [(rows[0][0], rows[-1][1])] for key, rows in by_hop.items()}
    return tuple(
        PeerTransfer(hop, peer, tuple(ContiguousCopy(0, start, start, stop - start) for start, stop in rows))
        for (hop, peer), rows in by_hop.items()
    )


def blocks_of(layout: Layout, cp_rank: int) -> Positions:
    """The blocks that a rank holds, in local order."""
    spans = [np.arange(start, stop, dtype=np.int64) for start, stop in layout.segments[cp_rank]]
    return np.concatenate([np.empty(0, dtype=np.int64), *spans])[::BLOCK_TOKENS] // BLOCK_TOKENS


def _packed(
    schedule: Schedule, cp_rank: int, hops: tuple[int, ...]
) -> tuple[list[Positions], tuple[Positions, ...], list[_Rows]]:
    """For each group in the internal order the fetched blocks and their positions among the blocks of its size; and the
    messages that bring them."""
    fetched: list[Positions] = []
    places: list[Positions] = []
    messages: list[_Rows] = []
    none, row = np.empty(0, dtype=np.int64), 0
    for alike in _by_size(schedule):
        blocks: list[list[Positions]] = [[none] for _ in alike]
        at: list[list[Positions]] = [[none] for _ in alike]
        num_blocks, begun = 0, row
        for hop in hops:
            own = schedule.hops[cp_rank][hop]
            there, first = blocks_of(schedule.layout, own.source), row
            for index, (number, _) in enumerate(alike):
                for start, stop in own.fetch[number]:
                    assert start % BLOCK_TOKENS == stop % BLOCK_TOKENS == 0, (start, stop)
                    blocks[index].append(there[start // BLOCK_TOKENS : stop // BLOCK_TOKENS])
                    at[index].append(np.arange(num_blocks, num_blocks + len(blocks[index][-1])))
                    num_blocks += len(blocks[index][-1])
            row = begun + num_blocks * BLOCK_TOKENS * len(alike[0][1].kv_heads)
            if row > first:
                messages.append((hop, own.source, first, row))
        fetched += map(np.concatenate, blocks)
        places += map(np.concatenate, at)
    return fetched, tuple(places), messages


def _regions(
    schedule: Schedule, own_blocks: Positions, fetched: list[Positions], masks: MaskNumbers | None
) -> tuple[tuple[Region, ...], tuple[Kept, ...], tuple[Positions, ...]]:
    """For each group in the internal order its region, the kept pairs of own and `fetched` blocks, and the own blocks
    among them: those that see any key, or all if gathering would save too little."""
    regions: list[Region] = []
    kept: list[Kept] = []
    readers: list[Positions] = []
    sharing = schedule.num_heads // schedule.num_kv_heads
    documents = schedule.sparse.documents(schedule.layout.seq_len)
    groups = [group for alike in _by_size(schedule) for _, group in alike]
    first_head = 0
    for group, keys in zip(groups, fetched, strict=True):
        num_heads = len(group.kv_heads)
        seen = kept_between(group.rules * num_heads, documents, own_blocks, keys, schedule.sparse.causal, masks)
        # Routed patterns keep all rows: their number would change from call to call, and some kernels compile for each.
        seeing = np.asarray(seen.any(axis=(0, 2))) | (schedule.for_one_call and bool(keys.size))
        blocks = np.flatnonzero(seeing)
        scattered = len(blocks) > 0 and blocks[-1] - blocks[0] + 1 != len(blocks)
        if scattered and len(blocks) > WORTH_COPYING * len(seeing):
            blocks = np.arange(len(seeing))
        readers.append(blocks)
        kept.append(seen[:, blocks])
        last_head = first_head + num_heads
        heads = (first_head * sharing, last_head * sharing)
        regions.append(Region((first_head, last_head), heads, len(keys) * BLOCK_TOKENS))
        first_head = last_head
    return tuple(regions), tuple(kept), tuple(readers)


def _served(schedule: Schedule, cp_rank: int, hops: tuple[int, ...]) -> tuple[list[_Rows], np.ndarray]:
    """The messages to other ranks, and the own rows that fill them."""
    messages: list[_Rows] = []
    rows = [np.empty(0, dtype=np.int32)]
    at = 0
    for hop in hops:
        first_head, requested = 0, schedule.requested(cp_rank, hop)
        for alike in _by_size(schedule):
            begun = at
            for number, group in alike:
                heads = np.arange(first_head, first_head + len(group.kv_heads), dtype=np.int32)
                first_head += len(group.kv_heads)
                tokens = [np.arange(start, stop, dtype=np.int32) for start, stop in requested[number]]
                if tokens:
                    rows.append((np.concatenate(tokens)[:, None] * schedule.num_kv_heads + heads[None, :]).ravel())
                    at += len(rows[-1])
            if at > begun:
                messages.append((hop, schedule.reader(cp_rank, hop), begun, at))
    return messages, np.concatenate(rows)
