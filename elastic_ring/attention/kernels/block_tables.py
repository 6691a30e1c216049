"""Block tables: the blocks that a block-sparse GPU kernel visits, as device tensors, for forward and backward.

They are built with numpy on the host. Queries and keys may be different parts of a sequence, such as a rank's own
slice and the keys it fetched. No kernels in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.patterns.blocks import any_partly, row_strips
from elastic_ring.attention.patterns.content import Chosen, TopK
from elastic_ring.attention.patterns.rules import NONE, Mask, Positions, Rule, Union

BLOCK_TOKENS = 128


@dataclass(frozen=True, eq=False)
class BlockLists:
    """int32 `counts` (1, H or 1, n) and `indices` (1, H or 1, n, width), ascending and left-aligned."""

    counts: torch.Tensor
    indices: torch.Tensor

    def of_heads(self, first: int, last: int) -> BlockLists:
        return self if self.counts.size(1) == 1 else BlockLists(self.counts[:, first:last], self.indices[:, first:last])


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Lists of blocks of 128 tokens: diagonal blocks (`own`, with the causal mask) and fully visible blocks (`full`).

    `own` and `full` list key blocks per query block, for forward; `own_by_key` and `full_by_key` list query blocks
    per key block, for backward. Fetched keys have no diagonal blocks: all counts of `own` are 0. `all_rows`: the
    queries are all queries of a rank, so their number is the same in every call; `all_keys`: the same for keys.
    `whole`: the tables of all heads and the first head of this subset, if this is a subset. `made` caches objects that
    kernels derive from the tables.
    """

    own: BlockLists
    own_by_key: BlockLists
    full: BlockLists
    full_by_key: BlockLists
    num_q_blocks: int
    num_k_blocks: int
    all_rows: bool = True
    all_keys: bool = True
    whole: tuple[BlockTables, int] | None = field(default=None, repr=False)
    made: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.own.counts.device

    @property
    def num_heads(self) -> int:
        """The number of heads in the lists; 1 if all heads share them."""
        return self.own.counts.size(1)

    def of_heads(self, first: int, last: int) -> BlockTables:
        """The tables of query heads `first` to `last` - 1."""
        lists = (self.own, self.own_by_key, self.full, self.full_by_key)
        own, own_by_key, full, full_by_key = (each.of_heads(first, last) for each in lists)
        return BlockTables(
            own, own_by_key, full, full_by_key, self.num_q_blocks, self.num_k_blocks, self.all_rows, self.all_keys,
            whole=(self, first),
        )  # fmt: skip

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the lists and of `made`, possibly with duplicates."""
        for lists in (self.own, self.own_by_key, self.full, self.full_by_key):
            yield from (lists.counts, lists.indices)
        for made in self.made.values():
            yield from (x for x in vars(made).values() if isinstance(x, torch.Tensor))


def tables_between(own: Mask, full: Mask, device: torch.device) -> BlockTables:
    """Tables from `full` (H or 1, n, n) bool, queries first, the fully visible blocks, and `own` (H or 1, n) bool,
    whether a query block sees its diagonal block under the causal mask."""
    num_heads, num_blocks = full.shape[:2]
    counts = torch.from_numpy(np.ascontiguousarray(own, dtype=np.int32)).unsqueeze(0).to(device)
    at = torch.arange(num_blocks, dtype=torch.int32, device=device)
    lists = BlockLists(counts, at.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    blocks = [np.arange(num_blocks)]
    by_key = _listed([full.transpose(0, 2, 1)], blocks, blocks, device)
    earlier = _listed([full], blocks, blocks, device)
    return BlockTables(lists, lists, earlier, by_key, num_blocks, num_blocks)


def tables_apart(
    kept: Sequence[Mask], keys: Sequence[Positions], device: torch.device, *, all_rows: bool = True
) -> BlockTables:
    """Tables for one or more groups whose queries see only keys of their own group, all fully and none diagonal.

    `kept[i]` (H or 1, n, m) bool, queries first, are the visible blocks of group i. The query blocks of the groups are
    concatenated; `keys[i]` (m,) are the ascending indices of the group's key blocks, and all groups together use every
    index from 0. If any group has H heads, all get H.
    """
    num_heads = max(len(each) for each in kept)
    num_q_blocks, num_k_blocks = (sum(each.shape[axis] for each in kept) for axis in (1, 2))
    own, own_by_key = (_empty_lists(num_heads, num, device) for num in (num_q_blocks, num_k_blocks))
    ends = np.cumsum([each.shape[1] for each in kept])
    queries = [np.arange(end - each.shape[1], end) for end, each in zip(ends, kept, strict=True)]
    full = _listed(kept, queries, keys, device)
    by_key = _listed([each.transpose(0, 2, 1) for each in kept], keys, queries, device)
    return BlockTables(own, own_by_key, full, by_key, num_q_blocks, num_k_blocks, all_rows, all_keys=False)


def kept_between(
    rules: tuple[Rule, ...], documents: tuple[Range, ...], queries: Positions, keys: Positions, causal: bool = True
) -> Mask:
    """(H, n, m) bool, or (1, n, m) if all heads follow one rule: the kept pairs of the blocks `queries` and `keys`.

    Block indices count from the sequence's start, in any order; `documents` are token ranges. Raises `ValueError` for
    a rule that keeps part of a block.
    """
    for rule in dict.fromkeys(rules):
        for number, (start, stop) in enumerate(documents):
            check_whole_blocks(rule.of_document(number), stop - start, causal)
    chosen = rules[:1] if len(set(rules)) == 1 else rules
    of_rule = {rule: _of_documents(rule, documents, queries, keys, causal) for rule in dict.fromkeys(chosen)}
    return np.stack([of_rule[rule] for rule in chosen])


def _of_documents(rule: Rule, documents: tuple[Range, ...], queries: Positions, keys: Positions, causal: bool) -> Mask:
    """(n, m) bool: the block pairs that `rule` keeps; none across documents."""
    kept = np.zeros((len(queries), len(keys)), dtype=bool)
    for number, (start, stop) in enumerate(documents):
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        rows, columns = (np.flatnonzero((first <= blocks) & (blocks < last)) for blocks in (queries, keys))
        if len(rows) and len(columns):
            pairs = (queries[rows] - first, keys[columns] - first)
            for strip, kinds in row_strips(rule.of_document(number), stop - start, BLOCK_TOKENS, *pairs, causal):
                kept[np.ix_(rows[strip], columns)] = kinds != NONE
    return kept


def check_documents(document_starts: tuple[int, ...]) -> None:
    """Raises `ValueError` if a document begins inside a block."""
    odd = next((start for start in document_starts if start % BLOCK_TOKENS), None)
    if odd is not None:
        raise ValueError(
            f"a document begins at position {odd}, inside a block of {BLOCK_TOKENS} tokens, which block-sparse kernels"
            f" cannot cut; have documents padded: align_tokens={BLOCK_TOKENS} of the data's source"
        )


def check_whole_blocks(rule: Rule, seq_len: int, causal: bool = True) -> None:
    """Raises `ValueError` if `rule` keeps part of a block of a document of `seq_len` tokens, or could for some content.

    Where `causal`, a diagonal block counts as whole if all its causal pairs are kept.
    """
    if rule.unit % BLOCK_TOKENS == 0:
        return
    if isinstance(rule, TopK | Chosen):
        raise ValueError(
            f"{rule}: content chooses blocks of {rule.unit_tokens} tokens, and block-sparse kernels keep whole blocks"
            f" of {BLOCK_TOKENS}; set unit={BLOCK_TOKENS}"
        )
    if isinstance(rule, Union) and (rule.awaits_content or rule.for_one_call):
        for part in rule.rules:  # by part, because the union differs in every call
            check_whole_blocks(part, seq_len, causal)
        return
    if any_partly(rule, seq_len, BLOCK_TOKENS, causal):
        raise ValueError(
            f"{rule}: keeps blocks of {BLOCK_TOKENS} tokens in part, which block-sparse kernels cannot; choose a rule"
            " over whole blocks, such as BigBird(window=8, globals=0, randoms=0), in short bigbird:8,0,0, for a window"
        )


def _listed(
    groups: Sequence[Mask], rows: Sequence[Positions], columns: Sequence[Positions], device: torch.device
) -> BlockLists:
    """The columns chosen in each row of `groups` (H or 1, n, m) bool, placed at `rows` (n,) and `columns` (m,) of a
    larger, else empty array. Temporary memory beyond the input scales with the number of chosen blocks."""
    num_heads = max(len(chosen) for chosen in groups)
    wide = [chosen if len(chosen) == num_heads else chosen.repeat(num_heads, axis=0) for chosen in groups]
    wide = [np.ascontiguousarray(chosen) for chosen in wide]  # numpy's indexing may return another memory order
    counts = np.empty((num_heads, sum(map(len, rows))), dtype=np.int32)
    for chosen, at in zip(wide, rows, strict=True):
        counts[:, at] = chosen.sum(-1, dtype=np.int32)
    indices = np.zeros((*counts.shape, max(1, int(counts.max(initial=0)))), dtype=np.int32)
    heads = np.arange(num_heads) * (counts.shape[1] * indices.shape[2])
    for chosen, at, to in zip(wide, rows, columns, strict=True):
        each = counts[:, at].ravel()
        found = np.flatnonzero(chosen)  # np.nonzero of a 3-D array is several times slower
        starts = np.add.outer(heads, at * indices.shape[2]).ravel() - (np.cumsum(each) - each)
        indices.ravel()[np.repeat(starts, each) + np.arange(found.size)] = to[found % max(1, len(to))]
    return BlockLists(*(torch.from_numpy(each).unsqueeze(0).to(device) for each in (counts, indices)))


def _empty_lists(num_heads: int, num_rows: int, device: torch.device) -> BlockLists:
    counts = torch.zeros(1, num_heads, num_rows, dtype=torch.int32, device=device)
    return BlockLists(counts, counts.unsqueeze(-1))
