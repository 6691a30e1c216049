"""What a layer computes before and after its attention: pure functions of tensors, eager or compiled.

Weights are arguments; modules do not appear. A compiled function then depends on shapes and dtypes alone, so all
layers share it, and so does the new module of the next generation. Attention, its communication and FSDP2's hooks stay
outside.
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

from elastic_ring.model import liger

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
"""No choice by timing: every process compiles the same kernels under any load, so a replacement worker gets the same
bits. One compile thread, because a process that may be killed at any moment must not start others.
"""

NUM_VARIANTS = 256
"""Limit for compiled variants, one for each slice length, device and kind of pass.

torch.compile's default of 8 is too few for the GPUs of a node, and calls beyond the limit fail.
"""


@dataclass(frozen=True)
class FusedOps:
    """The two functions of one layer: `before` and `after` of this module, or their compiled forms."""

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]


def before(
    x: Tensor,
    norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm, projections and rotary embedding: x (B, S, width) to q (B, S, H, D), k and v (B, S, H_kv, D)."""
    x = rms_norm(x, norm, eps)
    heads = (x.size(0), x.size(1), -1, head_dim)
    q, k, v = (F.linear(x, weight).view(heads) for weight in (query, key, value))
    if liger.fits(q, k) and cos.dtype == torch.float32:
        return *liger.rope_of_halves(q, k, cos.squeeze(2), sin.squeeze(2)), v
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def after(
    x: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """x (B, S, width) and attention's result (B, S, H * D) to the layer's output (B, S, width).

    Output projection with residual, then RMSNorm and SwiGLU (Shazeer 2020) with residual.
    """
    x = x + F.linear(attended, output)
    y = rms_norm(x, norm, eps)
    wide, other = F.linear(y, gate), F.linear(y, up)
    return x + F.linear(liger.silu_mul(wide, other) if liger.fits(wide, other) else F.silu(wide) * other, down)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) of x (B, S, width), whose result only linear layers read."""
    if liger.fits(x, weight):
        return liger.rms_norm(x, weight, eps, in_place=True)
    return F.rms_norm(x, [x.size(-1)], weight, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x (B, S, H, D) by cos and sin (B, S, 1, D/2); pairs halves, as GPT-NeoX."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


EAGER = FusedOps(before, after)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run the compiled layers of `model` eagerly within, for shapes that occur once; in all threads.

    torch's own switch would also disable FlexAttention's compiled kernel, and its eager form ignores block lists.
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
def compiled() -> FusedOps:
    """The compiled ops, with static shapes: each length is compiled at its first call.

    A dynamic-shape kernel would depend on the lengths that the process has met, and with it the bits.
    """
    return FusedOps(_compiled(before), _compiled(after))


def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    made = _made(piece)

    def call(*args: Any) -> Any:
        # Patch per call: since torch 2.12 the config is thread-local, and recomputation runs in autograd's threads.
        with torch._dynamo.config.patch(recompile_limit=NUM_VARIANTS):
            return made(*args)

    return call


def _made(piece: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(piece, fullgraph=True, dynamic=False, options=dict(OPTIONS))
