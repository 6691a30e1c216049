"""Which key a query of one head may see, as a rule over positions inside one document. Always causal on top.

A rule is a frozen dataclass: hashable, printable, the same on every rank, mesh and block size. It knows
nothing of heads, layouts or kernels; `sparse.SparsePattern` gives each head its rule, `blocks` turns a rule
into lists of blocks. numpy only.
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
"""What a rule says of a pair of blocks: no pair of tokens, some (or cheap to say: not surely all), or all."""

_STRIP_ELEMENTS = 1 << 22


class Rule:
    """The base of all rules. A subclass gives `sees`; `unit`, in tokens, when it only looks at position // unit.

    Positions count from the start of the document, so a packed document is seen as if it were alone. The other
    properties and `of_document` are for rules with a part that content chooses, which are in `content`. A rule that has
    a `short_name` is told as `spec.parse_pattern` reads it.
    """

    short_name: ClassVar[str] = ""

    def __str__(self) -> str:
        if "short_name" not in vars(type(self)):  # a subclass of one that has a name is another rule
            return repr(self)
        told = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                told.append(str(value))
            elif value != field.default:
                told.append(f"{field.name.removesuffix('_tokens')}={int(value)}")
        return f"{self.short_name}:{','.join(told)}" if told else self.short_name

    @property
    def unit(self) -> int:
        return 1

    @property
    def awaits_content(self) -> bool:
        """Whether some part of it is chosen by queries and keys that are not known yet."""
        return False

    @property
    def for_one_call(self) -> bool:
        """Whether it holds what content chose in one attention call: what is planned for it is not remembered."""
        return False

    @property
    def sure(self) -> Rule:
        """What it keeps whatever content chooses."""
        return self

    def num_chosen(self, positions: Positions) -> Positions:
        """(n,): how many keys besides `sure` content chooses for the queries at `positions`, at most."""
        return np.zeros_like(positions)

    def of_document(self, number: int) -> Rule:
        """The rule of the packed document with this number; content chooses for each one apart."""
        return self

    def sees(self, q: Positions, k: Positions) -> Mask:
        """For positions that broadcast, e.g. q (n, 1) and k (1, m): may q see k? Later keys are cut off elsewhere."""
        raise NotImplementedError

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        """(num_blocks, num_blocks) of NONE, PART, FULL, queries first. Only entries with key <= query count.

        On the diagonal FULL means all that causality leaves.
        """
        per_block = block // math.gcd(self.unit, block)
        kinds = np.zeros((num_blocks, num_blocks), dtype=np.uint8)
        strip = max(1, _STRIP_ELEMENTS // (num_blocks * per_block**2))
        for first in range(0, num_blocks, strip):
            rows = np.arange(first, min(num_blocks, first + strip), dtype=np.int64)
            kinds[rows] = self.row_kinds(rows, num_blocks, block)
        return kinds

    def row_kinds(self, rows: Positions, num_blocks: int, block: int) -> Kinds:
        """(len(rows), num_blocks): as `kinds`, of the query blocks `rows`."""
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

    Earlier queries see what causality leaves of them. Join it with a window: `Sinks(4) | Window(1024)`.

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
    Child et al. 2019, arXiv:1904.10509). `unit_tokens` 1 is the paper's, 128 strides whole blocks.

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
    """What any of its rules lets through, in one softmax: a key that two rules keep still counts once."""

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
    """Kinds from "the most favourable pair of the two blocks is seen" and "the least favourable is"."""
    return np.asarray(some, dtype=np.uint8) + np.asarray(every, dtype=np.uint8)


def by_distance(kinds: NDArray[Any]) -> NDArray[Any]:
    """(2 n - 1,), of the distances query minus key from 1 - n to n - 1, to (n, n), queries first."""
    num_blocks = (len(kinds) + 1) // 2
    return np.lib.stride_tricks.sliding_window_view(kinds[::-1], num_blocks)[::-1].copy()


def require(name: str, value: int, least: int, way_out: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}; {way_out}")
