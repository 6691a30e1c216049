"""Sparsity rules: which keys a query of one head may see, by position inside one document, besides causality.

A rule is a frozen dataclass: hashable, printable, independent of rank, mesh and block size. No heads, layouts or
kernels in this file: `sparse.SparsePattern` assigns rules to heads, `blocks` turns a rule into block lists. numpy
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]
Kinds = NDArray[np.uint8]
Span = tuple[Positions, Positions, int]
"""For each of some rows of blocks the key blocks first <= j < last, and the kind that they have at least."""

NONE, PART, FULL = 0, 1, 2
"""How much of a block pair a rule keeps: no token pair, some (or not known to be all), or all."""

_STRIP_ELEMENTS = 1 << 22


class Rule:
    """The base class of rules. A subclass must define `sees`, and `unit_tokens` if it reads position // unit_tokens.

    Positions count from the start of the document. `awaits_content`, `for_one_call`, `sure`, `num_chosen` and
    `of_document` are for content-chosen rules (see `content`). A rule with a `short_name` prints in the form that
    `parse.parse_pattern` reads.
    """

    short_name: ClassVar[str] = ""
    unit_tokens: int = 1

    def __str__(self) -> str:
        if "short_name" not in vars(type(self)):  # an inherited name belongs to another rule
            return repr(self)
        arguments = []
        for own in fields(self):  # type: ignore[arg-type]
            value = getattr(self, own.name)
            if own.default is MISSING:
                arguments.append(str(value))
            elif value != own.default:
                arguments.append(f"{own.name.removesuffix('_tokens')}={int(value)}")
        return f"{self.short_name}:{','.join(arguments)}" if arguments else self.short_name

    @property
    def unit(self) -> int:
        return self.unit_tokens

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

    @property
    def sees_ahead(self) -> bool:
        """Whether the rule defines which later keys a query sees, as attention that is not causal needs."""
        return False

    @property
    def num_ahead(self) -> int:
        """How many later keys the rule looks ahead; causal attention never sees them."""
        return 0

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span] | None:
        """The blocks that the blocks `rows` (m,) keep, in closed form: NONE outside all spans; where spans overlap, the
        larger kind holds. None: `row_kinds` must look at pairs of blocks.

        Spans may reach beyond the document and, where `causal`, beyond the row: callers cut them.
        """
        return None

    def kinds(self, num_blocks: int, block: int, causal: bool = True) -> Kinds:
        """(num_blocks, num_blocks) of NONE, PART, FULL, queries first, for blocks of `block` tokens: for plots and
        tests of short documents."""
        every = np.arange(num_blocks, dtype=np.int64)
        kinds = [self.row_kinds(every[some], every, block, causal) for some in self.strips(every, every, block)]
        return np.concatenate(kinds)

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        """(len(rows), len(columns)) of NONE, PART, FULL for query blocks and ascending key blocks.

        Where `causal`, later blocks are NONE, and on the diagonal FULL means all causal pairs.
        """
        spans = self.spans(rows, int(columns.max(initial=-1)) + 1, block, causal)
        if spans is None:
            kinds = self.kinds_by_pairs(rows, columns, block)
            if causal:
                kinds[columns[None, :] > rows[:, None]] = NONE
            return kinds
        painted = np.zeros((2, len(rows), len(columns) + 1), dtype=np.int16)
        at = np.arange(len(rows))
        for first, last, kind in spans:
            last = np.minimum(last, rows + 1) if causal else last
            begin, end = (np.searchsorted(columns, edge) for edge in (first, np.maximum(first, last)))
            painted[kind - 1, at, begin] += 1
            painted[kind - 1, at, end] -= 1
        seen = np.cumsum(painted[:, :, :-1], axis=2, dtype=np.int16) > 0
        return by_extremes(seen[0] | seen[1], seen[1])

    def strips(self, rows: Positions, columns: Positions, block: int) -> list[slice]:
        """Slices of `rows` for which `row_kinds` takes little memory each."""
        per_block = 1 if self.spans(rows[:0], 0, block) is not None else block // math.gcd(self.unit, block)
        return strips(len(rows), len(columns) * per_block**2)

    def kinds_by_pairs(self, rows: Positions, columns: Positions, block: int) -> Kinds:
        """As `row_kinds`, from `sees` for every pair, later keys included."""
        cell = math.gcd(self.unit, block)
        per_block = block // cell
        queries, keys = (
            ((blocks[:, None] * per_block + np.arange(per_block)) * cell).ravel() for blocks in (rows, columns)
        )
        seen = np.broadcast_to(self.sees(queries[:, None], keys[None, :]), (queries.size, keys.size))
        shaped = seen.reshape(len(rows), per_block, len(columns), per_block)
        return by_extremes(shaped.any(axis=(1, 3)), shaped.all(axis=(1, 3)))

    def token_pairs(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Mask:
        """(n, block, block): the kept pairs of tokens of the blocks rows[i] and columns[i] (n,)."""
        cell = math.gcd(self.unit, block)
        cells, inside = np.arange(0, block, cell), np.arange(block)
        q, k = ((blocks * block)[:, None, None] for blocks in (rows, columns))
        seen = np.broadcast_to(self.sees(q + cells[:, None], k + cells), (len(rows), len(cells), len(cells)))
        seen = seen.repeat(cell, axis=1).repeat(cell, axis=2)
        return seen & (k + inside <= q + inside[:, None]) if causal else seen

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

    @property
    def sees_ahead(self) -> bool:
        return True

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span]:
        return [(np.zeros_like(rows), np.full_like(rows, num_blocks), FULL)]


@dataclass(frozen=True)
class Window(Rule):
    """The last `tokens` keys, the query's own among them (Longformer, Beltagy et al. 2020, arXiv:2004.05150). Attention
    that is not causal also sees the next `ahead` keys.

    ::

        #
        ##
        .##
        ..##
    """

    short_name: ClassVar[str] = "window"

    tokens: int
    ahead: int = 0

    def __post_init__(self) -> None:
        require("tokens", self.tokens, 1, "a window holds at least the query's own token")
        require("ahead", self.ahead, 0, "0 sees no later key")

    @property
    def sees_ahead(self) -> bool:
        return self.ahead > 0

    @property
    def num_ahead(self) -> int:
        return self.ahead

    def num_blocks(self, block: int) -> int:
        """The fewest blocks of `block` tokens, the query's own among them, that hold its past wherever it stands."""
        return 1 + -(-(self.tokens - 1) // block)

    def sees(self, q: Positions, k: Positions) -> Mask:
        return (q - k < self.tokens) & (k - q <= self.ahead)

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span]:
        back, ahead = (self.tokens + block - 2) // block, (self.ahead + block - 1) // block
        back_full, ahead_full = self.tokens // block - 1, 0 if causal else (self.ahead + 1) // block - 1
        return [(rows - back, rows + ahead + 1, PART), (rows - back_full, rows + ahead_full + 1, FULL)]


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

    @property
    def sees_ahead(self) -> bool:
        return True

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span]:
        none, some, full = (np.full_like(rows, n) for n in (0, -(-self.tokens // block), self.tokens // block))
        return [(none, some, PART), (none, full, FULL)]


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

    def sees(self, q: Positions, k: Positions) -> Mask:
        back = q // self.unit_tokens - k // self.unit_tokens
        return (back < self.local) | (back % self.every == 0)

    def kinds_by_pairs(self, rows: Positions, columns: Positions, block: int) -> Kinds:
        if self.unit_tokens % block:
            return super().kinds_by_pairs(rows, columns, block)
        row, column = (blocks * block // self.unit_tokens for blocks in (rows, columns))
        back = np.arange(int(row.max(initial=0)) + int(column.max(initial=0)) + 1, dtype=np.int64)
        kinds = self.sees(back * self.unit_tokens, np.zeros_like(back)).astype(np.uint8) * np.uint8(FULL)
        return kinds[row[:, None] - column[None, :]]  # later keys, which attention never sees here, wrap around


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

    @property
    def sees_ahead(self) -> bool:
        return all(rule.sees_ahead for rule in self.rules)

    @property
    def num_ahead(self) -> int:
        return max(rule.num_ahead for rule in self.rules)

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span] | None:
        parts = [rule.spans(rows, num_blocks, block, causal) for rule in self.rules]
        return None if None in parts else [span for spans in parts for span in spans or ()]

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        return reduce(np.maximum, (rule.row_kinds(rows, columns, block, causal) for rule in self.rules))

    def token_pairs(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Mask:
        return reduce(np.logical_or, (rule.token_pairs(rows, columns, block, causal) for rule in self.rules))


def by_extremes(some: Any, every: Any) -> Kinds:
    """Kinds from `some`, whether any token pair of the blocks is kept, and `every`, whether all are."""
    return np.asarray(some, dtype=np.uint8) + np.asarray(every, dtype=np.uint8)


def unit_spans(keys: Iterable[tuple[Positions, Positions]], unit: int, block: int) -> list[Span] | None:
    """Whole units first <= j < last as spans of blocks that divide units; None where blocks do not."""
    per_unit = unit // block
    return None if unit % block else [(first * per_unit, last * per_unit, FULL) for first, last in keys]


def strips(num_rows: int, num_columns: int) -> list[slice]:
    """Slices of the rows, so that each strip of the columns stays small."""
    height = max(1, _STRIP_ELEMENTS // max(1, num_columns))
    return [slice(first, min(num_rows, first + height)) for first in range(0, num_rows, height)]


def require(name: str, value: int, least: int, way_out: str) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}; {way_out}")
