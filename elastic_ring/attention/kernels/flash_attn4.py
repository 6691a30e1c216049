"""The backend over flash-attn-4 (Zadouri et al. 2026; CuTe-DSL kernels). Tiles of one rank only: no hops, no merging.

Imported lazily: flash_attn and its compiler are loaded with the first call, and each variant is compiled once.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), fp32."""
    out, lse = _interface()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out, lse.transpose(1, 2)


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
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This tile's share of dq, dk, dv in the inputs' type, from the merged `out` and `lse`.

    `dk` and `dv`, shaped like k and v, are written to when given.
    """
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _interface()._flash_attn_bwd(
        q, k, v, out, dout, lse.transpose(1, 2).contiguous(),
        softmax_scale=scale, causal=causal, deterministic=deterministic, dk=dk, dv=dv,
    )[:3]  # fmt: skip
    return grads


deterministic_backward = partial(backward, deterministic=True)
