"""Which keys one kernel call reads, in the rank's own K and V or in a stage's buffer; and where their dK and dV go.

A source is K and V, or dK and dV: two tensors (B, n, Hkv, D), or a buffer whose rows have both. Tensor indexing only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Scattered, Span, as_index

Source = torch.Tensor | Sequence[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Keys(Protocol):
    def of(self, source: Source) -> Pair:
        """The call's keys, each (B, n, heads, D)."""
        ...

    def places(self, source: Source) -> Pair | None:
        """Views to which a kernel may write their dK and dV; None where they are gathered."""
        ...

    def put(self, source: Source, found: Sequence[torch.Tensor], *, added: bool) -> None:
        """Copy the dK and dV that a kernel returned to their place, or add them."""
        ...


def put_in_views(places: Pair, found: Sequence[torch.Tensor], *, added: bool) -> None:
    for place, each in zip(places, found, strict=True):
        place.add_(each) if added else place.copy_(each)


class TokenSpan(NamedTuple):
    """A contiguous range of tokens of two tensors."""

    span: Span

    def of(self, source: Source) -> Pair:
        k, v = source
        return self.span.take(k), self.span.take(v)

    def places(self, source: Source) -> Pair | None:
        return self.of(source)

    def put(self, source: Source, found: Sequence[torch.Tensor], *, added: bool) -> None:
        put_in_views(self.of(source), found, added=added)


class HeadRows(NamedTuple):
    """Rows [start, stop) of a buffer (rows, B, 2, D), which hold the tokens of `num_kv_heads` heads, head by head of a
    token."""

    rows: Range
    num_kv_heads: int

    def of(self, source: Source) -> Pair:
        assert isinstance(source, torch.Tensor)
        rows = source[slice(*self.rows)].unflatten(0, (-1, self.num_kv_heads))
        return rows[:, :, :, 0].permute(2, 0, 1, 3), rows[:, :, :, 1].permute(2, 0, 1, 3)

    def places(self, source: Source) -> Pair | None:
        return self.of(source)

    def put(self, source: Source, found: Sequence[torch.Tensor], *, added: bool) -> None:
        put_in_views(self.of(source), found, added=added)


@dataclass(frozen=True, eq=False)
class ScatteredTokens:
    """Ranges of tokens of some heads of two tensors: the own keys of a tile."""

    tokens: Scattered

    def of(self, source: Source) -> Pair:
        k, v = source
        return self.tokens.take(k), self.tokens.take(v)

    def places(self, source: Source) -> Pair | None:
        return None

    def put(self, source: Source, found: Sequence[torch.Tensor], *, added: bool) -> None:
        assert added
        for total, each in zip(source, found, strict=True):
            self.tokens.put_back(total, self.tokens.take(total) + each)


@dataclass(frozen=True, eq=False)
class GroupTokens:
    """Ranges of tokens of a head group, in a contiguous buffer in which the group's K, then V, begin at element `start`
    and are (B, num_tokens, num_kv_heads, D) each."""

    start: int
    shape: tuple[int, int, int, int]
    tokens: tuple[Range, ...]

    def of(self, source: Source) -> Pair:
        k, v = self._group(source)
        columns = as_index(self.tokens)
        return k[:, columns], v[:, columns]

    def places(self, source: Source) -> Pair | None:
        return None

    def put(self, source: Source, found: Sequence[torch.Tensor], *, added: bool) -> None:
        assert added
        columns = as_index(self.tokens)
        for total, each in zip(self._group(source), found, strict=True):
            total[:, columns] += each

    def _group(self, source: Source) -> Pair:
        assert isinstance(source, torch.Tensor)
        batch, num_tokens, num_heads, head_dim = self.shape
        length = 2 * batch * num_tokens * num_heads * head_dim
        both = source.view(-1)[self.start : self.start + length].view(2, *self.shape)
        return both[0], both[1]
