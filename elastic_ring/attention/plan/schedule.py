"""Schedules: the hops of a pattern on a layout (each rank's fetches from each other) and, if dense, exact tiles.

Two segments of one layout are the same or wholly ordered, so once they are cut at document boundaries every pair of
pieces is seen fully, not at all, or is the diagonal: no mask is ever built. The hops are a shift permutation: in hop t
rank r receives directly from rank (r - t) mod cp, instead of forwarding round the ring, so keys that no query needs are
skipped. `sparse_schedule` plans sparse patterns. Plain, hashable Python; no tensor, process group or clock may enter.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

from elastic_ring.attention.layouts.layout import Layout, Range, union
from elastic_ring.attention.patterns.rules import Rule
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern

Direction = Literal["forward", "backward"]
Side = Literal["received", "sent"]


@dataclass(frozen=True)
class Chunk:
    """A contiguous part of one block on a rank. `positions` count from the start of the document, `local` from the
    start of the rank's slice."""

    document: int
    block: int
    positions: Range
    local: Range


def chunks_of(layout: Layout, cp_rank: int, documents: tuple[Range, ...], block: int) -> tuple[Chunk, ...]:
    """A rank's slice, cut at document and block boundaries, in local order."""
    starts = [start for start, _ in documents]
    chunks: list[Chunk] = []
    offset = 0
    for start, stop in layout.segments[cp_rank]:
        document = bisect_right(starts, start) - 1
        at = start
        while at < stop:
            first, last = documents[document]
            index = (at - first) // block
            end = min(stop, last, first + (index + 1) * block)
            local = (offset + at - start, offset + end - start)
            chunks.append(Chunk(document, index, (at - first, end - first), local))
            document += end == last
            at = end
        offset += stop - start
    return tuple(chunks)


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
class HeadGroup:
    """K/V heads that are fetched together: the query heads of each follow `rules`, in this order. Dense attention has
    one group with neither, for any number of heads."""

    kv_heads: tuple[int, ...] = ()
    rules: tuple[Rule, ...] = ()

    def query_heads(self, rule: Rule) -> tuple[int, ...]:
        """The query heads that follow `rule`, grouped by K/V head."""
        num_sharing = len(self.rules)
        return tuple(kv * num_sharing + i for kv in self.kv_heads for i in range(num_sharing) if self.rules[i] == rule)


@dataclass(frozen=True)
class Hop:
    """One hop of one rank. `fetch`: for each head group, ranges of the source's local slice, ascending and disjoint;
    none in hop 0, the rank's own keys. `tiles`: dense attention's; those of patterns follow from their rules
    (`sparse_tiles`, `sparse_blocks`)."""

    source: int
    fetch: tuple[tuple[Range, ...], ...]
    tiles: tuple[Tile, ...] = ()

    def num_fetched_tokens(self, group: int = 0) -> int:
        return sum(stop - start for start, stop in self.fetch[group])

    def in_buffer(self, k: Range) -> Range:
        """The place of keys `k` (source-local) of the first group in the packed buffer of the fetched ranges."""
        offset = 0
        for start, stop in self.fetch[0]:
            if start <= k[0] and k[1] <= stop:
                return offset + k[0] - start, offset + k[1] - start
            offset += stop - start
        raise AssertionError(f"keys {k} are not fetched by {self.fetch}")


