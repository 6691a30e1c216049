"""Reference attention of one tile in fp64: `verify` compares backends with it; also the last backend to choose.

Simple rather than fast: it stores the whole score matrix. It must share no code with the backends that it tests.
"""

from __future__ import annotations

import math

import torch


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k, v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), in fp64."""
    group = q.size(2) // k.size(2)
    scores = _scores(q, k, causal=causal, scale=scale)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("bhqk,bkhd->bqhd", weights, _expand(v, group))
    return out, lse.transpose(1, 2).contiguous()


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
    """This tile's contribution to dq, dk, dv, in fp64, from the `out` and `lse` merged over all keys.

    Shapes as in `forward`; dout like out. FlashAttention-2's backward pass (Dao 2023, arXiv:2307.08691), which is
    additive over tiles: P = exp(s - lse) and dS = P * (dP - rowsum(dout * out)).
    """
    group = q.size(2) // k.size(2)
    dout = dout.double()
    scores = _scores(q, k, causal=causal, scale=scale)
    weights = torch.exp(scores - lse.double().transpose(1, 2).unsqueeze(-1))
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout)
    delta = (dout * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, _expand(v, group)) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, _expand(k, group))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
    return dq, _fold(dk, group), _fold(dv, group)


def _scores(q: torch.Tensor, k: torch.Tensor, *, causal: bool, scale: float) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), _expand(k, q.size(2) // k.size(2))) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _expand(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.double().repeat_interleave(group, dim=2)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], -1, group, x.size(3)).sum(3)
