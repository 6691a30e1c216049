"""The output projection with its loss, whole or in slices of the vocabulary.

The loss is computed in a module's forward, because FSDP2 keeps its weight gathered only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.model.loss import IGNORE, chunked_cross_entropy


class Head(nn.Linear):
    """(width) to the scores of all tokens."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__(width, num_tokens, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of x (B, S, width); with targets (B, S), as `chunked_cross_entropy` of them."""
        if targets is None:
            return super().forward(x)
        return chunked_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), chunk_tokens)


class HeadSlice(nn.Linear):
    """Scores of some tokens of the vocabulary."""

    def forward(  # type: ignore[override]
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of x (B, S, width); with targets (N,), counted from this slice's first token, two of (N,): their
        log-sum-exp, and the logit of the target, 0 where another slice has it."""
        if targets is None:
            return super().forward(x)
        scores: tuple[Tensor, Tensor] = _SliceScores.apply(x.flatten(0, 1), self.weight, targets, chunk_tokens)
        return scores


class SlicedHead(nn.Module):
    """As `Head`, with one slice after the other in memory, its gradient too."""

    def __init__(self, width: int, slices: Sequence[int]) -> None:
        super().__init__()
        self._slices = tuple(slices)
        for index, num_tokens in enumerate(slices):
            self.add_module(str(index), HeadSlice(width, num_tokens, bias=False))

    def forward(
        self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `Head.forward`."""
        if targets is None:
            return torch.cat([part(x) for part in self.children()], dim=-1)
        flat, first = targets.flatten(), 0
        counted = flat != IGNORE
        sums, chosen = [], []
        for part, num_tokens in zip(self.children(), self._slices, strict=True):
            lse, logit = part(x, torch.where(counted, flat - first, -1), chunk_tokens)
            sums.append(lse)
            chosen.append(logit)
            first += num_tokens
        losses = torch.stack(sums).logsumexp(0) - torch.stack(chosen).sum(0)
        return torch.where(counted, losses, 0.0).sum(), counted.sum()


class _SliceScores(torch.autograd.Function):
    """At most `chunk_tokens` rows of logits exist at a time; backward recomputes them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = torch.empty(len(targets), dtype=wide, device=hidden.device)
        chosen = torch.empty_like(lse)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = (hidden[rows] @ weight.t()).to(wide)
            lse[rows] = logits.logsumexp(dim=-1)
            inside, own = _within(targets[rows], len(weight))
            chosen[rows] = torch.where(inside, logits.gather(1, own).squeeze(1), 0.0)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunk_tokens = chunk_tokens
        return lse, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse = ctx.saved_tensors
        of_sums, of_chosen = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        for start in range(0, len(targets), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            inside, own = _within(targets[rows], len(weight))
            logits = (hidden[rows] @ weight.t()).to(lse.dtype)
            slopes = logits.sub_(lse[rows].unsqueeze(1)).exp_().mul_(of_sums[rows].unsqueeze(1))
            slopes.scatter_add_(1, own, torch.where(inside, of_chosen[rows], 0.0).unsqueeze(1))
            scaled = slopes.to(hidden.dtype)
            grad_hidden[rows] = scaled @ weight
            grad_weight += scaled.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _within(targets: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Whether each target is in a slice, and its place there (N, 1); arbitrary where it is not."""
    return (targets >= 0) & (targets < num_tokens), targets.clamp(0, num_tokens - 1).unsqueeze(1)
