"""Candidate layouts of a sparse pattern on a ring, their prices and ranks, by bytes, balance and predicted time.

A pure function of pattern, sizes and cost model; no measurement and no communication in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_ring.attention.layouts.layout import (
    Layout,
    balanced,
    contiguous,
    residue_class,
    striped,
    work_max_over_mean,
    zigzag,
)
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.rules import Rule, Strided, Union
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_tiles import tiles
from elastic_ring.costs import CostModel

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
class LayoutPrice:
    """The cost of a layout in one forward pass, of one layer or of all.

    `all_bytes` is received by all ranks; `forward_s` sums the slowest rank's time of each layer; `work_max_over_mean`
    is the mean over layers, weighted by FLOPs.
    """

    layout: Layout
    all_bytes: int
    work_max_over_mean: float
    forward_s: float

    def __str__(self) -> str:
        return (
            f"{self.layout.name}: {self.all_bytes:,} bytes, work max/mean {self.work_max_over_mean:.3f},"
            f" {self.forward_s * 1e3:.3f} ms"
        )


P = TypeVar("P", bound=LayoutPrice)


def rank(weighed: Sequence[P], balance_limit: float = 1.05) -> tuple[list[P], list[P]]:
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


def price(schedule: Schedule, sizes: Sizes, cost_model: CostModel) -> LayoutPrice:
    """The price of the forward pass of one layer, hops overlapped with kernels.

    Backward work and bytes are proportional, so they rank layouts equally. With `cost_model.per_tile` the tiles of all
    ranks are computed, which takes as long as planning the first call.
    """
    layout, times, all_bytes = schedule.layout, [], 0
    for own in range(layout.cp):
        received = schedule.received_bytes(own, sizes.head_dim, sizes.itemsize)
        num_pulls = sum(schedule.num_head_tokens(own, hop) > 0 for hop in range(layout.cp))
        kernel_s = sparse_kernel_s(schedule, own, num_pulls > 0, sizes.head_dim, cost_model)
        times.append(cost_model.hops_s(kernel_s, received, num_pulls))
        all_bytes += received
    spread = work_max_over_mean(layout, schedule.sparse.row_pairs(layout.seq_len))
    return LayoutPrice(layout, all_bytes, spread, max(times))


def sparse_kernel_s(schedule: Schedule, cp_rank: int, fetches: bool, head_dim: int, cost_model: CostModel) -> float:
    """Seconds of one rank's kernels in a forward pass."""
    calls, pairs = sparse_kernels(schedule, cp_rank, fetches, cost_model)
    return 4 * head_dim * pairs / cost_model.kernel_flops + cost_model.call_s * calls


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
