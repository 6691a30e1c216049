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
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from elastic_ring.model.memory import rows_of_logits

_OF_FOLDERS = "elastic_ring.integrations.transformers"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(*tensors: Tensor) -> bool:
    """Whether Liger's kernels take these tensors: on a GPU, of one of its types, none empty, the package installed."""
    first = tensors[0]
    if not first.is_cuda or first.dtype not in _TYPES or kernels() is None:
        return False
    return all(each.is_cuda and each.dtype == first.dtype and each.numel() > 0 for each in tensors)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: str = "llama", in_place: bool = False
) -> Tensor:
    """x (..., width) over its root mean square, times `offset + weight`.

    `casting`: "llama" rounds to x's type before it multiplies by the weight, "gemma" after. `in_place`: backward
    overwrites the gradient of its output, so nothing else may read it, as a residual connection would.
    """
    normed: Tensor = _required().rms_norm.apply(x, weight, eps, offset, casting, in_place)
    return normed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Backward overwrites both with their gradients: nothing else may need them."""
    product: Tensor = _required().silu_mul.apply(gate, up)
    return product


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by tanh. Backward overwrites both with their gradients: nothing else may need them."""
    product: Tensor = _required().gelu_mul.apply(gate, up)
    return product


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, pairing halves, of q (B, H, S, D) and k (B, H_kv, S, D): views of memory (B, S, H, D), which is
    overwritten, as backward overwrites the gradients.

    cos and sin (B or 1, S, D or less) are the angles twice over; dimensions beyond them pass unchanged. Computed in
    their type and rounded to q's.
    """
    rotated: tuple[Tensor, Tensor] = _required().rope.apply(q, k, cos, sin)
    return rotated


def rope_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rope`, for q (B, S, H, D), k (B, S, H_kv, D) and each angle once: cos and sin (B, S, D/2)."""
    turned = _required().rope.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, q.size(-1))
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


class CrossEntropySum(torch.autograd.Function):
    """(hidden, weight, targets, softcap) to the sum of -log softmax(hidden @ weight.T)[target] over targets that are
    not -100, fp32.

    Forward computes the gradients of its inputs as well, where `hidden` requires one; backward only scales them, in
    place, so it may run once. Logits exist for as many tokens at a time as make them about as large as `hidden`. The
    weight's gradient is summed in fp32.

    Liger's fused linear cross-entropy, with its kernel and its products, but for two reads of the device: it counts
    the targets before the first product, and asks in backward whether the loss was scaled. After either the GPU waits
    until the host, which was ahead by many launches, has launched the next.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        (num_tokens, width), vocab_size = hidden.shape, weight.size(0)
        num_rows = rows_of_logits(num_tokens, vocab_size, width)
        with_gradients, of_weight = ctx.needs_input_grad[:2]
        losses = torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients and of_weight else None
        room = torch.empty(num_rows, vocab_size, dtype=hidden.dtype, device=hidden.device)
        # Without a rounded product where the GPU can.
        adds_in_fp32 = hidden.dtype != torch.float32 and torch.cuda.get_device_capability(hidden.device) >= (8, 0)
        for start in range(0, num_tokens, num_rows):
            rows = slice(start, start + num_rows)
            part = hidden[rows]
            logits = torch.mm(part, weight.t(), out=room[: len(part)])
            _required().cross_entropy[(len(part),)](  # fills `losses`, and replaces logits by their gradients
                X_ptr=logits,
                X_stride=logits.stride(0),
                Y_ptr=targets[rows],
                Y_stride=targets.stride(0),
                weight_ptr=None,
                loss_ptr=losses[rows],
                z_loss_ptr=None,
                loss_stride=losses.stride(0),
                token_accuracy_ptr=None,
                token_accuracy_stride=0,
                predicted_tokens_ptr=None,
                predicted_tokens_stride=0,
                n_cols=vocab_size,
                n_non_ignore=1,  # this and the next are read for a mean only; numbers that vary are compiled for anew
                sum_non_ignore_weight=1,
                weight_sum=0.0,
                ignore_index=-100,
                lse_square_scale=0.0,
                label_smoothing=0.0,
                reduction="sum",
                softcap=softcap,
                RETURN_Z_LOSS=False,
                RETURN_TOKEN_ACCURACY=False,
                RETURN_PREDICTED_TOKENS=False,
                HAS_WEIGHT=False,
                HAS_SOFTCAPPING=softcap is not None,
                HAS_GRADIENTS=with_gradients,
                BLOCK_SIZE=min(_required().most_columns, 1 << (vocab_size - 1).bit_length()),
                num_warps=32,
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
            if grad_weight is not None and adds_in_fp32:
                torch.addmm(grad_weight, logits.t(), part, out_dtype=torch.float32, out=grad_weight)
            elif grad_weight is not None:
                grad_weight += (logits.t() @ part).float()
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0].view(1, 1)  # a scalar would be rounded to the gradients' type first
        scaled = (None if grad is None else grad.mul_(factor) for grad in (grad_hidden, grad_weight))
        return *scaled, None, None


def _required() -> SimpleNamespace:
    loaded = kernels()
    assert loaded is not None, "ask `fits` first"
    return loaded


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace | None:
    """Imports autograd functions of `liger_kernel.ops`, and the Triton kernel of the loss with its largest block: a
    second or more. None where the package is not installed."""
    if find_spec("liger_kernel") is None:
        return None
    # From the files of the operators: the package's own names may be replaced through its environment variable.
    with _without_peft():
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel
        from liger_kernel.ops.fused_linear_cross_entropy import MAX_FUSED_SIZE
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return SimpleNamespace(
        rms_norm=LigerRMSNormFunction,
        silu_mul=LigerSiLUMulFunction,
        gelu_mul=LigerGELUMulFunction,
        rope=LigerRopeFunction,
        cross_entropy=liger_cross_entropy_kernel,
        most_columns=MAX_FUSED_SIZE,
    )


@contextmanager
def _without_peft() -> Iterator[None]:
    """Hide peft from Liger's import, which would import transformers for its patches: seconds that no kernel needs. Not
    if peft is imported already, nor for a task of a model folder: it imports transformers in any case, which would
    remember peft as missing."""
    if "peft" in sys.modules or _OF_FOLDERS in sys.modules:
        yield
        return
    sys.modules["peft"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["peft"]
