"""A rule on one document in blocks of tokens: which blocks are kept, fully or in part, and how many pairs.

Blocks count from the document's start; the last block may be shorter. No heads, ranks or layouts in this file. Rules
with `spans` are counted in closed form, others in strips of rows. Results of `row_pairs` are read-only, and cached
except for one-call rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.patterns.caches import SizedLRU
from elastic_ring.attention.patterns.rules import FULL, NONE, PART, Kinds, Mask, Positions, Rule, Span, Union

_ROWS_AT_ONCE = 1 << 16

PAIRS_BYTES = 1 << 29
"""Bound, in bytes, of cached results of `row_pairs`: 8 a token and rule."""


def visible(rule: Rule, q: Positions, k: Positions, causal: bool = True) -> Mask:
    """(n, m): whether queries at positions `q` (n,) see keys at `k` (m,), where `causal` only earlier ones."""
    rows, columns = q[:, None], k[None, :]
    seen = rule.sees(rows, columns)
    if causal:
        seen = seen & (columns <= rows)
    assert seen.shape == (q.size, k.size), (rule, seen.shape)
    return seen


def block_kinds(rule: Rule, length: int, block: int, causal: bool = True) -> Kinds:
    """(n, n) of NONE, PART, FULL for a document of `length` tokens, for plots; where `causal` NONE above the diagonal,
    on which FULL means all causal pairs."""
    return rule.kinds(-(-length // block), block, causal)


def row_strips(
    rule: Rule, length: int, block: int, rows: Positions, columns: Positions | None = None, causal: bool = True
) -> Iterator[tuple[slice, Kinds]]:
    """Yields a slice of `rows` and its `block_kinds` in `columns` (None: all), a few rows at a time."""
    if columns is None:
        columns = np.arange(-(-length // block), dtype=np.int64)
    order = None if (columns[1:] >= columns[:-1]).all() else np.argsort(columns, kind="stable")
    for some in rule.strips(rows, columns, block):
        kinds = rule.row_kinds(rows[some], columns if order is None else columns[order], block, causal)
        if order is not None:
            ascending, kinds = kinds, np.empty_like(kinds)
            kinds[:, order] = ascending
        yield some, kinds


def kept_by_any(rule: Rule, length: int, block: int, rows: Positions, causal: bool = True) -> tuple[Mask, Mask]:
    """(n,), (n,): the blocks that any of `rows`, other than the block itself, keeps in full, and the blocks that any
    keeps at all. The second may leave out blocks of the first."""
    if isinstance(rule, Union):
        parts = [kept_by_any(part, length, block, rows, causal) for part in rule.rules]
        return np.logical_or.reduce([full for full, _ in parts]), np.logical_or.reduce([some for _, some in parts])
    num_blocks = -(-length // block)
    spans = _spans(rule, rows, num_blocks, block, causal)
    if spans is not None:
        full, some = np.zeros((2, num_blocks + 1), dtype=np.int64)
        for first, last, kind in spans:
            _add_edges(some, first, last)
            if kind == FULL:
                _add_edges(full, first, np.minimum(last, rows))
                _add_edges(full, np.maximum(first, rows + 1), last)
        return np.cumsum(full[:-1]) > 0, np.cumsum(some[:-1]) > 0
    most = np.zeros(num_blocks, dtype=np.uint8)
    for strip, kinds in row_strips(rule, length, block, rows, causal=causal):
        own = np.arange(len(kinds)), rows[strip]
        kinds[own] = np.minimum(kinds[own], PART)
        most = np.maximum(most, kinds.max(0))
    return most == FULL, most != NONE


@lru_cache(maxsize=256)
def any_partly(rule: Rule, length: int, block: int, causal: bool = True) -> bool:
    """Whether the rule keeps any block of a document in part."""
    num_blocks = -(-length // block)
    rows = np.arange(num_blocks, dtype=np.int64)
    spans = _spans(rule, rows, num_blocks, block, causal)
    if spans is None:
        return any(bool((kinds == PART).any()) for _, kinds in row_strips(rule, length, block, rows, causal=causal))
    full = [span for span in spans if span[2] == FULL]
    return bool((_union_size(spans, rows) > _union_size(full, rows)).any())


def row_pairs(rule: Rule, length: int, block: int, causal: bool = True) -> NDArray[np.int64]:
    """(length,): the number of keys that each query of a document sees. Exact for static rules; an upper bound if
    `awaits_content`, since chosen blocks may overlap with another rule."""
    return (_row_pairs if rule.for_one_call else _KEPT_PAIRS)(rule, length, block, causal)


def _row_pairs(rule: Rule, length: int, block: int, causal: bool) -> NDArray[np.int64]:
    pairs = np.zeros(length, dtype=np.int64)
    if rule.awaits_content:
        at = np.arange(length, dtype=np.int64)
        pairs = np.minimum(row_pairs(rule.sure, length, block) + rule.num_chosen(at), at + 1)
        pairs.setflags(write=False)
        return pairs
    unit = rule.unit
    num_units = -(-length // unit)
    for begin in range(0, num_units, _ROWS_AT_ONCE):  # whole units, which a rule keeps or does not
        rows = np.arange(begin, min(num_units, begin + _ROWS_AT_ONCE), dtype=np.int64)
        spans = _spans(rule, rows, num_units, unit, causal)
        if spans is None:
            _count_in_strips(pairs, rule, block, causal)
            break
        start, stop = begin * unit, min(length, (begin + len(rows)) * unit)
        sizes = _union_size(spans, rows) * unit
        if not causal:  # the document's last unit may be shorter
            at_end = np.logical_or.reduce([(first < num_units) & (num_units <= last) for first, last, _ in spans])
            sizes -= at_end * (num_units * unit - length)
        pairs[start:stop] = sizes.repeat(unit)[: stop - start]
        if causal:  # of the own unit only the tokens up to the query
            own = np.logical_or.reduce([(first <= rows) & (rows < last) for first, last, _ in spans])
            inside = np.arange(1, unit + 1, dtype=np.int64) - unit
            pairs[start:stop] += (own[:, None] * inside).ravel()[: stop - start]
    pairs.setflags(write=False)
    return pairs


_KEPT_PAIRS = SizedLRU(_row_pairs, PAIRS_BYTES, lambda pairs: pairs.nbytes)


def _count_in_strips(pairs: NDArray[np.int64], rule: Rule, block: int, causal: bool) -> None:
    length = len(pairs)
    at = np.arange(length, dtype=np.int64)
    num_blocks = -(-length // block)
    for strip, kinds in row_strips(rule, length, block, np.arange(num_blocks, dtype=np.int64), causal=causal):
        rows = np.arange(strip.start, strip.stop)
        full = kinds == FULL
        own = full[np.arange(len(rows)), rows]
        if causal:
            full[np.arange(len(rows)), rows] = False
        whole = np.count_nonzero(full, axis=1) * block - full[:, -1] * (num_blocks * block - length)
        partly = (kinds == PART).any(1)
        for number, row in enumerate(rows.tolist()):
            start, stop = row * block, min(length, (row + 1) * block)
            pairs[start:stop] = whole[number]
            if causal and own[number]:
                pairs[start:stop] += at[start:stop] - start + 1
            if partly[number]:
                keys = block_positions(np.flatnonzero(kinds[number] == PART), block, length)
                pairs[start:stop] += visible(rule, at[start:stop], keys, causal).sum(1)


def _spans(rule: Rule, rows: Positions, num_blocks: int, block: int, causal: bool) -> list[Span] | None:
    """The rule's spans, cut at the document's ends and, where `causal`, after each row's own block."""
    spans = rule.spans(rows, num_blocks, block, causal)
    if spans is None:
        return None
    ends = np.minimum(rows + 1, num_blocks) if causal else np.full_like(rows, num_blocks)
    return [(np.maximum(first, 0), np.minimum(last, ends), kind) for first, last, kind in spans]


