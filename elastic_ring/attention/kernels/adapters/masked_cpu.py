"""Tiles of a sparse pattern on the CPU: full and causal tiles by `aten_cpu`, masked tiles by aten with a mask.

A masked tile has only rows and columns with at least one visible pair. Tiles of one rank only; no hops and no merging.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from elastic_ring.attention.kernels.adapters import aten_cpu
from elastic_ring.attention.merge import accumulate_dtype, merge_

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `aten_cpu.forward`; `mask` (Sq, Sk) bool is True where a query sees a key, at least once in every row."""
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
    """As `aten_cpu.backward`, with the `mask` of `forward`."""
    if mask is None:
        return aten_cpu.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    group = q.size(2) // k.size(2)
    dq, dk, dv = _backward(
        _heads_first(dout, 1), _heads_first(q, 1), _heads_first(k, group), _heads_first(v, group),
        _heads_first(out, 1), lse.transpose(1, 2), 0.0, False, attn_mask=_bias(mask, q.dtype), scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), _fold(dk.transpose(1, 2), group), _fold(dv.transpose(1, 2), group)


@lru_cache(maxsize=16)
def self_test(dtype: torch.dtype, head_dim: int) -> str | None:
    """None if out, lse, dq, dk and dv agree with a masked fp64 softmax, else a text that names the difference.

    Uses grouped heads, a masked and a full tile, and the merged out and lse for backward, as in a ring.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 40, 4, head_dim), (1, 56, 2, head_dim), (1, 56, 2, head_dim), (1, 40, 4, head_dim)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.rand(40, 24, generator=generator) < 0.3
    mask[:, 0] = True
    scale = head_dim**-0.5
    tiles = [(slice(0, 32), None), (slice(32, 56), mask)]
    out = torch.zeros(q.shape, dtype=accumulate_dtype(dtype))
    lse = torch.full(q.shape[:3], -math.inf, dtype=out.dtype)
    for keys, own in tiles:
        merge_(out, lse, *forward(q, k[:, keys], v[:, keys], causal=False, scale=scale, mask=own))
    shares = [
        backward(dout, q, k[:, keys], v[:, keys], out, lse, causal=False, scale=scale, mask=own) for keys, own in tiles
    ]
    found = (out, lse, shares[0][0] + shares[1][0], *(torch.cat([s[i] for s in shares], dim=1) for i in (1, 2)))
    wanted = _whole(q, k, v, dout, torch.cat([torch.ones(40, 32, dtype=torch.bool), mask], dim=1), scale)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        worst = ((got.double() - want).norm() / want.norm()).item()
        if not worst <= _TOLERANCE[dtype]:
            return f"{name} of a masked tile differs by {worst:.2e} relative, allowed {_TOLERANCE[dtype]:.0e}"
    return None


_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Allowed relative error. 16-bit inputs are computed in fp32."""


def _whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a masked softmax in fp64.

    Avoids autograd: the first call may be inside a checkpointed block, which counts the tensors that autograd saves.
    """
    group = q.size(2) // k.size(2)
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    wide_k, wide_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale).masked_fill(~mask, -math.inf)
    shares = scores.softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", shares, wide_v)
    row_sums = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = shares * (torch.einsum("bqhd,bkhd->bhqk", dout, wide_v) - row_sums) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, wide_k)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q)
    dv = torch.einsum("bhqk,bqhd->bkhd", shares, dout)
    return [out, scores.logsumexp(-1).transpose(1, 2), dq, _fold(dk, group), _fold(dv, group)]


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
