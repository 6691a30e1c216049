"""Which blocks a GPU's block-sparse kernel visits, as tensors on the device, in both directions.

Made on the device from one bool per pair of blocks where content chooses, so that it never visits the host; made
by numpy on the host for a static pattern, once. Queries and keys may be different stretches of a sequence: of a
ring's rank, its own slice against the keys it fetched. No kernels in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.blocks import block_kinds, row_kinds
from elastic_ring.attention.content import Chosen, TopK
from elastic_ring.attention.layout import Range
from elastic_ring.attention.remembered import remembered
from elastic_ring.attention.rules import NONE, PART, Mask, Positions, Rule, Union
from elastic_ring.attention.sparse import SparsePattern

BLOCK_TOKENS = 128


@dataclass(frozen=True, eq=False)
class BlockLists:
    """int32 counts (1, H or 1, n) and, ascending and packed to the left, indices (1, H or 1, n, width)."""

    counts: torch.Tensor
    indices: torch.Tensor

    def of_heads(self, first: int, last: int) -> BlockLists:
        return self if self.counts.size(1) == 1 else BlockLists(self.counts[:, first:last], self.indices[:, first:last])


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Blocks of 128 tokens: each query block's own, under the causal mask, and the earlier ones it sees wholly.

    `own` and `full` list key blocks by query block, for forward; `own_by_key` and `full_by_key` list query blocks
    by key block, for backward. Keys that were fetched from elsewhere are nobody's own: all counts of `own` are 0.
    `all_rows` says that the queries are all that a rank holds, as many in every call, `all_keys` the same of the keys;
    others come in other numbers each time. `whole` are the tables of which these are some heads', from the first on.
    `made` is what a kernel has made of the tables, kept as long as they are.
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
        """Of the lists: 1 where all heads share them."""
        return self.own.counts.size(1)

    def of_heads(self, first: int, last: int) -> BlockTables:
        """The tables of query heads `first` to `last`."""
        lists = (self.own, self.own_by_key, self.full, self.full_by_key)
        own, own_by_key, full, full_by_key = (each.of_heads(first, last) for each in lists)
        return BlockTables(
            own, own_by_key, full, full_by_key, self.num_q_blocks, self.num_k_blocks, self.all_rows, self.all_keys,
            whole=(self, first),
        )  # fmt: skip

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that they hold, with what was made of them; some of it more than once."""
        for lists in (self.own, self.own_by_key, self.full, self.full_by_key):
            yield from (lists.counts, lists.indices)
        for made in self.made.values():
            yield from (x for x in vars(made).values() if isinstance(x, torch.Tensor))