def _union_size(spans: Sequence[Span], rows: Positions) -> NDArray[np.int64]:
    """(n,): how many blocks of each row lie in any of the spans."""
    if not spans:
        return np.zeros_like(rows)
    firsts, lasts = (np.stack([span[edge] for span in spans]) for edge in (0, 1))
    if len(spans) > 1:
        order = np.argsort(firsts, axis=0)
        firsts, lasts = (np.take_along_axis(each, order, 0) for each in (firsts, lasts))
    size, end = np.zeros_like(rows), np.zeros_like(rows)
    for first, last in zip(firsts, lasts, strict=True):
        size += np.maximum(last - np.maximum(first, end), 0)
        end = np.maximum(end, last)
    return size


def _add_edges(edges: NDArray[np.int64], first: Positions, last: Positions) -> None:
    """Add 1 at the start of each range and -1 at its end, without empty ranges."""
    filled = first < last
    edges += np.bincount(first[filled], minlength=len(edges))
    edges -= np.bincount(last[filled], minlength=len(edges))


def block_positions(columns: NDArray[np.intp], block: int, length: int) -> Positions:
    """The token positions of the blocks `columns`, cut at `length`."""
    positions: Positions = (columns[:, None].astype(np.int64) * block + np.arange(block)[None, :]).ravel()
    return positions[positions < length]
