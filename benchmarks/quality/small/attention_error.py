"""What a pattern would cost a dense-trained model: attention mass kept, and the error of attention's output.

A cheap first estimate: a model trained with a pattern adapts to it. No training in here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import Masks, SmallModel, attend
from benchmarks.quality.small.train import Settings


@torch.no_grad()
def fidelity(
    model: SmallModel, tokens: Tensor, chosen: list[Family], settings: Settings
) -> dict[str, dict[str, float]]:
    """{family: {"mass": share of attention kept, "worst_head": the least over heads, "error": relative error of
    attention's output}}, over layers, heads and queries of `tokens` (B, S).

    Each layer gets the dense model's input, so errors do not accumulate.
    """
    model.eval()
    config = model.config
    layered = _dense_heads(model, tokens)
    found = {}
    for family in chosen:
        masks = family.masks(settings.seq_len, config.num_heads)
        kept, error, size = [], 0.0, 0.0
        for number, (q, k, v) in enumerate(layered):
            mask = masks.for_call(number, q, k)
            dense = attend(q, k, v, None)
            sparse = attend(q, k, v, mask)
            error += float((sparse - dense).square().sum())
            size += float(dense.square().sum())
            kept.append(_mass(q, k, mask))
        heads = torch.stack(kept)
        found[family.name] = {
            "mass": float(heads.mean()),
            "worst_head": float(heads.min()),
            "error": math.sqrt(error / size),
        }
    return found


def _dense_heads(model: SmallModel, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v (B, S, H, D) of every layer of the dense model."""
    dense = Masks(None, tokens.size(1), model.config.num_heads)
    x, turn, found = model.embedding(tokens), model.turn(tokens.size(1)), []
    for number, layer in enumerate(model.layers):
        found.append(layer.heads(x, turn))  # type: ignore[operator]
        x = layer(x, turn, dense, number)
    return found


def _mass(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """(H,): the share of softmax weight on kept keys, averaged over queries and sequences."""
    if mask is None:
        return torch.ones(q.size(2), device=q.device)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.size(-1) ** -0.5
    causal = torch.ones(q.size(1), q.size(1), dtype=torch.bool, device=q.device).tril()
    shares = scores.masked_fill(~causal, -math.inf).softmax(-1)
    return (shares * mask).sum(-1).mean((0, 2))
