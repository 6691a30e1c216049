"""Latent attention on a ring (DeepSeek-V2, arXiv:2405.04434): what travels is each token's latent and rotated key, and
who reads them projects them up to K and V of all heads; gradients return as they came.

To plans and exchange the two halves of a token's numbers are K and V of one head. No messages in here.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from elastic_ring.attention.layouts.rows import Rows, Scattered
from elastic_ring.attention.merge import accumulate_dtype

Pair = tuple[torch.Tensor, torch.Tensor]


class Latents:
    """The projection of one pass, `up` (H * (N + V), L): of a token's L latent numbers to N of each head's key, which
    the R rotated ones follow, and to its value, which zeros widen to N + R. `dup` is its gradient, summed in the order
    of the calls; None unless `wanted`."""

    def __init__(self, up: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, wanted: bool = False) -> None:
        self._rank, self._head_dim, heads = up.size(1), q.size(3), q.size(2)
        self._of_key = self._head_dim - (2 * k.size(3) - self._rank)
        self._up = up.unflatten(0, (heads, -1))
        exact = accumulate_dtype(up.dtype)
        self.dup = torch.zeros(self._up.shape, dtype=exact, device=up.device) if wanted else None

    def keys(self, halves: Pair, rows: Rows) -> Pair:
        """K and V (B, n, h, N + R) of the heads of `rows`."""
        latent, rotated = self._parts(halves)
        up = self._up[_heads(rows)]
        both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        key, value = both[..., : self._of_key], both[..., self._of_key :]
        k = torch.cat((key, rotated.unsqueeze(2).expand(-1, -1, up.size(0), -1)), -1)
        return k, F.pad(value, (0, self._head_dim - value.size(-1)))

    def gradients(self, halves: Pair, dk: torch.Tensor, dv: torch.Tensor, rows: Rows) -> Pair:
        """Of the halves, from dK and dV of `keys`, in their type; that of the projection is added to `dup`."""
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
        """Of the projection, rounded once."""
        return None if self.dup is None else self.dup.flatten(0, 1).to(self._up.dtype)

    def _parts(self, halves: Pair) -> Pair:
        both = torch.cat(halves, -1).squeeze(2)
        return both[..., : self._rank], both[..., self._rank :]


def _heads(rows: Rows) -> list[int] | slice:
    return list(rows.heads) if isinstance(rows, Scattered) else slice(None)
