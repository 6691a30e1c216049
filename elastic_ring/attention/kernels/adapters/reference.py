"""The fp64 reference that every kernel, dense or over block tables, is compared with; also the last backend to choose.

Simple rather than fast: it stores the whole score matrix. It must share no code with the backends that it tests.
"""

from __future__ import annotations

import math

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockTables
from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair
from elastic_ring.attention.merge import accumulate_dtype


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, in fp64, of one softmax over the keys that `mask` (H or 1, Sq, Sk) bool shows.

    Without autograd: the first call may run inside a checkpointed block, which counts the tensors that autograd saves.
    """
    with torch.no_grad():
        out, lse = forward(q, k, v, causal=False, scale=scale, mask=mask, softcap=softcap)
        own = lse.masked_fill(lse == -math.inf, math.inf)
        return [out, lse, *backward(dout, q, k, v, out, own, causal=False, scale=scale, mask=mask, softcap=softcap)]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    documents: Documents | None = None,
    softcap: float = 0.0,
) -> Pair:
    """q (B, Sq, H, D), k, v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), in fp64.

    `mask` (H or 1, Sq, Sk) bool is True where a query sees a key. A query that sees none gets out 0 and lse -inf. With
    `softcap` scores s are softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
    """
    group, mask = q.size(2) // k.size(2), _mask(q, mask, documents)
    scores = _scores(q, k, causal=causal, scale=scale, mask=mask, softcap=softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _weights(scores, lse, mask)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, _expand(v, group))
    return out, lse.transpose(1, 2).contiguous()


def backward(
    *inputs: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    documents: Documents | None = None,
    softcap: float = 0.0,
) -> Grads:
    """This tile's contribution to dq, dk, dv, in fp64, from the `out` and `lse` merged over all keys.

    Shapes and `mask` as in `forward`; dout like out; lse is +inf where nothing is seen. FlashAttention-2's backward
    pass (Dao 2023, arXiv:2307.08691), which is additive over tiles: P = exp(s - lse) and
    dS = P * (dP - rowsum(dout * out)).
    """
    dout, q, k, v, out, lse = inputs
    group, mask = q.size(2) // k.size(2), _mask(q, mask, documents)
    dout = dout.double()
    scores = _scores(q, k, causal=causal, scale=scale, mask=mask, softcap=softcap)
    weights = _weights(scores, lse.double().transpose(1, 2), mask)
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout)
    delta = (dout * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, _expand(v, group)) - delta) * scale
    if softcap:
        dscores = dscores * (1 - (scores / softcap).square()).masked_fill(scores.isinf(), 0.0)
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, _expand(k, group))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.double())
    return dq, dk.unflatten(2, (-1, group)).sum(3), dv.unflatten(2, (-1, group)).sum(3)


def _mask(q: torch.Tensor, mask: torch.Tensor | None, documents: Documents | None) -> torch.Tensor | None:
    """(1, Sq, Sq) bool, which tokens are of one document."""
    if documents is None:
        return mask
    number = torch.searchsorted(documents.cuts, torch.arange(q.size(1), dtype=torch.int32, device=q.device), right=True)
    return (number[:, None] == number[None, :])[None]


def _scores(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), _expand(k, q.size(2) // k.size(2))) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _weights(scores: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return weights if mask is None else torch.where(mask, weights, 0.0)


def _expand(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.double().repeat_interleave(group, dim=2)


# ------------------------------------------------------------ over block tables


def seen_by(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: which keys each query sees by the forward lists of `tables`."""
    own, full = (_dense(lists, tables.num_k_blocks) for lists in (tables.own, tables.full))
    return _repeat_tokens(own) & _partial_masks(tables) | _repeat_tokens(full)


def seen_by_key(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: the same by the backward lists."""
    by_key = (tables.own_by_key, tables.full_by_key)
    own, full = (_dense(lists, tables.num_q_blocks).transpose(1, 2) for lists in by_key)
    return _repeat_tokens(own) & _partial_masks(tables) | _repeat_tokens(full)


def _partial_masks(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: which pairs count in partial blocks."""
    if tables.masks is None:
        causal = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool, device=tables.device).tril()
        return causal.repeat(1, tables.num_q_blocks, tables.num_k_blocks)
    numbers = tables.masks.numbers[:, : tables.num_q_blocks, : tables.num_k_blocks].long()
    words = tables.masks.masks[numbers].unsqueeze(-1)  # (H or 1, n, m, 128, 4, 1)
    bits = words >> torch.arange(32, dtype=torch.int32, device=tables.device) & 1
    return bits.flatten(4).transpose(2, 3).flatten(3).flatten(1, 2).bool()


def _dense(lists: BlockLists, num_columns: int) -> torch.Tensor:
    """(H or 1, n, num_columns) bool."""
    counts, indices = lists.counts[0], lists.indices[0]
    listed = torch.arange(indices.size(-1), device=counts.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*counts.shape, num_columns, dtype=torch.int32, device=counts.device)
    return dense.scatter_add_(-1, indices.long(), listed.int()) > 0


def _repeat_tokens(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2)


def sparse_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float, softcap: float = 0.0
) -> Pair:
    """As a kernel over tables, for tests on any device."""
    out, lse = forward(q, k, v, causal=False, scale=scale, mask=seen_by(tables), softcap=softcap)
    return out.to(q.dtype), lse.to(accumulate_dtype(q.dtype))


def sparse_backward(
    *inputs: torch.Tensor,
    tables: BlockTables,
    scale: float,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> Grads:
    _, q, k, v, *_ = inputs
    grads = backward(*inputs, causal=False, scale=scale, mask=seen_by_key(tables), softcap=softcap)
    dq, own_k, own_v = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, own_k if dk is None else dk.copy_(own_k), own_v if dv is None else dv.copy_(own_v)
