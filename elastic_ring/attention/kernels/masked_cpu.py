"""Tiles of a sparse pattern on the CPU: dense and causal ones as ever, masked ones over aten with a mask.

A masked tile holds only rows and columns with something to see. Tiles of one rank only: no hops, no merging.
"""

from __future__ import annotations

import math

import torch

from elastic_ring.attention.kernels import aten_cpu
from elastic_ring.attention.merge import accumulate_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `aten_cpu.forward`; `mask` (Sq, Sk) bool is True where a query sees a key, every row somewhere."""
    if mask is None:
        return aten_cpu.forward(q, k, v, causal=causal, scale=scale)
    group = q.size(2) // k.size(2)
    out, lse = _forward(
        _heads_first(q, 1), _heads_first(k, group), _heads_first(v, group), 0.0, False,
        attn_mask=_bias(mask, q.dtype), scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `aten_cpu.backward`: this tile's share of dq, dk, dv from the merged `out` and `lse`."""
    if mask is None:
        return aten_cpu.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    group = q.size(2) // k.size(2)
    dq, dk, dv = _backward(
        _heads_first(dout, 1), _heads_first(q, 1), _heads_first(k, group), _heads_first(v, group),
        _heads_first(out, 1), lse.transpose(1, 2), 0.0, False, attn_mask=_bias(mask, q.dtype), scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), _fold(dk.transpose(1, 2), group), _fold(dv.transpose(1, 2), group)


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(mask.shape, dtype=accumulate_dtype(dtype), device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    x = x.to(accumulate_dtype(x.dtype))
    if group > 1:
        x = x.repeat_interleave(group, dim=2)
    return x.transpose(1, 2)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    return x if group == 1 else x.reshape(*x.shape[:2], -1, group, x.size(3)).sum(3)
