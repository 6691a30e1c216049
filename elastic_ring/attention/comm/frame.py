"""The shape of an exchange's buffers. No messages in this file."""

from __future__ import annotations

import math
from typing import NamedTuple


class Frame(NamedTuple):
    """A buffer of n rows has the shape (*before, n, *after); pieces count in units of `unit` elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    unit: int

    @property
    def row(self) -> int:
        return math.prod(self.before) * math.prod(self.after)

    def shape(self, num_rows: int) -> tuple[int, ...]:
        return (*self.before, num_rows, *self.after)
