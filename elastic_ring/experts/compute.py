"""Choices sorted by expert and the way back, and the products of all experts with their own rows. No groups in here.

Every permutation is a gather, backward too: an addition by index would use atomics on GPUs, whose order differs from
run to run. Nothing is dropped: an expert takes all tokens that chose it, however a batch is cut. torch's grouped
product (`torch.nn.functional.grouped_mm`) serves where a self-test against fp64 passed in this process; elsewhere a
loop over the experts, which reads their loads on the host.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

ProductKind = Literal["grouped", "loop"]
ALIGNED_BYTES = 16
"""Alignment of rows that grouped kernels of GPUs read."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Order:
    """The choices of T tokens, k each, sorted by expert; within an expert in the order of the tokens.

    rows: int64 (T * k,), the choice in each row. back: int64 (T * k,), the row of each choice. ends: int32 (E,), where
    the rows of each expert end. Everything stays on the device; the host reads nothing.
    """

    rows: Tensor
    back: Tensor
    ends: Tensor
    num_choices: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Order:
        """`chosen`: int64 (T, k), an expert each."""
        flat = chosen.reshape(-1)
        by_expert, rows = torch.sort(flat, stable=True)
        back = inverse_of(rows)
        experts = torch.arange(num_experts, device=flat.device)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        return cls(rows, back, ends, chosen.size(-1))

    @property
    def load(self) -> Tensor:
        """int32 (E,): how many rows each expert has."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    def spread(self, tokens: Tensor) -> Tensor:
        """Tokens (T, width) to their rows (T * k, width), sorted by expert."""
        rows: Tensor = _Spread.apply(tokens, self.rows, self.back, self.num_choices)
        return rows

    def gather(self, results: Tensor, weights: Tensor) -> Tensor:
        """Rows (T * k, width), sorted by expert, to the weighted sum of each token's (T, width).

        `weights`: (T, k). The k products are added in the order of the choices, in the wider of both types; the sum has
        the type of `results`.
        """
        by_choice = permute(results, self.back, self.rows)
        parts = by_choice.view(-1, self.num_choices, results.size(-1)) * weights.unsqueeze(-1)
        return parts.sum(1).to(results.dtype)


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation, int64 (N,). A scatter would be slower on GPUs, where its repeatable form sorts."""
    return torch.sort(order).indices


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], with a gather as its backward."""
    ordered: Tensor = _Permute.apply(rows, order, inverse)
    return ordered


class _Spread(torch.autograd.Function):
    """Row i is token rows[i] // k; the gradient of a token is the sum over its k rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, back: Tensor, num_choices: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_choices = num_choices
        return tokens[rows // num_choices]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,), (grad,) = ctx.saved_tensors, grads
        return grad[back].view(-1, ctx.num_choices, grad.size(-1)).sum(1), None, None, None


class SelectScores(torch.autograd.Function):
    """The scores (T, E) of the chosen experts (T, k), which differ for each token. torch's own gradient would be a
    scatter."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.num_experts = scores.size(1)
        return scores.gather(1, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,), (grad,) = ctx.saved_tensors, grads
        experts = torch.arange(ctx.num_experts, device=grad.device)
        total = grad.new_zeros(grad.size(0), ctx.num_experts)
        for choice in range(chosen.size(1)):
            total += torch.where(experts == chosen[:, choice, None], grad[:, choice, None], 0.0)
        return total, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), (grad,) = ctx.saved_tensors, grads
        return grad[inverse], None, None


# ------------------------------------------------------------ products


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows (N, inputs), sorted by expert, times their expert's weight (E, outputs, inputs): (N, outputs).

    `ends`: int32 (E,), where the rows of each expert end; the last is N. An expert without rows gets a zero gradient.
    """
    if rows.is_meta:  # torch's grouped product takes bfloat16 only there
        return rows.new_empty(rows.size(0), weight.size(1))
    product = _grouped if product_kind(rows, weight) == "grouped" else _loop
    return product(rows, weight, ends)


def product_kind(rows: Tensor, weight: Tensor) -> ProductKind:
    """The product that serves these rows."""
    aligned = all(size * rows.element_size() % ALIGNED_BYTES == 0 for size in weight.shape[1:])
    if not aligned or rows.dtype not in _TOLERANCE or rows.size(0) == 0:
        return "loop"
    return "grouped" if _serves(rows.device, rows.dtype) else "loop"


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.mT, offs=ends)


def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not weight.size(0):  # a rank without experts keeps its exchanges in the graph, by rows or by weights
        return (rows.sum(1, keepdim=True) + weight.sum()).expand(-1, weight.size(1))
    loads = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(*pair) for pair in zip(rows.split(loads), weight.unbind(), strict=True)])


@lru_cache(maxsize=16)
def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the grouped product and its gradients agree with fp64. Draws nothing from the global generators."""
    drawn, shapes = torch.Generator().manual_seed(0), ((40, 16), (3, 32, 16), (40, 32))  # one expert has no row
    *exact, slope = (torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in shapes)
    ends = torch.tensor([23, 23, 40], dtype=torch.int32)
    results: list[list[Tensor]] = []
    try:
        # Own hooks: a checkpointed layer would count these tensors among those that it saves.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            for product, kind, where in ((_loop, torch.float64, torch.device("cpu")), (_grouped, dtype, device)):
                rows, weight = (tensor.to(where, kind).requires_grad_() for tensor in exact)
                out = product(rows, weight, ends.to(where))
                grads = torch.autograd.grad(out, (rows, weight), slope.to(where, kind))
                results.append([tensor.detach().double().cpu() for tensor in (out, *grads)])
    except (RuntimeError, NotImplementedError) as failure:
        log.warning("experts: no grouped product for %s on %s (%s); a loop takes its place", dtype, device, failure)
        return False
    error = max(float((own - exact).norm() / exact.norm()) for exact, own in zip(*results, strict=True))
    if error > _TOLERANCE[dtype]:
        reason = "experts: the grouped product for %s on %s is off by %.2g; a loop takes its place"
        log.warning(reason, dtype, device, error)
    return error <= _TOLERANCE[dtype]
