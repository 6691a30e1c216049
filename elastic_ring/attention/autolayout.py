"""Chooses one layout for all layers of a model on a ring, by bytes, balance and predicted time of its candidates.

Moving tokens between layers would cost more than it saves. A pure function of patterns, attention calls, sizes and cost
model, so that all workers get the same layout, also after a resize; no models, measurement or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from elastic_ring.attention.layouts.layout import (
    Layout,
    balanced,
    contiguous,
    residue_class,
    striped,
    tokens_max_over_mean,
    work_max_over_mean,
    zigzag,
)
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Strided, Union
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.plan.sparse_tiles import tiles
from elastic_ring.costs import CostModel

Call = tuple[int, int, int, int]
"""One attention call of a model: (layer, query heads, K/V heads, head dim)."""
SLACK = 1.05
BALANCE_LIMIT = 1.05
"""Limit of max over mean, for work and for tokens: memory and all other layers scale with tokens."""
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
    """(balanced candidates, best first; the rest). Best: fewest bytes within 5 % (`SLACK`) of the fastest.

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
    layouts = [contiguous(seq_len, cp), zigzag(seq_len, cp), striped(seq_len, cp, unit_tokens=unit)]
    parts = parts_of(pattern.heads)
    rates = {(max(rule.rates), rule.unit_tokens) for rule in parts if isinstance(rule, Dilated)}
    rates |= {(rule.every, rule.unit_tokens) for rule in parts if isinstance(rule, Strided)}
    layouts += [residue_class(seq_len, cp, rate, unit_tokens=tokens) for rate, tokens in sorted(rates) if rate > 1]
    layouts.append(balanced(pattern.row_pairs(seq_len), cp, unit_tokens=unit, limit=balance_limit)[0])
    distinct: dict[tuple[object, ...], Layout] = {}
    for layout in layouts:
        distinct.setdefault(layout.segments, layout)
    return tuple(distinct.values())


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
    parts: list[Rule] = []
    for rule in dict.fromkeys(rules):
        parts += parts_of(rule.rules) if isinstance(rule, Union) else [rule]
    return parts


@dataclass(frozen=True)
class LayoutChoice:
    """The layout, the reasons in words, and all priced candidates, best first; empty if none was priced."""

    layout: Layout
    why: str
    candidates: tuple[LayoutPrice, ...] = ()


@dataclass(frozen=True)
class _Layer:
    """The key by which equal layers are priced once: the rules of the heads and the sizes."""

    rules: tuple[Rule, ...]
    sizes: Sizes

    @property
    def dense(self) -> bool:
        return set(self.rules) == {Dense()}


@lru_cache(maxsize=64)
def choose_layout(
    patterns: LayerPatterns | None,
    calls: tuple[Call, ...],
    seq_len: int,
    cp: int,
    cost_model: CostModel = CostModel(),  # noqa: B008 (frozen)
    *,
    itemsize: int = 2,
    whole_blocks: bool = False,
) -> LayoutChoice:
    """The best layout, by `choice.rank`, for a forward pass of all `calls` together.

    Candidates are the layouts of every layer (`layouts_for`) and one balanced over the work of all layers. Token
    counts must be balanced within `BALANCE_LIMIT`; with `whole_blocks` no block of 128 tokens may be split. Each
    layer is priced by its exact schedule for one document, with hops overlapping kernels. The result is zigzag, with
    the reason in `why`, if no layer is sparse, a rule awaits content, `calls` is empty, cp is 1 or no candidate
    qualifies.

    Raises `ValueError` if `patterns` does not cover a layer or does not fit its heads.
    """
    reason = None
    if cp == 1:
        reason = "one rank holds all tokens"
    elif patterns is None or not patterns.any_sparse:
        reason = "every layer attends densely and causally, which it splits evenly"
    elif any(rule.awaits_content for group in patterns.groups for rule in parts_of(group.rules)):
        reason = "content chooses what some layers keep, so that there is no schedule to price before a call"
    elif not calls:
        reason = "the model's attention calls cannot be listed without running it"
    if reason is not None or patterns is None:
        return LayoutChoice(zigzag(seq_len, cp), f"zigzag: {reason}")
    layers = _counted(patterns, calls, itemsize)
    layouts = _candidates(layers, patterns.block, seq_len, cp)
    fitting = [layout for layout in layouts if not whole_blocks or in_whole_blocks(layout)]
    if not fitting:
        return LayoutChoice(zigzag(seq_len, cp), "zigzag: no layout cuts between blocks of 128 tokens only")
    ranked, rest = rank([_price(layers, patterns.block, layout, cost_model) for layout in fitting], BALANCE_LIMIT)
    return LayoutChoice(ranked[0].layout, _reason(ranked, rest, len(calls)), (*ranked, *rest))


