"""Backend for aten's CPU flash attention. Tiles of one rank only; no hops and no merging."""

from __future__ import annotations

import torch

from elastic_ring.attention.merge import accumulate_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H).

    Computes and returns fp32 (fp64 for fp64 inputs), so that bf16 results are rounded only once, after the merge.
    """
    group = q.size(2) // k.size(2)
    out, lse = _forward(_heads_first(q, 1), _heads_first(k, group), _heads_first(v, group), 0.0, causal, scale=scale)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This tile's contribution to dq, dk, dv, in fp32 (fp64 for fp64 inputs), from the merged `out` and `lse`.

    Shapes as in `forward`; dout like out.
    """
    group = q.size(2) // k.size(2)
    dq, dk, dv = _backward(
        _heads_first(dout, 1),
        _heads_first(q, 1),
        _heads_first(k, group),
        _heads_first(v, group),
        _heads_first(out, 1),
        lse.transpose(1, 2),
        0.0,
        causal,
        scale=scale,
    )
    return dq.transpose(1, 2), _fold(dk.transpose(1, 2), group), _fold(dv.transpose(1, 2), group)


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """(B, S, H, D) to (B, H * group, S, D) in the compute type; the kernel does not support grouped heads."""
    x = x.to(accumulate_dtype(x.dtype))
    if group > 1:
        x = x.repeat_interleave(group, dim=2)
    return x.transpose(1, 2)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    """Sum the gradients of the query heads that share a K/V head: (B, S, H, D) to (B, S, Hkv, D)."""
    return x if group == 1 else x.reshape(*x.shape[:2], -1, group, x.size(3)).sum(3)
