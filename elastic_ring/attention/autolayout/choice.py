"""The choice of layout and exchange for a sparse pattern on a ring, by bytes, balance and predicted time.

A pure function of pattern, sizes and cost model; no measurement and no communication in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from elastic_ring.attention.autolayout.cost_model import CostModel
from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.layouts.placement import (
    balanced,
    residue_class,
    striped,
    tokens_max_over_mean,
    work_max_over_mean,
)
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.rules import Rule, Strided, Union
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.plan.sparse_tiles import tiles

__all__ = [
    "Candidate",
    "Choice",
    "CostModel",
    "Exchange",
    "Sizes",
    "choose",
    "in_whole_blocks",
    "layouts_for",
    "price",
    "rank",
]  # fmt: skip

Exchange = Literal["hops", "packed"]
"""`hops`: exact ranges, one hop at a time, overlapped with the kernels (a halo exchange for windows).
`packed`: the same bytes in one all-to-all-v before the kernels."""

SLACK = 1.05

BLOCK_TOKENS = DEFAULT_BLOCK_TOKENS
"""Block size of the GPU kernels. Equals `kernels.block_tables.BLOCK_TOKENS`, whose module imports torch."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention calls. `itemsize` is in bytes per element."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    itemsize: int = 2


@dataclass(frozen=True)
class Candidate:
    """A layout with an exchange, and its predicted forward pass.

    `most_bytes` is received by the busiest rank, `all_bytes` and `num_messages` by all ranks together; `forward_s` is
    the time of the slowest rank.
    """

    layout: Layout
    exchange: Exchange
    most_bytes: int
    all_bytes: int
    num_messages: int
    work_max_over_mean: float
    forward_s: float

    def __str__(self) -> str:
        return (
            f"{self.layout.name}/{self.exchange}: {self.most_bytes:,} bytes to the busiest rank,"
            f" {self.num_messages} messages, work max/mean {self.work_max_over_mean:.3f},"
            f" {self.forward_s * 1e3:.3f} ms"
        )


@dataclass(frozen=True)
class Choice:
    """The chosen schedule and exchange, the reasons in words, and all candidates, best first."""

    schedule: Schedule
    exchange: Exchange
    why: str
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def ahead(self) -> int:
        """For `RingAttention`: the number of hops posted ahead of their kernels."""
        return 1 if self.exchange == "hops" else max(1, self.schedule.cp - 1)


def choose(
    pattern: SparsePattern,
    seq_len: int,
    cp: int,
    sizes: Sizes,
    cost_model: CostModel = CostModel(),  # noqa: B008 (frozen)
    *,
    balance_limit: float = 1.05,
    whole_blocks: bool = False,
) -> Choice:
    """The best candidate by `rank` among all layouts of `layouts_for` with every exchange.

    With `whole_blocks` only layouts that do not split blocks of 128 tokens are considered, as GPU kernels need.
    Raises `ValueError` if there is none.
    """
    weighed: list[Candidate] = []
    for layout in layouts_for(pattern, seq_len, cp, balance_limit):
        if not whole_blocks or in_whole_blocks(layout):
            weighed += price(pattern, layout, sizes, cost_model)
    if not weighed:
        raise ValueError(
            f"seq_len={seq_len} over cp={cp}: no layout cuts between blocks of {BLOCK_TOKENS} tokens; take a multiple"
            f" of {BLOCK_TOKENS * cp} tokens"
        )
    ranked, rest = rank(weighed, balance_limit)
    best = ranked[0]
    why = _reason(ranked, rest, balance_limit)
    schedule = plan_sparse(pattern, best.layout, sizes.num_heads, sizes.num_kv_heads)
    return Choice(schedule, best.exchange, why, (*ranked, *rest))


class Rankable(Protocol):
    """The attributes that `rank` compares."""

    @property
    def work_max_over_mean(self) -> float: ...

    @property
    def all_bytes(self) -> int: ...

    @property
    def forward_s(self) -> float: ...


W = TypeVar("W", bound=Rankable)


def rank(weighed: Sequence[W], balance_limit: float = 1.05) -> tuple[list[W], list[W]]:
    """(balanced candidates, best first; the others). Best: fewest bytes within 5 % (`SLACK`) of the fastest.

    A candidate is balanced if its work max/mean is at most `balance_limit` or, if none is, within `SLACK` of the
    smallest. Bytes decide before predicted time, because communication that overlaps on an idle machine may not on a
    busy one.
    """
    evenest = min(c.work_max_over_mean for c in weighed)
    limit = balance_limit if evenest <= balance_limit else evenest * SLACK
    even = [c for c in weighed if c.work_max_over_mean <= limit]
    fast_s = SLACK * min(c.forward_s for c in even)
    ranked = sorted(even, key=lambda c: (c.forward_s > fast_s, c.all_bytes, c.forward_s))
    rest = sorted((c for c in weighed if c.work_max_over_mean > limit), key=lambda c: (c.all_bytes, c.forward_s))
    return ranked, rest


