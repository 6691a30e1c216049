"""The fp64 reference over block tables, as a kernel for tests on any device.

It takes the same tables as the GPU kernels and must share no other code with them.
"""

from __future__ import annotations

import torch

from elastic_ring.attention.kernels.adapters import reference
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockTables
from elastic_ring.attention.kernels.kernel import Grads, Pair
from elastic_ring.attention.merge import accumulate_dtype


def seen_by(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: which keys each query sees by the forward lists of `tables`."""
    own, full = (_dense(lists, tables.num_k_blocks) for lists in (tables.own, tables.full))
    return _of_tokens(own) & _masks(tables) | _of_tokens(full)


def seen_by_key(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: the same by the backward lists."""
    by_key = (tables.own_by_key, tables.full_by_key)
    own, full = (_dense(lists, tables.num_q_blocks).transpose(1, 2) for lists in by_key)
    return _of_tokens(own) & _masks(tables) | _of_tokens(full)


def _masks(tables: BlockTables) -> torch.Tensor:
    """(H or 1, Sq, Sk) bool: which pairs count of blocks that are kept in part."""
    if tables.masks is None:
        causal = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool, device=tables.device).tril()
        return causal.repeat(1, tables.num_q_blocks, tables.num_k_blocks)
    numbers = tables.masks.numbers[:, : tables.num_q_blocks, : tables.num_k_blocks].long()
    words = tables.masks.masks[numbers].unsqueeze(-1)  # (H or 1, n, m, 128, 4, 1)
    bits = words >> torch.arange(32, dtype=torch.int32, device=tables.device) & 1
    return bits.flatten(4).transpose(2, 3).flatten(3).flatten(1, 2).bool()


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float) -> Pair:
    out, lse = reference.forward(q, k, v, causal=False, scale=scale, mask=seen_by(tables))
    return out.to(q.dtype), lse.to(accumulate_dtype(q.dtype))


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: BlockTables,
    scale: float,
    *,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
) -> Grads:
    seen = seen_by_key(tables)
    dq, of_k, of_v = reference.backward(dout, q, k, v, out, lse, causal=False, scale=scale, mask=seen)
    own_k, own_v = of_k.to(k.dtype), of_v.to(v.dtype)
    return dq.to(q.dtype), own_k if dk is None else dk.copy_(own_k), own_v if dv is None else dv.copy_(own_v)


def _dense(lists: BlockLists, num_columns: int) -> torch.Tensor:
    """(H or 1, n, num_columns) bool."""
    counts, indices = lists.counts[0], lists.indices[0]
    listed = torch.arange(indices.size(-1), device=counts.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*counts.shape, num_columns, dtype=torch.int32, device=counts.device)
    return dense.scatter_add_(-1, indices.long(), listed.int()) > 0


def _of_tokens(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2)
