"""Which of a rank's queries meet fetched keys in one kernel call: how to gather and scatter them.

Tensor indexing only: block tables, kernels and communication must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.patterns.rules import Positions


class QueryIndex(Protocol):
    """Selects (token, query head) pairs of a rank. `take` gathers x (B, S, H, ...) to (B, n, h, ...), and `put_back`
    writes such a part back to x; where `take` returned a view it does nothing."""

    def take(self, x: torch.Tensor) -> torch.Tensor: ...

    def put_back(self, x: torch.Tensor, part: torch.Tensor) -> None: ...

    def run(self, num_heads: int) -> Range | None:
        """The token range, if it is contiguous and `take` selects all `num_heads` heads in order; else None."""
        ...


@dataclass(frozen=True, eq=False)
class OneGroup:
    """Tokens of one range of heads: a view for a slice of tokens, a copy for an index (n,) int64."""

    tokens: slice | torch.Tensor
    heads: slice

    def take(self, x: torch.Tensor) -> torch.Tensor:
        some = x[:, :, self.heads]
        return some[:, self.tokens] if isinstance(self.tokens, slice) else some.index_select(1, self.tokens)

    def put_back(self, x: torch.Tensor, part: torch.Tensor) -> None:
        if not isinstance(self.tokens, slice):
            x[:, :, self.heads].index_copy_(1, self.tokens, part)

    def run(self, num_heads: int) -> Range | None:
        if not isinstance(self.tokens, slice) or self.heads != slice(0, num_heads):
            return None
        return self.tokens.start, self.tokens.stop


@dataclass(frozen=True, eq=False)
class SeveralGroups:
    """The queries of several groups of `num_heads` heads each, one group after another: always a copy, of at most as
    many elements as x.

    `index` (n * num_heads / unit,) int64 holds distinct units, where a unit is a run of `unit` heads of one token: unit
    r of x is number r % (H / unit) of token r // (H / unit). The target of `put_back` must be contiguous by row.
    """

    index: torch.Tensor
    unit: int
    num_heads: int

    def take(self, x: torch.Tensor) -> torch.Tensor:
        units = x.reshape(self._by_unit(x)).index_select(1, self.index)
        return units.view(x.size(0), -1, self.num_heads, *x.shape[3:])

    def put_back(self, x: torch.Tensor, part: torch.Tensor) -> None:
        x.view(self._by_unit(x)).index_copy_(1, self.index, part.view(self._by_unit(part)))

    def run(self, num_heads: int) -> Range | None:
        return None

    def _by_unit(self, x: torch.Tensor) -> tuple[int, ...]:
        return (x.size(0), x.size(1) * x.size(2) // self.unit, self.unit, *x.shape[3:])


def query_index_of(
    blocks: Sequence[Positions], heads: Sequence[Range], num_heads: int, device: torch.device
) -> OneGroup | SeveralGroups:
    """The queries in each group's `blocks` (of a rank's slice, ascending) and `heads`, the same number in each group,
    out of `num_heads` heads."""
    if len(blocks) == 1:
        return OneGroup(_tokens_of(blocks[0], device), slice(*heads[0]))
    together = heads[0][1] - heads[0][0]
    unit = math.gcd(num_heads, together, *(first for first, _ in heads))
    per_token = num_heads // unit
    pairs = zip(blocks, heads, strict=True)
    starts = np.concatenate([some * (BLOCK_TOKENS * per_token) + first // unit for some, (first, _) in pairs])
    # Expanded on the device; on the host this would take longer than making the tables.
    tokens = per_token * torch.arange(BLOCK_TOKENS, device=device).unsqueeze(-1)
    units = torch.arange(together // unit, device=device)
    index = torch.from_numpy(starts).to(device).view(-1, 1, 1) + tokens + units
    return SeveralGroups(index.flatten(), unit, together)


def _tokens_of(blocks: Positions, device: torch.device) -> slice | torch.Tensor:
    if len(blocks) and blocks[-1] - blocks[0] + 1 != len(blocks):
        tokens = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return torch.from_numpy(tokens.ravel()).to(device)
    first = int(blocks[0]) if len(blocks) else 0
    return slice(first * BLOCK_TOKENS, (first + len(blocks)) * BLOCK_TOKENS)
