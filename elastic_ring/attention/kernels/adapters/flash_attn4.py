"""Backend for flash-attn-4 (Zadouri et al. 2026; CuTe-DSL kernels).

The first call imports flash_attn and its compiler. Each variant is compiled once per process, which takes seconds
and holds the GIL.

The variant depends on (`compile_key` in flash_attn.cute.interface, 4.0.0b36): architecture, dtype, head dim, query
heads per K/V head, causal, deterministic, and three comparisons of lengths. Forward: whether the queries, times the
query heads per K/V head, fit into one tile (or two, on sm_100). Backward: whether the queries fit into one tile, and
whether the keys do. Packed documents give tiles of any length, so a run needs all of these variants. Documents that lie
end to end go into one call, whose variants depend on whether there are more than 256 of them. Batch size, number of
heads, strides and given gradient tensors do not matter.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair

TILE_TOKENS = (48, 64, 80, 96, 128, 192, 256)
"""Tile sizes of the forward and backward kernels (`_tile_size_fwd_sm90`, `_tile_size_bwd_sm90`; 128 on sm_100), and 256
for two tiles of 128."""


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, documents: Documents | None = None
) -> Pair:
    call = partial(_interface()._flash_attn_fwd, softmax_scale=scale, causal=causal, return_lse=True)
    if documents is not None:
        out, lse = call(q[0], k[0], v[0], **_cuts(documents))[:2]
        return out[None], lse.t()[None]
    out, lse = call(q, k, v)[:2]
    return out, lse.transpose(1, 2)


def _cuts(documents: Documents) -> dict[str, Any]:
    """With `longest` above every tile size: a bound is enough, and the lengths enter `compile_key` by it alone."""
    longest = max(documents.longest, 2 * TILE_TOKENS[-1])
    return {
        "cu_seqlens_q": documents.cuts,
        "cu_seqlens_k": documents.cuts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


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
    documents: Documents | None = None,
) -> Grads:
    call = partial(_interface()._flash_attn_bwd, softmax_scale=scale, causal=causal, deterministic=deterministic)
    if documents is not None:
        places = {name: None if x is None else x[0] for name, x in (("dk", dk), ("dv", dv))}
        given, lse = (x[0] for x in (q, k, v, out, dout)), lse[0].t().contiguous()
        dq, *found = call(*given, lse, **_cuts(documents), **places)[:3]
        return dq[None], found[0][None], found[1][None]
    grads: Grads = call(q, k, v, out, dout, lse.transpose(1, 2).contiguous(), dk=dk, dv=dv)[:3]
    return grads


deterministic_backward = partial(backward, deterministic=True)
