"""Balance without a loss: a bias on each expert's score, which counts for the choice only (Wang et al. 2024,
arXiv:2408.15664).

The bias is a parameter, and its gradient is how many tokens too many its expert got. So it is summed over slices and
rings, voted on, applied, healed and saved as every gradient and parameter is, and recomputation does not count twice.
An optimizer takes the sign of that gradient (`train.optim`): a bias falls or rises by the same small step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BIAS = "balance_bias"
"""How such parameters' names end."""


def with_excess(weights: Tensor, bias: Tensor, load: Tensor) -> Tensor:
    """`weights` as they are; in backward `bias` (E,) gets what `load` (E,) has over an equal share as its gradient."""
    same: Tensor = _Excess.apply(weights, bias, load)
    return same


class _Excess(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        ctx.dtype = bias.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (load,) = ctx.saved_tensors
        counts = load.to(torch.float32)
        return grads[0], (counts - counts.mean()).to(ctx.dtype), None
