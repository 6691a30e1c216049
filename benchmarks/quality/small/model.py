"""A decoder that trains in a minute, whose attention follows a pattern by mask, or is passed per layer.

The package's own rules define what is kept, as in rings; only the implementation differs: at these lengths a mask over
dense attention is faster and supports batches. Time and bytes are measured elsewhere, never with masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.layers import AttentionFn
from elastic_ring.attention.patterns.blocks import visible
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.rules import Dense


@dataclass(frozen=True)
class SmallConfig:
    """A decoder's sizes."""

    vocab_size: int
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    ffn_width: int = 128
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class Masks:
    """Boolean masks (H, S, S) by layer; without a pattern plain causal attention."""

    def __init__(self, pattern: LayerPatterns | None, seq_len: int, num_heads: int) -> None:
        self.pattern, self.seq_len, self.num_heads = pattern, seq_len, num_heads
        self._kept: dict[tuple[int, torch.device], Tensor | None] = {}

    def of_layer(self, layer: int, device: torch.device) -> Tensor | None:
        """Bool (H, S, S), or None for plain causal attention."""
        if (layer, device) not in self._kept:
            made = self._make(layer)
            self._kept[layer, device] = None if made is None else made.to(device)
        return self._kept[layer, device]

    def _make(self, layer: int) -> Tensor | None:
        if self.pattern is None:
            return None
        rules = self.pattern.of_layer(layer).heads(self.num_heads, self.num_heads)
        if set(rules) == {Dense()}:
            return None
        at = np.arange(self.seq_len, dtype=np.int64)
        seen = {rule: visible(rule, at, at) for rule in dict.fromkeys(rules)}
        heads = rules * self.num_heads if len(rules) == 1 else rules
        return torch.from_numpy(np.stack([seen[rule] for rule in heads]))

    def for_call(self, layer: int, q: Tensor, k: Tensor) -> Tensor | None:
        """The mask of a layer for these q and k (B, S, H, D)."""
        return self.of_layer(layer, q.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k, v (B, S, H, D) to out (B, S, H, D); a query without keys gives 0, as in rings."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    blind = ~mask.any(-1)
    bias = torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -math.inf)
    if bool(blind.any()):
        bias = bias.masked_fill(blind.unsqueeze(-1), 0.0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias if bias.dim() == 4 else bias.unsqueeze(0))
    if bool(blind.any()):
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
    return out.transpose(1, 2)


def before(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, qkv: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, S, width) to q, k, v (B, S, H, D), projected from each token and the one before it."""
    x = F.rms_norm(x, [x.size(-1)], norm)
    x = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], dim=-1)
    q, k, v = F.linear(x, qkv).unflatten(-1, (3, num_heads, -1)).unbind(2)
    return _turned(q, cos, sin), _turned(k, cos, sin), v


def after(x: Tensor, seen: Tensor, output: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x (B, S, width) and attention's result (B, S, H, D) to the layer's result (B, S, width)."""
    x = x + F.linear(seen.flatten(2), output)
    gate, value = F.linear(F.rms_norm(x, [x.size(-1)], norm), up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * value, down)


@dataclass(frozen=True)
class FusedOps:
    """What a layer computes before and after its attention: `before` and `after`, or their compiled forms.

    Weights are arguments, so that one compiled form serves all layers of all models and keeps none of them alive.
    """

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]


AS_WRITTEN = FusedOps(before, after)


class Layer(nn.Module):
    """Attention and SwiGLU; queries, keys and values are projected from a token and the one before it.

    This shift (as in many small recurrent and convolutional mixers), and an initialisation of half of the heads that
    makes queries match keys of tokens that follow an equal one (after mimetic initialization, Trockman & Kolter 2023,
    arXiv:2305.09828), are the same for every pattern. They skip the long plateau before a model learns to look back,
    but show no key that a pattern hides.
    """

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.num_heads, self.pieces = config.num_heads, AS_WRITTEN
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(2 * config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 2 * config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)
        matched = config.num_heads // 2 * config.head_dim
        with torch.no_grad():
            self.qkv.weight.mul_(0.5)
            queries, keys, _ = self.qkv.weight.split(config.width)
            shared = 1.2 * torch.randn(matched, config.width) / config.width**0.5
            queries[:matched, : config.width] += shared
            keys[:matched, config.width :] += shared

    def heads(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, S, H, D) of x (B, S, width)."""
        return self.pieces.before(x, *turn, self.attention_norm.weight, self.qkv.weight, self.num_heads)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], masks: Masks | Sequence[AttentionFn], layer: int
    ) -> Tensor:
        q, k, v = self.heads(x, turn)
        seen = attend(q, k, v, masks.for_call(layer, q, k)) if isinstance(masks, Masks) else masks[layer](q, k, v)
        return self.rest(x, seen)

    def rest(self, x: Tensor, seen: Tensor) -> Tensor:
        """What follows attention: x (B, S, width) and attention's result (B, S, H, D) to (B, S, width)."""
        return self.pieces.after(x, seen, self.output.weight, self.ffn_norm.weight, self.up.weight, self.down.weight)


class SmallModel(nn.Module):
    """tokens (B, S) to logits (B, S, vocab_size).

    A call takes masks, or an attention per layer: q, k, v (B, S, H, D) to out (B, S, H, D).
    """

    def __init__(self, config: SmallConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def turn(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """cos and sin (S, 1, D/8), on the model's device."""
        half = self.config.head_dim // 8
        device = self.head.weight.device  # create on the device: a copy would synchronise with the GPU
        at, channel = torch.arange(seq_len, device=device), torch.arange(half, device=device)
        angles = (at[:, None] * self.config.rope_theta ** (-channel / half)).unsqueeze(1)
        return angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, masks: Masks | Sequence[AttentionFn]) -> Tensor:
        x, turn = self.embedding(tokens), self.turn(tokens.size(1))
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, masks, number)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on a quarter of the channels, so that matching by content does not depend on distance."""
    half = cos.size(-1)
    first, second, rest = x.split([half, half, x.size(-1) - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)
