"""The choice of one layout for all layers of a model; moving tokens between layers would cost more than it saves.

A pure function of patterns, attention calls, sizes and cost model, so that all workers get the same layout, also
after a resize. No models and no communication in this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from elastic_ring.attention.autolayout.choice import (
    SLACK,
    LayoutPrice,
    Sizes,
    in_whole_blocks,
    layouts_for,
    parts_of,
    price,
    rank,
)
from elastic_ring.attention.layouts.layout import Layout, balanced, contiguous, tokens_max_over_mean, zigzag
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.costs import CostModel

Call = tuple[int, int, int, int]
"""One attention call of a model: (layer, query heads, K/V heads, head dim)."""

BALANCE_LIMIT = 1.05
"""Limit of max over mean, for work and for tokens: memory and all other layers scale with tokens."""


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
    reason = _nothing_to_weigh(patterns, calls, cp)
    if reason is not None or patterns is None:
        return LayoutChoice(zigzag(seq_len, cp), f"zigzag: {reason}")
    layers = _counted(patterns, calls, itemsize)
    found = _candidates(layers, patterns.block, seq_len, cp)
    fitting = [layout for layout in found if not whole_blocks or in_whole_blocks(layout)]
    if not fitting:
        return LayoutChoice(zigzag(seq_len, cp), "zigzag: no layout cuts between blocks of 128 tokens only")
    ranked, rest = rank([_price(layers, patterns.block, layout, cost_model) for layout in fitting], BALANCE_LIMIT)
    return LayoutChoice(ranked[0].layout, _reason(ranked, rest, len(calls)), (*ranked, *rest))


def forward_bytes(patterns: LayerPatterns, calls: tuple[Call, ...], layout: Layout, *, itemsize: int = 2) -> int:
    """K and V that all ranks of a ring receive in a forward pass of all `calls`; where content chooses, as if all keys
    were fetched."""
    every = Counter[_Layer]()
    for layer, number in _counted(patterns, calls, itemsize).items():
        chosen = any(rule.awaits_content for rule in parts_of(layer.rules))
        every[_Layer((Dense(),), layer.sizes) if chosen else layer] += number
    return _price(every, patterns.block, layout, CostModel()).all_bytes


def _counted(patterns: LayerPatterns, calls: tuple[Call, ...], itemsize: int) -> Counter[_Layer]:
    """How many calls are alike."""
    return Counter(
        _Layer(patterns.of_layer(layer).heads(num_heads, num_kv_heads), Sizes(num_heads, num_kv_heads, dim, itemsize))
        for layer, num_heads, num_kv_heads, dim in calls
    )


def _nothing_to_weigh(patterns: LayerPatterns | None, calls: tuple[Call, ...], cp: int) -> str | None:
    if cp == 1:
        return "one rank holds all tokens"
    if patterns is None or not patterns.any_sparse:
        return "every layer attends densely and causally, which it splits evenly"
    rules = [rule for group in patterns.groups for rule in parts_of(group.rules)]
    if any(getattr(rule, "awaits_content", False) for rule in rules):
        return "content chooses what some layers keep, so that there is no schedule to price before a call"
    if not calls:
        return "the model's attention calls cannot be listed without running it"
    return None


def _candidates(layers: Counter[_Layer], block: int, seq_len: int, cp: int) -> Iterator[Layout]:
    """The distinct candidates whose token counts are balanced and leave no rank empty."""
    found = [contiguous(seq_len, cp), zigzag(seq_len, cp)]
    work = np.zeros(seq_len, dtype=np.int64)
    for layer, number in layers.items():
        pattern = SparsePattern(layer.rules, block)
        found += layouts_for(pattern, seq_len, cp, BALANCE_LIMIT)
        flops_per_pair = layer.sizes.num_heads // len(layer.rules) * layer.sizes.head_dim
        work += pattern.row_pairs(seq_len) * (number * flops_per_pair)
    unit = max(1, min(block, -(-seq_len // (2 * cp))))
    found.append(balanced(work, cp, unit_tokens=unit, limit=BALANCE_LIMIT)[0])
    evenest = min(map(tokens_max_over_mean, found))
    limit = BALANCE_LIMIT if evenest <= BALANCE_LIMIT else evenest * SLACK
    seen: set[object] = set()
    for layout in found:
        if layout.segments not in seen and tokens_max_over_mean(layout) <= limit and all(layout.segments):
            seen.add(layout.segments)
            yield layout


def _price(layers: Counter[_Layer], block: int, layout: Layout, cost_model: CostModel) -> LayoutPrice:
    num_bytes, forward_s, most, mean = 0, 0.0, 0.0, 0.0
    for layer, number in layers.items():
        if layer.dense:
            one = price_dense(layout, layer.sizes, cost_model)
        else:
            pattern = SparsePattern(layer.rules, block)
            schedule = plan_sparse(pattern, layout, layer.sizes.num_heads, layer.sizes.num_kv_heads)
            one = price(schedule, layer.sizes, cost_model)
        num_bytes += number * one.all_bytes
        forward_s += number * one.forward_s
        pairs = _pairs(layer.rules, block, layout.seq_len) * layer.sizes.num_heads // len(layer.rules)
        flops = float(number * pairs * layer.sizes.head_dim)
        most, mean = most + flops * one.work_max_over_mean, mean + flops
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
    uneven = [price for price in rest if price.layout.name == "zigzag" or price == rest[0]]
    words += [
        f"passed over, work max/mean above {BALANCE_LIMIT}: {price}"
        for price in uneven
        if price.all_bytes < best.all_bytes
    ]
    return "; ".join(words)
