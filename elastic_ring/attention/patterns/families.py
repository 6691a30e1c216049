"""Published sparse pattern families and learned profiles as rules.

Each family cites its paper and has a drawing. The base class and the basic rules are in `rules`; no layouts or
kernels in this file, and of heads only the assignment of one rule to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from elastic_ring.attention.patterns.rules import FULL, Kinds, Mask, Positions, Rule, Span, require, unit_spans


@dataclass(frozen=True)
class Dilated(Rule):
    """LongNet's dilated attention for one head (Ding et al. 2023, arXiv:2307.02486).

    Branch i splits the document into segments of `segments[i]` tokens and keeps every `rates[i]`-th unit of each,
    counted from `offset`: kept queries see kept keys of their segment. A query that no branch keeps sees nothing.
    One softmax runs over the union of the branches, so a key of two branches counts once; the paper weights
    branches by their softmax denominators and counts it in each. The paper uses `unit_tokens` 1; 128 dilates whole
    blocks, which block-sparse kernels run faster.

    ::

        #                 segments (4, 8, 16) units, rates (1, 2, 4)
        ##
        ###
        ####
        #.#.#
        ....##
        #.#.###
        ....####
        #...#...#
    """

    segments: tuple[int, ...]
    rates: tuple[int, ...]
    offset: int = 0
    unit_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.segments or len(self.segments) != len(self.rates):
            raise ValueError(f"segments={self.segments}, rates={self.rates}: give one rate for each segment length")
        require("unit_tokens", self.unit_tokens, 1, "1 dilates single tokens")
        require("offset", self.offset, 0, "use the head's index")
        for segment, rate in zip(self.segments, self.rates, strict=True):
            require("rates", rate, 1, "1 keeps every unit")
            if segment < 1 or segment % self.unit_tokens:
                raise ValueError(
                    f"segments={self.segments}: {segment} must be a positive multiple of unit_tokens={self.unit_tokens}"
                )

    def sees(self, q: Positions, k: Positions) -> Mask:
        seen = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=bool)
        for segment, rate in zip(self.segments, self.rates, strict=True):
            kept = self.offset % rate
            q_kept, k_kept = (x % segment // self.unit_tokens % rate == kept for x in (q, k))
            seen |= (q // segment == k // segment) & q_kept & k_kept
        return seen

    @property
    def sees_ahead(self) -> bool:
        return True

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        if block != self.unit_tokens:
            return super().row_kinds(rows, columns, block, causal)
        kept = np.zeros((len(rows), len(columns)), dtype=bool)
        for segment, rate in zip(self.segments, self.rates, strict=True):
            length, offset = segment // block, self.offset % rate
            at, to = (np.flatnonzero(blocks % length % rate == offset) for blocks in (rows, columns))
            first = rows[at] // length * length
            last = np.minimum(first + length, rows[at] + 1) if causal else first + length
            begin, end = (np.searchsorted(columns[to], edge) for edge in (first, last))
            counts = end - begin
            steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            kept[np.repeat(at, counts), to[np.repeat(begin, counts) + steps]] = True
        return kept.astype(np.uint8) * np.uint8(FULL)


def longnet_text(rules: Sequence[Rule]) -> str | None:
    """The short form that `parse.parse_pattern` reads for rules offset by 0, 1, ... units, or None for other rules."""
    first = rules[0]
    if not isinstance(first, Dilated):
        return None
    shifted = tuple(replace(first, offset=offset) for offset in range(max(first.rates)))
    if tuple(rules) != shifted:
        return None
    pairs = ",".join(f"{segment}/{rate}" for segment, rate in zip(first.segments, first.rates, strict=True))
    return f"longnet:{pairs}" + (f",unit={first.unit_tokens}" if first.unit_tokens != 1 else "")


@dataclass(frozen=True)
class BigBird(Rule):
    """A causal BigBird (Zaheer et al. 2020, arXiv:2007.14062): a window, global blocks at the start, and random blocks
    that each row draws from the blocks before its window. All numbers count units of `unit_tokens` tokens.

    The draw depends only on the seed and the row, not on the length of the sequence or the ring.

    ::

        #
        ##
        ###
        ####
        ##.##
        #..###
    """

    short_name: ClassVar[str] = "bigbird"

    window: int = 3
    globals: int = 1
    randoms: int = 3
    seed: int = 0
    unit_tokens: int = 128

    def __post_init__(self) -> None:
        require("window", self.window, 1, "a window holds at least the query's own block")
        require("globals", self.globals, 0, "0 has no global blocks")
        require("randoms", self.randoms, 0, "0 draws none")
        require("seed", self.seed, 0, "use a non-negative seed")
        require("unit_tokens", self.unit_tokens, 1, "128 is the kernels' block")

    def sees(self, q: Positions, k: Positions) -> Mask:
        row, column = q // self.unit_tokens, k // self.unit_tokens
        num_rows = int(row.max(initial=0)) + 1
        drawn = _drawn(self.seed, self.randoms, self.window, self.globals, 1 << (num_rows - 1).bit_length())
        at_random = np.zeros(np.broadcast_shapes(row.shape, column.shape), dtype=bool)
        for choice in range(self.randoms):
            at_random |= drawn[row, choice] == column
        return (row - column < self.window) | (column < self.globals) | at_random

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span] | None:
        row = rows * block // self.unit_tokens
        num_rows = int(row.max(initial=0)) + 1
        drawn = _drawn(self.seed, self.randoms, self.window, self.globals, 1 << (num_rows - 1).bit_length())[row].T
        near = (row - self.window + 1, row + 1)
        first = (np.zeros_like(row), np.full_like(row, self.globals))
        return unit_spans((near, first, *((column, column + 1) for column in drawn)), self.unit_tokens, block)


@lru_cache(maxsize=32)
def _drawn(seed: int, randoms: int, window: int, first: int, num_rows: int) -> Positions:
    """(num_rows, randoms): the distinct columns that each row draws; -1 where too few columns exist."""
    drawn = np.full((num_rows, randoms), -1, dtype=np.int64)
    for begun in range(0, num_rows, _DRAWN_TOGETHER):
        rows = np.arange(begun, min(begun + _DRAWN_TOGETHER, num_rows), dtype=np.uint64)
        tries = np.zeros((len(rows), 0), dtype=np.uint64)
        for row in range(begun, begun + len(rows)):
            num_open = row - window + 1 - first
            num_drawn = min(randoms, num_open)
            while num_drawn > 0:
                candidates = (tries[row - begun] % np.uint64(num_open)).astype(np.int64) + first
                _, places = np.unique(candidates, return_index=True)
                if len(places) >= num_drawn:
                    drawn[row, :num_drawn] = candidates[np.sort(places)[:num_drawn]]
                    break
                more = np.arange(tries.shape[1], 2 * max(randoms, tries.shape[1]), dtype=np.uint64)
                tries = np.concatenate([tries, _splitmix64(seed, rows[:, None], more[None, :])], axis=1)
    return drawn


_DRAWN_TOGETHER = 256
"""Rows hashed together. The first rows need many attempts because they draw nearly all of their few columns."""


def _splitmix64(*words: Any) -> Any:
    """Hash of integers or integer arrays, the same on every machine and library version."""
    state = np.zeros((1, 1), dtype=np.uint64)
    for word in words:
        state = state + np.asarray(word, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


@dataclass(frozen=True)
class Hierarchical(Rule):
    """All near units, and farther units with increasing stride (after the log-sparse patterns of Li et al. 2019,
    arXiv:1907.00235): at distances from base * 2^(l-1) to base * 2^l the last unit of every group of 2^l is kept,
    about base / 2 units per doubling of the distance.

    ::

        #                 base 2
        ##
        .##
        .###
        .#.##
        ...###
        ...#.##
        ...#.###
    """

    short_name: ClassVar[str] = "hierarchical"

    base: int = 4
    unit_tokens: int = 128

    def __post_init__(self) -> None:
        require("base", self.base, 1, "the first level holds at least the query's own unit")
        require("unit_tokens", self.unit_tokens, 1, "128 is the kernels' block")

    def sees(self, q: Positions, k: Positions) -> Mask:
        column = k // self.unit_tokens
        back = q // self.unit_tokens - column
        seen = back < self.base
        farthest = int(back.max(initial=0))
        reach, every = self.base, 2
        while reach <= farthest:
            seen |= (back >= reach) & (back < 2 * reach) & (column % every == every - 1)
            reach, every = 2 * reach, 2 * every
        return seen

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span] | None:
        row = rows * block // self.unit_tokens
        farthest = int(row.max(initial=0))
        kept = [(row - self.base + 1, row + 1)]
        reach, every = self.base, 2
        while reach <= farthest:
            nearest = (row - reach + 1) // every * every - 1
            for column in (nearest - every * n for n in range(-(-reach // every))):
                kept.append((column, np.where(column > row - 2 * reach, column + 1, column)))
            reach, every = 2 * reach, 2 * every
        return unit_spans(kept, self.unit_tokens, block)


@dataclass(frozen=True)
class Profile(Rule):
    """The key distances, in units, that one head keeps, such as those of a learned profile."""

    distances: tuple[int, ...]
    unit_tokens: int = 128

    def __post_init__(self) -> None:
        require("unit_tokens", self.unit_tokens, 1, "128 is the kernels' block")
        if not self.distances or list(self.distances) != sorted(set(self.distances)) or self.distances[0] != 0:
            raise ValueError(f"distances={self.distances}: give each once, ascending, beginning with 0 (the own unit)")

    def __str__(self) -> str:
        unit = f",unit={self.unit_tokens}" if self.unit_tokens != 128 else ""
        return f"profile:{'/'.join(map(str, self.distances))}{unit}"

    def sees(self, q: Positions, k: Positions) -> Mask:
        back = q // self.unit_tokens - k // self.unit_tokens
        kept = np.zeros(self.distances[-1] + 2, dtype=bool)
        kept[list(self.distances)] = True
        return kept[np.clip(back, -1, self.distances[-1] + 1)]

    def spans(self, rows: Positions, num_blocks: int, block: int, causal: bool = True) -> list[Span] | None:
        row = rows * block // self.unit_tokens
        return unit_spans(((row - d, row - d + 1) for d in self.distances), self.unit_tokens, block)
