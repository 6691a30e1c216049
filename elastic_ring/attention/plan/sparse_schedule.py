"""Schedules of sparse patterns: the exact keys that each rank fetches for each K/V head.

The hops are those of `schedule`. K/V heads whose query heads follow the same rules form a head group and share their
key ranges; a key that no query of a rank sees under a group's rules is not fetched for that group. `sparse_tiles` and
`sparse_blocks` derive the kernel calls. numpy only: tensors and communication must not enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_ring.attention.layouts.layout import Layout, Range
from elastic_ring.attention.patterns.blocks import block_positions, kept_by_any, row_strips, visible
from elastic_ring.attention.patterns.rules import NONE, Mask, Positions, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Chunk, HeadGroup, Hop, Schedule, chunks_of


def plan_sparse(pattern: SparsePattern, layout: Layout, num_heads: int, num_kv_heads: int) -> Schedule:
    """The hops of every rank. Raises `ValueError` if documents or heads do not match, and for a pattern whose blocks
    content has not chosen yet."""
    groups = head_groups(pattern.rules(num_heads), num_kv_heads)
    owned = owned_positions(layout)
    hops = tuple(rank_hops(pattern, layout, rank, groups, owned) for rank in range(layout.cp))
    return Schedule(pattern, layout, hops, num_heads, num_kv_heads, groups)


def rank_hops(
    pattern: SparsePattern, layout: Layout, rank: int, groups: tuple[HeadGroup, ...], owned: Sequence[Positions]
) -> tuple[Hop, ...]:
    """The hops of one rank: its fetches from each other rank. `owned`: `owned_positions(layout)`."""
    documents = pattern.documents(layout.seq_len)
    chunks = chunks_of(layout, rank, documents, pattern.block)
    needed = {rule: _needed(rule, pattern, layout, documents, rank, chunks) for rule in dict.fromkeys(pattern.heads)}
    of_groups = [np.logical_or.reduce([needed[rule] for rule in set(group.rules)]) for group in groups]
    hops = []
    for source in ((rank - hop) % layout.cp for hop in range(layout.cp)):
        fetched = (runs(need[owned[source]]) if source != rank else () for need in of_groups)
        hops.append(Hop(source, tuple(fetched)))
    return tuple(hops)


def head_groups(rules: tuple[Rule, ...], num_kv_heads: int) -> tuple[HeadGroup, ...]:
    if num_kv_heads < 1 or len(rules) % num_kv_heads:
        raise ValueError(f"{len(rules)} query heads do not divide among {num_kv_heads} K/V heads")
    sharing = len(rules) // num_kv_heads
    members: dict[tuple[Rule, ...], list[int]] = {}
    for kv_head in range(num_kv_heads):
        members.setdefault(rules[kv_head * sharing : (kv_head + 1) * sharing], []).append(kv_head)
    return tuple(HeadGroup(tuple(kv_heads), shared) for shared, kv_heads in members.items())


def runs(chosen: Mask) -> tuple[Range, ...]:
    """The (start, stop) ranges of the true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def owned_positions(layout: Layout) -> tuple[Positions, ...]:
    """The positions of each rank's tokens, in local order."""
    none = np.empty(0, dtype=np.int64)
    return tuple(
        np.concatenate([none, *(np.arange(start, stop, dtype=np.int64) for start, stop in segments)])
        for segments in layout.segments
    )


def _needed(
    rule: Rule,
    pattern: SparsePattern,
    layout: Layout,
    documents: tuple[Range, ...],
    cp_rank: int,
    chunks: tuple[Chunk, ...],
) -> Mask:
    """(seq_len,): the keys that any query of `cp_rank`, whose slice is `chunks`, sees under `rule`; its own keys may be
    missing."""
    needed = np.zeros(layout.seq_len, dtype=bool)
    foreign = np.ones(layout.seq_len, dtype=bool)
    for start, stop in layout.segments[cp_rank]:
        foreign[start:stop] = False
    by_document: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_document.setdefault(chunk.document, []).append(chunk)
    for document, inside in by_document.items():
        start, stop = documents[document]
        own, span = rule.of_document(document), slice(start, stop)
        _mark(own, pattern.block, inside, foreign[span], needed[span], pattern.causal)
    return needed


def _mark(rule: Rule, block: int, chunks: list[Chunk], foreign: Mask, needed: Mask, causal: bool) -> None:
    """Set `needed` (length,) for the keys of one document that the queries of `chunks` see, restricted to `foreign`."""
    length = len(needed)
    if rule.unit == 1 and rule.spans(np.empty(0, dtype=np.int64), 0, 1) is not None:  # in closed form, key by key
        queries = np.concatenate([np.arange(*chunk.positions, dtype=np.int64) for chunk in chunks])
        needed |= np.logical_or(*kept_by_any(rule, length, 1, queries, causal))
        return
    open_blocks = np.logical_or.reduceat(foreign, np.arange(0, length, block))
    rows = np.array([chunk.block for chunk in chunks], dtype=np.int64)
    whole, partly = kept_by_any(rule, length, block, rows, causal)
    needed |= np.repeat(whole, block)[:length]
    partial_columns = np.flatnonzero(open_blocks & ~whole & partly)
    if not partial_columns.size:
        return
    for strip, kinds in row_strips(rule, length, block, rows, partial_columns, causal):
        seen = kinds != NONE
        for at in np.flatnonzero(seen.any(1)):
            keys = block_positions(partial_columns[seen[at]], block, length)
            keys = keys[foreign[keys] & ~needed[keys]]
            queries = np.arange(*chunks[strip.start + at].positions, dtype=np.int64)
            needed[keys[visible(rule, queries, keys, causal).any(0)]] = True
