"""Which blocks a GPU's block-sparse kernel visits, as tensors on the device, in both directions.

Made on the device from one bool per pair of blocks, so that a pattern chosen by content never visits the host.
No kernels in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from elastic_ring.attention.blocks import block_kinds
from elastic_ring.attention.rules import FULL, NONE, PART
from elastic_ring.attention.sparse import SparsePattern

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class BlockLists:
    """int32 counts (1, H or 1, n) and, ascending and packed to the left, indices (1, H or 1, n, width)."""

    counts: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class BlockTables:
    """Blocks of 128 tokens: each query block's own, under the causal mask, and the earlier ones it sees wholly.

    `own` and `full` list key blocks by query block, for forward; `full_by_key` lists query blocks by key block,
    for backward (`own` is its own transpose). `num_blocks` is on both sides.
    """

    own: BlockLists
    full: BlockLists
    full_by_key: BlockLists
    num_blocks: int

    @property
    def device(self) -> torch.device:
        return self.own.counts.device


def tables_of(kept: torch.Tensor, *, width: int | None = None) -> BlockTables:
    """From kept (H or 1, n, n) bool, queries first. Own blocks count as kept; what lies after them is dropped.

    `width` is the most earlier blocks that a query block keeps, where it is known: finding it out is a read by
    the host.
    """
    num_heads, num_blocks = kept.shape[:2]
    earlier = kept.tril(-1)
    at = torch.arange(num_blocks, dtype=torch.int32, device=kept.device)
    ones = torch.ones(1, num_heads, num_blocks, dtype=torch.int32, device=kept.device)
    own = BlockLists(ones, at.view(1, 1, -1, 1).expand(1, num_heads, -1, 1).contiguous())
    by_key = _listed(earlier.transpose(1, 2), None if width is None else num_blocks)
    return BlockTables(own, _listed(earlier, width), by_key, num_blocks)


def tables_for(pattern: SparsePattern, seq_len: int, num_heads: int, device: torch.device) -> BlockTables:
    """Of a static pattern on one document. Raises `ValueError` for one that the kernels cannot run, by name."""
    if seq_len % BLOCK_TOKENS:
        raise ValueError(f"seq_len={seq_len}: block-sparse kernels take multiples of {BLOCK_TOKENS} tokens")
    if pattern.document_starts != (0,):
        raise ValueError("block-sparse kernels take one document at a time; call once for each")
    rules = pattern.rules(num_heads)
    kept = []
    for rule in rules if len(set(rules)) > 1 else rules[:1]:
        kinds = block_kinds(rule, seq_len, BLOCK_TOKENS)
        if (np.tril(kinds, -1) == PART).any() or (np.diagonal(kinds) != FULL).any():
            raise ValueError(
                f"{rule}: keeps blocks of {BLOCK_TOKENS} tokens in part, which block-sparse kernels cannot; choose a"
                " rule over whole blocks, such as BigBird(window=8, globals=0, randoms=0) for a window"
            )
        kept.append(torch.from_numpy(kinds != NONE))
    return tables_of(torch.stack(kept).to(device))


def _listed(chosen: torch.Tensor, width: int | None) -> BlockLists:
    """chosen (H, n, m) bool to the columns of each row."""
    counts = chosen.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if width is None else min(width, chosen.size(-1))
    # Stable: the chosen columns come first, in their order.
    order = chosen.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    return BlockLists(counts.unsqueeze(0), order[..., :width].to(torch.int32).unsqueeze(0).contiguous())
