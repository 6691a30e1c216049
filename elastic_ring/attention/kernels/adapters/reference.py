"""The fp64 reference that every kernel, dense or sparse, is compared with; also the last backend to choose.

Simple rather than fast: it stores the whole score matrix. It must share no code with the backends that it tests.
"""

from __future__ import annotations

import math

import torch

from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, in fp64, of one softmax over the keys that `mask` (H or 1, Sq, Sk) bool lets be seen; other
    shapes as in `forward`. Without autograd: the first call may run inside a checkpointed block, which counts the
    tensors that autograd saves."""
    with torch.no_grad():
        out, lse = forward(q, k, v, causal=False, scale=scale, mask=mask)
        own = lse.masked_fill(lse == -math.inf, math.inf)
        return [out, lse, *backward(dout, q, k, v, out, own, causal=False, scale=scale, mask=mask)]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> Pair:
    """q (B, Sq, H, D), k, v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), in fp64.

    `mask` (H or 1, Sq, Sk) bool is True where a query sees a key. One that sees none gets out 0 and lse -inf.
    """
    group, mask = q.size(2) // k.size(2), _mask(q, mask, documents)
    scores = _scores(q, k, causal=causal, scale=scale, mask=mask)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _weights(scores, lse, mask)
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
    mask: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> Grads:
    """This tile's contribution to dq, dk, dv, in fp64, from the `out` and `lse` merged over all keys.

    Shapes and `mask` as in `forward`; dout like out; lse is +inf where nothing is seen. FlashAttention-2's backward
    pass (Dao 2023, arXiv:2307.08691), which is additive over tiles: P = exp(s - lse) and
    dS = P * (dP - rowsum(dout * out)).
    """
    group, mask = q.size(2) // k.size(2), _mask(q, mask, documents)
    dout = dout.double()
    weights = _weights(_scores(q, k, causal=causal, scale=scale, mask=mask), lse.double().transpose(1, 2), mask)
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout)
    delta = (dout * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, _expand(v, group)) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, _expand(k, group))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
    return dq, _fold(dk, group), _fold(dv, group)


def _mask(q: torch.Tensor, mask: torch.Tensor | None, documents: Documents | None) -> torch.Tensor | None:
    """(1, Sq, Sq) bool, which tokens are of one document."""
    if documents is None:
        return mask
    number = torch.searchsorted(documents.cuts, torch.arange(q.size(1), dtype=torch.int32, device=q.device), right=True)
    return (number[:, None] == number[None, :])[None]


def _scores(q: torch.Tensor, k: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), _expand(k, q.size(2) // k.size(2))) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _weights(scores: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return weights if mask is None else torch.where(mask, weights, 0.0)


def _expand(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.double().repeat_interleave(group, dim=2)


def _fold(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.unflatten(2, (x.size(2) // group, group)).sum(3)
