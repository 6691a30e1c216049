"""A rule on one document as blocks of tokens: which are kept, wholly or in part, and what that costs.

Blocks are counted from the document's start; the last one may be ragged. Nothing of heads, ranks or layouts
may enter. The arrays that are returned are cached and read-only, but for rules of one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.remembered import remembered
from elastic_ring.attention.rules import FULL, NONE, PART, Kinds, Mask, Positions, Rule, Union


@dataclass(frozen=True)
class BlockLists:
    """For each block of one side, the blocks of the other that a kernel must visit, ascending.

    `full` blocks need no mask; `mask` blocks are on the diagonal or kept in part. In the forward direction
    entry i lists key blocks for query block i, in the transposed one query blocks for key block i.
    """

    block: int
    mask: tuple[tuple[int, ...], ...]
    full: tuple[tuple[int, ...], ...]

    def transposed(self) -> BlockLists:
        """The same pairs listed from the other side, as a backward pass over key blocks wants them."""
        return BlockLists(self.block, _turned(self.mask), _turned(self.full))

    @property
    def num_blocks(self) -> int:
        """Pairs of blocks that are visited."""
        return sum(map(len, self.mask)) + sum(map(len, self.full))


def visible(rule: Rule, q: Positions, k: Positions) -> Mask:
    """(n, m): whether queries at positions `q` (n,) see keys at `k` (m,), causality included."""
    rows, columns = q[:, None], k[None, :]
    seen = rule.sees(rows, columns) & (columns <= rows)
    assert seen.shape == (q.size, k.size), (rule, seen.shape)
    return seen


@remembered(maxsize=24)
def block_kinds(rule: Rule, length: int, block: int) -> Kinds:
    """(n, n) of NONE, PART, FULL for a document of `length` tokens; nothing above the diagonal.

    On the diagonal FULL means all that causality leaves.
    """
    kinds = np.tril(rule.kinds(-(-length // block), block))
    kinds.setflags(write=False)
    return kinds


def row_kinds(rule: Rule, length: int, block: int, rows: Positions) -> Kinds:
    """(len(rows), n): the rows `rows` of `block_kinds`, of which a rule of one call has no others made."""
    if not rule.for_one_call:
        return block_kinds(rule, length, block)[rows]
    if isinstance(rule, Union):
        return reduce(np.maximum, (row_kinds(part, length, block, rows) for part in rule.rules))
    num_blocks = -(-length // block)
    kinds = rule.row_kinds(rows, num_blocks, block)
    if rule.unit != block:  # else an own block is one, and what content chooses lies before it
        kinds[np.arange(num_blocks)[None, :] > rows[:, None]] = NONE
    return kinds


def block_lists(rule: Rule, length: int, block: int) -> BlockLists:
    """The visited blocks of each query block. What the diagonal keeps is always a mask block."""
    kinds = block_kinds(rule, length, block)
    full, mask = kinds == FULL, kinds == PART
    at = np.arange(len(kinds))
    mask[at, at], full[at, at] = kinds[at, at] != NONE, False
    return BlockLists(block, _listed(mask), _listed(full))


@remembered(maxsize=64)
def row_pairs(rule: Rule, length: int, block: int) -> NDArray[np.int64]:
    """(length,): how many keys each query of a document sees. Exact, token by token; where content has yet to choose
    beside another rule, at most so many: what it chooses may be kept already."""
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
    """The positions of all tokens of the blocks `columns`, of which only the last can be ragged."""
    positions: Positions = (columns[:, None].astype(np.int64) * block + np.arange(block)[None, :]).ravel()
    return positions[positions < length]


def reach(kinds: Kinds, depth: int) -> tuple[float, ...]:
    """After 1 to `depth` layers, the share of causal pairs of blocks between which something can have flowed."""
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
    """Per row, the blocks whose tokens must be looked at one by one."""
    return [np.flatnonzero(row == PART) for row in kinds]


def _listed(chosen: NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in chosen)


def _turned(lists: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    turned: list[list[int]] = [[] for _ in lists]
    for row, columns in enumerate(lists):
        for column in columns:
            turned[column].append(row)
    return tuple(map(tuple, turned))
