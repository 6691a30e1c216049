"""The kernel calls of one rank in each hop: dense, causal and masked tiles that skip unseen pairs.

The keys of a tile are gathered: all blocks that a query block sees in full form one tile without a mask. In blocks seen
in part, rows and columns without any pair are dropped first, so that a dilated pattern gives small dense tiles. numpy
only: tensors, communication and kernels must not enter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.patterns.blocks import row_strips, visible
from elastic_ring.attention.patterns.rules import FULL, NONE, Kinds, Mask, Positions, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.chunks import Chunk, chunks_of
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.traffic import ContiguousCopy, ExchangePlan, PeerTransfer, Traffic


@dataclass(frozen=True)
class SparseTile:
    """One kernel call.

    `q` are ranges of local rows, `k` ranges of the rank's own slice (hop 0) or of the hop's receive buffer for head
    group `group`, `heads` the query heads. `mask` (nq, nk) marks the visible pairs; None: all of them, or with `causal`
    the lower triangle of a square tile.
    """

    group: int
    heads: tuple[int, ...]
    q: tuple[Range, ...]
    k: tuple[Range, ...]
    causal: bool = False
    mask: Mask | None = field(default=None, compare=False, repr=False)

    @property
    def num_pairs(self) -> int:
        """Query-key pairs that the tile computes for one head; a masked tile computes all of its pairs."""
        num_rows, num_columns = num_tokens(self.q), num_tokens(self.k)
        return num_rows * (num_rows + 1) // 2 if self.causal else num_rows * num_columns


def num_tokens(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)


def tiles(schedule: Schedule, cp_rank: int) -> tuple[tuple[SparseTile, ...], ...]:
    """For each hop of `cp_rank` its tiles, in the order of computation."""
    documents, pattern = schedule.sparse.documents(schedule.layout.seq_len), schedule.sparse
    block = pattern.block
    queries = chunks_of(schedule.layout, cp_rank, documents, block)
    by_hop = []
    for index, hop in enumerate(schedule.hops[cp_rank]):
        keys = _KeyChunks(chunks_of(schedule.layout, hop.source, documents, block))
        found: list[SparseTile] = []
        for number, group in enumerate(schedule.groups):
            place = _Place(hop.fetch[number] if index else None)
            for rule in dict.fromkeys(group.rules):
                heads = group.query_heads(rule)
                for here, chunk, kinds in _rows(rule, pattern, documents, queries, keys):
                    for q, k, causal, mask in _tiles_of_chunk(here, kinds, chunk, keys, pattern.causal):
                        found.append(SparseTile(number, heads, q, place(k), causal, mask))
        by_hop.append(tuple(found))
    return tuple(by_hop)


def _rows(
    rule: Rule, pattern: SparsePattern, documents: tuple[Range, ...], queries: tuple[Chunk, ...], keys: _KeyChunks
) -> Iterator[tuple[Rule, Chunk, Kinds]]:
    """Each chunk of queries in whose document the source has keys, with the kinds of the chunks of these keys."""
    for document, chunks in groupby(queries, lambda chunk: chunk.document):
        blocks = keys.blocks(document)
        if not blocks.size:
            continue
        own, (start, stop), here = list(chunks), documents[document], rule.of_document(document)
        rows = np.array([chunk.block for chunk in own], dtype=np.int64)
        for strip, kinds in row_strips(here, stop - start, pattern.block, rows, blocks, pattern.causal):
            for chunk, of_chunk in zip(own[strip], kinds, strict=True):
                yield here, chunk, of_chunk


class _KeyChunks:
    """A source's chunks as arrays, by document."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self._of: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            self._of.setdefault(chunk.document, []).append(chunk)
        self._arrays = {document: np.array([(c.block, *c.local) for c in own]) for document, own in self._of.items()}

    def blocks(self, document: int) -> Positions:
        """The blocks of the source's chunks of `document`, ascending."""
        found = self._arrays.get(document)
        return np.empty(0, dtype=np.int64) if found is None else found[:, 0]

    def full(self, document: int, kinds: Kinds, row: int) -> tuple[Range, ...]:
        """Local ranges of the chunks that query block `row` sees in full, except its own block's; `kinds` (n,) says how
        much it sees of each chunk's block."""
        blocks, starts, stops = self._arrays[document].T
        chosen = np.flatnonzero((kinds == FULL) & (blocks != row))
        return _joined(starts[chosen], stops[chosen])

    def partial(self, document: int, kinds: Kinds, row: int) -> list[Chunk]:
        """The chunks that need a mask: those of partly kept blocks and of the query block itself."""
        blocks = self._arrays[document][:, 0]
        chosen = np.flatnonzero((kinds != NONE) & ((kinds != FULL) | (blocks == row)))
        return [self._of[document][i] for i in chosen]


