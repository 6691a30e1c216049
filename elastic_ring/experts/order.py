"""Which token goes to which expert: choices sorted by expert, and the way back. No groups and no weights in here.

Every permutation is a gather, backward too: an addition by index would use atomics on GPUs, whose order differs from
run to run. Nothing is dropped: an expert takes all tokens that chose it, however a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """The choices of T tokens, k each, sorted by expert; those of one expert keep the order of the tokens.

    rows: int64 (T * k,), the choice that stands in each row. back: int64 (T * k,), the row of each choice. ends: int32
    (E,), where the rows of each expert end. Everything stays on the device; the host reads nothing.
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
        spread: Tensor = _Spread.apply(tokens, self.rows, self.back, self.num_choices)
        return spread

    def gather(self, results: Tensor, weights: Tensor) -> Tensor:
        """Rows (T * k, width), sorted by expert, to the weighted sum of each token's (T, width).

        `weights`: (T, k). The k products are added in the order of the choices, in the wider of both types; the sum has
        the type of `results`.
        """
        by_choice = permuted(results, self.back, self.rows)
        parts = by_choice.view(-1, self.num_choices, results.size(-1)) * weights.unsqueeze(-1)
        return parts.sum(1).to(results.dtype)


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation, int64 (N,). A scatter would be slower on GPUs, where its repeatable form sorts,
    too."""
    return torch.sort(order).indices


def taken(scores: Tensor, chosen: Tensor) -> Tensor:
    """The scores (T, E) of those that are chosen, (T, k), each at most once by a token. torch's own gradient would be
    a scatter."""
    found: Tensor = _Taken.apply(scores, chosen)
    return found


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], with a gather as its backward."""
    found: Tensor = _Permuted.apply(rows, order, inverse)
    return found


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


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.num_experts = scores.size(1)
        return scores.gather(1, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,), (grad,) = ctx.saved_tensors, grads
        experts = torch.arange(ctx.num_experts, device=grad.device)
        found = grad.new_zeros(grad.size(0), ctx.num_experts)
        for choice in range(chosen.size(1)):
            found += torch.where(experts == chosen[:, choice, None], grad[:, choice, None], 0.0)
        return found, None


class _Permuted(torch.autograd.Function):
    """Rows by a permutation whose inverse is known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), (grad,) = ctx.saved_tensors, grads
        return grad[inverse], None, None
