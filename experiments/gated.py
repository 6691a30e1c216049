"""Gated sparse attention: three views of the past, mixed by learned gates: compressed blocks, selected blocks, a
window.

After native sparse attention (Yuan et al. 2025, arXiv:2502.11089), with two simplifications: blocks are compressed by
their mean instead of a small network, and one selection serves a block of queries instead of a token, which makes it a
block pattern. Each view has its own softmax; the gates mix the outputs. On one process, S x S masks define what is
seen; this path supports batches and short sequences on any device. For sequences that are sharded over a ring, or long,
`gated_ring` computes the views. Communication must not enter.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from elastic_ring.attention.options import check_tensors
from elastic_ring.attention.patterns.rules import require
from experiments.block_means import choose_blocks, means_of_blocks
from experiments.gated_ring import GatedRing, ViewSizes

NUM_VIEWS = 3


class GatedSparseAttention(nn.Module):
    """Attention of `num_heads` query heads, with a gate per head and view computed from the layer's input.

    `block`: tokens per block. `top_k`: each query block sees its own block and the `top_k` - 1 highest-scoring past
    blocks. `window`: number of most recent tokens seen. By default the mean query of a block selects, so a block's
    later queries influence what its earlier ones see, although no query sees a later key; with `first_query` the
    block's first query selects, and no output depends on a later token. All gates start at 0.5, so every view gets
    gradients from the first step.

    The module holds no group and no plan: it can be built on the meta device, sharded, saved and recovered like any
    other layer. The gates' gradients cover this rank's tokens and must be summed like those of other parameters.
    Raises: `ValueError` for sizes below 1.
    """

    def __init__(
        self, width: int, num_heads: int, *, block: int, top_k: int, window: int, first_query: bool = False
    ) -> None:
        super().__init__()
        require("block", block, 1, "128 suits the kernels")
        require("top_k", top_k, 1, "1 keeps only the own block")
        require("window", window, 1, "a window holds at least the query's own token")
        self.num_heads, self.block, self.top_k, self.window = num_heads, block, top_k, window
        self.first_query = first_query
        self.gates = nn.Linear(width, num_heads * NUM_VIEWS)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: GatedRing | None = None
    ) -> torch.Tensor:
        """x (B, S, width), q (B, S, H, D), k and v (B, S, Hkv, D) to out (B, S, H, D).

        With `ring` the arguments are this rank's slices, (B, S_local, ...), and all ranks make the same calls in the
        same order. Raises: `ValueError` for shapes that do not match each other, the module or the ring.
        """
        check_tensors(q, k, v)
        self._check(x, q)
        if ring is None:
            chosen, window = (self._masked(q, k, v, mask) for mask in (self.selected(q, k), self._window_mask(q)))
            views = (self._compressed(q, k, v), chosen, window)
        else:
            views = ring.views(q, k, v, ViewSizes(self.block, self.top_k, self.window, self.first_query))
        shares = torch.sigmoid(self.gates(x)).unflatten(-1, (self.num_heads, NUM_VIEWS)).unbind(-1)
        out = torch.zeros_like(q)
        for share, view in zip(shares, views, strict=True):
            out = out + share.unsqueeze(-1) * view
        return out

    def selected(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Bool (B, H, S, S): the pairs in the selected blocks. The selection has no gradient; attention over them
        has."""
        mean_q, mean_k = (means_of_blocks(x.detach(), self.block) for x in (q, k))
        if self.first_query:
            mean_q = q.detach()[:, :: self.block].to(mean_k.dtype)
        rows = list(range(mean_q.size(1)))
        chosen = torch.stack([choose_blocks(a, b, rows, self.top_k) for a, b in zip(mean_q, mean_k, strict=True)])
        wide = chosen.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return wide[:, :, : q.size(1), : q.size(1)] & _causal(q)

    def _compressed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention over the means of the blocks before the query's own; queries of the first block get 0."""
        mean_k, mean_v = (means_of_blocks(x, self.block).to(x.dtype) for x in (k, v))
        num_blocks = mean_k.size(1)
        own = torch.arange(q.size(1), device=q.device) // self.block
        past = torch.arange(num_blocks, device=q.device)[None, :] < own[:, None]
        return self._masked(q, mean_k, mean_v, past)

    def _window_mask(self, q: torch.Tensor) -> torch.Tensor:
        return _causal(q) & _causal(q).triu(1 - self.window)

    def _masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        blind = ~mask.any(-1, keepdim=True)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask & ~blind, -math.inf)
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=bias, enable_gqa=q.size(2) != k.size(2))
        return out.masked_fill(blind, 0.0).transpose(1, 2)

    def _check(self, x: torch.Tensor, q: torch.Tensor) -> None:
        if q.size(2) != self.num_heads:
            raise ValueError(f"q has {q.size(2)} heads, the gates are for num_heads={self.num_heads}; give as many")
        if x.dim() != 3 or x.shape[:2] != q.shape[:2] or x.size(2) != self.gates.in_features:
            raise ValueError(
                f"x {tuple(x.shape)}, q {tuple(q.shape)}: x must be (B, S, {self.gates.in_features}) with q's B and S"
            )


def _causal(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.size(1), q.size(1), dtype=torch.bool, device=q.device).tril()
