"""Backend for torch's built-in FlashAttention-2 (Dao 2023, arXiv:2307.08691).

Tiles of one rank only; no hops and no merging.
"""

from __future__ import annotations

import torch

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), fp32."""
    result = _forward(q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=scale)
    return result[0], result[1].transpose(1, 2)


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
    """This tile's contribution to dq, dk, dv, in the inputs' type, from the merged `out` and `lse`.

    Shapes as in `forward`; dout like out.
    """
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _backward(
        dout, q, k, v, out, lse.transpose(1, 2).contiguous(), None, None, q.size(1), k.size(1), 0.0, causal,
        random, random, scale=scale,
    )  # fmt: skip
    return grads


def deterministic_backward(
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
    """As `backward`, bitwise repeatable. Sets torch's global flag for the call, since aten has no argument for it."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        return backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    finally:
        torch.set_deterministic_debug_mode(mode)
