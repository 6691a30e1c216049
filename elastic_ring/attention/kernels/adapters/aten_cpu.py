"""Backend for aten's CPU flash attention, with or without a mask."""

from __future__ import annotations

import math

import torch

from elastic_ring.attention.kernels.adapters.heads import fold, heads_first
from elastic_ring.attention.kernels.kernel import Grads, Pair
from elastic_ring.attention.merge import accumulate_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> Pair:
    """Computes and returns fp32 (fp64 for fp64 inputs), so that bf16 results are rounded only once, after the merge.

    `mask` (Sq, Sk) bool, not with `causal`, is True where a query sees a key, at least once in every row.
    """
    group = q.size(2) // k.size(2)
    out, lse = _forward(
        _exact(q, 1), _exact(k, group), _exact(v, group), 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scale
    )
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
) -> Grads:
    group = q.size(2) // k.size(2)
    dq, dk, dv = _backward(
        _exact(dout, 1),
        _exact(q, 1),
        _exact(k, group),
        _exact(v, group),
        _exact(out, 1),
        lse.transpose(1, 2),
        0.0,
        causal,
        attn_mask=_bias(mask, q.dtype),
        scale=scale,
    )
    return dq.transpose(1, 2), fold(dk.transpose(1, 2), group), fold(dv.transpose(1, 2), group)


def _exact(x: torch.Tensor, group: int) -> torch.Tensor:
    """(B, S, H, D) to (B, H * group, S, D) in the compute type; the kernel does not support grouped heads."""
    return heads_first(x.to(accumulate_dtype(x.dtype)), group)


def _bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=accumulate_dtype(dtype), device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)
