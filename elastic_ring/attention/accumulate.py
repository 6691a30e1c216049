"""Running sums of a pass: out with its lse and dq over kernel calls, and the gradients of a rank's own keys.

They hold what was added so far and know which rows a call computed on; the arithmetic is `merge`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.lowering.rows import Rows
from elastic_ring.attention.merge import MOST_AT_ONCE, accumulate_dtype, add_, merge_, merge_all_


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
