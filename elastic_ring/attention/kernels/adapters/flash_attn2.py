"""Backend for the optional flash-attn 2 package (FlashAttention-2, Dao 2023, arXiv:2307.08691)."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from elastic_ring.attention.kernels.kernel import Grads, Pair


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Pair:
    out, lse = _interface()._flash_attn_forward(
        q,
        k,
        v,
        0.0,
        scale,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )[:2]
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
) -> Grads:
    dq = torch.empty_like(q)
    dk = torch.empty_like(k) if dk is None else dk
    dv = torch.empty_like(v) if dv is None else dv
    _interface()._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.transpose(1, 2).contiguous(),
        dq,
        dk,
        dv,
        0.0,
        scale,
        causal,
        -1,
        -1,
        0.0,
        None,
        deterministic,
    )
    return dq, dk, dv


deterministic_backward = partial(backward, deterministic=True)