def in_whole_blocks(layout: Layout) -> bool:
    """Whether all segments of `layout` begin and end at multiples of 128 tokens."""
    return all(edge % BLOCK_TOKENS == 0 for own in layout.segments for segment in own for edge in segment)


def layouts_for(pattern: SparsePattern, seq_len: int, cp: int, balance_limit: float = 1.05) -> tuple[Layout, ...]:
    """The candidate layouts: contiguous, zigzag, striped, by residue class for dilated and strided rules, balanced."""
    unit = max(1, min(pattern.block, -(-seq_len // (2 * cp))))
    found = [contiguous(seq_len, cp), zigzag(seq_len, cp), striped(seq_len, cp, unit_tokens=unit)]
    parts = parts_of(pattern.heads)
    rates = {(max(rule.rates), rule.unit_tokens) for rule in parts if isinstance(rule, Dilated)}
    rates |= {(rule.every, rule.unit_tokens) for rule in parts if isinstance(rule, Strided)}
    found += [residue_class(seq_len, cp, rate, unit_tokens=tokens) for rate, tokens in sorted(rates) if rate > 1]
    found.append(balanced(pattern.row_pairs(seq_len), cp, unit_tokens=unit, limit=balance_limit)[0])
    seen: dict[tuple[object, ...], Layout] = {}
    for layout in found:
        seen.setdefault(layout.segments, layout)
    return tuple(seen.values())


def price(pattern: SparsePattern, layout: Layout, sizes: Sizes, cost_model: CostModel) -> list[Candidate]:
    """Price the forward pass on `layout` with each exchange: kernels and messages overlapped, or in sequence.

    Backward work and bytes are proportional, so they rank layouts equally. With `cost_model.per_tile` the tiles of all
    ranks are computed, which takes as long as planning the first call.
    """
    schedule = plan_sparse(pattern, layout, sizes.num_heads, sizes.num_kv_heads)
    cp = layout.cp
    spread = work_max_over_mean(layout, pattern.row_pairs(layout.seq_len))
    num_pulls = [sum(schedule.num_head_tokens(rank, hop) > 0 for hop in range(cp)) for rank in range(cp)]
    kernels = [sparse_kernels(schedule, rank, num_pulls[rank] > 0, cost_model) for rank in range(cp)]
    kernel_s = [4 * sizes.head_dim * n / cost_model.kernel_flops + cost_model.call_s * calls for calls, n in kernels]
    num_bytes = [schedule.received_bytes(rank, sizes.head_dim, sizes.itemsize) for rank in range(cp)]
    hops_s, packed_s = [], []
    for rank in range(cp):
        # The first hop overlaps only with the kernels of the rank's own keys, a later hop with those of earlier hops.
        moving_s = cost_model.moving_s(num_bytes[rank], num_pulls[rank])
        hops_s.append(
            cost_model.together_s(kernel_s[rank], moving_s) + (cost_model.message_s if num_pulls[rank] else 0.0)
        )
        packed_s.append(kernel_s[rank] + cost_model.moving_s(num_bytes[rank], cp > 1))
    times: tuple[tuple[Exchange, list[float]], ...] = (("hops", hops_s), ("packed", packed_s))
    return [
        Candidate(layout, exchange, max(num_bytes), sum(num_bytes), sum(num_pulls), spread, max(seconds))
        for exchange, seconds in times
    ]


def sparse_kernels(schedule: Schedule, cp_rank: int, fetches: bool, cost_model: CostModel) -> tuple[int, int]:
    """(kernel calls, query-key pairs) of one rank's forward pass. A masked tile computes all its pairs."""
    if not cost_model.per_tile:
        return 1 + fetches, schedule.work(cp_rank)
    own = [tile for hop in tiles(schedule, cp_rank) for tile in hop]
    return len(own), sum(tile.num_pairs * len(tile.heads) for tile in own)


def parts_of(rules: tuple[Rule, ...]) -> list[Rule]:
    """`rules` with unions replaced by their parts, recursively."""
    found: list[Rule] = []
    for rule in dict.fromkeys(rules):
        found += parts_of(rule.rules) if isinstance(rule, Union) else [rule]
    return found


def _reason(ranked: list[Candidate], rest: list[Candidate], limit: float) -> str:
    best = ranked[0]
    words = [str(best)]
    words.append(f"tokens max/mean {tokens_max_over_mean(best.layout):.3f}")
    if best.work_max_over_mean > limit:
        words.append(f"no layout has work max/mean within {limit}")
    if rest and rest[0].all_bytes < best.all_bytes:
        words.append(f"passed over as too uneven: {rest[0]}")
    other = next((c for c in ranked if c.layout != best.layout), None)
    if other is not None:
        words.append(f"next: {other}")
    return "; ".join(words)
