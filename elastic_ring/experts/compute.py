"""The products of all experts with their own rows, in one call where the device has it.

torch's grouped product (`torch.nn.functional.grouped_mm`) serves where a self-test against fp64 passed in this process;
elsewhere a loop over the experts, which reads their loads on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

ProductKind = Literal["grouped", "loop"]
ALIGNED_BYTES = 16
"""Alignment of rows that grouped kernels of GPUs read."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_TESTED = (3, 32, 16)  # experts, outputs, inputs; one expert has no row


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows (N, inputs), sorted by expert, times their expert's weight (E, outputs, inputs): (N, outputs).

    `ends`: int32 (E,), where the rows of each expert end; the last is N. An expert without rows gets a zero gradient.
    """
    if rows.is_meta:  # where torch's product knows bfloat16 only
        return rows.new_empty(rows.size(0), weight.size(1))
    return _PRODUCTS[product_kind(rows, weight)](rows, weight, ends)


def product_kind(rows: Tensor, weight: Tensor) -> ProductKind:
    """Which way these rows go."""
    aligned = all(size * rows.element_size() % ALIGNED_BYTES == 0 for size in weight.shape[1:])
    if not aligned or rows.dtype not in _TOLERANCE or rows.size(0) == 0:
        return "loop"
    return "grouped" if _serves(rows.device, rows.dtype) else "loop"


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.mT, offs=ends)


def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not weight.size(0):  # a rank without experts: its exchanges stay in the graph, by rows or by weights
        return (rows.sum(1, keepdim=True) + weight.sum()).expand(-1, weight.size(1))
    loads = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(*pair) for pair in zip(rows.split(loads), weight.unbind(), strict=True)])


_PRODUCTS: dict[ProductKind, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"grouped": _grouped, "loop": _loop}


@lru_cache(maxsize=16)
def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the grouped product gives what fp64 gives, its gradients too."""
    try:
        error = _error(device, dtype)
    except (RuntimeError, NotImplementedError) as failure:
        log.warning("experts: no grouped product for %s on %s (%s); a loop takes its place", dtype, device, failure)
        return False
    if error > _TOLERANCE[dtype]:
        log.warning(
            "experts: the grouped product for %s on %s is off by %.2g; a loop takes its place", dtype, device, error
        )
        return False
    return True


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of a product and its gradients. Draws nothing from the global generators."""
    experts, outputs, inputs = _TESTED
    drawn = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in ((40, inputs), (experts, outputs, inputs))
    ]
    slope = torch.randn(40, outputs, generator=drawn, dtype=torch.float64)
    ends = torch.tensor([23, 23, 40], dtype=torch.int32)
    found: list[list[Tensor]] = []
    # Hooks of its own: inside a layer that is checkpointed, its tensors would count as the layer's.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        for product, kind, where in ((_loop, torch.float64, torch.device("cpu")), (_grouped, dtype, device)):
            rows, weight = (tensor.to(where, kind).requires_grad_() for tensor in exact)
            out = product(rows, weight, ends.to(where))
            grads = torch.autograd.grad(out, (rows, weight), slope.to(where, kind))
            found.append([tensor.detach().double().cpu() for tensor in (out, *grads)])
    return max(float((ours - theirs).norm() / theirs.norm()) for theirs, ours in zip(found[0], found[1], strict=True))
