"""Backend for cuDNN's fused attention, called through aten."""

from __future__ import annotations

import torch

from elastic_ring.attention.kernels.adapters.heads import fold, heads_first
from elastic_ring.attention.kernels.kernel import Grads, Pair


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Pair:
    group = q.size(2) // k.size(2)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        heads_first(q, 1), heads_first(k, group), heads_first(v, group), None, True, 0.0, causal, False, scale=scale
    )
    return result[0].transpose(1, 2), result[1].squeeze(-1).transpose(1, 2)


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
) -> Grads:
    group = q.size(2) // k.size(2)
    random = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        heads_first(dout, 1),
        heads_first(q, 1),
        heads_first(k, group),
        heads_first(v, group),
        heads_first(out, 1),
        lse.transpose(1, 2).contiguous().unsqueeze(-1),
        random,
        random,
        None,
        None,
        None,
        q.size(1),
        k.size(1),
        0.0,
        causal,
        scale=scale,
    )
    return dq.transpose(1, 2), fold(dk.transpose(1, 2), group), fold(dv.transpose(1, 2), group)
