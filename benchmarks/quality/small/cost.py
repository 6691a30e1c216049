"""Cost of one attention call of a family on the code that skips blocks: CPU seconds on one rank, bytes on a ring.

Measured at a length where skipping matters, with the family scaled to it; never with the masks of `model`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.quality.small.families import Family
from elastic_ring.attention.layouts.layout import Layout, contiguous, work_max_over_mean, zigzag
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse

BF16_BYTES = 2
NUM_HEADS = 4


def step_ratio(family: Family, seq_len: int, *, head_dim: int = 32, pairs: int = 3) -> float:
    """CPU seconds of a layer's forward and backward relative to dense: the median of `pairs`, timed in turn so that
    other load affects both.
    """
    own, dense = (timer(one, seq_len, 1, head_dim) for one in (family, Family("dense", "dense", family.block)))
    own()
    dense()
    return statistics.median(own() / dense() for _ in range(pairs))


def timer(family: Family, seq_len: int, num_layers: int, head_dim: int) -> Callable[[], float]:
    """A function that runs forward and backward and returns the CPU seconds per layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, seq_len, NUM_HEADS, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    layers = family.layers(contiguous(seq_len, 1), num_layers, head_dim)

    def call() -> float:
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
    one = SparsePattern(pattern.of_layer(0).heads(NUM_HEADS, NUM_HEADS), pattern.block)
    schedule = plan_sparse(one, layout, NUM_HEADS, NUM_HEADS)
    received = sum(schedule.received_bytes(rank, head_dim, BF16_BYTES) for rank in range(layout.cp))
    work = work_max_over_mean(layout, one.row_pairs(layout.seq_len))
    return received / dense_bytes(layout.seq_len, layout.cp, head_dim), work


def dense_bytes(seq_len: int, cp: int, head_dim: int) -> float:
    """Bytes that all ranks of the causal zigzag ring receive in one forward call."""
    dense = plan(Pattern(), zigzag(seq_len, cp))
    return float(sum(dense.received_bytes(rank, head_dim, BF16_BYTES, kv_heads=NUM_HEADS) for rank in range(cp)))
