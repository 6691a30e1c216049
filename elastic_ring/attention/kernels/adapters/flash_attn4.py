"""Backend for flash-attn-4 (Zadouri et al. 2026; CuTe-DSL kernels).

The first call imports flash_attn and its compiler. Each variant is compiled once per process, which takes seconds
and holds the GIL.

The variant depends on (`compile_key` in flash_attn.cute.interface, 4.0.0b36): architecture, dtype, head dim, query
heads per K/V head, causal, deterministic, and three comparisons of lengths. Forward: whether the queries, times the
query heads per K/V head, fit into one tile (or two, on sm_100). Backward: whether the queries fit into one tile, and
whether the keys do. Packed documents give tiles of any length, so a run needs all of these variants. Batch size,
number of heads, strides and given gradient tensors do not matter.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from elastic_ring.attention.kernels.kernel import Grads, Pair

TILE_TOKENS = (48, 64, 80, 96, 128, 192, 256)
"""Tile sizes of the forward and backward kernels (`_tile_size_fwd_sm90`, `_tile_size_bwd_sm90`; 128 on sm_100), and 256
for two tiles of 128."""


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Pair:
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
) -> Grads:
    grads: Grads = _interface()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse.transpose(1, 2).contiguous(),
        softmax_scale=scale,
        causal=causal,
        deterministic=deterministic,
        dk=dk,
        dv=dv,
    )[:3]
    return grads


deterministic_backward = partial(backward, deterministic=True)
