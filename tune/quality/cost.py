"""What one attention call of a family costs on the paths that skip: CPU seconds on one rank, bytes on a ring.

Measured at a length where skipping shows, with the family scaled to it; never with the masks of `model`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elastic_ring.attention.choice import Machine, Sizes, choose
from elastic_ring.attention.content import TopK
from elastic_ring.attention.gated import GatedSparseAttention
from elastic_ring.attention.gated_ring import GatedRing
from elastic_ring.attention.layers import LayerGroup, LayerPatterns, PatternedAttention
from elastic_ring.attention.layout import Layout, contiguous, zigzag
from elastic_ring.attention.model_layout import price_dense
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.rules import Dense
from elastic_ring.attention.schedule import plan
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_schedule import plan_sparse
from tune.quality.families import Family

BF16_BYTES = 2
NUM_HEADS = 4


def step_s(family: Family, seq_len: int, num_layers: int, *, head_dim: int = 64, repeats: int = 2) -> float:
    """CPU seconds of forward and backward through the attention of `num_layers` layers, the mean layer, the least
    of `repeats`. Routing by content is in, and so are gates; planning of static patterns is done once and left out.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, seq_len, NUM_HEADS, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pattern, layout = family.pattern(), contiguous(seq_len, 1)
    times = []
    for repeat in range(repeats + 1):
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
        if repeat:
            times.append((time.process_time() - start) / len(layers))
    return min(times)


def _gated(family: Family, layout: Layout, head_dim: int) -> Callable[..., torch.Tensor]:
    """The path of a ring, on one rank: the masks of the definition say nothing of what skipping costs."""
    width = NUM_HEADS * head_dim
    gated = GatedSparseAttention(
        width, NUM_HEADS, block=family.block, top_k=family.top_k, window=family.window, first_query=family.first_query
    )
    x = torch.randn(1, layout.seq_len, width, generator=torch.Generator().manual_seed(1))
    return partial(gated, x, ring=GatedRing(layout, 0, None))


def ring_bytes(
    family: Family, seq_len: int, cp: int, num_layers: int, *, head_dim: int = 64, machine: Machine | None = None
) -> float:
    """K and V that a rank receives in one forward call, the mean over ranks and layers, over the dense ring's.

    The layout is the one that `choose` picks for each layer. Nan for content, whose choices random keys do not show.
    """
    return ring_costs(family, seq_len, cp, num_layers, head_dim=head_dim, machine=machine)[0]


def ring_costs(
    family: Family, seq_len: int, cp: int, num_layers: int, *, head_dim: int = 64, machine: Machine | None = None
) -> tuple[float, float]:
    """(bytes as `ring_bytes`, seconds of a forward call by the figures of `machine` over the zigzag dense ring's)."""
    pattern = family.pattern()
    if pattern is None:
        return float("nan"), float("nan")
    sizes, figures = Sizes(NUM_HEADS, NUM_HEADS, head_dim, BF16_BYTES), machine or Machine()
    dense_s = price_dense((Dense(),), pattern.block, zigzag(seq_len, cp), sizes, figures).forward_s
    total = seconds = 0.0
    for layer in range(num_layers):
        rules = pattern.of_layer(layer).heads(NUM_HEADS, NUM_HEADS)
        one = SparsePattern(rules, pattern.block)
        chosen = choose(one, seq_len, cp, sizes, figures)
        schedule = plan_sparse(one, chosen.schedule.layout, NUM_HEADS, NUM_HEADS)
        total += sum(schedule.received_bytes(rank, head_dim, BF16_BYTES) for rank in range(cp))
        seconds += dense_s if set(rules) == {Dense()} else chosen.best.forward_s
    return total / num_layers / dense_bytes(seq_len, cp, head_dim), seconds / num_layers / dense_s


def dense_bytes(seq_len: int, cp: int, head_dim: int) -> float:
    """What all ranks of the causal zigzag ring receive in one forward call."""
    dense = plan(Pattern(), zigzag(seq_len, cp))
    return float(
        sum(
            dense.hop_bytes(rank, hop, NUM_HEADS, head_dim, BF16_BYTES, "forward")
            for rank in range(cp)
            for hop in range(cp)
        )
    )