def forward_bytes(patterns: LayerPatterns, calls: tuple[Call, ...], layout: Layout, *, itemsize: int = 2) -> int:
    """Bytes of K and V that all ranks of a ring receive in a forward pass of all `calls`; if content chooses, of all
    keys."""
    every = Counter[_Layer]()
    for layer, number in _counted(patterns, calls, itemsize).items():
        chosen = any(rule.awaits_content for rule in parts_of(layer.rules))
        every[_Layer((Dense(),), layer.sizes) if chosen else layer] += number
    return _price(every, patterns.block, layout, CostModel()).all_bytes


def _counted(patterns: LayerPatterns, calls: tuple[Call, ...], itemsize: int) -> Counter[_Layer]:
    """The number of calls of each kind of layer."""
    return Counter(
        _Layer(patterns.of_layer(layer).heads(num_heads, num_kv_heads), Sizes(num_heads, num_kv_heads, dim, itemsize))
        for layer, num_heads, num_kv_heads, dim in calls
    )


def _candidates(layers: Counter[_Layer], block: int, seq_len: int, cp: int) -> Iterator[Layout]:
    """The distinct candidates whose token counts are balanced and leave no rank empty."""
    layouts = [contiguous(seq_len, cp), zigzag(seq_len, cp)]
    work = np.zeros(seq_len, dtype=np.int64)
    for layer, number in layers.items():
        pattern = SparsePattern(layer.rules, block)
        layouts += layouts_for(pattern, seq_len, cp, BALANCE_LIMIT)
        flops_per_pair = layer.sizes.num_heads // len(layer.rules) * layer.sizes.head_dim
        work += pattern.row_pairs(seq_len) * (number * flops_per_pair)
    unit = max(1, min(block, -(-seq_len // (2 * cp))))
    layouts.append(balanced(work, cp, unit_tokens=unit, limit=BALANCE_LIMIT)[0])
    evenest = min(map(tokens_max_over_mean, layouts))
    limit = BALANCE_LIMIT if evenest <= BALANCE_LIMIT else evenest * SLACK
    seen: set[object] = set()
    for layout in layouts:
        if layout.segments not in seen and tokens_max_over_mean(layout) <= limit and all(layout.segments):
            seen.add(layout.segments)
            yield layout


def _price(layers: Counter[_Layer], block: int, layout: Layout, cost_model: CostModel) -> LayoutPrice:
    num_bytes, forward_s, most, mean = 0, 0.0, 0.0, 0.0
    for layer, number in layers.items():
        if layer.dense:
            layer_price = price_dense(layout, layer.sizes, cost_model)
        else:
            pattern = SparsePattern(layer.rules, block)
            schedule = plan_sparse(pattern, layout, layer.sizes.num_heads, layer.sizes.num_kv_heads)
            layer_price = price(schedule, layer.sizes, cost_model)
        num_bytes += number * layer_price.all_bytes
        forward_s += number * layer_price.forward_s
        pairs = _pairs(layer.rules, block, layout.seq_len) * layer.sizes.num_heads // len(layer.rules)
        flops = float(number * pairs * layer.sizes.head_dim)
        most, mean = most + flops * layer_price.work_max_over_mean, mean + flops
    return LayoutPrice(layout, num_bytes, most / mean, forward_s)


@lru_cache(maxsize=64)
def _pairs(rules: tuple[Rule, ...], block: int, seq_len: int) -> int:
    return int(SparsePattern(rules, block).row_pairs(seq_len).sum())


def price_dense(layout: Layout, sizes: Sizes, cost_model: CostModel) -> LayoutPrice:
    """The price of a layer on the dense ring, by the tiles and hops of its schedule."""
    schedule, cp = plan(Pattern(), layout), layout.cp
    work, times, all_bytes = [], [], 0
    for own in range(cp):
        tiles = [tile for hop in schedule.hops[own] for tile in hop.tiles]
        sides = [(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], tile.causal) for tile in tiles]
        work.append(sizes.num_heads * sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in sides))
        received = [
            schedule.hop_bytes(own, hop, sizes.head_dim, sizes.itemsize, "forward", kv_heads=sizes.num_kv_heads)
            for hop in range(cp)
        ]
        all_bytes += sum(received)
        kernel_s = 4 * sizes.head_dim * work[-1] / cost_model.dense_flops + cost_model.call_s * len(tiles)
        times.append(cost_model.hops_s(kernel_s, sum(received), sum(num > 0 for num in received)))
    return LayoutPrice(layout, all_bytes, max(work) * cp / sum(work), max(times))


def _reason(ranked: list[LayoutPrice], rest: list[LayoutPrice], num_calls: int) -> str:
    best = ranked[0]
    words = [f"{best} for {num_calls} attention calls of a forward pass"]
    if best.work_max_over_mean > BALANCE_LIMIT:
        words.append(f"no layout has work max/mean within {BALANCE_LIMIT}")
    words += [f"against {price}" for price in ranked if price.layout.name == "zigzag" and price != best]
    words += [
        f"passed over, work max/mean above {BALANCE_LIMIT}: {price}"
        for price in rest
        if (price.layout.name == "zigzag" or price == rest[0]) and price.all_bytes < best.all_bytes
    ]
    return "; ".join(words)
