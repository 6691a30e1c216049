"""The choice of layout and exchange for one sparse pattern. Training chooses one layout for all layers instead
(`attention.autolayout`) and always exchanges hop by hop.

A pure function of pattern, sizes and cost model; no torch, no measurement and no communication in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_ring.attention.autolayout import (
    BLOCK_TOKENS,
    LayoutPrice,
    Sizes,
    in_whole_blocks,
    layouts_for,
    price,
    rank,
    sparse_kernel_s,
)
from elastic_ring.attention.layouts.layout import tokens_max_over_mean
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.costs import CostModel

Exchange = Literal["hops", "packed"]
"""`hops`: exact ranges, one hop at a time, overlapped with the kernels (a halo exchange for windows).
`packed`: the same bytes in one all-to-all-v before the kernels."""


@dataclass(frozen=True)
class Candidate(LayoutPrice):
    """The price of a layout with an exchange.

    `most_bytes` is received by the busiest rank, `num_messages` by all ranks together.
    """

    exchange: Exchange
    most_bytes: int
    num_messages: int

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

    With `whole_blocks` only layouts that do not cut blocks of 128 tokens are considered, which GPUs run faster.
    Raises `ValueError` if there is none.
    """
    weighed: list[Candidate] = []
    for layout in layouts_for(pattern, seq_len, cp, balance_limit):
        if not whole_blocks or in_whole_blocks(layout):
            schedule = plan_sparse(pattern, layout, sizes.num_heads, sizes.num_kv_heads)
            weighed += price_exchanges(schedule, sizes, cost_model)
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


def price_exchanges(schedule: Schedule, sizes: Sizes, cost_model: CostModel) -> list[Candidate]:
    """The forward pass with each exchange: kernels and messages overlapped, or in sequence."""
    hops, ranks = price(schedule, sizes, cost_model), range(schedule.cp)
    num_bytes = [schedule.received_bytes(rank, sizes.head_dim, sizes.itemsize) for rank in ranks]
    num_pulls = [sum(schedule.num_head_tokens(rank, hop) > 0 for hop in ranks) for rank in ranks]
    packed_s = max(
        sparse_kernel_s(schedule, rank, num_pulls[rank] > 0, sizes.head_dim, cost_model)
        + cost_model.moving_s(num_bytes[rank], schedule.cp > 1)
        for rank in ranks
    )
    times: tuple[tuple[Exchange, float], ...] = (("hops", hops.forward_s), ("packed", packed_s))
    return [
        Candidate(
            hops.layout, hops.all_bytes, hops.work_max_over_mean, forward_s, exchange, max(num_bytes), sum(num_pulls)
        )
        for exchange, forward_s in times
    ]


def _reason(ranked: list[Candidate], rest: list[Candidate], limit: float) -> str:
    best = ranked[0]
    words = [str(best), f"tokens max/mean {tokens_max_over_mean(best.layout):.3f}"]
    if best.work_max_over_mean > limit:
        words.append(f"no layout has work max/mean within {limit}")
    if rest and rest[0].all_bytes < best.all_bytes:
        words.append(f"passed over as too uneven: {rest[0]}")
    other = next((c for c in ranked if c.layout != best.layout), None)
    if other is not None:
        words.append(f"next: {other}")
    return "; ".join(words)
