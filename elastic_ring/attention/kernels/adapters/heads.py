"""Conversion between (B, S, H, D) and the heads-first form without grouped heads that some kernels need."""

from __future__ import annotations

import torch

from elastic_ring.attention.merge import accumulate_dtype


def heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """(B, S, H, D) to (B, H * group, S, D), each head repeated `group` times."""
    if group > 1:
        x = x.repeat_interleave(group, dim=2)
    return x.transpose(1, 2)


def fold(x: torch.Tensor, group: int) -> torch.Tensor:
    """Sum, in the accumulation type, the gradients of the query heads that share a K/V head: (B, S, H, D) to
    (B, S, Hkv, D)."""
    if group == 1:
        return x
    return x.reshape(*x.shape[:2], -1, group, x.size(3)).sum(3, dtype=accumulate_dtype(x.dtype)).to(x.dtype)
