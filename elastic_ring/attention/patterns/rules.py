"""Sparsity rules: which keys a query of one head may see, by position inside one document, besides causality.

A rule is a frozen dataclass: hashable, printable, independent of rank, mesh and block size. No heads, layouts or
kernels in this file: `sparse.SparsePattern` assigns rules to heads, `blocks` turns a rule into block lists. numpy
only.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]
Kinds = NDArray[np.uint8]

NONE, PART, FULL = 0, 1, 2
"""How much of a block pair a rule keeps: no token pair, some (or not known to be all), or all."""

_STRIP_ELEMENTS = 1 << 22


class Rule:
    """The base class of rules. A subclass must define `sees`, and `unit` (tokens) if it depends on position // unit.

    Positions count from the start of the document. `awaits_content`, `for_one_call`, `sure`, `num_chosen` and
    `of_document` are for content-chosen rules (see `content`). A rule with a `short_name` prints in the form that
    `parse.parse_pattern` reads.
    """

    short_name: ClassVar[str] = ""

    def __str__(self) -> str:
        if "short_name" not in vars(type(self)):  # an inherited name belongs to another rule
            return repr(self)
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                arguments.append(str(value))
            elif value != field.default:
                arguments.append(f"{field.name.removesuffix('_tokens')}={int(value)}")
        return f"{self.short_name}:{','.join(arguments)}" if arguments else self.short_name

    @property
    def unit(self) -> int:
        return 1

    @property
    def awaits_content(self) -> bool:
        """Whether part of the rule depends on queries and keys that are not known yet."""
        return False

    @property
    def for_one_call(self) -> bool:
        """Whether the rule holds the choices of one attention call, so that its plans must not be cached."""
        return False

    @property
    def sure(self) -> Rule:
        """The part of the rule that does not depend on content."""
        return self

    def num_chosen(self, positions: Positions) -> Positions:
        """(n,): upper bound on the keys that content chooses, besides `sure`, for queries at `positions` (n,)."""
        return np.zeros_like(positions)

    def of_document(self, number: int) -> Rule:
        """The rule of packed document `number`; content-chosen rules differ per document."""
        return self

    def sees(self, q: Positions, k: Positions) -> Mask:
        """Whether q may see k, elementwise for positions that broadcast, e.g. q (n, 1) and k (1, m).

        The result need not be causal: callers drop later keys.
        """
        raise NotImplementedError

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        """(num_blocks, num_blocks) of NONE, PART, FULL, queries first, for blocks of `block` tokens.

        Only entries with key <= query are valid. On the diagonal FULL means all causal pairs.
        """
        per_block = block // math.gcd(self.unit, block)
        kinds = np.zeros((num_blocks, num_blocks), dtype=np.uint8)
        strip = max(1, _STRIP_ELEMENTS // (num_blocks * per_block**2))
        for first in range(0, num_blocks, strip):
            rows = np.arange(first, min(num_blocks, first + strip), dtype=np.int64)
            kinds[rows] = self.row_kinds(rows, num_blocks, block)
        return kinds

    def row_kinds(self, rows: Positions, num_blocks: int, block: int) -> Kinds:
        """(len(rows), num_blocks): the rows `rows` of `kinds`."""
        cell = math.gcd(self.unit, block)
        per_block = block // cell
        keys = (np.arange(num_blocks * per_block, dtype=np.int64) * cell)[None, :]
        queries = ((rows[:, None] * per_block + np.arange(per_block)) * cell).reshape(-1, 1)
        seen = np.broadcast_to(self.sees(queries, keys), (queries.size, keys.size))
        shaped = seen.reshape(len(rows), per_block, num_blocks, per_block)
        some, every = shaped.any(axis=(1, 3)), shaped.all(axis=(1, 3))
        return by_extremes(some, every)

    def __or__(self, other: Rule) -> Rule:
        return Union((self, other))


@dataclass(frozen=True)
class Dense(Rule):
    """Every earlier key: plain causal attention.

    ::

        #
        ##
        ###
        ####
    """

    short_name: ClassVar[str] = "dense"

    def sees(self, q: Positions, k: Positions) -> Mask:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), dtype=bool)

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        return np.full((num_blocks, num_blocks), FULL, dtype=np.uint8)


@dataclass(frozen=True)
class Window(Rule):
    """The last `tokens` keys, the query's own among them (Longformer, Beltagy et al. 2020, arXiv:2004.05150).

    ::

        #
        ##
        .##
        ..##
    """

    short_name: ClassVar[str] = "window"

    tokens: int

    def __post_init__(self) -> None:
        require("tokens", self.tokens, 1, "a window holds at least the query's own token")

    def sees(self, q: Positions, k: Positions) -> Mask:
        return q - k < self.tokens

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        distance = np.arange(1 - num_blocks, num_blocks, dtype=np.int64) * block
        return by_distance(by_extremes(distance - block + 1 < self.tokens, distance + block - 1 < self.tokens))


@dataclass(frozen=True)
class Sinks(Rule):
    """The first `tokens` keys of the document (attention sinks, Xiao et al. 2023, arXiv:2309.17453).

    Usually joined with a window: `Sinks(4) | Window(1024)`.

    ::

        #
        #.
        #..
        #...
    """

    short_name: ClassVar[str] = "sinks"

    tokens: int

    def __post_init__(self) -> None:
        require("tokens", self.tokens, 1, "leave Sinks out to have none")

    def sees(self, q: Positions, k: Positions) -> Mask:
        return np.broadcast_to(k < self.tokens, np.broadcast_shapes(q.shape, k.shape))

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        start = np.arange(num_blocks, dtype=np.int64) * block
        row = by_extremes(start < self.tokens, start + block <= self.tokens)
        return np.broadcast_to(row, (num_blocks, num_blocks)).copy()


@dataclass(frozen=True)
class Strided(Rule):
    """Every `every`-th unit counted back from the query's own, and the last `local` units (Sparse Transformer,
    Child et al. 2019, arXiv:1904.10509). The paper uses `unit_tokens` 1; 128 strides whole blocks.

    ::

        #
        ##
        .##
        #.##
        .#.##
    """

    short_name: ClassVar[str] = "strided"

    every: int
    local: int = 1
    unit_tokens: int = 128

    def __post_init__(self) -> None:
        require("every", self.every, 1, "1 is dense attention")
        require("local", self.local, 0, "0 leaves only the stride")
        require("unit_tokens", self.unit_tokens, 1, "1 strides single tokens")

    @property
    def unit(self) -> int:
        return self.unit_tokens

    def sees(self, q: Positions, k: Positions) -> Mask:
        back = q // self.unit_tokens - k // self.unit_tokens
        return (back < self.local) | (back % self.every == 0)


@dataclass(frozen=True)
class Union(Rule):
    """The pairs that any of `rules` keeps, in one softmax; a key kept by several rules counts once."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules=(): a union of no rules lets nothing through; give at least one")

    def __str__(self) -> str:
        return "+".join(map(str, self.rules))

    @property
    def unit(self) -> int:
        return math.gcd(*(rule.unit for rule in self.rules))

    @property
    def awaits_content(self) -> bool:
        return any(rule.awaits_content for rule in self.rules)

    @property
    def for_one_call(self) -> bool:
        return any(rule.for_one_call for rule in self.rules)

    @property
    def sure(self) -> Rule:
        return Union(tuple(rule.sure for rule in self.rules)) if self.awaits_content else self

    def num_chosen(self, positions: Positions) -> Positions:
        return sum((rule.num_chosen(positions) for rule in self.rules), np.zeros_like(positions))

    def sees(self, q: Positions, k: Positions) -> Mask:
        return reduce(np.logical_or, (rule.sees(q, k) for rule in self.rules))

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        return reduce(np.maximum, (rule.kinds(num_blocks, block) for rule in self.rules))


def by_extremes(some: Any, every: Any) -> Kinds:
    """Kinds from `some`, whether any token pair of the blocks is kept, and `every`, whether all are."""
    return np.asarray(some, dtype=np.uint8) + np.asarray(every, dtype=np.uint8)


def by_distance(kinds: NDArray[Any]) -> NDArray[Any]:
    """Toeplitz (n, n), queries first, from (2 n - 1,) values for the distances query - key from 1 - n to n - 1."""
    num_blocks = (len(kinds) + 1) // 2
    return np.lib.stride_tricks.sliding_window_view(kinds[::-1], num_blocks)[::-1].copy()


def require(name: str, value: int, least: int, way_out: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}; {way_out}")
