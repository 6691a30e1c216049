"""Block-sparse attention of whole sequences on one GPU, static or routed by content.

Rings use `RingAttention` over the same kernels. Communication must not enter.
"""

from __future__ import annotations

import math

import torch

from elastic_ring.attention.checks import check_tensors
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockTables, tables_for, tables_of
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.plan_cache import LRUCache

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
            q.device, q.dtype, q.size(-1), self._deterministic, self._kernel, cover="tables",
            head_ratio=q.size(2) // k.size(2),
        )  # fmt: skip
        assert kernel.whole is not None
        out, _ = kernel.whole(q, k, v, self._tables_for(q, k), q.size(-1) ** -0.5 if scale is None else scale)
        return out

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
