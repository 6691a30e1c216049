"""Adding up partial attention results: (out, lse) of two disjoint sets of keys into those of their union.

The eager form is the reference and the CPU's path; on a GPU `fused_merge` does the same in one pass over memory.
In place, on accumulators of fp32 (fp64 for fp64 inputs), or in the kernels' own type where that rounds only
once more. Knows nothing of hops or ranks. Fully masked rows have lse = -inf going into a merge and +inf
going into a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


MOST_AT_ONCE = 3
"""Parts merged in one pass over memory: the limit of the fused kernel."""


def merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """In place: `out`, `lse` become those of both key sets. Shapes (B, n, H, D) and (B, n, H).

    The softmax rescaling of FlashAttention's split keys (Dao 2022, arXiv:2205.14135), applied across hops.
    """
    merge_all_(out, lse, [(part_out, part_lse)])


def merge_all_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The same with up to MOST_AT_ONCE parts, in their order: in one pass over memory, rounded once to `out`'s type."""
    fused = fused_for(out)
    (eager_merge_all_ if fused is None else fused.merge_all_)(out, lse, parts)


def add_(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """In place: `total` (B, n, H, D) grows by all `parts`, in their order, rounded once to `total`'s type."""
    if len(parts) == 1 and parts[0].dtype == total.dtype and total.size(0) <= _FEW_SEQUENCES:
        # The same bits: a sum of two is formed in fp32 and rounded once here too, and launched in less time.
        for one, share in zip(total.unbind(0), parts[0].unbind(0), strict=True):
            one.add_(share)
        return
    fused = fused_for(total)
    (eager_add_ if fused is None else fused.add_)(total, parts)


def add_placed_(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
    """In place: row r of `total` (B, n, D) grows by row places[i, r] of `inbox` (B, m, D) for every i in order that
    has it (-1: none), rounded once to `total`'s type. `places` (hops, n) int32."""
    fused = fused_for(total)
    (eager_add_placed_ if fused is None else fused.add_placed_)(total, inbox, places)


def own_gradients(
    dout: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream gradients that make a tile-local softmax return its global share: of `own_out` (B, n, H, D), in `dout`'s
    type, and of `own_lse` (B, n, H), in its type and memory order.

    `dout` and `out` (B, n, H, D) and `lse` (B, n, H), +inf where nothing is seen, are those of all keys. With
    w = exp(own_lse - lse) this part's P is w times its own, and dS = w * P_own * (dP - rowsum(dout * out)): d own_out =
    w * dout, and the row sums' difference goes by way of the other, d own_lse = rowsum(w * dout * (own_out - out)).
    """
    fused = fused_for(dout)
    return (eager_own_gradients if fused is None else fused.own_gradients)(dout, own_out, own_lse, out, lse)


_FEW_SEQUENCES = 4
"""Up to so many plain sums cost the host no more than one Triton launch; dK and dV count as one each."""


def eager_merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    part_lse = part_lse.to(lse.dtype)
    # From the difference alone, so that the two weights add up to 1 however large the scores are. A part
    # of -inf weighs nothing, whatever it meets: the difference of two -inf would be NaN.
    weight = torch.sigmoid(part_lse - lse).masked_fill(part_lse == -math.inf, 0.0)
    if out.dtype == lse.dtype:
        out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    else:
        out.copy_(torch.lerp(out.to(lse.dtype), part_out.to(lse.dtype), weight.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, part_lse))


def eager_merge_all_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    exact = out if len(parts) == 1 else out.to(lse.dtype)
    for part_out, part_lse in parts:
        eager_merge_(exact, lse, part_out, part_lse)
    if exact is not out:
        out.copy_(exact)


def eager_add_(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if total.dtype == accumulate_dtype(total.dtype):
        for part in parts:
            total += part
        return
    exact = total.to(accumulate_dtype(total.dtype))
    for part in parts:
        exact += part
    total.copy_(exact)


def eager_add_placed_(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
    exact = total.to(accumulate_dtype(total.dtype))
    for place in places:
        found = inbox.index_select(1, place.clamp(min=0))
        exact = torch.where((place >= 0)[None, :, None], exact + found, exact)
    total.copy_(exact)


def eager_own_gradients(
    dout: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # The whole's lse is never -inf: of a query that sees none of these keys the weight is exp(-inf), not NaN.
    exact = accumulate_dtype(dout.dtype)
    weighted = dout.to(exact) * torch.exp(own_lse - lse).to(exact).unsqueeze(-1)
    down_lse = (weighted * (own_out.to(exact) - out.to(exact))).sum(-1)
    return weighted.to(dout.dtype), torch.empty_like(own_lse).copy_(down_lse)


def lse_for_backward(lse: torch.Tensor) -> torch.Tensor:
    """The merged lse with +inf for fully masked rows, so that P = exp(s - lse) is 0 there, not NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def fused_for(total: torch.Tensor) -> ModuleType | None:
    """The Triton kernels for tensors of a GPU, unless Triton is missing or they are fp64's."""
    if not total.is_cuda or total.dtype == torch.float64:
        return None
    return _triton_kernels()


@lru_cache(maxsize=1)
def _triton_kernels() -> ModuleType | None:
    try:
        from elastic_ring.attention import fused_merge
    except ImportError:
        return None
    return fused_merge
