"""Attention patterns as plain data, the same on every rank: dense inside packed documents, or one rule per head.

The kept pairs do not depend on ring size or layout, so a pattern stays valid when the ring is resized. Basic rules are
in `rules`, published families in `families`, content-chosen blocks in `content`. `schedule.plan` and
`sparse_schedule.plan_sparse` turn a pattern and a layout into hops: tensors, ranks and bytes must not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.patterns.blocks import block_kinds, row_pairs
from elastic_ring.attention.patterns.rules import Kinds, Rule

DEFAULT_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Pattern:
    """Dense attention inside each packed document, causal or full; no attention across documents.

    `document_starts` are the positions in the global sequence where documents begin: 0 first, strictly ascending,
    else `ValueError`. `documents` checks them against the length of the sequence.
    """

    causal: bool = True
    document_starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        starts = self.document_starts
        if not starts or starts[0] != 0:
            raise ValueError(f"document_starts={_short(starts)}: the first document must start at position 0")
        for before, after in pairwise(starts):
            if after <= before:
                raise ValueError(
                    f"document_starts={_short(starts)}: {after} follows {before}; give each start once, in"
                    " ascending order"
                )

    def documents(self, seq_len: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) range of every document. Raises `ValueError` if one starts at or after `seq_len`."""
        starts = self.document_starts
        if starts[-1] >= seq_len:
            raise ValueError(
                f"document_starts={_short(starts)}: the last start must lie inside the sequence of"
                f" {seq_len} tokens; leave out the starts from {seq_len} on"
            )
        return tuple(zip(starts, (*starts[1:], seq_len), strict=True))


def _short(starts: tuple[int, ...]) -> str:
    if len(starts) <= 8:
        return str(starts)
    return f"({', '.join(map(str, starts[:4]))}, ... {len(starts)} in all, last {starts[-1]})"


@dataclass(frozen=True)
class SparsePattern:
    """Attention in which query head h keeps the pairs of rule `heads[h]`; a single rule applies to all heads. `causal`:
    a query sees no later key; else each rule must say which later keys it keeps.

    Positions and blocks count from each document's start, so packing does not change a document's result. `block`
    (tokens) is the granularity of block lists and does not affect which pairs are kept. Raises `ValueError` for no
    rules, a block below 1, unsorted `document_starts`, or a rule that does not look ahead where not `causal`.
    """

    heads: tuple[Rule, ...]
    block: int = DEFAULT_BLOCK_TOKENS
    document_starts: tuple[int, ...] = (0,)
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("heads=(): give one rule for all heads, or one for each query head")
        if self.block < 1:
            raise ValueError(f"block={self.block}: a block has at least one token; 128 suits the kernels")
        Pattern(self.causal, self.document_starts)
        behind = next((rule for rule in self.heads if not (self.causal or rule.sees_ahead)), None)
        if behind is not None:
            raise ValueError(
                f"causal=False, but {behind} does not say which later keys a query sees; dense, sinks, longnet,"
                " functions of blocks and windows with ahead do, for example sinks:64+window:512,ahead=511"
            )

    @property
    def for_one_call(self) -> bool:
        """Whether content has chosen some blocks, so that the pattern is valid for one call only."""
        return any(rule.for_one_call for rule in self.heads)

    def rules(self, num_heads: int) -> tuple[Rule, ...]:
        """The rule of each of `num_heads` query heads. Raises `ValueError` if the number of rules does not fit."""
        if len(self.heads) == 1:
            return self.heads * num_heads
        if len(self.heads) != num_heads:
            raise ValueError(
                f"the pattern has rules for {len(self.heads)} heads, the call has {num_heads} query heads; give"
                " one rule for each query head, or one for all"
            )
        return self.heads

    def documents(self, seq_len: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) range of every document. Raises `ValueError` if one starts at or after `seq_len`."""
        return Pattern(self.causal, self.document_starts).documents(seq_len)

    def row_pairs(self, seq_len: int) -> NDArray[np.int64]:
        """(seq_len,): keys that each query sees, summed over `heads`; an upper bound if rules await content."""
        total = np.zeros(seq_len, dtype=np.int64)
        for number, (start, stop) in enumerate(self.documents(seq_len)):
            for rule in self.heads:
                total[start:stop] += row_pairs(rule.of_document(number), stop - start, self.block, self.causal)
        return total

    def density(self, seq_len: int) -> float:
        """The kept share of the documents' pairs (dense = 1), causal ones if `causal`, averaged over heads; an upper
        bound if rules await content."""
        lengths = [stop - start for start, stop in self.documents(seq_len)]
        dense = sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)
        return float(self.row_pairs(seq_len).sum()) / (dense * len(self.heads))

    def kinds(self, length: int) -> Kinds:
        """(n, n) of NONE, PART, FULL for the block pairs of a document of `length` tokens: the maximum over heads."""
        rules = dict.fromkeys(self.heads)
        return reduce(np.maximum, (block_kinds(rule, length, self.block, self.causal) for rule in rules))

    def __str__(self) -> str:
        packed = "" if self.document_starts == (0,) else f", {len(self.document_starts)} documents"
        return f"{rules_text(self.heads)} in blocks of {self.block}{packed}{'' if self.causal else ', not causal'}"


def rules_text(heads: Sequence[Rule]) -> str:
    """Text: the single rule, or each rule with its number of heads."""
    if len(heads) == 1:
        return str(heads[0])
    counted = [f"{heads.count(rule)} x {rule}" for rule in dict.fromkeys(heads)]
    return "; ".join(counted if len(counted) <= 4 else [*counted[:3], f"... {len(counted)} rules in all"])
