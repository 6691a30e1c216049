"""The kernel calls of one rank in each hop of a sparse schedule: dense, causal and masked tiles without unseen pairs.

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
from elastic_ring.attention.plan.schedule import Chunk, Schedule, chunks_of
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
    pattern, documents = schedule.sparse, schedule.sparse.documents(schedule.layout.seq_len)
    queries = chunks_of(schedule.layout, cp_rank, documents, pattern.block)
    by_hop = []
    for index, hop in enumerate(schedule.hops[cp_rank]):
        keys = _KeyChunks(chunks_of(schedule.layout, hop.source, documents, pattern.block))
        hop_tiles: list[SparseTile] = []
        for number, group in enumerate(schedule.groups):
            buffer = _BufferPlaces(hop.fetch[number]) if index else None
            for rule in dict.fromkeys(group.rules):
                heads = group.query_heads(rule)
                for document, chunks in groupby(queries, lambda chunk: chunk.document):
                    blocks, own = keys.blocks(document), list(chunks)
                    if not blocks.size:
                        continue
                    (start, stop), inside = documents[document], rule.of_document(document)
                    rows = np.array([chunk.block for chunk in own], dtype=np.int64)
                    for strip, kinds in row_strips(inside, stop - start, pattern.block, rows, blocks, pattern.causal):
                        for chunk, of_chunk in zip(own[strip], kinds, strict=True):
                            for q, k, causal, mask in _tiles_of_chunk(inside, of_chunk, chunk, keys, pattern.causal):
                                k = k if buffer is None else buffer.of(k)
                                hop_tiles.append(SparseTile(number, heads, q, k, causal, mask))
        by_hop.append(tuple(hop_tiles))
    return tuple(by_hop)


class _KeyChunks:
    """A source's chunks as arrays, by document."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self._of: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            self._of.setdefault(chunk.document, []).append(chunk)
        self._arrays = {document: np.array([(c.block, *c.local) for c in own]) for document, own in self._of.items()}

    def blocks(self, document: int) -> Positions:
        """The blocks of the source's chunks of `document`, ascending."""
        chunks = self._arrays.get(document)
        return np.empty(0, dtype=np.int64) if chunks is None else chunks[:, 0]

    def full(self, document: int, kinds: Kinds, row: int) -> tuple[Range, ...]:
        """Local ranges of the chunks that query block `row` sees in full, except its own block's; `kinds` (n,): how
        much it sees of each chunk's block."""
        blocks, starts, stops = self._arrays[document].T
        chosen = np.flatnonzero((kinds == FULL) & (blocks != row))
        return _joined(starts[chosen], stops[chosen])

    def partial(self, document: int, kinds: Kinds, row: int) -> list[Chunk]:
        """The chunks that need a mask: those of partly kept blocks and of the query block itself."""
        blocks = self._arrays[document][:, 0]
        chosen = np.flatnonzero((kinds != NONE) & ((kinds != FULL) | (blocks == row)))
        return [self._of[document][i] for i in chosen]


class _BufferPlaces:
    """Maps ranges of the source's slice to the receive buffer of the ranges `fetch`."""

    def __init__(self, fetch: tuple[Range, ...]) -> None:
        table = np.array(fetch, dtype=np.int64).reshape(-1, 2)
        self._starts, lengths = table[:, 0], table[:, 1] - table[:, 0]
        self._offsets = np.cumsum(lengths) - lengths

    def of(self, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
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
    positions = np.concatenate([np.arange(*each.positions, dtype=np.int64) for each in partial_chunks])
    local = np.concatenate([np.arange(*each.local, dtype=np.int64) for each in partial_chunks])
    seen = visible(rule, np.arange(*chunk.positions, dtype=np.int64), positions, causal)
    # Key blocks whose visible pairs lie in the same rows share a tile.
    owners = np.repeat(np.arange(len(partial_chunks)), [c.positions[1] - c.positions[0] for c in partial_chunks])
    rows_of = np.stack([seen[:, owners == i].any(1) for i in range(len(partial_chunks))])
    patterns, which = np.unique(rows_of, axis=0, return_inverse=True)
    for number, sees in enumerate(patterns):
        if not sees.any():
            continue
        rows, columns = np.flatnonzero(sees), np.flatnonzero((which.ravel()[owners] == number) & seen.any(0))
        mask = seen[np.ix_(rows, columns)]
        q, k = (_joined(at, at + 1) for at in (rows + chunk.local[0], local[columns]))
        is_full = bool(mask.all())
        is_triangle = mask.shape[0] == mask.shape[1] and np.array_equal(mask, np.tril(np.ones_like(mask)))
        yield q, k, is_triangle and not is_full, None if is_full or is_triangle else mask


def _joined(starts: Positions, stops: Positions) -> tuple[Range, ...]:
    """Ascending ranges, with adjacent ones merged."""
    if not len(starts):
        return ()
    breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
    first, last = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]]) - 1
    return tuple(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def tile_exchange(schedule: Schedule, cp_rank: int, ahead: int) -> ExchangePlan:
    """The exchange of `cp_rank` hop by hop, each hop one message a direction, posted `ahead` hops before its
    kernels."""

    def message(hop: int, peer: int, num_rows: int) -> tuple[PeerTransfer, ...]:
        return (PeerTransfer(hop, peer, (ContiguousCopy(0, 0, 0, num_rows),)),) if num_rows else ()

    stages = []
    for hop in range(1, schedule.cp):
        reader = schedule.reader(cp_rank, hop)
        fetched, served = schedule.num_head_tokens(cp_rank, hop), schedule.num_head_tokens(reader, hop)
        here, there = message(hop, schedule.hops[cp_rank][hop].source, fetched), message(hop, reader, served)
        stages.append(Traffic(here, there, here, there, fetched, served))
    return ExchangePlan(schedule.cp, tuple(stages), ahead=ahead, packed=True, send_slots=ahead + 1)