@dataclass(frozen=True)
class Schedule:
    """`hops[cp_rank][hop]` for every rank of the ring. Compares equal if pattern, layout and numbers of heads are
    equal. `num_heads` and `num_kv_heads` are 0 in dense attention, which fits any. `in_part`: blocks may be kept in
    part (`padded_blocks`)."""

    pattern: Pattern | SparsePattern
    layout: Layout
    hops: tuple[tuple[Hop, ...], ...] = field(compare=False, repr=False)
    num_heads: int = 0
    num_kv_heads: int = 0
    groups: tuple[HeadGroup, ...] = field(default=(HeadGroup(),), compare=False, repr=False)
    in_part: bool = False

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def is_dense(self) -> bool:
        return isinstance(self.pattern, Pattern)

    @property
    def sparse(self) -> SparsePattern:
        assert isinstance(self.pattern, SparsePattern)
        return self.pattern

    @property
    def for_one_call(self) -> bool:
        """Whether the pattern was chosen by content for a single call."""
        return isinstance(self.pattern, SparsePattern) and self.pattern.for_one_call

    def reader(self, cp_rank: int, hop: int) -> int:
        """The rank that reads from `cp_rank` in `hop`."""
        return (cp_rank + hop) % self.cp

    def requested(self, cp_rank: int, hop: int) -> tuple[tuple[Range, ...], ...]:
        """For each head group, the ranges of `cp_rank`'s own slice that its reader fetches in `hop`."""
        return self.hops[self.reader(cp_rank, hop)][hop].fetch

    def num_head_tokens(self, cp_rank: int, hop: int, kv_heads: int = 0) -> int:
        """Tokens times K/V heads that `cp_rank` fetches in `hop`; `kv_heads` is needed if dense."""
        assert kv_heads or not self.is_dense
        own = self.hops[cp_rank][hop]
        return sum((len(group.kv_heads) or kv_heads) * own.num_fetched_tokens(i) for i, group in enumerate(self.groups))

    def hop_bytes(
        self,
        cp_rank: int,
        hop: int,
        head_dim: int,
        itemsize: int,
        direction: Direction,
        *,
        kv_heads: int = 0,
        batch: int = 1,
        side: Side = "received",
        partial_itemsize: int | None = None,
        keys_kept: bool = False,
        wire_row_bytes: int | None = None,
    ) -> int:
        """Bytes that `cp_rank` receives (or sends) in one hop of one attention call, of `kv_heads` if dense.

        Forward: K and V of the fetched tokens, `itemsize` bytes an element. Backward: K and V again (not if
        `keys_kept`), and the dK and dV partials the other way, `partial_itemsize` bytes an element: by default those of
        the accumulation type (fp32, or fp64 for fp64 inputs), and `itemsize` for kernels that round to it.
        `wire_row_bytes`: of one head's key as it crosses, if not `head_dim` * `itemsize` (`comm.packing.row_bytes`).
        """
        pulled, served = (self.num_head_tokens(rank, hop, kv_heads) for rank in (cp_rank, self.reader(cp_rank, hop)))
        keys, partials = (pulled, served) if side == "received" else (served, pulled)
        if direction == "forward":
            return 2 * batch * keys * (wire_row_bytes or head_dim * itemsize)
        num_bytes = 0 if keys_kept else 2 * batch * keys * (wire_row_bytes or head_dim * itemsize)
        return num_bytes + 2 * batch * head_dim * partials * (partial_itemsize or max(itemsize, 4))

    def received_bytes(
        self, cp_rank: int, head_dim: int, itemsize: int, direction: Direction = "forward", kv_heads: int = 0
    ) -> int:
        """Bytes received over all hops of one attention call with batch size 1."""
        return sum(
            self.hop_bytes(cp_rank, hop, head_dim, itemsize, direction, kv_heads=kv_heads) for hop in range(self.cp)
        )

    def work(self, cp_rank: int) -> int:
        """Number of query-key pairs that `cp_rank` computes under a pattern, over all query heads."""
        pairs = self.sparse.row_pairs(self.layout.seq_len)
        times = self.num_heads // len(self.sparse.heads)
        return times * sum(int(pairs[start:stop].sum()) for start, stop in self.layout.segments[cp_rank])


def plan(pattern: Pattern, layout: Layout) -> Schedule:
    """The hops of every rank. Pure: equal arguments give equal schedules on every rank and in every process. Raises
    `ValueError` when the documents do not fit the layout's sequence."""
    cp = layout.cp
    documents = pattern.documents(layout.seq_len)
    pieces: list[dict[int, list[Chunk]]] = [{} for _ in range(cp)]  # a rank's parts of each document, ascending
    for cp_rank, of_rank in enumerate(pieces):
        for chunk in chunks_of(layout, cp_rank, documents, layout.seq_len):
            of_rank.setdefault(chunk.document, []).append(chunk)

    def hop_from(source: int, cp_rank: int) -> Hop:
        tiles: list[Tile] = []
        for document, rows in pieces[cp_rank].items():
            columns = pieces[source].get(document)
            if columns is None:
                continue
            if pattern.causal and source != cp_rank:
                tiles += _staircase(rows, columns)
            else:
                # All of a document that a rank holds is one local range: its segments ascend, so nothing of another
                # document can lie between two pieces of this one.
                q, k = ((own[0].local[0], own[-1].local[1]) for own in (rows, columns))
                tiles.append(Tile(q, k, pattern.causal))
        fetch = () if source == cp_rank else union(tile.k for tile in tiles)
        return Hop(source, (fetch,), tuple(tiles))

    return Schedule(
        pattern, layout, tuple(tuple(hop_from((rank - hop) % cp, rank) for hop in range(cp)) for rank in range(cp))
    )


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
