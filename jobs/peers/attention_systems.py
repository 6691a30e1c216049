"""What every measured attention has in common: the problem, and one forward and backward pass of it.

A system is asked whether it can do a problem, then for a function that runs it once. It holds no timer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Pass = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""q (1, S_local, H, D), k, v (1, S_local, Hkv, D) and dout, to out, dq, dk, dv of the same shapes."""


@dataclass(frozen=True)
class Problem:
    """Causal attention over `num_tokens` that `cp` ranks share, bf16."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cp: int

    @property
    def flops_per_rank(self) -> float:
        """Forward and backward (2.5 times the forward's products), the causal half only."""
        return 3.5 * 2.0 * self.num_tokens**2 * self.num_heads * self.head_dim / self.cp

    @property
    def name(self) -> str:
        return f"{self.num_tokens // 1024}K {self.num_heads}:{self.num_kv_heads} D{self.head_dim} cp{self.cp}"


class System(Protocol):
    """One way to compute a `Problem`. `layout` is how its ranks share the sequence."""

    name: str
    layout: str

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot run here (not installed, heads that do not divide), or None."""

    def prepare(self, problem: Problem, cp_rank: int, group: Any) -> Pass: ...
