"""A sparse pattern: a rule for each head, packed documents, a block size. Plain data, the same on every rank.

What a pattern keeps does not depend on ring or layout, so a resized ring keeps its meaning exactly. Tensors,
ranks and bytes belong in `sparse_schedule`; pictures in `picture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.blocks import block_kinds, reach, row_pairs
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.rules import Kinds, Rule

DEFAULT_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class SparsePattern:
    """Causal attention in which query head h keeps what `heads[h]` lets through; one rule serves all heads.

    Positions and blocks of `block` tokens count from each document's start, so a packed document gets what
    it would get alone. `block` is how finely lists are made, not what is kept. Raises `ValueError` for no
    rules, a block below 1, or unsorted `document_starts`.
    """

    heads: tuple[Rule, ...]
    block: int = DEFAULT_BLOCK_TOKENS
    document_starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("heads=(): give one rule for all heads, or one for each query head")
        if self.block < 1:
            raise ValueError(f"block={self.block}: a block has at least one token; 128 suits the kernels")
        Pattern(True, self.document_starts)

    @property
    def awaits_content(self) -> bool:
        """Whether content has yet to choose a part of it: such a pattern can be counted, not planned."""
        return any(rule.awaits_content for rule in self.heads)

    @property
    def for_one_call(self) -> bool:
        """Whether content has chosen a part of it, in the one call that it is for."""
        return any(rule.for_one_call for rule in self.heads)

    def rules(self, num_heads: int) -> tuple[Rule, ...]:
        """The rule of each of `num_heads` query heads. Raises `ValueError` when their number does not fit."""
        if len(self.heads) == 1:
            return self.heads * num_heads
        if len(self.heads) != num_heads:
            raise ValueError(
                f"the pattern has rules for {len(self.heads)} heads, the call has {num_heads} query heads; give"
                " one rule for each query head, or one for all"
            )
        return self.heads

    def documents(self, seq_len: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) position range of every document. Raises `ValueError` when they do not fit."""
        return Pattern(True, self.document_starts).documents(seq_len)

    def row_pairs(self, seq_len: int) -> NDArray[np.int64]:
        """(seq_len,): keys that each query sees, summed over `heads`; with content to choose beside, at most."""
        total = np.zeros(seq_len, dtype=np.int64)
        for number, (start, stop) in enumerate(self.documents(seq_len)):
            for rule in self.heads:
                total[start:stop] += row_pairs(rule.of_document(number), stop - start, self.block)
        return total

    def density(self, seq_len: int) -> float:
        """The kept share of the documents' causal triangles (dense causal = 1), the mean over heads; as `row_pairs`
        where content has yet to choose."""
        triangles = sum((stop - start) * (stop - start + 1) // 2 for start, stop in self.documents(seq_len))
        return float(self.row_pairs(seq_len).sum()) / (triangles * len(self.heads))

    def kinds(self, length: int) -> Kinds:
        """NONE, PART or FULL for every pair of blocks of one document; what any head keeps counts as kept."""
        return reduce(np.maximum, (block_kinds(rule, length, self.block) for rule in dict.fromkeys(self.heads)))

    def reachability(self, length: int, depth: int) -> tuple[float, ...]:
        """For 1 to `depth` layers of this pattern, the share of causal block pairs (query, key) of a document
        of `length` tokens between which information can have flowed. Heads mix after each layer.
        """
        return reach(self.kinds(length), depth)

    def __str__(self) -> str:
        packed = "" if self.document_starts == (0,) else f", {len(self.document_starts)} documents"
        return f"{rules_told(self.heads)} in blocks of {self.block}{packed}"


def mixed(*parts: tuple[int, Rule]) -> tuple[Rule, ...]:
    """Rules for a mix of heads: `mixed((6, Window(1024)), (2, Dense()))` are 6 local heads and 2 dense ones."""
    rules = tuple(rule for num_heads, rule in parts for _ in range(num_heads))
    if not rules:
        raise ValueError(f"parts={parts}: give at least one head")
    return rules


def rules_told(heads: Sequence[Rule]) -> str:
    """The rule of all heads, or how many heads follow each."""
    counted = [f"{heads.count(rule)} x {rule}" for rule in dict.fromkeys(heads)]
    return str(heads[0]) if len(heads) == 1 else "; ".join(_shortened(counted))


def _shortened(items: Sequence[str]) -> Sequence[str]:
    return items if len(items) <= 4 else [*items[:3], f"... {len(items)} rules in all"]
