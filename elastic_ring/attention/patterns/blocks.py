"""A rule on one document in blocks of tokens: which blocks are kept, fully or in part, and how many pairs.

Blocks count from the document's start; the last one may be shorter. No heads, ranks or layouts in this file.
Results of `block_kinds` and `row_pairs` are read-only, and cached except for one-call rules.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.patterns.rules import FULL, NONE, PART, Kinds, Mask, Positions, Rule, Union
from elastic_ring.attention.plan.cached import static_lru_cache


def visible(rule: Rule, q: Positions, k: Positions) -> Mask:
    """(n, m): whether queries at positions `q` (n,) see keys at `k` (m,), under the rule and causality."""
    rows, columns = q[:, None], k[None, :]
    seen = rule.sees(rows, columns) & (columns <= rows)
    assert seen.shape == (q.size, k.size), (rule, seen.shape)
    return seen


@static_lru_cache(maxsize=24)
def block_kinds(rule: Rule, length: int, block: int) -> Kinds:
    """(n, n) of NONE, PART, FULL for a document of `length` tokens; NONE above the diagonal.

    On the diagonal FULL means all causal pairs.
    """
    kinds = np.tril(rule.kinds(-(-length // block), block))
    kinds.setflags(write=False)
    return kinds


def row_kinds(rule: Rule, length: int, block: int, rows: Positions) -> Kinds:
    """(len(rows), n): the rows `rows` of `block_kinds`; a one-call rule computes only these."""
    if not rule.for_one_call:
        return block_kinds(rule, length, block)[rows]
    if isinstance(rule, Union):
        return reduce(np.maximum, (row_kinds(part, length, block, rows) for part in rule.rules))
    num_blocks = -(-length // block)
    kinds = rule.row_kinds(rows, num_blocks, block)
    if rule.unit != block:  # otherwise a block is a unit, and chosen units lie before the diagonal
        kinds[np.arange(num_blocks)[None, :] > rows[:, None]] = NONE
    return kinds


@static_lru_cache(maxsize=64)
def row_pairs(rule: Rule, length: int, block: int) -> NDArray[np.int64]:
    """(length,): the number of keys that each query of a document sees. Exact for static rules; an upper bound if
    `awaits_content`, since chosen blocks may overlap with another rule."""
    at = np.arange(length, dtype=np.int64)
    if rule.awaits_content:
        most: NDArray[np.int64] = np.minimum(row_pairs(rule.sure, length, block) + rule.num_chosen(at), at + 1)
        most.setflags(write=False)
        return most
    kinds = block_kinds(rule, length, block)
    whole = np.tril(kinds == FULL, -1).sum(1) * block
    pairs: NDArray[np.int64] = whole[at // block]
    for row, masked in enumerate(_masked_columns(kinds)):
        start, stop = row * block, min(length, (row + 1) * block)
        if kinds[row, row] == FULL:
            pairs[start:stop] += at[start:stop] - start + 1
        if masked.size:
            pairs[start:stop] += visible(rule, at[start:stop], block_positions(masked, block, length)).sum(1)
    pairs.setflags(write=False)
    return pairs


def block_positions(columns: NDArray[np.intp], block: int, length: int) -> Positions:
    """The token positions of the blocks `columns`, cut at `length`."""
    positions: Positions = (columns[:, None].astype(np.int64) * block + np.arange(block)[None, :]).ravel()
    return positions[positions < length]


def reach(kinds: Kinds, depth: int) -> tuple[float, ...]:
    """After 1 to `depth` layers, the share of causal block pairs whose key can influence the query."""
    num_blocks = len(kinds)
    step = (kinds != NONE).astype(np.float32)
    reached = np.minimum(step + np.eye(num_blocks, dtype=np.float32), 1)
    shares = []
    carried = reached
    for layer in range(depth):
        if layer:
            carried = ((reached @ carried) > 0).astype(np.float32)
        shares.append(float(carried.sum()) / (num_blocks * (num_blocks + 1) / 2))
    return tuple(shares)


def _masked_columns(kinds: Kinds) -> list[NDArray[np.intp]]:
    """Per row, the columns of PART blocks, which need token-wise evaluation."""
    return [np.flatnonzero(row == PART) for row in kinds]
