"""Three views of the past, mixed by learned gates: compressed blocks, selected blocks, and a window.

After native sparse attention (Yuan et al. 2025, arXiv:2502.11089). Simpler than the paper in two places: blocks
are compressed by their mean, not by a small network, and one selection serves a block of queries, not a token,
so that it is a block pattern like any other. Each view has its own softmax; the gates mix their outputs. On one
process masks of S x S say what is seen, which is the definition, takes batches and serves short sequences on any
device; where the sequence lies on a ring, or is long, `gated_ring` computes the views. There are no hops in here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from elastic_ring.attention.checks import check_tensors
from elastic_ring.attention.gated_ring import GatedRing, ViewSizes
from elastic_ring.attention.routing import choose_blocks
from elastic_ring.attention.rules import require
from elastic_ring.attention.summaries import means_of_blocks

NUM_VIEWS = 3


class GatedSparseAttention(nn.Module):
    """Attention of `num_heads` query heads with one gate for each head and view, read from the layer's input.

    `block` tokens make a block; each block of queries sees its own and the `top_k` - 1 past blocks that score
    highest; `window` tokens are seen beside. The mean of a block's queries chooses, so its later ones have a say in
    what its earlier ones see, though none sees a later key; with `first_query` its first query alone does, and no
    output depends on any later token. Gates start even, so that every view gets gradients at once.

    It holds no group and no plan, so that it can be built on the meta device, sharded, saved and healed like any
    other layer; the gates' gradients are those of this rank's tokens, to be summed as any other parameter's.
    Raises `ValueError` for numbers below 1.
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

        With `ring` they are this rank's slices, (B, S_local, ...), of the sequence that lies on it; every rank calls
        in the same order. Raises `ValueError` for shapes that do not fit each other, the module or the ring.
        """
        check_tensors(q, k, v)
        self._check(x, q)
        if ring is None:
            chosen, near = (self._masked(q, k, v, mask) for mask in (self.selected(q, k), self._near(q)))
            views = (self._compressed(q, k, v), chosen, near)
        else:
            views = ring.views(q, k, v, ViewSizes(self.block, self.top_k, self.window, self.first_query))
        shares = torch.sigmoid(self.gates(x)).unflatten(-1, (self.num_heads, NUM_VIEWS)).unbind(-1)
        out = torch.zeros_like(q)
        for share, view in zip(shares, views, strict=True):
            out = out + share.unsqueeze(-1) * view
        return out

    def selected(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Bool (B, H, S, S): the pairs of the chosen blocks. The choice has no gradient; what is chosen has."""
        mean_q, mean_k = (means_of_blocks(x.detach(), self.block) for x in (q, k))
        if self.first_query:
            mean_q = q.detach()[:, :: self.block].to(mean_k.dtype)
        rows = list(range(mean_q.size(1)))
        chosen = torch.stack([choose_blocks(a, b, rows, self.top_k) for a, b in zip(mean_q, mean_k, strict=True)])
        wide = chosen.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return wide[:, :, : q.size(1), : q.size(1)] & _causal(q)

    def _compressed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Over the means of the blocks that ended before the query's own began; a query of the first block gets 0."""
        mean_k, mean_v = (means_of_blocks(x, self.block).to(x.dtype) for x in (k, v))
        num_blocks = mean_k.size(1)
        own = torch.arange(q.size(1), device=q.device) // self.block
        past = torch.arange(num_blocks, device=q.device)[None, :] < own[:, None]
        return self._masked(q, mean_k, mean_v, past)

    def _near(self, q: torch.Tensor) -> torch.Tensor:
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
