"""What every measured attention has in common: the problem, and one forward and backward pass of it.

A system is asked whether it can do a problem, then for a function that runs it once. It holds no timer.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

IN_A_ROW = """passes between two looks at the clock: 1 has GPUs wait for the host, more let it run ahead as in a step;
waits for messages are always watched in single passes (1)"""

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


def one_backward_thread() -> None:
    """Passes of one layer hand over to a thread for backward each time, which takes the host as long as the layer does;
    a training step does so once for all its layers. Of this thread's calls, whatever system they are of."""
    torch.autograd.set_multithreading_enabled(False)


def at_least_one(text: str) -> int:
    """A count on the command line."""
    if int(text) < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)
