"""Rules from user functions of blocks. Training does not reach them: a function has no short form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_ring.attention.patterns.rules import Kinds, Mask, Positions, Rule, require, strips


@dataclass(frozen=True)
class BlockFunction(Rule):
    """A user-defined rule: `function(query_unit, key_unit)` of integer arrays that broadcast, elementwise.

    Example: `lambda i, j: (i - j) % 3 == 0`. The function must be pure and the same on every rank; two rules are equal
    if they hold the same function object. `sees` raises `ValueError` if the function is not elementwise, `row_kinds` if
    it keeps a future unit under causal attention.
    """

    function: Callable[[Positions, Positions], Any]
    unit_tokens: int = 128

    def __post_init__(self) -> None:
        require("unit_tokens", self.unit_tokens, 1, "128 is the kernels' block")

    def sees(self, q: Positions, k: Positions) -> Mask:
        row, column = q // self.unit_tokens, k // self.unit_tokens
        shape = np.broadcast_shapes(row.shape, column.shape)
        try:
            kept = np.broadcast_to(np.asarray(self.function(row, column), dtype=bool), shape)
        except (ValueError, TypeError) as error:
            name = getattr(self.function, "__name__", repr(self.function))
            raise ValueError(
                f"function={name}: must take integer arrays and answer elementwise; use & | and numpy.where"
                f" instead of and, or, if ({error})"
            ) from error
        return kept

    @property
    def sees_ahead(self) -> bool:
        return True

    def row_kinds(self, rows: Positions, columns: Positions, block: int, causal: bool = True) -> Kinds:
        if causal:
            self.check_causal(*(np.unique(self._units(blocks, block)) for blocks in (rows, columns)))
        return super().row_kinds(rows, columns, block, causal)

    def _units(self, blocks: Positions, block: int) -> Positions:
        """All units of which these blocks hold a part."""
        parts = np.arange(0, block, math.gcd(block, self.unit_tokens), dtype=np.int64)
        return (blocks[:, None] * block + parts).ravel() // self.unit_tokens

    def check_causal(self, rows: Positions, columns: Positions) -> None:
        """Raises `ValueError` that names the first kept pair of units whose key comes after the query."""
        queries, keys = rows[:, None] * self.unit_tokens, columns[None, :] * self.unit_tokens
        for some in strips(len(rows), len(columns)):
            early = self.sees(queries[some], keys) & (keys > queries[some])
            if early.any():
                row, column = np.argwhere(early)[0]
                name = getattr(self.function, "__name__", repr(self.function))
                raise ValueError(
                    f"function={name}: lets query unit {rows[some][row]} see unit {columns[column]} of the future; add"
                    " `& (key <= query)`"
                )
