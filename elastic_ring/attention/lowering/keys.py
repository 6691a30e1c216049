"""The keys of one kernel call, in the rank's own K and V or in a stage's buffer, and the places of their dK and dV.

A source is K and V, or dK and dV: two tensors (B, n, Hkv, D), or a buffer whose rows have both. In latent attention on
a ring (DeepSeek-V2, arXiv:2405.04434) hops carry each token's latent and rotated key as K and V of one head, and
`Latents` projects them up to K and V of all heads at the reader. Tensor arithmetic only, no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Rows, Scattered, Span, as_index
from elastic_ring.attention.merge import accumulate_dtype

Source = torch.Tensor | Sequence[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Keys(Protocol):
    def of(self, source: Source) -> Pair:
        """The call's keys, each (B, n, heads, D)."""
        ...

    def places(self, source: Source) -> Pair | None:
        """Views to which a kernel may write their dK and dV; None if they are gathered."""
        ...

    def put(self, source: Source, gradients: Sequence[torch.Tensor], *, added: bool) -> None:
        """Copy the dK and dV that a kernel returned to their place, or add them."""
        ...


class _Views:
    """Keys that are views of the source, so that kernels write their dK and dV in place."""

    def of(self, source: Source) -> Pair:
        raise NotImplementedError

    def places(self, source: Source) -> Pair | None:
        return self.of(source)

    def put(self, source: Source, gradients: Sequence[torch.Tensor], *, added: bool) -> None:
        for place, each in zip(self.of(source), gradients, strict=True):
            place.add_(each) if added else place.copy_(each)


@dataclass(frozen=True)
class TokenSpan(_Views):
    """A contiguous range of tokens of two tensors."""

    span: Span

    def of(self, source: Source) -> Pair:
        k, v = source
        return self.span.take(k), self.span.take(v)


@dataclass(frozen=True)
class HeadRows(_Views):
    """Rows [start, stop) of a buffer (rows, B, 2, D), which hold the tokens of `num_kv_heads` heads, head by head of a
    token."""

    rows: Range
    num_kv_heads: int

    def of(self, source: Source) -> Pair:
        assert isinstance(source, torch.Tensor)
        rows = source[slice(*self.rows)].unflatten(0, (-1, self.num_kv_heads))
        return rows[:, :, :, 0].permute(2, 0, 1, 3), rows[:, :, :, 1].permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class ScatteredTokens:
    """Ranges of tokens of some heads of two tensors: a tile's own keys."""

    tokens: Scattered

    def of(self, source: Source) -> Pair:
        k, v = source
        return self.tokens.take(k), self.tokens.take(v)

    def places(self, source: Source) -> Pair | None:
        return None

    def put(self, source: Source, gradients: Sequence[torch.Tensor], *, added: bool) -> None:
        assert added
        for total, each in zip(source, gradients, strict=True):
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

    def put(self, source: Source, gradients: Sequence[torch.Tensor], *, added: bool) -> None:
        assert added
        columns = as_index(self.tokens)
        for total, each in zip(self._group(source), gradients, strict=True):
            total[:, columns] += each

    def _group(self, source: Source) -> Pair:
        assert isinstance(source, torch.Tensor)
        batch, num_tokens, num_heads, head_dim = self.shape
        length = 2 * batch * num_tokens * num_heads * head_dim
        both = source.view(-1)[self.start : self.start + length].view(2, *self.shape)
        return both[0], both[1]


class Latents:
    """The projection of one pass, `up` (H * (N + V), L): of a token's L latent numbers to N of each head's key, before
    the R rotated ones, and to its value, which zeros widen to N + R. `dup` is its gradient, summed in the order of the
    calls; None unless `needs_grad`."""

    def __init__(self, up: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, needs_grad: bool = False) -> None:
        self._rank, self._head_dim, heads = up.size(1), q.size(3), q.size(2)
        self._of_key = self._head_dim - (2 * k.size(3) - self._rank)
        self._up = up.unflatten(0, (heads, -1))
        exact = accumulate_dtype(up.dtype)
        self.dup = torch.zeros(self._up.shape, dtype=exact, device=up.device) if needs_grad else None

    def keys(self, halves: Pair, rows: Rows) -> Pair:
        """K and V (B, n, h, N + R) of the heads of `rows`."""
        latent, rotated = self._parts(halves)
        up = self._up[_heads(rows)]
        both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        key, value = both[..., : self._of_key], both[..., self._of_key :]
        k = torch.cat((key, rotated.unsqueeze(2).expand(-1, -1, up.size(0), -1)), -1)
        return k, F.pad(value, (0, self._head_dim - value.size(-1)))

    def gradients(self, halves: Pair, dk: torch.Tensor, dv: torch.Tensor, rows: Rows) -> Pair:
        """Gradients of the halves from dK and dV of `keys`, in their type; the projection's is added to `dup`."""
        up, heads = self._up, _heads(rows)
        both = torch.cat((dk[..., : self._of_key], dv[..., : up.size(1) - self._of_key]), -1).flatten(2)
        down = both @ up[heads].flatten(0, 1).to(both.dtype)
        rotated = dk[..., self._of_key :].sum(2, dtype=accumulate_dtype(dk.dtype)).to(down.dtype)
        if self.dup is not None:
            latent = self._parts(halves)[0].to(both.dtype)
            share = both.flatten(0, 1).mT @ latent.flatten(0, 1)
            self.dup[heads] += share.view(-1, *up.shape[1:])
        first, second = torch.cat((down, rotated), -1).unsqueeze(2).chunk(2, -1)
        return first, second

    def gradient(self) -> torch.Tensor | None:
        """The projection's gradient, rounded once."""
        return None if self.dup is None else self.dup.flatten(0, 1).to(self._up.dtype)

    def _parts(self, halves: Pair) -> Pair:
        both = torch.cat(halves, -1).squeeze(2)
        return both[..., : self._rank], both[..., self._rank :]


def _heads(rows: Rows) -> list[int] | slice:
    return list(rows.heads) if isinstance(rows, Scattered) else slice(None)
