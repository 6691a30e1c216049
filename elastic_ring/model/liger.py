"""Liger's Triton kernels (Hsu et al. 2024, arXiv:2410.10989) for a layer's elementwise chains and for the loss on GPUs.

Where the package is missing, on CPUs and in fp64 callers use torch's own operators: `fits` decides by the tensors of a
call. No kernel here sums with atomics or chooses a block size by timing: in liger-kernel 0.8.5 a row is summed by one
program, and a norm's weight gradient is the sum, in order, of one partial sum for each multiprocessor. Equal inputs
give equal bits on equal GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_OF_FOLDERS = "elastic_ring.integrations.transformers"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Kernels:
    """Autograd functions of `liger_kernel.ops`."""

    rms_norm: Any
    silu_mul: Any
    gelu_mul: Any
    rope: Any
    linear_cross_entropy: Any


def fits(*tensors: Tensor) -> bool:
    """Whether Liger's kernels take these tensors: on a GPU, of one of its types, none empty, the package installed."""
    first = tensors[0]
    if not first.is_cuda or first.dtype not in _TYPES or _kernels() is None:
        return False
    return all(each.is_cuda and each.dtype == first.dtype and each.numel() > 0 for each in tensors)


def load() -> None:
    """Import the kernels, where they are installed: it takes a second or more."""
    _kernels()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: str = "llama", in_place: bool = False
) -> Tensor:
    """x (..., width) over its root mean square, times `offset + weight`.

    `casting`: "llama" rounds to x's type before it multiplies by the weight, "gemma" after. `in_place`: backward
    overwrites the gradient of its output, so nothing else may read it, as a residual connection would.
    """
    normed: Tensor = _found().rms_norm.apply(x, weight, eps, offset, casting, in_place)
    return normed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Backward overwrites both with their gradients: nothing else may need them."""
    product: Tensor = _found().silu_mul.apply(gate, up)
    return product


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by tanh. Backward overwrites both with their gradients: nothing else may need them."""
    product: Tensor = _found().gelu_mul.apply(gate, up)
    return product


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, pairing halves, of q (B, H, S, D) and k (B, H_kv, S, D): views of memory (B, S, H, D), which is
    overwritten, as backward overwrites the gradients.

    cos and sin (B or 1, S, D or less) are the angles twice over; what they do not reach passes unchanged. Computed in
    their type and rounded to q's.
    """
    rotated: tuple[Tensor, Tensor] = _found().rope.apply(q, k, cos, sin)
    return rotated


def rope_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rope`, for q (B, S, H, D), k (B, S, H_kv, D) and each angle once: cos and sin (B, S, D/2)."""
    turned = _found().rope.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, q.size(-1))
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def rows_of_logits(num_tokens: int, vocab_size: int, width: int) -> int:
    """How many tokens' logits `cross_entropy_sum` holds at a time, in the hidden type: about as much as the hidden
    states of all `num_tokens` (`fused_linear_cross_entropy_forward` of liger-kernel 0.8.5)."""
    rows = -(-num_tokens // -(-vocab_size // width))
    return min(num_tokens, 1 << (rows - 1).bit_length())


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[target] over targets that are not -100, fp32.

    Forward computes the gradients of its inputs as well, where `hidden` requires one; backward only scales them, in
    place, so it may run once. Logits exist for as many tokens at a time as make them about as large as `hidden`. The
    weight's gradient is summed in fp32.
    """
    kernel = _found().linear_cross_entropy
    fp32 = torch.float32
    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
    # return_z_loss, accum_dtype
    found = kernel.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum", softcap, False, fp32)
    loss_sum: Tensor = found[0]
    return loss_sum


def _found() -> _Kernels:
    kernels = _kernels()
    assert kernels is not None, "ask `fits` first"
    return kernels


@lru_cache(maxsize=1)
def _kernels() -> _Kernels | None:
    if find_spec("liger_kernel") is None:
        return None
    # From the files of the operators: the package's own names may be replaced through its environment variable.
    with _without_peft():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return _Kernels(
        LigerRMSNormFunction,
        LigerSiLUMulFunction,
        LigerGELUMulFunction,
        LigerRopeFunction,
        LigerFusedLinearCrossEntropyFunction,
    )


@contextmanager
def _without_peft() -> Iterator[None]:
    """Importing Liger looks for peft, for whose models it has patches, and so imports transformers: seconds that no
    kernel needs. Whoever has imported peft already keeps it, and a task of a model folder imports transformers in any
    case, which would go on taking peft for missing if it looked for it now."""
    if "peft" in sys.modules or _OF_FOLDERS in sys.modules:
        yield
        return
    sys.modules["peft"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["peft"]
