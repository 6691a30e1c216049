"""Which layout and which exchange a sparse pattern gets on a ring, by bytes and balance, and why.

A pure function of pattern, sizes and a machine's few figures; measures and moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeVar

from elastic_ring.attention.families import Dilated
from elastic_ring.attention.layout import Layout, contiguous, zigzag
from elastic_ring.attention.machine import Machine
from elastic_ring.attention.placement import balanced, residue_class, striped, tokens_max_over_mean, work_max_over_mean
from elastic_ring.attention.rules import Rule, Strided, Union
from elastic_ring.attention.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern
from elastic_ring.attention.sparse_schedule import SparseSchedule, plan_sparse
from elastic_ring.attention.sparse_tiles import tiles

__all__ = ["Candidate", "Choice", "Exchange", "Machine", "Sizes", "choose", "in_whole_blocks", "layouts_for", "price",
           "rank"]  # fmt: skip

Exchange = Literal["hops", "packed", "gather", "ring"]
"""`hops`: exact ranges pulled hop by hop, under the kernels (a halo for windows). `packed`: the same bytes in
one all-to-all-v before the kernels. `gather`: everybody's keys at once. `ring`: everybody's, hop by hop."""

SENT_WHOLE = ("gather", "ring")

SLACK = 1.05

BLOCK_TOKENS = DEFAULT_BLOCK_TOKENS
"""Of the kernels of GPUs: `kernels.block_tables` says the same, and imports torch, which plans do not need."""


@dataclass(frozen=True)
class Sizes:
    """Of the attention calls that the plan is for. `itemsize` in bytes an element."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    itemsize: int = 2


@dataclass(frozen=True)
class Candidate:
    """One layout with one exchange: per rank the most bytes received in forward, the spread, the time."""

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
    """What was chosen, why in words, and every candidate that was weighed, best first."""

    schedule: SparseSchedule
    exchange: Exchange
    why: str
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def ahead(self) -> int:
        """For `SparseRingAttention`: how many hops are posted before their kernels."""
        return 1 if self.exchange == "hops" else max(1, self.schedule.cp - 1)


@lru_cache(maxsize=64)
def choose(
    pattern: SparsePattern,
    seq_len: int,
    cp: int,
    sizes: Sizes,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    *,
    balance_limit: float = 1.05,
    whole_blocks: bool = False,
) -> Choice:
    """The first by `rank` of every layout worth weighing with every exchange. Pure, so cached.

    With `whole_blocks` only layouts that cut between blocks of 128 tokens are weighed, which the kernels of GPUs
    need. Raises `ValueError` where none does.
    """
    weighed: list[Candidate] = []
    for layout in layouts_for(pattern, seq_len, cp, balance_limit):
        if not whole_blocks or in_whole_blocks(layout):
            weighed += price(pattern, layout, sizes, machine)
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


class Weighed(Protocol):
    """What `rank` looks at."""

    @property
    def work_max_over_mean(self) -> float: ...

    @property
    def all_bytes(self) -> int: ...

    @property
    def forward_s(self) -> float: ...


W = TypeVar("W", bound=Weighed)


def rank(weighed: Sequence[W], balance_limit: float = 1.05) -> tuple[list[W], list[W]]:
    """(the even enough, best first; the others): the fewest bytes among the fast enough, and then the fastest.

    Even enough is a work max/mean of at most `balance_limit`, or within `SLACK` of the evenest where none is: a
    hair of balance is not worth many bytes. Fast enough is within `SLACK` of the fastest even one by the model,
    since bytes that hide on an idle machine do not on a busy one.
    """
    evenest = min(c.work_max_over_mean for c in weighed)
    limit = balance_limit if evenest <= balance_limit else evenest * SLACK
    even = [c for c in weighed if c.work_max_over_mean <= limit]
    fast_s = SLACK * min(c.forward_s for c in even)
    ranked = sorted(even, key=lambda c: (c.forward_s > fast_s, c.all_bytes, c.forward_s))
    rest = sorted((c for c in weighed if c.work_max_over_mean > limit), key=lambda c: (c.all_bytes, c.forward_s))
    return ranked, rest


def in_whole_blocks(layout: Layout) -> bool:
    """Whether it cuts between blocks of 128 tokens only."""
    return all(edge % BLOCK_TOKENS == 0 for own in layout.segments for segment in own for edge in segment)


def layouts_for(pattern: SparsePattern, seq_len: int, cp: int, balance_limit: float = 1.05) -> tuple[Layout, ...]:
    """The layouts worth weighing: the named ones, by residue class for dilated and strided rules, placed by work."""
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


def price(pattern: SparsePattern, layout: Layout, sizes: Sizes, machine: Machine) -> list[Candidate]:
    """Each exchange on `layout`: a rank's kernels and messages, side by side or one after the other.

    Of the forward pass. Backward computes, fetches and returns in proportion, so it orders layouts alike. With
    `machine.per_tile` every rank's tiles are made to be counted, which takes as long as the first call would.
    """
    schedule = plan_sparse(pattern, layout, sizes.num_heads, sizes.num_kv_heads)
    cp = layout.cp
    spread = work_max_over_mean(layout, pattern.row_pairs(layout.seq_len))
    num_pulls = [sum(schedule.num_head_tokens(rank, hop) > 0 for hop in range(cp)) for rank in range(cp)]
    kernels = [sparse_kernels(schedule, rank, num_pulls[rank] > 0, machine) for rank in range(cp)]
    kernel_s = [4 * sizes.head_dim * n / machine.kernel_flops + machine.call_s * calls for calls, n in kernels]
    exact = [schedule.received_bytes(rank, sizes.head_dim, sizes.itemsize) for rank in range(cp)]
    per_token = 2 * sizes.num_kv_heads * sizes.head_dim * sizes.itemsize
    whole = [(layout.seq_len - layout.num_tokens(rank)) * per_token for rank in range(cp)]
    found = []
    exchanges: tuple[Exchange, ...] = ("hops", "packed", "gather", "ring")
    for exchange in exchanges:
        num_bytes = whole if exchange in SENT_WHOLE else exact
        messages = [cp - 1] * cp if exchange in SENT_WHOLE else num_pulls
        times = []
        for rank in range(cp):
            if exchange in ("hops", "ring"):
                # The first hop has only the own keys' kernels to hide under; the rest hide under one another.
                moving_s = machine.moving_s(num_bytes[rank], messages[rank])
                times.append(
                    machine.together_s(kernel_s[rank], moving_s) + (machine.message_s if messages[rank] else 0.0)
                )
            else:
                times.append(kernel_s[rank] + machine.moving_s(num_bytes[rank], cp > 1))
        found.append(Candidate(layout, exchange, max(num_bytes), sum(num_bytes), sum(messages), spread, max(times)))
    return found


def sparse_kernels(schedule: SparseSchedule, cp_rank: int, fetches: bool, machine: Machine) -> tuple[int, int]:
    """(calls, pairs of query and key) of one rank's kernels in a forward pass. A masked tile computes all its pairs."""
    if not machine.per_tile:
        return 1 + fetches, schedule.work(cp_rank)
    own = [tile for hop in tiles(schedule, cp_rank) for tile in hop]
    return len(own), sum(tile.num_pairs * len(tile.heads) for tile in own)


def parts_of(rules: tuple[Rule, ...]) -> list[Rule]:
    """The rules that are no union, of these and of unions among them."""
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
