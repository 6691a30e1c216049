"""Routing by content, as rules: `TopK` before a call, and `Chosen` for the blocks that a call chose.

After MoBA (Lu et al. 2025, arXiv:2502.13189): each query block keeps its own block and the past blocks whose mean key
scores highest with the block's routing query. Here one choice serves a whole query block of a head, so that the result
is a rule over pairs of blocks like any other. numpy only: scoring and communication are in `routing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import FULL, NONE, Kinds, Mask, Positions, Rule, Union, require
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS

Choices = NDArray[np.int32]
"""(units, width): the past units that each unit's queries see, ascending; shorter rows are padded with -1."""


@dataclass(frozen=True)
class TopK(Rule):
    """For each unit of queries and each head: the own unit and the `blocks` - 1 past units of highest score.

    A past unit's score is the dot product of its mean key and the choosing unit's routing query. With `causal` this is
    the unit's first query. Otherwise it is the mean of its queries, and a unit's later tokens influence what its
    earlier ones see. Scores that are equal in fp32 are resolved in favour of the earlier unit. Units count from the
    start of the document, and units of other documents are never chosen.

    With `fetch_all`, block tables are made on the device: all past keys are fetched, so the host plans once and waits
    for no choice. Without, only chosen keys are fetched, and the host reads the choices in every call.

    The pairs are known only within a call, so `sees` raises `ValueError`; their number is known beforehand.
    """

    short_name: ClassVar[str] = "topk"

    blocks: int
    causal: bool = True
    unit_tokens: int = 128
    fetch_all: bool = False

    def __post_init__(self) -> None:
        require("blocks", self.blocks, 1, "1 keeps only the own block")
        require("unit", self.unit_tokens, 1, "128 is the kernels' block")
        if self.causal not in (0, 1):
            raise ValueError(
                f"causal={self.causal}: 1 has a block's first query choose, 0 the mean of all its queries, which lets"
                " later tokens decide what earlier ones see"
            )
        if self.fetch_all not in (0, 1):
            raise ValueError(f"fetch_all={self.fetch_all}: 1 fetches all past keys, 0 the chosen ones")
        if self.fetch_all and self.unit_tokens != DEFAULT_BLOCK_TOKENS:
            raise ValueError(
                f"fetch_all=1 with unit={self.unit_tokens}: tables are made on the device for the kernels' blocks of"
                f" {DEFAULT_BLOCK_TOKENS} tokens only; leave unit or fetch_all out"
            )
        for name in ("causal", "fetch_all"):  # 1 and True must give equal rules
            object.__setattr__(self, name, bool(getattr(self, name)))

    @property
    def width(self) -> int:
        """The number of past units that a unit chooses at most."""
        return self.blocks - 1

    @property
    def awaits_content(self) -> bool:
        return True

    @property
    def sure(self) -> Rule:
        return BigBird(1, 0, 0, 0, self.unit_tokens)

    def num_chosen(self, positions: Positions) -> Positions:
        return np.minimum(self.width, positions // self.unit_tokens) * self.unit_tokens

    def sees(self, q: Positions, k: Positions) -> Mask:
        raise ValueError(
            f"{self}: which blocks it keeps is chosen by queries and keys, anew in every call, so it has no pairs"
            " before one; attend through PatternedAttention (--pattern, the trainer's pattern), or plan with a static"
            " rule"
        )


@dataclass(frozen=True)
class Chosen(Rule):
    """The blocks that content chose for one head in one document: `choices` are the bytes of `past`, row by row."""

    num_units: int
    choices: bytes = field(repr=False)
    unit_tokens: int = 128

    @property
    def for_one_call(self) -> bool:
        return True

    @cached_property
    def past(self) -> Choices:
        return np.frombuffer(self.choices, dtype=np.int32).reshape(self.num_units, -1)

    def sees(self, q: Positions, k: Positions) -> Mask:
        # Positions of whole blocks may exceed the document's end.
        row, column = np.minimum(q // self.unit_tokens, self.num_units - 1), k // self.unit_tokens
        seen: Mask = row == column
        for choice in range(self.past.shape[1]):
            seen = seen | (self.past[row, choice] == column)
        return seen

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        if self.unit_tokens % block:
            return super().row_kinds(rows, columns, block, causal)
        per_unit = self.unit_tokens // block
        units = rows // per_unit
        kinds = np.zeros((len(rows), self.num_units), dtype=np.uint8)
        past = self.past[units]
        at, choice = np.nonzero(past >= 0)
        kinds[at, past[at, choice]] = FULL
        kinds[np.arange(len(rows)), units] = FULL
        if per_unit == 1:  # chosen units lie before the diagonal
            return kinds[:, columns]
        kinds = kinds[:, columns // per_unit]
        kinds[columns[None, :] > rows[:, None]] = NONE
        return kinds


@dataclass(frozen=True)
class ByDocument(Rule):
    """One rule per packed document, for patterns that content chose by document."""

    rules: tuple[Rule, ...]

    @property
    def unit(self) -> int:
        return math.gcd(*(rule.unit for rule in self.rules))

    @property
    def for_one_call(self) -> bool:
        return True

    def of_document(self, number: int) -> Rule:
        return self.rules[number]


def top_ks_of(rule: Rule) -> tuple[TopK, ...]:
    """The `TopK` parts of `rule`, without duplicates."""
    if isinstance(rule, TopK):
        return (rule,)
    if isinstance(rule, Union):
        return tuple(dict.fromkeys(top_k for part in rule.rules for top_k in top_ks_of(part)))
    return ()


def chosen_without_host(rules: Sequence[Rule]) -> bool:
    """Whether content chooses for heads that follow `rules`, and only on the device."""
    top_ks = [top_k for rule in rules for top_k in top_ks_of(rule)]
    return bool(top_ks) and all(top_k.fetch_all for top_k in top_ks)


def resolved(rule: Rule, chosen: Mapping[TopK, Rule]) -> Rule:
    """`rule` with each `TopK` replaced by its chosen blocks."""
    if isinstance(rule, TopK):
        return chosen[rule]
    if isinstance(rule, Union) and rule.awaits_content:
        return Union(tuple(resolved(part, chosen) for part in rule.rules))
    return rule
