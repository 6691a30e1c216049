"""Balance of experts: by a bias on each expert's score, which counts for the choice only (Wang et al. 2024,
arXiv:2408.15664), or by a loss (Fedus et al. 2021, arXiv:2101.03961).

The bias is a parameter, and its gradient is how many tokens too many its expert got. So it is summed over slices and
rings, voted on, applied, healed and saved as every gradient and parameter is, and recomputation does not count twice.
An optimizer takes the sign of that gradient (`train.optim`): a bias falls or rises by the same small step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ring.attention.comm.exchange import Group
from elastic_ring.experts.exchange import ring_sum

BIAS = "balance_bias"
"""How such parameters' names end."""


class LoadMeter:
    """How unevenly the tokens of a ring fall on experts in a step. `layers`: as `expert_layers` gives them. A layer
    that computes again in backward adds all its loads once more, which changes no share."""

    def __init__(self, layers: Sequence[Any], group: Group | None, device: torch.device) -> None:
        nums = [next(layer.parameters(recurse=False)).shape[0] for layer in layers]
        self._nums = torch.tensor(nums, device=device)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._loads = torch.zeros(len(layers), max(nums), dtype=torch.int64, device=device)
        self._group = group
        for layer in layers:
            layer.meter = self

    def leave(self) -> None:
        """Drop the group: layers may live as long as an error's traceback, and with the group its sockets."""
        self._group = None

    def begin(self) -> None:
        """A step begins."""
        self._loads.zero_()

    def add(self, layer: Any, load: Tensor) -> None:
        """This rank's tokens for each expert, (E,), in one pass."""
        self._loads[self._rows[layer], : load.size(0)].add_(load)

    def largest(self) -> Tensor:
        """The largest load of an expert by its fair share, in the layer where it is largest; 0 without tokens. A scalar
        on the device, after an exchange in the ring."""
        loads = ring_sum(self._loads, self._group)
        return (loads.amax(1) * self._nums / loads.sum(1).clamp_min(1)).amax().double()


def with_excess(weights: Tensor, bias: Tensor, load: Tensor) -> Tensor:
    """`weights` as they are; in backward `bias` (E,) gets what `load` (E,) has over an equal share as its gradient."""
    same: Tensor = _Excess.apply(weights, bias, load)
    return same


def balancing_loss(logits: Sequence[Tensor], top_k: int, group: Group | None, num_targets: Tensor) -> Tensor:
    """A rank's part of E sum_e f_e P_e, times the targets of the whole sequence: it adds up as sums of losses do.

    `logits`: of each layer's router, (T, E) for this rank's tokens. f_e: the share of all choices that fell on expert
    e, P_e: the mean probability of e, both over all layers and all tokens of the ring's sequence, as transformers has
    it. Choices are counted over the ring in forward; no gradient passes through them.
    """
    num_experts = logits[0].size(-1)
    experts = torch.arange(num_experts, device=logits[0].device)
    counts, shares = torch.zeros_like(experts), torch.zeros(num_experts, device=experts.device)
    for layer in logits:
        likely = layer.float().softmax(-1)
        chosen = likely.detach().topk(top_k, dim=-1).indices
        for choice in chosen.unbind(1):
            counts = counts + (choice[:, None] == experts).sum(0)
        shares = shares + likely.sum(0)
    num_rows = counts.new_tensor([len(logits) * logits[0].size(0)])
    whole = ring_sum(torch.cat([counts, num_rows, num_targets.reshape(1).to(counts.dtype)]), group).float()
    rows, targets = whole[num_experts], whole[num_experts + 1]
    return num_experts * (whole[:num_experts] / rows * (shares / rows)).sum() * targets


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
