"""Block-sparse attention of whole sequences on one GPU, static or routed by content.

Rings use `RingAttention` over the same kernels. Communication must not enter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import (
    BLOCK_TOKENS,
    BlockLists,
    BlockTables,
    check_documents,
    kept_between,
    tables_between,
)
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.merge import lse_for_backward
from elastic_ring.attention.options import check_tensors
from elastic_ring.attention.patterns.caches import LRUCache
from elastic_ring.attention.patterns.sparse import SparsePattern

NUM_LENGTHS = 8
"""Lengths whose tables are kept."""


class BlockSparseAttention:
    """Causal attention over kept blocks of 128 tokens on one GPU: a static pattern, or `top_k` blocks chosen by
    content.

    Content routing is that of `content.TopK` with `causal` False: each query block and head keeps its own block and the
    `top_k` - 1 past blocks whose mean key scores highest with its mean query. The tables of a static pattern are cached
    by length. Raises: `ValueError` for a pattern that keeps blocks in part, unless exactly one of `pattern` and `top_k`
    is given, and in a call that the kernel cannot serve.
    """

    def __init__(
        self,
        pattern: SparsePattern | None = None,
        *,
        top_k: int | None = None,
        kernel: str | None = None,
        deterministic: bool = True,
    ) -> None:
        if (pattern is None) == (top_k is None):
            raise ValueError(f"pattern={pattern}, top_k={top_k}: give one of them")
        if top_k is not None and top_k < 2:
            raise ValueError(f"top_k={top_k}: 1 keeps only the own block; give at least 2")
        self._pattern, self._top_k = pattern, top_k
        self._kernel, self._deterministic = kernel, deterministic
        self._tables = LRUCache(NUM_LENGTHS)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (B, S, H, D), k and v (B, S, Hkv, D) to out (B, S, H, D); B must be 1 with `top_k`."""
        check_tensors(q, k, v)
        if not q.is_cuda:
            raise ValueError(f"device {q.device}: block-sparse kernels run on GPUs; on a CPU use RingAttention")
        kernel = select(
            q.device,
            q.dtype,
            q.size(-1),
            self._deterministic,
            self._kernel,
            cover="tables",
            head_ratio=q.size(2) // k.size(2),
        )
        return attend(kernel, q, k, v, self._tables_for(q, k), q.size(-1) ** -0.5 if scale is None else scale)

    def _tables_for(self, q: torch.Tensor, k: torch.Tensor) -> BlockTables:
        if self._top_k is not None:
            return tables_of(choose_on_device(q.detach(), k.detach(), self._top_k), width=self._top_k - 1)
        assert self._pattern is not None
        pattern, key = self._pattern, (q.size(1), q.size(2), q.device)
        return self._tables.get(key, lambda: tables_for(pattern, *key))


def choose_on_device(q: torch.Tensor, k: torch.Tensor, top_k: int) -> torch.Tensor:
    """Bool (H, n, n), queries first, for q (1, S, H, D) and k (1, S, Hkv, D): the past blocks chosen, as by
    `choose_blocks` but without a device-to-host copy; ties are broken arbitrarily. Raises: `ValueError` unless B = 1
    and S is a multiple of 128."""
    if q.size(0) != 1 or q.size(1) % BLOCK_TOKENS:
        raise ValueError(
            f"q of shape {tuple(q.shape)}: content chooses for one sequence of a multiple of {BLOCK_TOKENS} tokens"
        )
    mean_q, mean_k = (x[0].unflatten(0, (-1, BLOCK_TOKENS)).mean(1, dtype=torch.float32) for x in (q, k))
    num_blocks = len(mean_q)
    scores = torch.einsum("ihd,jhd->hij", mean_q, mean_k.repeat_interleave(q.size(2) // k.size(2), dim=1))
    past = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=q.device).tril(-1)
    best = scores.masked_fill(~past, -math.inf).topk(min(top_k - 1, num_blocks), dim=-1).indices
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=q.device).scatter_(-1, best, True)
    return chosen & past


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
    ) -> torch.Tensor:
        out, lse = kernel.attend(q, k, v, tables, scale)
        ctx.kernel, ctx.tables, ctx.scale = kernel, tables, scale
        ctx.save_for_backward(q, k, v, out, lse_for_backward(lse))
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.kernel.gradients(dout.contiguous(), *ctx.saved_tensors, ctx.tables, ctx.scale)
        return (None, *grads, None, None)


def attend(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
) -> torch.Tensor:
    """`out` of one call of a kernel over all keys, differentiable."""
    out: torch.Tensor = _Attend.apply(kernel, q, k, v, tables, scale)
    return out


def tables_of(kept: torch.Tensor, *, width: int | None = None) -> BlockTables:
    """Tables from `kept` (H or 1, n, n) bool, queries first. Diagonal blocks are always kept, later ones dropped.

    `width` is the largest number of earlier blocks that a query block keeps; without it the host must read it from
    the device.
    """
    num_heads, num_blocks = kept.shape[:2]
    earlier = kept.tril(-1)
    at = torch.arange(num_blocks, dtype=torch.int32, device=kept.device)
    ones = torch.ones(1, num_heads, num_blocks, dtype=torch.int32, device=kept.device)
    own = BlockLists(ones, at.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    by_key = _listed(earlier.transpose(1, 2), None if width is None else num_blocks)
    return BlockTables(own, own, _listed(earlier, width), by_key, num_blocks, num_blocks)


def tables_for(pattern: SparsePattern, seq_len: int, num_heads: int, device: torch.device) -> BlockTables:
    """Tables of a static pattern. Raises `ValueError` if `seq_len`, a document or a rule splits a block."""
    if seq_len % BLOCK_TOKENS:
        raise ValueError(f"seq_len={seq_len}: block-sparse kernels take multiples of {BLOCK_TOKENS} tokens")
    check_documents(pattern.document_starts)
    blocks = np.arange(seq_len // BLOCK_TOKENS)
    kept = kept_between(pattern.rules(num_heads), pattern.documents(seq_len), blocks, blocks, pattern.causal)
    at = np.arange(len(blocks))
    own = kept[:, at, at] & pattern.causal
    kept[:, at, at] &= not pattern.causal
    return tables_between(own, kept, device)


def _listed(chosen: torch.Tensor, width: int | None) -> BlockLists:
    """The columns chosen in each row of `chosen` (H, n, m) bool."""
    counts = chosen.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if width is None else min(width, chosen.size(-1))
    # A stable sort puts the chosen columns first and keeps them ascending.
    order = chosen.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    return BlockLists(counts.unsqueeze(0), order[..., :width].to(torch.int32).unsqueeze(0).contiguous())
