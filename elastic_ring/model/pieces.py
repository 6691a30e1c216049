"""What a layer computes before and after its attention: plain functions of plain tensors, run as they are or compiled.

Weights are arguments and modules never appear. A compiled function is then tied to shapes and types alone: all layers
share it, and so does the fresh module of the next generation. Attention, its hops and FSDP2's hooks stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "shape_padding": False,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
    "compile_threads": 1,
}
"""Nothing that is decided by timing: two processes that compile the same get the same kernels, whatever else runs on
their machines, so that a newcomer's bits are those of the one it replaces. One thread, because a process that may be
killed at any moment starts no others."""

NUM_VARIANTS = 256
"""One for each length of a slice, device and kind of pass; torch.compile's own limit of 8 is less than a node's GPUs
take, and a call beyond it fails."""


@dataclass(frozen=True)
class Pieces:
    """The two functions of one layer, `before` and `after` of this module or what was made of them."""

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]


def before(
    x: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, eps: float,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x (B, S, width) to q (B, S, H, D), k and v (B, S, Hkv, D): normalised, projected, turned to its positions."""
    x = F.rms_norm(x, [x.size(-1)], norm, eps)
    heads = (x.size(0), x.size(1), -1, head_dim)
    q = rotated(F.linear(x, query).view(heads), cos, sin)
    k = rotated(F.linear(x, key).view(heads), cos, sin)
    return q, k, F.linear(x, value).view(heads)


def after(
    x: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """x (B, S, width) and attention's result (B, S, H * D) to the layer's result: both residual sums, SwiGLU (Shazeer
    2020) between."""
    x = x + F.linear(attended, output)
    y = F.rms_norm(x, [x.size(-1)], norm, eps)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, S, H, D) turned by the angles of cos and sin (B, S, 1, D/2): its halves are the two coordinates (Su et al.
    2021, in GPT-NeoX's pairing)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


EAGER = Pieces(before, after)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Within, the layers of `model` that compile run as they are written: for shapes that come once.

    In every thread, autograd's among them. torch's own switch would turn FlexAttention off too, and without its kernel
    that ignores the lists of blocks.
    """
    compiling: list[Any] = [each for each in model.modules() if getattr(each, "compile_blocks", False) is True]
    for module in compiling:
        module.compile_blocks = False
    try:
        yield
    finally:
        for module in compiling:
            module.compile_blocks = True


@lru_cache(maxsize=1)
def compiled() -> Pieces:
    """Each length is compiled for itself, at its first call: a function for any length would be another one, with
    other bits, in a process that has met other lengths before."""
    return Pieces(_compiled(before), _compiled(after))


def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    made = _made(piece)

    def call(*args: Any) -> Any:
        # At every call: recomputation runs in a thread of autograd's, and settings are a thread's own from torch 2.12.
        with torch._dynamo.config.patch(recompile_limit=NUM_VARIANTS):
            return made(*args)

    return call


def _made(piece: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(piece, fullgraph=True, dynamic=False, options=dict(OPTIONS))
