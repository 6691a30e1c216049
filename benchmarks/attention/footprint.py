"""The device memory that a ring's calls over block tables take besides their inputs and outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from elastic_ring.attention.lowering.blocks import PlacedSums
from elastic_ring.attention.ring import RingAttention


class Footprint(NamedTuple):
    """Device memory of a ring's calls, in bytes.

    `buffer_bytes`: buffers that all rings share. `kept_bytes`: kept by each call from forward to backward.
    `table_bytes`: the tables of a plan, with what kernels have derived from them so far. Temporaries of a pass are not
    counted; with more than three stages its sums are fp32.
    """

    num_stages: int
    buffer_bytes: int
    kept_bytes: int
    table_bytes: int


def footprint(ring: RingAttention, q: torch.Tensor, k: torch.Tensor) -> Footprint:
    """The memory of calls with tensors like q (B, S_local, H, D) and k (B, S_local, Hkv, D)."""
    plan = ring.call_plan(q, k)
    assert isinstance(plan.returns, PlacedSums)
    exchange, row = plan.exchange, 2 * q.size(0) * q.size(3)  # a row holds K and V, or dK and dV, of the whole batch
    row_bytes, partial_row_bytes = row * q.dtype.itemsize, row * plan.partial_dtype.itemsize
    num_keys = sum(exchange.served_slots) + (0 if plan.keeps else sum(exchange.key_slots))
    num_partials = sum(exchange.partial_slots) + sum(exchange.inbox_slots)
    num_kept = sum(stage.num_fetched for stage in exchange.stages) if plan.keeps else 0
    return Footprint(
        len(exchange.stages),
        num_keys * row_bytes + num_partials * partial_row_bytes,
        num_kept * row_bytes,
        plan.returns.blocks.num_bytes,
    )
