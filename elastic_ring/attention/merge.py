"""Adding up partial attention results: (out, lse) of two disjoint sets of keys into those of their union.

The eager form is the reference and the CPU's path; on a GPU `fused_merge` does the same in one pass over memory.
In place, on accumulators of fp32 (fp64 for fp64 inputs), or in the kernels' own type where that rounds only
once more. Fully masked rows have lse = -inf going into a merge and +inf going into a backward pass. `Accumulator`,
`GradientSum` and `KeyGradients` are the running sums of a pass; they know which rows a call computed on, no hops or
ranks.
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


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with one more key of value 0 for each head, whose score is `sinks` (H,): out (B, S, H, D) and lse (B,
    S, H) of the other keys become those of all (Xiao et al. 2023, arXiv:2309.17453). The backward pass of a kernel
    takes this pair as it takes any; rows that see no key stay 0."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype))
    kept = torch.where(lse == math.inf, 0.0, (lse - whole).exp())
    return (out.to(lse.dtype) * kept.unsqueeze(-1)).to(out.dtype), whole


def sinks_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Of `with_sinks`, whose results `out` and `lse` are, (H,)."""
    share = (sinks.to(lse.dtype) - lse).exp()
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 1)).to(sinks.dtype)


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


class Accumulator:
    """Running `out` (B, S, H, D) and `lse` (B, S, H, natural log) over the keys merged so far.

    Rows without keys so far have lse = -inf and out = 0. `dtype` is the type of the running `out`, by default the
    accumulation type, which lse always has. With `by_rows` both are stored row by row, heads innermost. With `at_once`
    all parts but the first are merged at the end, in one pass over memory, where they are contiguous.
    """

    def __init__(
        self, like: torch.Tensor, dtype: torch.dtype | None = None, *, by_rows: bool = False, at_once: bool = False
    ) -> None:
        self._at_once = at_once
        self._like = like
        self._by_rows = by_rows
        self._dtype = accumulate_dtype(like.dtype) if dtype is None else dtype
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._deferred: list[tuple[Range, tuple[torch.Tensor, torch.Tensor]]] = []

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
        if self._out is None and out.shape == self._like.shape:
            self._out, lse = _own(out, self._dtype, self._by_rows), lse.to(accumulate_dtype(self._like.dtype))
            self._lse = lse.contiguous() if self._by_rows else lse
            return
        run = rows.run(self._like.size(2)) if self._at_once else None
        if run is not None:
            assert len(self._deferred) < MOST_AT_ONCE
            self._deferred.append((run, (out, lse)))
            return
        total, total_lse = self._merged()
        grown, grown_lse = rows.take(total), rows.take(total_lse)
        merge_(grown, grown_lse, out, lse)
        rows.put_back(total, grown)
        rows.put_back(total_lse, grown_lse)

    def _merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._fill()
        assert self._out is not None
        assert self._lse is not None
        deferred, self._deferred = self._deferred, []
        for start, length, parts in _strips(deferred):
            merge_all_(
                self._out.narrow(1, start, length),
                self._lse.narrow(1, start, length),
                [(out, lse) for out, lse in parts],
            )
        return self._out, self._lse

    def _fill(self) -> None:
        if self._out is not None:
            return
        like = self._like
        self._out = torch.zeros(like.shape, dtype=self._dtype, device=like.device)
        # Heads before rows in memory, as the GPU kernels have it.
        shape = (like.size(0), like.size(2), like.size(1))
        lse = torch.full(shape, -math.inf, dtype=accumulate_dtype(like.dtype), device=like.device)
        self._lse = lse.transpose(1, 2).contiguous() if self._by_rows else lse.transpose(1, 2)


class GradientSum:
    """Running dq (B, S, H, D) over calls.

    The first share that covers all of it becomes the total (with `by_rows` stored row by row); the first share of some
    heads is copied. `at_once` is as for `Accumulator`."""

    def __init__(
        self, like: torch.Tensor, dtype: torch.dtype | None = None, *, by_rows: bool = False, at_once: bool = False
    ) -> None:
        self._at_once = at_once
        self._like = like
        self._by_rows = by_rows
        self._dtype = accumulate_dtype(like.dtype) if dtype is None else dtype
        self._total: torch.Tensor | None = None
        self._unwritten = [range(like.size(2))]  # heads whose rows hold nothing yet
        self._deferred: list[tuple[Range, tuple[torch.Tensor]]] = []

    def add(self, rows: Rows, share: torch.Tensor) -> None:
        """Add the share (B, n, h, D) of the queries `rows`."""
        num_heads = self._like.size(2)
        if self._total is None and share.shape == self._like.shape:
            self._total, self._unwritten = _own(share, self._dtype, self._by_rows), []
            return
        if self._unwritten and share.size(1) == self._like.size(1):
            heads = rows.head_run(num_heads)
            if heads is not None and self._first(heads):
                self._made()[:, :, heads.start : heads.stop].copy_(share)
                return
        run = rows.run(num_heads) if self._at_once else None
        if run is not None:
            assert len(self._deferred) < MOST_AT_ONCE
            self._deferred.append((run, (share,)))
            return
        grown = rows.take(self.total)
        if grown[0].is_contiguous():
            add_(grown, [share])
        else:
            grown.add_(share)
        rows.put_back(self.total, grown)

    @property
    def total(self) -> torch.Tensor:
        total = self._made()
        for heads in self._unwritten:
            total[:, :, heads.start : heads.stop].zero_()
        self._unwritten = []
        deferred, self._deferred = self._deferred, []
        for start, length, shares in _strips(deferred):
            add_(total.narrow(1, start, length), [share for (share,) in shares])
        return total

    def _made(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.empty(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self._total

    def _first(self, heads: range) -> bool:
        """Whether nothing was added to these heads so far; something is from now on."""
        for index, free in enumerate(self._unwritten):
            if free.start <= heads.start and heads.stop <= free.stop:
                left = range(free.start, heads.start), range(heads.stop, free.stop)
                self._unwritten[index : index + 1] = [each for each in left if each]
                return True
        return False


class KeyGradients:
    """dK and dV of a rank's own keys: the shares of its own queries, by some heads or all, and what comes back from
    other ranks. `total` is (2, B, S, Hkv, D) of type `dtype`; with `zeroed` it begins as zeros."""

    def __init__(self, k: torch.Tensor, dtype: torch.dtype, *, zeroed: bool) -> None:
        make = torch.zeros if zeroed else torch.empty
        self.total = make((2, *k.shape), dtype=dtype, device=k.device)

    def of_heads(self, heads: Range | None) -> torch.Tensor:
        """The part of some K/V heads, all for None."""
        return self.total if heads is None else self.total[:, :, :, heads[0] : heads[1]]


def _strips(
    deferred: Sequence[tuple[Range, tuple[torch.Tensor, ...]]],
) -> Iterator[tuple[int, int, list[tuple[torch.Tensor, ...]]]]:
    """Start and length of each strip of queries that gets the same parts (B, n, ...), with the parts cut to the strip,
    in the order of arrival."""
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
