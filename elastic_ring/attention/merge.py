"""Adds up partial attention results: (out, lse) of disjoint sets of keys into those of their union.

The eager form is the reference and the CPU's path; on a GPU `fused_merge` does the same in one pass over memory.
In place, on accumulators of fp32 (fp64 for fp64 inputs), or in the kernels' own type where that rounds only
once more. Fully masked rows have lse = -inf going into a merge and +inf going into a backward pass. `Accumulator`,
`GradientSum` and `KeyGradients` are the running sums of a pass: rows of a call, no hops or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import torch

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import MOST_AT_ONCE, Rows


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results of inputs of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_all_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """In place: `out` (B, n, H, D), `lse` (B, n, H) become those of their keys and of up to MOST_AT_ONCE parts, merged
    in their order, in one pass over memory and rounded once to `out`'s type.

    The softmax rescaling of FlashAttention's split keys (Dao 2022, arXiv:2205.14135), applied across hops.
    """
    fused = fused_for(out)
    (eager_merge_all_ if fused is None else fused.merge_all_)(out, lse, parts)


def add_(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """In place: `total` (B, n, H, D) grows by all `parts`, in their order, rounded once to `total`'s type."""
    if len(parts) == 1 and parts[0].dtype == total.dtype and total.size(0) <= _FEW_SEQUENCES:
        # The same bits: a sum of two is formed in fp32 and rounded once here too, and launched in less time.
        for sequence, share in zip(total.unbind(0), parts[0].unbind(0), strict=True):
            sequence.add_(share)
        return
    fused = fused_for(total)
    (eager_add_ if fused is None else fused.add_)(total, parts)


