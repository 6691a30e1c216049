"""Cost of one attention call of a family on the code that skips blocks: CPU seconds on one rank, bytes on a ring.

Measured at a length where skipping matters, with the family scaled to it; never with the masks of `model`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elastic_ring.attention.autolayout.choice import Sizes
from elastic_ring.attention.layers import LayerGroup, LayerPatterns, PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.layouts.placement import work_max_over_mean
from elastic_ring.attention.patterns.content import TopK
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.contrib.gated import GatedSparseAttention
from elastic_ring.contrib.gated_ring import GatedRing
from elastic_ring.contrib.pattern_choice import choose
from elastic_ring.tuning.quality.families import Family

BF16_BYTES = 2
NUM_HEADS = 4


def step_s(family: Family, seq_len: int, num_layers: int, *, head_dim: int = 64, repeats: int = 2) -> float:
    """CPU seconds per layer of attention, forward and backward over `num_layers` layers; the least of `repeats`.

    Includes routing by content and gates; excludes the one-off planning of static patterns.
    """
    call = _timer(family, seq_len, num_layers, head_dim)
    call()
    return min(call() for _ in range(repeats))


def step_ratio(family: Family, seq_len: int, *, head_dim: int = 32, pairs: int = 3) -> float:
    """CPU seconds of a layer's forward and backward relative to dense: the median of `pairs`, timed in turn so that
    other load affects both.
    """
    own, dense = (_timer(one, seq_len, 1, head_dim) for one in (family, Family("dense", "dense", family.block)))
    own()
    dense()
    return statistics.median(own() / dense() for _ in range(pairs))


def _timer(family: Family, seq_len: int, num_layers: int, head_dim: int) -> Callable[[], float]:
    """A function that runs forward and backward and returns the CPU seconds per layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, seq_len, NUM_HEADS, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pattern, layout = family.pattern(), contiguous(seq_len, 1)

    def call() -> float:
        if family.window:
            layers: list[Any] = [_gated(family, layout, head_dim)]
        elif pattern is None:
            rule = TopK(family.top_k, family.first_query, family.block)
            chosen = LayerPatterns((LayerGroup((rule,)),), family.block)
            layers = [PatternedAttention(chosen, layout, 0, None)]
        else:
            ring = PatternedAttention(pattern, layout, 0, None)
            groups = [pattern.of_layer(i) for i in range(num_layers)]
            layers = [ring.layer(0)] if len(set(groups)) == 1 else [ring.layer(i) for i in range(num_layers)]
        start = time.process_time()
        for layer in layers:
            layer(*leaves).backward(dout)
        return (time.process_time() - start) / len(layers)

    return call


def placed(family: Family, layout: Layout, *, head_dim: int = 64) -> tuple[float, float]:
    """(bytes, work) of a single-rule family on `layout`, counted from the plan.

    Bytes: K and V that all ranks receive in a forward call, relative to the dense ring. Work: pairs of the busiest
    rank over the mean.
    """
    pattern = family.pattern()
    assert pattern is not None, family
    one = SparsePattern(pattern.of_layer(0).heads(NUM_HEADS, NUM_HEADS), pattern.block)
    schedule = plan_sparse(one, layout, NUM_HEADS, NUM_HEADS)
    received = sum(schedule.received_bytes(rank, head_dim, BF16_BYTES) for rank in range(layout.cp))
    work = work_max_over_mean(layout, one.row_pairs(layout.seq_len))
    return received / dense_bytes(layout.seq_len, layout.cp, head_dim), work


def _gated(family: Family, layout: Layout, head_dim: int) -> Callable[..., torch.Tensor]:
    """The ring's implementation on one rank; masks would not show the cost of skipping."""
    width = NUM_HEADS * head_dim
    gated = GatedSparseAttention(
        width, NUM_HEADS, block=family.block, top_k=family.top_k, window=family.window, first_query=family.first_query
    )
    x = torch.randn(1, layout.seq_len, width, generator=torch.Generator().manual_seed(1))
    return partial(gated, x, ring=GatedRing(layout, 0, None))


def ring_bytes(family: Family, seq_len: int, cp: int, num_layers: int, *, head_dim: int = 64) -> float:
    """K and V that a rank receives in one forward call, relative to the dense ring; mean over ranks and layers.

    Each layer uses the layout that `choose` picks. Nan for content, whose choices random keys do not represent.
    """
    pattern = family.pattern()
    if pattern is None:
        return float("nan")
    sizes = Sizes(NUM_HEADS, NUM_HEADS, head_dim, BF16_BYTES)
    received: dict[SparsePattern, int] = {}
    layers = [
        SparsePattern(pattern.of_layer(layer).heads(NUM_HEADS, NUM_HEADS), pattern.block) for layer in range(num_layers)
    ]
    for one in dict.fromkeys(layers):
        schedule = choose(one, seq_len, cp, sizes).schedule
        received[one] = sum(schedule.received_bytes(rank, head_dim, BF16_BYTES) for rank in range(cp))
    return sum(received[one] for one in layers) / num_layers / dense_bytes(seq_len, cp, head_dim)


def dense_bytes(seq_len: int, cp: int, head_dim: int) -> float:
    """Bytes that all ranks of the causal zigzag ring receive in one forward call."""
    dense = plan(Pattern(), zigzag(seq_len, cp))
    return float(sum(dense.received_bytes(rank, head_dim, BF16_BYTES, kv_heads=NUM_HEADS) for rank in range(cp)))