def tables_of(kept: torch.Tensor, *, width: int | None = None) -> BlockTables:
    """From kept (H or 1, n, n) bool, queries first. Own blocks count as kept; what lies after them is dropped.

    `width` is the most earlier blocks that a query block keeps, where it is known: finding it out is a read by
    the host.
    """
    num_heads, num_blocks = kept.shape[:2]
    earlier = kept.tril(-1)
    at = torch.arange(num_blocks, dtype=torch.int32, device=kept.device)
    ones = torch.ones(1, num_heads, num_blocks, dtype=torch.int32, device=kept.device)
    own = BlockLists(ones, at.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    by_key = _listed(earlier.transpose(1, 2), None if width is None else num_blocks)
    return BlockTables(own, own, _listed(earlier, width), by_key, num_blocks, num_blocks)


def tables_between(own: Mask, full: Mask, device: torch.device) -> BlockTables:
    """From full (H or 1, n, n) bool, queries first: the blocks seen wholly; and own (H or 1, n), whether a query
    block sees what causality leaves of key block n, its own."""
    num_heads, num_blocks = full.shape[:2]
    counts = torch.from_numpy(np.ascontiguousarray(own, dtype=np.int32)).unsqueeze(0).to(device)
    at = torch.arange(num_blocks, dtype=torch.int32, device=device)
    lists = BlockLists(counts, at.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    blocks = [np.arange(num_blocks)]
    by_key = _listed_by_host([full.transpose(0, 2, 1)], blocks, blocks, device)
    earlier = _listed_by_host([full], blocks, blocks, device)
    return BlockTables(lists, lists, earlier, by_key, num_blocks, num_blocks)


def tables_apart(
    kept: Sequence[Mask], keys: Sequence[Positions], device: torch.device, *, all_rows: bool = True
) -> BlockTables:
    """Of one or more groups that lie in one sequence: from each one's (H or 1, n, m) bool, queries first, the blocks of
    its own that it sees, wholly. One group's query blocks lie behind another's; `keys` (m,) says where its key blocks
    lie, ascending, and together they are all from 0 on. No key is a query's own. As many heads for all where any needs
    them."""
    num_heads = max(len(each) for each in kept)
    num_q_blocks, num_k_blocks = (sum(each.shape[axis] for each in kept) for axis in (1, 2))
    own, own_by_key = (_nothing(num_heads, num, device) for num in (num_q_blocks, num_k_blocks))
    ends = np.cumsum([each.shape[1] for each in kept])
    queries = [np.arange(end - each.shape[1], end) for end, each in zip(ends, kept, strict=True)]
    full = _listed_by_host(kept, queries, keys, device)
    by_key = _listed_by_host([each.transpose(0, 2, 1) for each in kept], keys, queries, device)
    return BlockTables(own, own_by_key, full, by_key, num_q_blocks, num_k_blocks, all_rows, all_keys=False)


def tables_for(pattern: SparsePattern, seq_len: int, num_heads: int, device: torch.device) -> BlockTables:
    """Of a static pattern on its documents. Raises `ValueError` for one that the kernels cannot run, by name."""
    if seq_len % BLOCK_TOKENS:
        raise ValueError(f"seq_len={seq_len}: block-sparse kernels take multiples of {BLOCK_TOKENS} tokens")
    check_documents(pattern.document_starts)
    blocks = np.arange(seq_len // BLOCK_TOKENS)
    kept = kept_between(pattern.rules(num_heads), pattern.documents(seq_len), blocks, blocks)
    at = np.arange(len(blocks))
    own = kept[:, at, at]
    kept[:, at, at] = False
    return tables_between(own, kept, device)


def kept_between(
    rules: tuple[Rule, ...], documents: tuple[Range, ...], queries: Positions, keys: Positions
) -> Mask:
    """(H, n, m) bool, or (1, n, m) where all heads follow one rule: the kept pairs of these blocks of a sequence.

    Blocks count from the sequence's start, ascending or not; `documents` are ranges of tokens. Raises `ValueError`
    for a rule that keeps blocks in part.
    """
    for rule in dict.fromkeys(rules):
        for number, (start, stop) in enumerate(documents):
            check_whole_blocks(rule.of_document(number), stop - start)
    chosen = rules[:1] if len(set(rules)) == 1 else rules
    of_rule = {rule: _of_documents(rule, documents, queries, keys) for rule in dict.fromkeys(chosen)}
    return np.stack([of_rule[rule] for rule in chosen])


def _of_documents(rule: Rule, documents: tuple[Range, ...], queries: Positions, keys: Positions) -> Mask:
    """(n, m): no query sees a key of another document."""
    kept = np.zeros((len(queries), len(keys)), dtype=bool)
    for number, (start, stop) in enumerate(documents):
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        rows, columns = (np.flatnonzero((first <= blocks) & (blocks < last)) for blocks in (queries, keys))
        if len(rows) and len(columns):
            kinds = row_kinds(rule.of_document(number), stop - start, BLOCK_TOKENS, queries[rows] - first)
            kept[np.ix_(rows, columns)] = kinds[:, keys[columns] - first] != NONE
    return kept


def check_documents(document_starts: tuple[int, ...]) -> None:
    """Raises `ValueError` for a document that begins inside a block."""
    odd = next((start for start in document_starts if start % BLOCK_TOKENS), None)
    if odd is not None:
        raise ValueError(
            f"a document begins at position {odd}, inside a block of {BLOCK_TOKENS} tokens, which block-sparse kernels"
            f" cannot cut; have documents padded: align_tokens={BLOCK_TOKENS} of the data's source"
        )


@remembered(maxsize=256)
def check_whole_blocks(rule: Rule, seq_len: int) -> None:
    """Raises `ValueError` when `rule` keeps some block of a document of `seq_len` tokens in part, or content may have
    it do so.

    The blocks on the diagonal are kept whole when all that causality leaves of them is.
    """
    if rule.unit % BLOCK_TOKENS == 0:
        return
    if isinstance(rule, TopK | Chosen):
        raise ValueError(
            f"{rule}: content chooses blocks of {rule.unit_tokens} tokens, and block-sparse kernels keep whole blocks"
            f" of {BLOCK_TOKENS}; set unit={BLOCK_TOKENS}"
        )
    if isinstance(rule, Union) and (rule.awaits_content or rule.for_one_call):
        for part in rule.rules:  # not what they make together: that is another in every call
            check_whole_blocks(part, seq_len)
        return
    if (np.tril(block_kinds(rule, seq_len, BLOCK_TOKENS)) == PART).any():
        raise ValueError(
            f"{rule}: keeps blocks of {BLOCK_TOKENS} tokens in part, which block-sparse kernels cannot; choose a rule"
            " over whole blocks, such as BigBird(window=8, globals=0, randoms=0), in short bigbird:8,0,0, for a window"
        )


def _listed(chosen: torch.Tensor, width: int | None) -> BlockLists:
    """chosen (H, n, m) bool to the columns of each row."""
    counts = chosen.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if width is None else min(width, chosen.size(-1))
    # Stable: the chosen columns come first, in their order.
    order = chosen.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    return BlockLists(counts.unsqueeze(0), order[..., :width].to(torch.int32).unsqueeze(0).contiguous())


def _listed_by_host(
    groups: Sequence[Mask], rows: Sequence[Positions], columns: Sequence[Positions], device: torch.device
) -> BlockLists:
    """The same of arrays (H or 1, n, m), each at its rows (n,) and columns (m,) of a larger one that has nothing else,
    in time and memory that follow what is chosen."""
    num_heads = max(len(chosen) for chosen in groups)
    wide = [chosen if len(chosen) == num_heads else chosen.repeat(num_heads, axis=0) for chosen in groups]
    wide = [np.ascontiguousarray(chosen) for chosen in wide]  # what numpy picked out of a table lies by columns
    counts = np.empty((num_heads, sum(map(len, rows))), dtype=np.int32)
    for chosen, at in zip(wide, rows, strict=True):
        counts[:, at] = chosen.sum(-1, dtype=np.int32)
    indices = np.zeros((*counts.shape, max(1, int(counts.max(initial=0)))), dtype=np.int32)
    heads = np.arange(num_heads) * (counts.shape[1] * indices.shape[2])
    for chosen, at, to in zip(wide, rows, columns, strict=True):
        each = counts[:, at].ravel()
        found = np.flatnonzero(chosen)  # of three dimensions at once numpy takes several times as long
        starts = np.add.outer(heads, at * indices.shape[2]).ravel() - (np.cumsum(each) - each)
        indices.ravel()[np.repeat(starts, each) + np.arange(found.size)] = to[found % max(1, len(to))]
    return BlockLists(*(torch.from_numpy(each).unsqueeze(0).to(device) for each in (counts, indices)))


def _nothing(num_heads: int, num_rows: int, device: torch.device) -> BlockLists:
    counts = torch.zeros(1, num_heads, num_rows, dtype=torch.int32, device=device)
    return BlockLists(counts, counts.unsqueeze(-1))


