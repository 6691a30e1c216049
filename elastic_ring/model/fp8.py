"""Linear layers whose products are computed in 8 bits, with a scale for each row computed in each call: no state.

As torchao's recipe `rowwise_with_gw_hp` has it (arXiv:2209.05433 for the type): e4m3 for inputs, weights and the
gradients of outputs, scales that are powers of two, the gradient of the weight in the type of the inputs. Equal inputs
give equal bits on equal GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.errors import RunFailed

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
LEAST_CAPABILITY = (9, 0)
"""The least compute capability of a GPU: an H100's."""
ALIGNED = 16
"""Both widths of a product are multiples of this."""
_LEAST_SCALE = 2.0**-100


class Fp8Linear(nn.Linear):
    """A linear layer that computes in 8 bits; an `nn.Linear` becomes one by its class, so names and values stay."""

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x.flatten(0, -2), self.weight)
        product = product.unflatten(0, x.shape[:-1])
        return product if self.bias is None else product + self.bias


def use_fp8(layers: Sequence[nn.Module]) -> set[int]:
    """Have the linear layers in `layers` compute in 8 bits, except in the first and the last; returns the widths of
    their rows, forward and backward. Those whose widths no kernel takes stay as they are."""
    widths = set[int]()
    for layer in layers[1:-1]:
        for module in layer.modules():
            if type(module) is nn.Linear and not (module.in_features % ALIGNED or module.out_features % ALIGNED):
                module.__class__ = Fp8Linear
                widths |= {module.in_features, module.out_features}
    return widths


def warm_up(device: torch.device, dtype: torch.dtype, widths: set[int]) -> None:
    """Compile and load what layers of these widths need, by a row of each and one small layer. Raises RunFailed for a
    GPU older than an H100."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise RunFailed(
            f"linears='fp8': {torch.cuda.get_device_name(device)} (compute capability {capability[0]}."
            f"{capability[1]}) does not multiply rows with scales of their own in 8 bits; an H100 or a newer one does: "
            "leave linears out"
        )
    least = min(widths)
    with torch.device(device):
        for width in sorted(widths):
            rows(torch.ones(1, width, dtype=dtype))
        layer = Fp8Linear(least, least, bias=False, dtype=dtype)
        layer(torch.ones(1, ALIGNED, least, dtype=dtype, requires_grad=True)).sum().backward()


class _Product(torch.autograd.Function):
    """x (N, inputs) times weight (outputs, inputs): (N, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(rows(x), rows(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _product(rows(grad), columns(weight), x.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad.t() @ x if ctx.needs_input_grad[1] else None


Scaled = tuple[Tensor, Tensor]
"""Numbers in e4m3 (N, width), each row to be multiplied by its scale (N, 1)."""


def _product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """left (N, width) times right (M, width), transposed. The kernels for scales of rows are fast with the tensor
    cores' own sums only (torchao)."""
    return torch._scaled_mm(
        left[0],
        right[0].t(),
        scale_a=left[1],
        scale_b=right[1].t(),
        out_dtype=dtype,
        use_fast_accum=left[0].is_cuda,
    )


def rows(x: Tensor) -> Scaled:
    """x (N, width) with a scale for each row."""
    x = x.contiguous()
    return eager_rows(x) if (fused := _fused(x)) is None else fused.rows(x)


def columns(weight: Tensor) -> Scaled:
    """weight (outputs, inputs) transposed, with a scale for each of its columns."""
    weight = weight.contiguous()
    return eager_rows(weight.t().contiguous()) if (fused := _fused(weight)) is None else fused.columns(weight)


def eager_rows(x: Tensor) -> Scaled:
    """As `rows`, by torch's operators: the fused kernel's reference."""
    finite = x.abs().nan_to_num(nan=0.0, posinf=torch.inf)  # a NaN is left to the number itself
    scale = scale_of(finite.amax(dim=1, keepdim=True).float())
    return (x.float() / scale).to(E4M3), scale


def scale_of(largest: Tensor) -> Tensor:
    """The least power of two that, as a divisor, makes numbers of up to `largest` (fp32) fit. Infinity for infinity:
    such a row becomes NaN, and the step is skipped."""
    needed = largest.div(LARGEST).clamp_min(_LEAST_SCALE)
    return ((needed.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(torch.float32)


def _fused(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels, for a tensor that they take."""
    if not tensor.is_cuda or not tensor.numel():
        return None
    try:
        from elastic_ring.model import fp8_kernels
    except ImportError:
        return None
    return fp8_kernels
