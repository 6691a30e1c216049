"""Cross-entropy in chunks, which never holds the logits of a whole sequence, and the default loss function.

A loss is a sum and a count, never a mean: rings hold different numbers of targets, and the step divides once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_ring.model import liger
from elastic_ring.model.memory import LOGITS_BYTES, rows_of_logits

IGNORE = -100


class BatchLike(Protocol):
    """The argument of a loss function: one rank's slice of a sequence and the attention of its ring.

    tokens, targets, positions: int64 (1, S); document_ids: int32 (1, S), with the local length S. attention takes q
    (1, S, H, D), k and v (1, S, H_kv, D) and returns (1, S, H, D).
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def document_ids(self) -> Tensor: ...
    @property
    def attention(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]: ...


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of -log softmax(hidden @ weight.T + bias)[target], number of targets), as 0-dim tensors.

    hidden (N, width), weight (vocab_size, width), bias (vocab_size,), targets int64 (N,), where -100 does not count. At
    most `chunk_tokens` rows of logits exist at a time; backward recomputes them. Logits have the dtype of `hidden`;
    softmax, sum and the gradients of weight and bias are fp32 (fp64 for fp64 inputs). With `softcap` logits x become
    softcap * tanh(x / softcap). On GPUs Liger's kernel takes its place where there is no bias and its own rows of
    logits need no more memory. Raises: ValueError for chunk_tokens below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1")
    if bias is None and _is_for_liger(hidden, weight, chunk_tokens):
        loss_sum = liger.CrossEntropySum.apply(hidden, weight, targets, softcap)
    else:
        loss_sum = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens, softcap)
    return loss_sum, (targets != IGNORE).sum()


def _is_for_liger(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> bool:
    if not liger.fits(hidden, weight):
        return False
    if torch.is_grad_enabled() and weight.requires_grad and not hidden.requires_grad:
        return False  # it would give the weight no gradient
    # Long slices, and a memory relief that asks for small chunks, are for the function below.
    rows = rows_of_logits(hidden.size(0), *weight.shape)
    return rows * hidden.element_size() <= chunk_tokens * LOGITS_BYTES


def language_model_loss(model: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
    """The default loss function: next-token cross-entropy of this rank's slice, (fp32 sum, number of targets), both
    0-dim: a number in host memory would be a wait for the device.

    The model is called like `Transformer.forward` with targets. Without targets the loss is a zero with a graph, since
    every rank of a ring must run backward.
    """
    loss_sum, num_tokens = model(
        batch.tokens,
        positions=batch.positions,
        document_ids=batch.document_ids,
        attention=batch.attention,
        targets=batch.targets,
    )
    return loss_sum, num_tokens


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Saves the log-sum-exp of forward, so that backward needs no second softmax reduction."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_tokens: int,
        softcap: float | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        loss_sum = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            counted = targets[rows] != IGNORE
            logits = _capped(_logits(hidden[rows], weight, bias).to(wide), softcap)
            lse[rows] = logits.logsumexp(dim=-1)
            chosen = logits.gather(1, targets[rows].clamp_min(0).unsqueeze(1)).squeeze(1)
            loss_sum += torch.where(counted, lse[rows] - chosen, 0.0).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.chunk_tokens, ctx.softcap = chunk_tokens, softcap
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        (grad,) = grads
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight.shape if is_trained else 0, dtype=lse.dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            counted = targets[rows] != IGNORE
            logits = _capped(_logits(hidden[rows], weight, bias).to(lse.dtype), ctx.softcap)
            slope = None if ctx.softcap is None else 1.0 - (logits / ctx.softcap).square()
            # d loss / d logits = softmax - one-hot, zero where there is no target.
            probabilities = logits.sub_(lse[rows].unsqueeze(1)).exp_()
            one_hot = torch.ones(len(counted), 1, dtype=lse.dtype, device=lse.device)
            probabilities.scatter_add_(1, targets[rows].clamp_min(0).unsqueeze(1), -one_hot)
            if slope is not None:
                probabilities *= slope
            scaled = (probabilities * torch.where(counted, grad, 0.0).unsqueeze(1)).to(hidden.dtype)
            grad_hidden[rows] = scaled @ weight
            if is_trained:
                grad_weight += scaled.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += scaled.sum(0, dtype=lse.dtype)
        of_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype) if is_trained else None, of_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.t()
    return logits if bias is None else logits + bias


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)
