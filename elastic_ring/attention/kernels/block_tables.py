"""Block tables: the blocks that a block-sparse GPU kernel visits, as device tensors, for forward and backward.

They are built with numpy on the host. Queries and keys may be different parts of a sequence, such as a rank's own
slice and the keys it fetched. A block that is kept in part has a mask, which blocks with equal pairs share. No kernels
in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.patterns.blocks import any_partly, row_strips
from elastic_ring.attention.patterns.content import Chosen, TopK
from elastic_ring.attention.patterns.rules import FULL, NONE, PART, Kinds, Mask, Positions, Rule, Union, Window

BLOCK_TOKENS = 128


@dataclass(frozen=True, eq=False)
class BlockLists:
    """int32 `counts` (1, H or 1, n) and `indices` (1, H or 1, n, width), ascending and left-aligned."""

    counts: torch.Tensor
    indices: torch.Tensor

    def of_heads(self, first: int, last: int) -> BlockLists:
        return self if self.counts.size(1) == 1 else BlockLists(self.counts[:, first:last], self.indices[:, first:last])


@dataclass(frozen=True, eq=False)
class BlockMasks:
    """Masks of partial blocks: `masks` (m, 128, 4) int32, a bit for each query and key (`packed`). `numbers` (H or 1, n
    or 2, n' or 2) int32 has the mask of each pair of blocks; number 0 is the causal mask."""

    numbers: torch.Tensor
    masks: torch.Tensor

    def of_heads(self, first: int, last: int) -> BlockMasks:
        return self if self.numbers.size(0) == 1 else BlockMasks(self.numbers[first:last], self.masks)


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Lists of blocks of 128 tokens: diagonal blocks (`own`, with the causal mask) and fully visible blocks (`full`).
    With `masks`, `own` are all partial blocks.

    `own` and `full` list key blocks per query block, for forward; `own_by_key` and `full_by_key` list query blocks
    per key block, for backward. Fetched keys have no diagonal blocks: all counts of `own` are 0. `all_rows`: the
    queries are all queries of a rank, so their number is the same in every call; `all_keys`: the same for keys.
    `whole`: the tables of all heads and the first head of this subset, if this is a subset. `derived` caches
    objects that kernels derive from the tables.
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
    masks: BlockMasks | None = None
    derived: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.own.counts.device

    @property
    def num_heads(self) -> int:
        """The number of heads in the lists; 1 if all heads share them."""
        return self.own.counts.size(1)

    def of_heads(self, first: int, last: int) -> BlockTables:
        """The tables of query heads `first` to `last` - 1."""
        return replace(
            self,
            own=self.own.of_heads(first, last),
            own_by_key=self.own_by_key.of_heads(first, last),
            full=self.full.of_heads(first, last),
            full_by_key=self.full_by_key.of_heads(first, last),
            whole=(self, first),
            masks=self.masks and self.masks.of_heads(first, last),
            derived={},
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the lists and of `derived`, possibly with duplicates."""
        for lists in (self.own, self.own_by_key, self.full, self.full_by_key):
            yield from (lists.counts, lists.indices)
        if self.masks is not None:
            yield from (self.masks.numbers, self.masks.masks)
        for derived in self.derived.values():
            yield from (x for x in vars(derived).values() if isinstance(x, torch.Tensor))


def tables_between(own: Mask, full: Kept, device: torch.device, masks: torch.Tensor | None = None) -> BlockTables:
    """Tables from `full` (H or 1, n, n) bool, queries first, the fully visible blocks, and `own` (H or 1, n) bool,
    whether a query block sees its diagonal block under the causal mask. With `masks`, `full` is as in `Kept`."""
    num_heads, num_blocks = full.shape[:2]
    if masks is not None:
        at, full = np.arange(num_blocks), full.copy()
        full[:, at, at] = np.where(own, CAUSAL, full[:, at, at])
        return tables_apart([full], [at], device, masks, all_rows=False)
    counts = torch.from_numpy(np.ascontiguousarray(own, dtype=np.int32)).unsqueeze(0).to(device)
    each = torch.arange(num_blocks, dtype=torch.int32, device=device)
    lists = BlockLists(counts, each.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    blocks = [np.arange(num_blocks)]
    by_key = _listed([full.transpose(0, 2, 1)], blocks, blocks, device)
    earlier = _listed([full], blocks, blocks, device)
    return BlockTables(lists, lists, earlier, by_key, num_blocks, num_blocks)


def tables_apart(
    kept: Sequence[Kept],
    keys: Sequence[Positions],
    device: torch.device,
    masks: torch.Tensor | None = None,
    *,
    all_rows: bool = True,
) -> BlockTables:
    """Tables for one or more groups whose queries see only keys of their own group, all fully and none diagonal.

    `kept[i]` (H or 1, n, m) bool, queries first, are the visible blocks of group i, with `masks` as in `Kept`. The
    query blocks of the groups are concatenated; `keys[i]` (m,) are the ascending indices of the
    group's key blocks, and all groups together use every index from 0. If any group has H heads, all get H.
    """
    num_heads = max(len(each) for each in kept)
    num_q_blocks, num_k_blocks = (sum(each.shape[axis] for each in kept) for axis in (1, 2))
    ends = np.cumsum([each.shape[1] for each in kept])
    queries = [np.arange(end - each.shape[1], end) for end, each in zip(ends, kept, strict=True)]

    def listed(chosen: Sequence[Mask]) -> tuple[BlockLists, BlockLists]:
        by_key = [each.transpose(0, 2, 1) for each in chosen]
        return _listed(chosen, queries, keys, device), _listed(by_key, keys, queries, device)

    if masks is None:
        empty = [torch.zeros(1, num_heads, n, dtype=torch.int32, device=device) for n in (num_q_blocks, num_k_blocks)]
        own, own_by_key = (BlockLists(counts, counts.unsqueeze(-1)) for counts in empty)
        full, full_by_key = listed(kept)
        numbered = None
    else:
        own, own_by_key = listed([(each != 0) & (each != WHOLE) for each in kept])
        full, full_by_key = listed([each == WHOLE for each in kept])
        # At least two each way: flash-attn-4 looks for the one dimension whose stride is 1.
        numbers = np.zeros((num_heads, max(2, num_q_blocks), max(2, num_k_blocks)), dtype=np.int32)
        for each, rows, columns in zip(kept, queries, keys, strict=True):
            numbers[np.ix_(np.arange(num_heads), rows, columns)] = np.maximum(each - FIRST_MASK, 0)
        numbered = BlockMasks(torch.from_numpy(numbers).to(device), masks)
    return BlockTables(
        own, own_by_key, full, full_by_key, num_q_blocks, num_k_blocks, all_rows, all_keys=False, masks=numbered
    )


# ------------------------------------------------------------ the kept part of each block

Kept = NDArray[Any]
"""The kept part of each pair of blocks, int16: 0, nothing; WHOLE, all; else FIRST_MASK + a mask's number. Or bool."""
WHOLE, CAUSAL, FIRST_MASK = 1, 2, 2
MOST_MASKS = 1 << 12
"""Different masks of a plan: 8 MiB of device memory."""
MASK_WORDS = BLOCK_TOKENS // 32
PAIRS_AT_ONCE = 1 << 8


class MaskNumbers:
    """Numbers the masks of a plan, in the order of their first use after the causal mask."""

    def __init__(self) -> None:
        causal = np.tril(np.ones((BLOCK_TOKENS, BLOCK_TOKENS), dtype=bool))
        self._numbers = {packed(causal).tobytes(): 0}

    def kept(self, rule: Rule, kinds: Kinds, queries: Positions, keys: Positions, causal: bool) -> Kept:
        """`kinds` (n, m) of the blocks `queries` and `keys` under `rule`, with the masks of partial blocks. Raises
        `ValueError` beyond `MOST_MASKS`."""
        kept = np.where(kinds == FULL, WHOLE, 0).astype(np.int16)
        rows, columns = np.nonzero(kinds == PART)
        for first in range(0, len(rows), PAIRS_AT_ONCE):
            some = rows[first : first + PAIRS_AT_ONCE], columns[first : first + PAIRS_AT_ONCE]
            seen = rule.token_pairs(queries[some[0]], keys[some[1]], BLOCK_TOKENS, causal)
            kept[some] = [0 if not mask.any() else WHOLE if mask.all() else self._number(mask) for mask in seen]
        return kept

    def _number(self, mask: Mask) -> int:
        number = self._numbers.setdefault(packed(mask).tobytes(), len(self._numbers))
        if number >= MOST_MASKS:
            raise ValueError(
                f"the pattern keeps blocks of {BLOCK_TOKENS} tokens in more than {MOST_MASKS} different ways; choose a"
                " rule over whole blocks, a layout whose pieces are multiples of 128, or have documents begin with a"
                " block: align_tokens=128 of the data's source"
            )
        return FIRST_MASK + number

    def array(self) -> NDArray[np.int32]:
        """(m, 128, 4), the `masks` of `BlockMasks`."""
        words = np.frombuffer(bytearray(b"".join(self._numbers)), dtype="<i4")
        return words.reshape(-1, BLOCK_TOKENS, MASK_WORDS)


def packed(masks: Mask) -> NDArray[np.int32]:
    """(..., 128, 128) bool to (..., 128, 4): bit i of a word is key 32 * word + i."""
    return np.packbits(masks, axis=-1, bitorder="little").view("<i4")


def kept_between(
    rules: tuple[Rule, ...],
    documents: tuple[Range, ...],
    queries: Positions,
    keys: Positions,
    causal: bool = True,
    masks: MaskNumbers | None = None,
) -> Kept:
    """(H, n, m), or (1, n, m) if all heads follow one rule: the kept part of each pair of the blocks `queries` and
    `keys`; bool without `masks`.

    Block indices count from the sequence's start, in any order; `documents` are token ranges. Raises `ValueError` for
    a rule with partial blocks where there are no `masks`.
    """
    for rule in dict.fromkeys(rules if masks is None else ()):
        for number, (start, stop) in enumerate(documents):
            check_whole_blocks(rule.of_document(number), stop - start, causal)
    chosen = rules[:1] if len(set(rules)) == 1 else rules
    of_rule = {
        rule: _kept_in_documents(rule, documents, queries, keys, causal, masks) for rule in dict.fromkeys(chosen)
    }
    return np.stack([of_rule[rule] for rule in chosen])


def _kept_in_documents(
    rule: Rule,
    documents: tuple[Range, ...],
    queries: Positions,
    keys: Positions,
    causal: bool,
    masks: MaskNumbers | None,
) -> Kept:
    """(n, m): the kept part of each pair of blocks under `rule`; nothing across documents."""
    kept: Kept = np.zeros((len(queries), len(keys)), dtype=bool if masks is None else np.int16)
    for number, (start, stop) in enumerate(documents):
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        rows, columns = (np.flatnonzero((first <= blocks) & (blocks < last)) for blocks in (queries, keys))
        if len(rows) and len(columns):
            here, own, own_keys = rule.of_document(number), queries[rows] - first, keys[columns] - first
            for strip, kinds in row_strips(here, stop - start, BLOCK_TOKENS, own, own_keys, causal):
                some = kinds != NONE if masks is None else masks.kept(here, kinds, own[strip], own_keys, causal)
                kept[np.ix_(rows[strip], columns)] = some
    return kept


# ------------------------------------------------------------ whole blocks


def check_documents(document_starts: tuple[int, ...]) -> None:
    """Raises `ValueError` if a document begins inside a block."""
    odd = next((start for start in document_starts if start % BLOCK_TOKENS), None)
    if odd is not None:
        raise ValueError(
            f"a document begins at position {odd}, inside a block of {BLOCK_TOKENS} tokens; have documents padded:"
            f" align_tokens={BLOCK_TOKENS} of the data's source"
        )


def check_whole_blocks(rule: Rule, seq_len: int, causal: bool = True) -> None:
    """Raises `ValueError` if `rule` has, or for some content could have, partial blocks in a document of `seq_len`
    tokens.

    Where `causal`, a diagonal block counts as whole if all its causal pairs are kept.
    """
    if rule.unit % BLOCK_TOKENS == 0:
        return
    if isinstance(rule, TopK | Chosen):
        raise ValueError(
            f"{rule}: content chooses blocks of {rule.unit_tokens} tokens, no multiple of {BLOCK_TOKENS}; set"
            f" unit={BLOCK_TOKENS}"
        )
    if isinstance(rule, Union) and (rule.awaits_content or rule.for_one_call):
        for part in rule.rules:  # by part, because the union differs in every call
            check_whole_blocks(part, seq_len, causal)
        return
    if any_partly(rule, seq_len, BLOCK_TOKENS, causal):
        windows = [part for part in (rule.rules if isinstance(rule, Union) else (rule,)) if isinstance(part, Window)]
        num_blocks = max((window.num_blocks(BLOCK_TOKENS) for window in windows), default=8)
        raise ValueError(
            f"{rule}: keeps blocks of {BLOCK_TOKENS} tokens in part; choose a rule over whole blocks, such as"
            f" bigbird:{num_blocks},0,0, the last {num_blocks} blocks{', for its window' if windows else ''}"
        )


# ------------------------------------------------------------ lists


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
        flat = np.flatnonzero(chosen)  # np.nonzero of a 3-D array is several times slower
        starts = np.add.outer(heads, at * indices.shape[2]).ravel() - (np.cumsum(each) - each)
        indices.ravel()[np.repeat(starts, each) + np.arange(flat.size)] = to[flat % max(1, len(to))]
    return BlockLists(*(torch.from_numpy(each).unsqueeze(0).to(device) for each in (counts, indices)))
