"""Adding up partial attention results: (out, lse) of two disjoint sets of keys into those of their union.

The eager form, in place, on accumulators of fp32 (fp64 for fp64 inputs). Knows nothing of hops or ranks.
Fully masked rows have lse = -inf going into a merge and +inf going into a backward pass.
"""

from __future__ import annotations

import math

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Accumulator:
    """Running `out` (B, S, H, D) and `lse` (B, S, H, natural log) over the keys merged so far.

    Rows that no key has reached yet have lse = -inf and out = 0.
    """

    def __init__(self, like: torch.Tensor) -> None:
        dtype = accumulate_dtype(like.dtype)
        self.out = torch.zeros(like.shape, dtype=dtype, device=like.device)
        self.lse = torch.full(like.shape[:3], -math.inf, dtype=dtype, device=like.device)

    def add(self, rows: tuple[int, int], out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result for the local query range `rows`: `out` (B, n, H, D), `lse` (B, n, H)."""
        start, stop = rows
        merge_(self.out[:, start:stop], self.lse[:, start:stop], out, lse)


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """In place: `out`, `lse` become those of both key sets. Shapes (B, n, H, D) and (B, n, H).

    The softmax rescaling of FlashAttention's split keys (Dao 2022, arXiv:2205.14135), applied across hops.
    """
    part_lse = part_lse.to(lse.dtype)
    # From the difference alone, so that the two weights add up to 1 however large the scores are. A part
    # of -inf weighs nothing, whatever it meets: the difference of two -inf would be NaN.
    weight = torch.sigmoid(part_lse - lse).masked_fill(part_lse == -math.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def lse_for_backward(lse: torch.Tensor) -> torch.Tensor:
    """The merged lse with +inf for fully masked rows, so that P = exp(s - lse) is 0 there, not NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf)
