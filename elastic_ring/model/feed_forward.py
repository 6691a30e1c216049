"""The feed-forward part of a layer, SwiGLU, and its place with experts: a router, the chosen experts, a shared one.

As in DeepSeek-V3 (arXiv:2412.19437) and GLM-4.5 with one group of experts: scores are sigmoids in fp32, a bias that
balances the load is added for the choice alone, and the chosen scores are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.recomputation import Start
from elastic_ring.experts.compute import Order, SelectScores, grouped_linear
from elastic_ring.experts.exchange import Excess, ExpertExchange, LoadMeter, run_experts
from elastic_ring.model import liger
from elastic_ring.model.config import ModelConfig


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) of x (B, S, width), whose result only linear layers may read."""
    if liger.fits(x, norm.weight) and norm.eps is not None:
        return liger.rms_norm(x, norm.weight, norm.eps, in_place=True)
    normed: Tensor = norm(x)
    return normed


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normed x (B, S, width) -> (B, S, width)."""
        gate, up = self.gate(x), self.up(x)
        out: Tensor = self.down(liger.silu_mul(gate, up) if liger.fits(gate, up) else F.silu(gate) * up)
        return out


class FeedForwardSlice(FeedForward):
    """Some of the inner columns of a feed-forward part, gathered on its own: its share of the result."""

    def forward(self, x: Tensor, norm: nn.RMSNorm, start: Start | None) -> Tensor:  # type: ignore[override]
        """x (B, S, width) that `norm` is still to norm -> (B, S, width)."""
        return self._compute(norm, x) if start is None else start.recomputed(partial(self._compute, norm), x)

    def _compute(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return super().forward(rms_norm(x, norm))


class SlicedFeedForward(nn.Module):
    """SwiGLU of which one slice after the other is in memory. Their results are summed in fp32 or wider."""

    def __init__(self, width: int, slices: Sequence[int]) -> None:
        super().__init__()
        for index, inner in enumerate(slices):
            self.add_module(str(index), FeedForwardSlice(width, inner))

    def forward(self, x: Tensor, norm: nn.RMSNorm, start: Start | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total: Tensor | None = None
        for part in self.children():
            share = part(x, norm, start).to(wide)
            total = share if total is None else total + share
        assert total is not None
        return total.to(x.dtype)


class Experts(nn.Module):
    """The experts' weights, each expert a row: gate_up (E, 2 * inner, width), down (E, width, inner)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        number, inner = config.num_experts, config.expert_width
        self.experts_per_token, self.width = config.experts_per_token, config.width
        self.exchange: ExpertExchange | None = None
        self.meter: LoadMeter | None = None
        self.gate_up = nn.Parameter(torch.empty(number, 2 * inner, config.width))
        self.down = nn.Parameter(torch.empty(number, config.width, inner))

    def forward(self, tokens: Tensor, order: Order, weights: Tensor) -> Tensor:
        """tokens (T, width), weights (T, k) -> (T, width)."""

        def swiglu(weights: Mapping[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
            gate, up = grouped_linear(rows, weights["gate_up"], ends).chunk(2, dim=-1)
            return grouped_linear(F.silu(gate) * up, weights["down"], ends)

        return order.gather(run_experts(self, order, order.spread(tokens), swiglu), weights)


class MoE(nn.Module):
    """A router, its experts, and a feed-forward part for every token where the config has one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.balance_bias = nn.Parameter(torch.empty(config.num_experts))
        self.experts = Experts(config)
        self.shared = FeedForward(config.width, config.shared_width) if config.shared_width else None

    def forward(self, x: Tensor) -> Tensor:
        """Normed x (B, S, width) -> (B, S, width)."""
        tokens = x.flatten(0, 1)
        order, weights = self.choose(tokens)
        out = self.experts(tokens, order, weights).view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def choose(self, tokens: Tensor) -> tuple[Order, Tensor]:
        """tokens (T, width) to the order of their experts and the weights (T, k) of these, fp32 or wider."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        scores = F.linear(tokens.to(wide), self.router.weight.to(wide)).sigmoid()
        chosen = (scores.detach() + self.balance_bias.detach().to(wide)).topk(self.experts_per_token, dim=-1).indices
        order = Order.of(chosen, scores.size(-1))
        weights = SelectScores.apply(scores, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return order, Excess.apply(weights, self.balance_bias, order.load)
