"""Pads a sparse schedule to whole blocks of 128 tokens where layouts, documents or rules cut blocks.

Each part of a block that lies on one rank (a chunk) gets a block of its own, filled up with invisible tokens, so that
kernels over whole blocks run any pattern: which pairs of such a block count is a mask. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS
from elastic_ring.attention.layouts.layout import Layout, Range, union
from elastic_ring.attention.patterns.rules import NONE, PART, Kinds, Mask, Positions, Rule
from elastic_ring.attention.plan.schedule import Chunk, Schedule, chunks_of


def padded(schedule: Schedule) -> Schedule:
    """The schedule in whole blocks: each rank holds a block for each of its chunks, in the same order, and fetches
    every block from which `schedule` fetches a token."""
    cp = schedule.cp
    chunks = [_chunks(schedule, cp_rank) for cp_rank in range(cp)]
    ordered = sorted((c.document, c.positions, cp_rank) for cp_rank in range(cp) for c in chunks[cp_rank])
    blocks: list[list[Range]] = [[] for _ in range(cp)]
    for number, (_, _, cp_rank) in enumerate(ordered):
        blocks[cp_rank].append((number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
    layout = Layout(schedule.layout.name, len(ordered) * BLOCK_TOKENS, tuple(map(union, blocks)))

    of_document = np.array([document for document, _, _ in ordered])
    begins = np.flatnonzero(np.diff(of_document, prepend=-1))
    pieces = _Pieces(np.array([positions for _, positions, _ in ordered]), begins)
    rules = {rule: _InBlocks(rule, pieces) for group in schedule.groups for rule in group.rules}
    pattern = replace(
        schedule.sparse,
        heads=tuple(rules[rule] for rule in schedule.sparse.heads),
        block=BLOCK_TOKENS,
        document_starts=tuple((begins * BLOCK_TOKENS).tolist()),
    )
    edges = [np.array([0, *(c.local[1] for c in of_rank)]) for of_rank in chunks]
    hops = tuple(
        tuple(
            replace(hop, fetch=tuple(_whole_blocks(ranges, edges[hop.source]) for ranges in hop.fetch)) for hop in own
        )
        for own in schedule.hops
    )
    groups = tuple(replace(group, rules=tuple(rules[rule] for rule in group.rules)) for group in schedule.groups)
    return Schedule(pattern, layout, hops, schedule.num_heads, schedule.num_kv_heads, groups, in_part=True)


def padded_rows(schedule: Schedule, cp_rank: int) -> Positions:
    """(S_local,): where a rank's tokens lie among those of `padded(schedule)`."""
    lengths = np.array([c.local[1] - c.local[0] for c in _chunks(schedule, cp_rank)], dtype=np.int64)
    begins = np.arange(len(lengths)) * BLOCK_TOKENS - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(begins, lengths)


def _chunks(schedule: Schedule, cp_rank: int) -> tuple[Chunk, ...]:
    documents = schedule.sparse.documents(schedule.layout.seq_len)
    return chunks_of(schedule.layout, cp_rank, documents, BLOCK_TOKENS)


def _whole_blocks(ranges: tuple[Range, ...], edges: Positions) -> tuple[Range, ...]:
    """The blocks, as ranges of tokens, of the chunks between `edges` that have a token in `ranges`."""
    starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    first, last = np.searchsorted(edges, starts, side="right") - 1, np.searchsorted(edges, stops)
    return union(zip((first * BLOCK_TOKENS).tolist(), (last * BLOCK_TOKENS).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class _Pieces:
    """`positions` (n, 2): the tokens of each block, from the start of its document; `begins`: the first block of each
    document. Compared by identity: a schedule has one."""

    positions: Positions
    begins: Positions

    def of_document(self, number: int) -> Positions:
        return self.positions[self.begins[number] :][: np.diff(self.begins, append=len(self.positions))[number]]


@dataclass(frozen=True)
class _InBlocks(Rule):
    """`rule`, by places in padded blocks instead of positions."""

    rule: Rule
    pieces: _Pieces = field(repr=False)

    def __str__(self) -> str:
        return str(self.rule)

    @property
    def for_one_call(self) -> bool:
        return self.rule.for_one_call

    @property
    def sees_ahead(self) -> bool:
        return self.rule.sees_ahead

    def of_document(self, number: int) -> Rule:
        return _InDocument(self.rule.of_document(number), self.pieces.of_document(number))


@dataclass(frozen=True, eq=False)
class _InDocument(Rule):
    """`rule` of a document whose blocks hold the positions `pieces` (n, 2). Padding keys are invisible; padding queries
    see what a token there would see, at the document's end what its last token sees."""

    rule: Rule
    pieces: Positions

    def sees(self, q: Positions, k: Positions) -> Mask:
        (q_block, q_at), (k_block, k_at) = (np.divmod(each, BLOCK_TOKENS) for each in (q, k))
        last = self.pieces[-1, 1] - 1
        own, other = (np.minimum(self.pieces[b, 0] + at, last) for b, at in ((q_block, q_at), (k_block, k_at)))
        return self.rule.sees(own, other) & (k_at < self.pieces[k_block, 1] - self.pieces[k_block, 0])

    def token_pairs(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Mask:
        seen = np.empty((len(rows), block, block), dtype=bool)
        whole = (self.pieces[rows, 0] % block == 0) & (self.pieces[columns, 0] % block == 0)
        whole &= np.diff(self.pieces[columns]).squeeze(1) == block
        whole &= self.pieces[rows, 0] + block <= self.pieces[-1, 1]
        queries, keys = (self.pieces[blocks[whole], 0] // block for blocks in (rows, columns))
        seen[whole] = self.rule.token_pairs(queries, keys, block, causal)  # by its unit, not token by token
        seen[~whole] = super().token_pairs(rows[~whole], columns[~whole], block, causal)
        return seen

    def strips(self, rows: Positions, columns: Positions, block: int) -> list[slice]:
        return self.rule.strips(rows, columns, block)

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        assert block == BLOCK_TOKENS, block
        keys, index = np.unique(self.pieces[columns, 0] // block, return_inverse=True)
        kinds = self.rule.row_kinds(self.pieces[rows, 0] // block, keys, block, causal)[:, index]
        if causal:  # of several parts of one block
            kinds[columns[None, :] > rows[:, None]] = NONE
        filled = self.pieces[columns, 1] - self.pieces[columns, 0] < block
        # On the diagonal causality alone hides the padding.
        hidden = filled[None, :] & ~(causal & (columns[None, :] == rows[:, None]))
        return np.where(hidden, np.minimum(kinds, PART), kinds)
