"""Who chooses for which block, and what it must be told for that: plain arrays from a layout, documents and a `TopK`.

Blocks are numbered over all documents of a sequence, one document after another. numpy only; what is sent, and when,
is in `routing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from elastic_ring.attention.content import Choices, TopK
from elastic_ring.attention.layout import Layout, Range
from elastic_ring.attention.rules import Positions
from elastic_ring.attention.sparse_schedule import chunks_of


@dataclass(frozen=True, eq=False)
class Told:
    """What every rank tells one: for each rank, which of its chunks. All of these, ranks in order, are entries.

    `turns` put them together: (entries, blocks) in which no block comes twice, the parts of a block that lies on
    several ranks in the order of their positions.
    """

    chunks: tuple[Positions, ...]
    turns: tuple[tuple[Positions, Positions], ...]


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Of all ranks. `local[r]` are the (start, stop) of rank r's chunks in its slice.

    Rank r chooses for the blocks `rows[r]`: those whose first token it holds, as its token `speakers[r]`, and which
    have more past blocks than may be chosen. The past of row i are the blocks from `begins[r][i]` to before it.
    `keys[r]` and `queries[r]` are what rank r is told; queries only where not the first one alone speaks.
    `few` (blocks, width) are the choices of all other blocks, within their documents: all of their past.
    """

    num_blocks: int
    first_block: tuple[int, ...]
    local: tuple[tuple[Range, ...], ...]
    rows: tuple[Positions, ...]
    speakers: tuple[Positions, ...]
    begins: tuple[Positions, ...]
    keys: tuple[Told, ...]
    queries: tuple[Told, ...]
    few: Choices

    @property
    def any_chosen(self) -> bool:
        return any(len(rows) for rows in self.rows)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """A rank's chunks as arrays: the block's number, its first block's, where it starts, and where it lies here."""

    number: Positions
    begin: Positions
    position: Positions
    local: Positions


@lru_cache(maxsize=32)
def plan_routing(layout: Layout, documents: tuple[Range, ...], rule: TopK) -> RoutingPlan:
    """Pure, so cached."""
    unit, width = rule.unit_tokens, rule.width
    counts = [-(-(stop - start) // unit) for start, stop in documents]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    held = [_chunks(layout, cp_rank, documents, unit, first) for cp_rank in range(layout.cp)]
    chooses = [
        (own.position == (own.number - own.begin) * unit) & (own.number - own.begin > width) & (width > 0)
        for own in held
    ]
    rows = tuple(own.number[chosen] for own, chosen in zip(held, chooses, strict=True))
    begins = tuple(own.begin[chosen] for own, chosen in zip(held, chooses, strict=True))
    nobody = np.zeros(int(first[-1]), dtype=bool)
    keys, queries = [], []
    for own_rows, own_begins in zip(rows, begins, strict=True):
        past, spoken = nobody.copy(), nobody.copy()
        for begin, row in dict(zip(own_begins.tolist(), own_rows.tolist(), strict=True)).items():
            past[begin:row] = True  # of a document's rows the last has the longest past
        spoken[own_rows] = not rule.causal
        keys.append(_told(held, past))
        queries.append(_told(held, spoken))
    return RoutingPlan(
        num_blocks=int(first[-1]), first_block=tuple(first[:-1].tolist()),
        local=tuple(tuple(map(tuple, own.local.tolist())) for own in held), rows=rows,
        speakers=tuple(own.local[chosen, 0] for own, chosen in zip(held, chooses, strict=True)), begins=begins,
        keys=tuple(keys), queries=tuple(queries), few=_few(counts, width),
    )  # fmt: skip


def _chunks(layout: Layout, cp_rank: int, documents: tuple[Range, ...], unit: int, first: Positions) -> _Chunks:
    own = chunks_of(layout, cp_rank, documents, unit)
    document = np.array([chunk.document for chunk in own], dtype=np.int64)
    begin = first[document]
    return _Chunks(
        begin + np.array([chunk.block for chunk in own], dtype=np.int64), begin,
        np.array([chunk.positions[0] for chunk in own], dtype=np.int64),
        np.array([chunk.local for chunk in own], dtype=np.int64).reshape(-1, 2),
    )  # fmt: skip


def _told(held: list[_Chunks], wanted: np.ndarray) -> Told:
    """The chunks of the blocks `wanted`, and how they are put together."""
    chunks = tuple(np.flatnonzero(wanted[own.number]) for own in held)
    number = np.concatenate([own.number[chosen] for own, chosen in zip(held, chunks, strict=True)])
    position = np.concatenate([own.position[chosen] for own, chosen in zip(held, chunks, strict=True)])
    order = np.lexsort((position, number))
    blocks = number[order]
    starts = np.concatenate([[True], blocks[1:] != blocks[:-1]]) if len(blocks) else np.zeros(0, dtype=bool)
    begun = np.flatnonzero(starts)
    part = np.arange(len(blocks)) - np.repeat(begun, np.diff(np.concatenate([begun, [len(blocks)]])))
    turns = [(order[part == turn], blocks[part == turn]) for turn in range(int(part.max(initial=-1)) + 1)]
    return Told(chunks, tuple(turns))


def _few(counts: list[int], width: int) -> Choices:
    rows = []
    for count in counts:
        at, choice = np.arange(count)[:, None], np.arange(width)[None, :]
        rows.append(np.where((choice < at) & (at <= width), choice, -1))
    return np.concatenate(rows).astype(np.int32)
