"""Families whose blocks content chooses, for the tables of quality: by masks to train, by rings of one rank to time.

The search for patterns does not propose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import Masks
from elastic_ring.attention.layers import AttentionFn, PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.patterns.content import TopK
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from experiments.block_means import choose_blocks


@dataclass(frozen=True)
class ContentFamily(Family):
    """`top_k` blocks of `block` tokens, chosen by content; `text` is empty.

    `first_query` routes by a block's first query; the mean of all queries leaks later tokens of the block to earlier
    ones.
    """

    top_k: int = 0
    first_query: bool = False

    def pattern(self) -> LayerPatterns:
        return LayerPatterns((LayerGroup((TopK(self.top_k, self.first_query, self.block),)),), self.block)

    def density(self, seq_len: int, num_layers: int, num_heads: int) -> float:
        """That of `top_k` blocks."""
        num_blocks, block = -(-seq_len // self.block), self.block
        earlier = sum(min(self.top_k, row + 1) - 1 for row in range(num_blocks))
        kept = earlier * block * block + num_blocks * block * (block + 1) // 2
        return kept / (seq_len * (seq_len + 1) / 2)

    def masks(self, seq_len: int, num_heads: int) -> ContentMasks:
        return ContentMasks(self, seq_len, num_heads)

    def layers(self, layout: Layout, num_layers: int, head_dim: int) -> list[AttentionFn]:
        return [PatternedAttention(self.pattern(), layout, 0, None)]


class ContentMasks(Masks):
    """Blocks are chosen by content in each call."""

    def __init__(self, family: ContentFamily, seq_len: int, num_heads: int) -> None:
        super().__init__(None, seq_len, num_heads)
        self.family = family

    def for_call(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        """Bool (B, H, S, S): the blocks that `choose_blocks` picks for each sequence; q, k (B, S, H, D)."""
        block = self.family.block
        num_blocks = -(-self.seq_len // block)
        mean_q, mean_k = (x.detach().unflatten(1, (num_blocks, block)).mean(2) for x in (q, k))
        if self.family.first_query:
            mean_q = q.detach()[:, ::block]
        # Heads choose independently, so the batch can be folded into the heads.
        mean_q, mean_k = (x.transpose(0, 1).flatten(1, 2) for x in (mean_q, mean_k))
        chosen = choose_blocks(mean_q, mean_k, list(range(num_blocks)), self.family.top_k).unflatten(0, (q.size(0), -1))
        wide = chosen.repeat_interleave(block, 2).repeat_interleave(block, 3)
        return wide & torch.ones(self.seq_len, self.seq_len, dtype=torch.bool, device=q.device).tril()