def add_placed_(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
    """In place: row r of `total` (B, n, D) grows by the rows places[i, r] of `inbox` (B, m, D), in the order of i,
    rounded once to `total`'s type. `places` (hops, n) int32; -1: no row."""
    fused = fused_for(total)
    (eager_add_placed_ if fused is None else fused.add_placed_)(total, inbox, places)


def own_gradients(
    dout: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream gradients that make a tile-local softmax return its global share: of `own_out` (B, n, H, D), in `dout`'s
    type, and of `own_lse` (B, n, H), in its type and memory order.

    `dout` and `out` (B, n, H, D) and `lse` (B, n, H), +inf where nothing is seen, are those of all keys. With
    w = exp(own_lse - lse) this part's P is w * P_own, and dS = w * P_own * (dP - rowsum(dout * out)): d own_out = w *
    dout, and d own_lse = rowsum(w * dout * (own_out - out)) corrects the row sum.
    """
    fused = fused_for(dout)
    return (eager_own_gradients if fused is None else fused.own_gradients)(dout, own_out, own_lse, out, lse)


_FEW_SEQUENCES = 4
"""Up to this number plain sums cost the host no more than one Triton launch; dK and dV count as one each."""


def eager_merge_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    part_lse = part_lse.to(lse.dtype)
    # From the difference alone, so that the two weights add up to 1 however large the scores are. A part of -inf has
    # weight 0 in any case: the difference of two -inf would be NaN.
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
        share = inbox.index_select(1, place.clamp(min=0))
        exact = torch.where((place >= 0)[None, :, None], exact + share, exact)
    total.copy_(exact)


def eager_own_gradients(
    dout: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # The merged lse is never -inf, so a query that sees none of these keys has the weight exp(-inf), not NaN.
    exact = accumulate_dtype(dout.dtype)
    weighted = dout.to(exact) * torch.exp(own_lse - lse).to(exact).unsqueeze(-1)
    down_lse = (weighted * (own_out.to(exact) - out.to(exact))).sum(-1)
    return weighted.to(dout.dtype), torch.empty_like(own_lse).copy_(down_lse)


def lse_for_backward(lse: torch.Tensor) -> torch.Tensor:
    """The merged lse with +inf for fully masked rows, so that P = exp(s - lse) is 0 there, not NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with one more key of value 0 for each head, whose score is `sinks` (H,): out (B, S, H, D) and lse (B,
    S, H) of the other keys become those of all (Xiao et al. 2023, arXiv:2309.17453). A kernel's backward pass takes
    this pair unchanged; rows that see no key stay 0."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype))
    kept = torch.where(lse == math.inf, 0.0, (lse - whole).exp())
    return (out.to(lse.dtype) * kept.unsqueeze(-1)).to(out.dtype), whole


def sinks_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient (H,) of `sinks` in `with_sinks`, which returned `out` and `lse`."""
    share = (sinks.to(lse.dtype) - lse).exp()
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 1)).to(sinks.dtype)


def fused_for(total: torch.Tensor) -> ModuleType | None:
    """The Triton kernels for a tensor on a GPU; None for fp64 or without Triton."""
    if not total.is_cuda or total.dtype == torch.float64:
        return None
    return _import_fused_merge()


@lru_cache(maxsize=1)
def _import_fused_merge() -> ModuleType | None:
    try:
        from elastic_ring.attention import fused_merge
    except ImportError:
        return None
    return fused_merge


class _RunningSum:
    """A sum over calls, shaped as `like` (B, S, H, D).

    `dtype` is the type of the sum, by default the accumulation type. With `by_rows` it is stored row by row, heads
    innermost. With `at_once` all parts but the first are added at the end, in one pass over memory, where they are
    contiguous.
    """

    def __init__(
        self, like: torch.Tensor, dtype: torch.dtype | None = None, *, by_rows: bool = False, at_once: bool = False
    ) -> None:
        self._like, self._by_rows, self._at_once = like, by_rows, at_once
        self._dtype = accumulate_dtype(like.dtype) if dtype is None else dtype
        self._deferred: list[tuple[Range, tuple[torch.Tensor, ...]]] = []

    def _defer(self, rows: Rows, *part: torch.Tensor) -> bool:
        """True if the part of `rows` is added later."""
        run = rows.run(self._like.size(2)) if self._at_once else None
        if run is None:
            return False
        assert len(self._deferred) < MOST_AT_ONCE
        self._deferred.append((run, part))
        return True


class Accumulator(_RunningSum):
    """Running `out` (B, S, H, D) and `lse` (B, S, H, natural log) over the keys merged so far.

    Rows without keys so far have lse = -inf and out = 0. lse has the accumulation type.
    """

    _sums: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def out(self) -> torch.Tensor:
        return self._merged()[0]

    @property
    def lse(self) -> torch.Tensor:
        return self._merged()[1]

    def add(self, rows: Rows, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result of the queries `rows`: `out` (B, n, h, D), `lse` (B, n, h).

        The first part that covers all rows becomes the accumulator: merging it into nothing would change no bit.
        """
        if self._sums is None and out.shape == self._like.shape:
            lse = lse.to(accumulate_dtype(self._like.dtype))
            self._sums = _own(out, self._dtype, self._by_rows), lse.contiguous() if self._by_rows else lse
        elif not self._defer(rows, out, lse):
            total, total_lse = self._merged()
            grown, grown_lse = rows.take(total), rows.take(total_lse)
            merge_all_(grown, grown_lse, [(out, lse)])
            rows.put_back(total, grown)
            rows.put_back(total_lse, grown_lse)

    def _merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sums is None:
            like = self._like
            out = torch.zeros(like.shape, dtype=self._dtype, device=like.device)
            # Heads before rows in memory, as in the GPU kernels.
            shape = (like.size(0), like.size(2), like.size(1))
            lse = torch.full(shape, -math.inf, dtype=accumulate_dtype(like.dtype), device=like.device).transpose(1, 2)
            self._sums = out, lse.contiguous() if self._by_rows else lse
        out, lse = self._sums
        deferred, self._deferred = self._deferred, []
        for start, length, parts in _strips(deferred):
            pairs = [(part_out, part_lse) for part_out, part_lse in parts]
            merge_all_(out.narrow(1, start, length), lse.narrow(1, start, length), pairs)
        return out, lse


class GradientSum(_RunningSum):
    """Running dq (B, S, H, D) over calls.

    The first share that covers all of it becomes the total; the first share of some heads is copied."""

    _total: torch.Tensor | None = None

    def __init__(
        self, like: torch.Tensor, dtype: torch.dtype | None = None, *, by_rows: bool = False, at_once: bool = False
    ) -> None:
        super().__init__(like, dtype, by_rows=by_rows, at_once=at_once)
        self._unwritten = [range(like.size(2))]  # heads whose rows hold nothing yet

    def add(self, rows: Rows, share: torch.Tensor) -> None:
        """Add the share (B, n, h, D) of the queries `rows`."""
        num_tokens, num_heads = self._like.shape[1:3]
        if self._total is None and share.shape == self._like.shape:
            self._total, self._unwritten = _own(share, self._dtype, self._by_rows), []
            return
        heads = rows.head_run(num_heads) if self._unwritten and share.size(1) == num_tokens else None
        if heads is not None and self._mark_written(heads):
            self._allocated()[:, :, heads.start : heads.stop].copy_(share)
        elif not self._defer(rows, share):
            grown = rows.take(self.total)
            if grown[0].is_contiguous():
                add_(grown, [share])
            else:
                grown.add_(share)
            rows.put_back(self.total, grown)

    @property
    def total(self) -> torch.Tensor:
        total = self._allocated()
        for heads in self._unwritten:
            total[:, :, heads.start : heads.stop].zero_()
        self._unwritten = []
        deferred, self._deferred = self._deferred, []
        for start, length, shares in _strips(deferred):
            add_(total.narrow(1, start, length), [share for (share,) in shares])
        return total

    def _allocated(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.empty(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self._total

    def _mark_written(self, heads: range) -> bool:
        """True if nothing was added to these heads so far."""
        for index, free in enumerate(self._unwritten):
            if free.start <= heads.start and heads.stop <= free.stop:
                rest = range(free.start, heads.start), range(heads.stop, free.stop)
                self._unwritten[index : index + 1] = [each for each in rest if each]
                return True
        return False


class KeyGradients:
    """dK and dV of a rank's own keys, from its own queries and from other ranks. `total` is (2, B, S, Hkv, D) of type
    `dtype`; with `zeroed` it begins as zeros."""

    def __init__(self, k: torch.Tensor, dtype: torch.dtype, *, zeroed: bool) -> None:
        make = torch.zeros if zeroed else torch.empty
        self.total = make((2, *k.shape), dtype=dtype, device=k.device)

    def of_heads(self, heads: Range | None) -> torch.Tensor:
        """The part of K/V heads [first, last); None: all."""
        return self.total if heads is None else self.total[:, :, :, heads[0] : heads[1]]


def _strips(
    deferred: Sequence[tuple[Range, tuple[torch.Tensor, ...]]],
) -> Iterator[tuple[int, int, list[tuple[torch.Tensor, ...]]]]:
    """Start and length of each strip of queries with the same parts (B, n, ...), and the parts cut to the strip, in the
    order of arrival."""
    for start, stop in pairwise(sorted({edge for rows, _ in deferred for edge in rows})):
        parts = [
            tuple(tensor.narrow(1, start - first, stop - start) for tensor in tensors)
            for (first, last), tensors in deferred
            if first <= start and stop <= last
        ]
        if parts:
            yield start, stop - start, parts


def _own(part: torch.Tensor, dtype: torch.dtype, by_rows: bool) -> torch.Tensor:
    """`part` as a running total: in its type, and on a GPU in the order that the fused kernels walk."""
    part = part.to(dtype)
    return part.contiguous() if by_rows or part.is_cuda else part
