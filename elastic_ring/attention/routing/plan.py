"""Plans the routing of a `TopK` over a layout and documents: which rank chooses for which block, from which sums.

Blocks are numbered consecutively over all documents of a sequence. numpy only: sending is in `router`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic_ring.attention.layouts.layout import Layout, Range
from elastic_ring.attention.patterns.content import Choices, TopK
from elastic_ring.attention.patterns.rules import Positions
from elastic_ring.attention.plan.schedule import chunks_of


@dataclass(frozen=True, eq=False)
class SentBlocks:
    """The chunks that one rank receives, as indices of each source rank's chunks. Concatenated in rank order they are
    *entries*.

    `turns` are (entries, blocks) to be added one turn after another; within a turn each block occurs at most once, and
    the parts of a block on several ranks are in the order of their positions.
    """

    chunks: tuple[Positions, ...]
    turns: tuple[tuple[Positions, Positions], ...]


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The plan of all ranks. `local[r]` are the (start, stop) of rank r's chunks in its slice.

    Rank r chooses for the blocks `rows[r]`, which have more past blocks than may be chosen, and whose first token it
    holds, as local token `speakers[r]`. The past blocks of row i are `begins[r][i]` to `rows[r][i]` - 1. `keys[r]`
    and `queries[r]` are the sums that rank r receives; queries only if the mean query routes. `few` (blocks, width) are
    the choices of all other blocks, relative to their documents: all of their past blocks.
    """

    num_blocks: int
    first_block: tuple[int, ...]
    local: tuple[tuple[Range, ...], ...]
    rows: tuple[Positions, ...]
    speakers: tuple[Positions, ...]
    begins: tuple[Positions, ...]
    keys: tuple[SentBlocks, ...]
    queries: tuple[SentBlocks, ...]
    few: Choices

    @property
    def any_chosen(self) -> bool:
        return any(len(rows) for rows in self.rows)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """A rank's chunks as arrays: block number, number of the document's first block, start position, local range."""

    number: Positions
    begin: Positions
    position: Positions
    local: Positions


def plan_routing(layout: Layout, documents: tuple[Range, ...], rule: TopK) -> RoutingPlan:
    """The routing plan of all ranks."""
    unit, width = rule.unit_tokens, rule.width
    counts = [-(-(stop - start) // unit) for start, stop in documents]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    held = [_rank_chunks(layout, cp_rank, documents, unit, first) for cp_rank in range(layout.cp)]
    chooses = [
        (own.position == (own.number - own.begin) * unit) & (own.number - own.begin > width) & (width > 0)
        for own in held
    ]
    rows = tuple(own.number[chosen] for own, chosen in zip(held, chooses, strict=True))
    begins = tuple(own.begin[chosen] for own, chosen in zip(held, chooses, strict=True))
    no_blocks = np.zeros(int(first[-1]), dtype=bool)
    keys, queries, few = [], [], []
    for own_rows, own_begins in zip(rows, begins, strict=True):
        past, query_blocks = no_blocks.copy(), no_blocks.copy()
        for begin, row in dict(zip(own_begins.tolist(), own_rows.tolist(), strict=True)).items():
            past[begin:row] = True  # the last row of a document has the longest past
        query_blocks[own_rows] = not rule.causal
        keys.append(_sent_blocks(held, past))
        queries.append(_sent_blocks(held, query_blocks))
    for count in counts:
        at, choice = np.arange(count)[:, None], np.arange(width)[None, :]
        few.append(np.where((choice < at) & (at <= width), choice, -1))
    return RoutingPlan(
        num_blocks=int(first[-1]),
        first_block=tuple(first[:-1].tolist()),
        local=tuple(tuple(map(tuple, own.local.tolist())) for own in held),
        rows=rows,
        speakers=tuple(own.local[chosen, 0] for own, chosen in zip(held, chooses, strict=True)),
        begins=begins,
        keys=tuple(keys),
        queries=tuple(queries),
        few=np.concatenate(few).astype(np.int32),
    )


def _rank_chunks(layout: Layout, cp_rank: int, documents: tuple[Range, ...], unit: int, first: Positions) -> _Chunks:
    own = chunks_of(layout, cp_rank, documents, unit)
    document = np.array([chunk.document for chunk in own], dtype=np.int64)
    begin = first[document]
    return _Chunks(
        begin + np.array([chunk.block for chunk in own], dtype=np.int64),
        begin,
        np.array([chunk.positions[0] for chunk in own], dtype=np.int64),
        np.array([chunk.local for chunk in own], dtype=np.int64).reshape(-1, 2),
    )


def _sent_blocks(held: list[_Chunks], selected: np.ndarray) -> SentBlocks:
    """The chunks of the `selected` blocks, and the turns in which they are added."""
    chunks = tuple(np.flatnonzero(selected[own.number]) for own in held)
    number = np.concatenate([own.number[chosen] for own, chosen in zip(held, chunks, strict=True)])
    position = np.concatenate([own.position[chosen] for own, chosen in zip(held, chunks, strict=True)])
    order = np.lexsort((position, number))
    blocks = number[order]
    starts = np.concatenate([[True], blocks[1:] != blocks[:-1]]) if len(blocks) else np.zeros(0, dtype=bool)
    begun = np.flatnonzero(starts)
    part = np.arange(len(blocks)) - np.repeat(begun, np.diff(np.concatenate([begun, [len(blocks)]])))
    turns = [(order[part == turn], blocks[part == turn]) for turn in range(int(part.max(initial=-1)) + 1)]
    return SentBlocks(chunks, tuple(turns))
