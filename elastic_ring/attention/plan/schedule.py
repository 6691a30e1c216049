"""From a pattern and a layout to hops: who fetches which keys from whom, and which tiles use them.

Plain, hashable Python; no tensor, process group or clock may enter. Two segments of one layout are either
the same one or wholly ordered, so once they are cut at document boundaries every pair of pieces is seen
fully, seen not at all, or is the diagonal: tiles are exact and no mask tensor is ever built.

The hops are a shift permutation: in hop t rank r receives directly from rank (r - t) mod cp, instead of forwarding
round the ring, so keys that no query needs can be skipped. `sparse_schedule` does the same for sparse patterns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic_ring.attention.layouts.layout import Layout, Range, union
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.chunks import Chunk, chunks_of

Direction = Literal["forward", "backward"]
Side = Literal["received", "sent"]


@dataclass(frozen=True)
class Tile:
    """One kernel call: local queries `q` of the rank against local keys `k` of the hop's source.

    `causal` tiles lie on the diagonal: both ranges have the same length and their tokens the same positions.
    All other tiles are full.
    """

    q: Range
    k: Range
    causal: bool


@dataclass(frozen=True)
class Hop:
    """What one rank does in one hop. `fetch` are ranges of the source's local slice, ascending and disjoint.

    In hop 0 a rank reads its own keys, so `fetch` is empty. A later hop that needs nothing has no tiles
    and no ranges, and sends nothing.
    """

    source: int
    fetch: tuple[Range, ...]
    tiles: tuple[Tile, ...]

    @property
    def num_fetched_tokens(self) -> int:
        return sum(stop - start for start, stop in self.fetch)

    def in_buffer(self, k: Range) -> Range:
        """Where keys `k` (source-local) lie in the packed buffer of the fetched ranges, one after another."""
        offset = 0
        for start, stop in self.fetch:
            if start <= k[0] and k[1] <= stop:
                return offset + k[0] - start, offset + k[1] - start
            offset += stop - start
        raise AssertionError(f"keys {k} are not fetched by {self.fetch}")


@dataclass(frozen=True)
class Schedule:
    """`hops[cp_rank][hop]` for every rank of the ring. Equal when pattern and layout are."""

    pattern: Pattern
    layout: Layout
    hops: tuple[tuple[Hop, ...], ...] = field(compare=False, repr=False)

    @property
    def cp(self) -> int:
        return self.layout.cp

    def reader(self, cp_rank: int, hop: int) -> int:
        """The rank that reads from `cp_rank` in `hop`."""
        return (cp_rank + hop) % self.cp

    def requested(self, cp_rank: int, hop: int) -> tuple[Range, ...]:
        """The ranges of `cp_rank`'s own slice that its reader fetches in `hop`."""
        return self.hops[self.reader(cp_rank, hop)][hop].fetch

    def hop_bytes(
        self,
        cp_rank: int,
        hop: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int,
        direction: Direction,
        *,
        batch: int = 1,
        side: Side = "received",
        partial_itemsize: int | None = None,
        wire_row_bytes: int | None = None,
    ) -> int:
        """Bytes that `cp_rank` receives (or sends) in one hop of one attention call.

        Forward: K and V of the fetched tokens, `itemsize` bytes an element. Backward: K and V again, and
        the dK and dV partials the other way, `partial_itemsize` bytes an element: by default those of the
        accumulation type (fp32, or fp64 for fp64 inputs), and `itemsize` for kernels that round to it.
        `wire_row_bytes`: of one head's key as it crosses, if not `head_dim` * `itemsize` (`comm.fp8.row_bytes`).
        """
        pulled = self.hops[cp_rank][hop].num_fetched_tokens
        served = self.hops[self.reader(cp_rank, hop)][hop].num_fetched_tokens
        keys, partials = (pulled, served) if side == "received" else (served, pulled)
        num_elements = 2 * batch * kv_heads * head_dim
        num_bytes = 2 * batch * kv_heads * keys * (wire_row_bytes or head_dim * itemsize)
        if direction == "backward":
            num_bytes += num_elements * partials * (max(itemsize, 4) if partial_itemsize is None else partial_itemsize)
        return num_bytes


_Pieces = dict[int, list[Chunk]]
"""A rank's parts of each document, ascending."""


def plan(pattern: Pattern, layout: Layout) -> Schedule:
    """The hops of every rank. Raises `ValueError` when the documents do not fit the layout's sequence.

    Pure: equal arguments give equal schedules on every rank and in every process.
    """
    cp = layout.cp
    documents = pattern.documents(layout.seq_len)
    pieces: list[_Pieces] = [{} for _ in range(cp)]
    for cp_rank, of_rank in enumerate(pieces):
        for chunk in chunks_of(layout, cp_rank, documents, layout.seq_len):
            of_rank.setdefault(chunk.document, []).append(chunk)
    hops = tuple(
        tuple(_plan_hop(pattern.causal, pieces, cp_rank, (cp_rank - hop) % cp) for hop in range(cp))
        for cp_rank in range(cp)
    )
    return Schedule(pattern, layout, hops)


def _plan_hop(causal: bool, pieces: list[_Pieces], cp_rank: int, source: int) -> Hop:
    queries, keys = pieces[cp_rank], pieces[source]
    tiles: list[Tile] = []
    for document, rows in queries.items():
        columns = keys.get(document)
        if columns is None:
            continue
        # All of a document that a rank holds is one local range: its segments ascend, so nothing of
        # another document can lie between two pieces of this one.
        all_rows = (rows[0].local[0], rows[-1].local[1])
        all_columns = (columns[0].local[0], columns[-1].local[1])
        if not causal:
            tiles.append(Tile(all_rows, all_columns, causal=False))
        elif source == cp_rank:
            tiles.append(Tile(all_rows, all_columns, causal=True))
        else:
            tiles.extend(_staircase(rows, columns))
    fetch = () if source == cp_rank else union(tile.k for tile in tiles)
    return Hop(source, fetch, tuple(tiles))


def _staircase(rows: list[Chunk], columns: list[Chunk]) -> list[Tile]:
    """Causal attention between two different ranks: each piece of queries sees the pieces of keys before it.

    Neighbouring pieces of queries that see the same keys share a tile.
    """
    tiles: list[Tile] = []
    num_seen = 0
    for row in rows:
        while num_seen < len(columns) and columns[num_seen].positions[1] <= row.positions[0]:
            num_seen += 1
        if num_seen == 0:
            continue
        seen = (columns[0].local[0], columns[num_seen - 1].local[1])
        if tiles and tiles[-1].k == seen:
            tiles[-1] = Tile((tiles[-1].q[0], row.local[1]), seen, causal=False)
        else:
            tiles.append(Tile(row.local, seen, causal=False))
    return tiles
