"""The attention systems that `bench_ring` compares: the problem they solve, and what each of them provides.

A system prepares outside the clock everything that its own documentation prepares outside a training step (its tensors
in its own layout, contexts, buffers, graphs); only `Prepared.run` is timed. Systems hold no timer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""q (1, S_local, H, D), k and v (1, S_local, Hkv, D), dout like q; or results: out, dq, dk, dv of the same shapes."""


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


def _unchanged(found: Tensors) -> Tensors:
    return found


def _nothing() -> None:
    pass


@dataclass
class Prepared:
    """A system that holds the tensors of one problem. Only `run` is timed.

    `run` does one forward and backward and returns out, dq, dk, dv in the system's own layout; `results` brings them
    into `Tensors`' shapes. `select` sets the process-wide options that `run` needs, before each timing. `close` undoes
    what preparing changed in the process; prepared systems are closed in reverse order, all at the end of a problem.
    """

    run: Callable[[], Tensors]
    results: Callable[[Tensors], Tensors] = _unchanged
    select: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


class System(Protocol):
    """One way to compute a `Problem`. `layout` is how its ranks share the sequence."""

    name: str
    layout: str

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot run here (not installed, heads that do not divide), or None."""

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        """`tensors` are this rank's share of the sequence in the system's `layout`. Called by all ranks."""


def through_autograd(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Tensors) -> Callable[[], Tensors]:
    """One forward and backward of `attend`, on leaves that are made once."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    dout = tensors[3]

    def run() -> Tensors:
        out = attend(q, k, v)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return out.detach(), dq, dk, dv

    return run


def one_backward_thread() -> None:
    """Run backward in the calling thread, whatever the system.

    Handing a single layer over to autograd's thread takes as long as the layer; a training step does it once for all
    layers.
    """
    torch.autograd.set_multithreading_enabled(False)