class _Place:
    """Maps ranges of the source's slice to the receive buffer; the identity in hop 0."""

    def __init__(self, fetch: tuple[Range, ...] | None) -> None:
        self._starts: Positions | None = None
        if fetch is not None:
            table = np.array(fetch, dtype=np.int64).reshape(-1, 2)
            self._starts, lengths = table[:, 0], table[:, 1] - table[:, 0]
            self._offsets = np.cumsum(lengths) - lengths

    def __call__(self, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        if self._starts is None:
            return ranges
        table = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        at = np.searchsorted(self._starts, table[:, 0], side="right") - 1
        moved = table - self._starts[at, None] + self._offsets[at, None]
        return _joined(moved[:, 0], moved[:, 1])


_Piece = tuple[tuple[Range, ...], tuple[Range, ...], bool, Mask | None]


def _tiles_of_chunk(rule: Rule, kinds: Kinds, chunk: Chunk, keys: _KeyChunks, causal: bool) -> Iterator[_Piece]:
    """The tiles of one query chunk over one source's keys, as (q, k, causal, mask) in local ranges."""
    full = keys.full(chunk.document, kinds, chunk.block)
    if full:
        yield (chunk.local,), full, False, None
    partial_chunks = keys.partial(chunk.document, kinds, chunk.block)
    if not partial_chunks:
        return
    positions = np.concatenate([np.arange(*other.positions, dtype=np.int64) for other in partial_chunks])
    local = np.concatenate([np.arange(*other.local, dtype=np.int64) for other in partial_chunks])
    seen = visible(rule, np.arange(*chunk.positions, dtype=np.int64), positions, causal)
    # Key blocks whose visible pairs lie in the same rows share a tile.
    owners = np.repeat(np.arange(len(partial_chunks)), [o.positions[1] - o.positions[0] for o in partial_chunks])
    rows_of = np.stack([seen[:, owners == i].any(1) for i in range(len(partial_chunks))])
    patterns, which = np.unique(rows_of, axis=0, return_inverse=True)
    for number, rows in enumerate(patterns):
        if rows.any():
            columns = np.flatnonzero((which.ravel()[owners] == number) & seen.any(0))
            yield _compressed(seen, np.flatnonzero(rows), columns, chunk.local[0], local)


def _compressed(seen: Mask, rows: Positions, columns: Positions, offset: int, local: Positions) -> _Piece:
    mask = seen[np.ix_(rows, columns)]
    (q, k) = (_joined(at, at + 1) for at in (rows + offset, local[columns]))
    if mask.all():
        return q, k, False, None
    if mask.shape[0] == mask.shape[1] and np.array_equal(mask, np.tril(np.ones_like(mask))):
        return q, k, True, None
    return q, k, False, mask


def _joined(starts: Positions, stops: Positions) -> tuple[Range, ...]:
    """Ascending ranges, with adjacent ones merged."""
    if not len(starts):
        return ()
    breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
    first, last = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]]) - 1
    return tuple(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def tile_exchange(schedule: Schedule, cp_rank: int, ahead: int) -> ExchangePlan:
    """What `cp_rank` moves hop by hop, each hop one message a direction, posted `ahead` hops before its kernels."""
    stages = []
    for hop in range(1, schedule.cp):
        reader = schedule.reader(cp_rank, hop)
        fetched, served = schedule.num_head_tokens(cp_rank, hop), schedule.num_head_tokens(reader, hop)
        here = _message(hop, schedule.hops[cp_rank][hop].source, fetched)
        there = _message(hop, reader, served)
        stages.append(Traffic(here, there, here, there, fetched, served))
    return ExchangePlan(schedule.cp, tuple(stages), ahead=ahead, packed=True, send_slots=ahead + 1)


def _message(hop: int, peer: int, num_rows: int) -> tuple[PeerTransfer, ...]:
    return (PeerTransfer(hop, peer, (ContiguousCopy(0, 0, 0, num_rows),)),) if num_rows else ()
