"""Which (token, query head) pairs of a rank take part in one kernel call: how to gather and scatter them.

Tensor indexing only: block tables, kernels and communication must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elastic_ring.attention.layouts.layout import Range

MOST_AT_ONCE = 3
"""Parts of the same rows that are merged in one pass over memory: the limit of the fused kernel."""


class Rows:
    """Selects (token, query head) pairs of a rank."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S, H, ...) to (B, n, h, ...)."""
        raise NotImplementedError

    def put_back(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Write such a part back to x; nothing to do where `take` returned a view."""

    def run(self, num_heads: int) -> Range | None:
        """The token range, if it is contiguous and `take` selects all `num_heads` heads in order; else None."""
        return None

    def head_run(self, num_heads: int) -> range | None:
        """The heads, if `take` selects a contiguous range of tokens and of heads; else None."""
        return None


@dataclass(frozen=True)
class Span(Rows):
    """Tokens [start, stop) of the heads `heads` (None: all): a view, or x itself where it is all of it, because a view
    costs the host microseconds."""

    start: int
    stop: int
    heads: Range | None = None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.stop - self.start < x.size(1):
            x = x.narrow(1, self.start, self.stop - self.start)
        return x if self.heads is None else x.narrow(2, self.heads[0], self.heads[1] - self.heads[0])

    def run(self, num_heads: int) -> Range | None:
        return (self.start, self.stop) if self.heads in (None, (0, num_heads)) else None

    def head_run(self, num_heads: int) -> range | None:
        return range(num_heads) if self.heads is None else range(*self.heads)


@dataclass(frozen=True, eq=False)
class Scattered(Rows):
    """Ranges of tokens, of any heads: a view where both are contiguous, else a copy."""

    tokens: tuple[Range, ...]
    heads: tuple[int, ...]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, as_index(self.tokens)]
        return rows if len(self.heads) == x.size(2) else select_heads(rows, self.heads)

    def put_back(self, x: torch.Tensor, part: torch.Tensor) -> None:
        first, rows = self.heads[0], as_index(self.tokens)
        if self.heads == tuple(range(first, first + len(self.heads))):
            x[:, rows, first : first + len(self.heads)] = part
        elif isinstance(rows, slice):
            x[:, rows][:, :, list(self.heads)] = part
        else:
            x[:, rows[:, None], torch.tensor(self.heads)[None, :]] = part


def select_heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """x[:, :, heads], (B, S, len(heads), D): a view if the heads are consecutive, else a copy."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x[:, :, heads[0] : heads[0] + len(heads)]
    return x[:, :, list(heads)]


def as_index(ranges: tuple[Range, ...]) -> Any:
    """An index of these rows: a slice for a single range, else an int64 tensor."""
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


@dataclass(frozen=True, eq=False)
class OneGroup(Rows):
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

    def head_run(self, num_heads: int) -> range | None:
        return range(*self.heads.indices(num_heads)) if isinstance(self.tokens, slice) else None


@dataclass(frozen=True, eq=False)
class SeveralGroups(Rows):
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

    def _by_unit(self, x: torch.Tensor) -> tuple[int, ...]:
        return (x.size(0), x.size(1) * x.size(2) // self.unit, self.unit, *x.shape[3:])


class Places(NamedTuple):
    """A rank's tokens among the `num_tokens` of a plan in padded blocks: token i is number inner[i] (S_local,). `outer`
    (num_tokens,) is the inverse; its entries at `filled`, the padding, are any token."""

    inner: torch.Tensor
    outer: torch.Tensor
    filled: torch.Tensor

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, S_local, ...) to (B, num_tokens, ...), zeros elsewhere."""
        return x.index_select(1, self.outer).index_fill_(1, self.filled, 0)

    def take(self, wide: torch.Tensor) -> torch.Tensor:
        return wide.index_select(1, self.inner)
