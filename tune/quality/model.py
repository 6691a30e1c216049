"""A decoder small enough to be trained in a minute, whose attention follows a pattern by mask.

What is kept is decided by the package's own rules (and `choose_blocks` for content), so the meaning is the one
that rings run; only the path is another: at these lengths a mask over dense attention is the quicker one, and
it takes batches. Time and bytes of patterns are measured elsewhere, never with this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.adaptive import choose_blocks
from elastic_ring.attention.blocks import visible
from elastic_ring.attention.layers import LayerPatterns
from elastic_ring.attention.rules import Dense


@dataclass(frozen=True)
class SmallConfig:
    """A decoder's sizes. `rope_theta` as usual."""

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
    """What each head of a layer sees, as (H, S, S); `content` is the number of blocks chosen by content instead."""

    def __init__(self, pattern: LayerPatterns | None, seq_len: int, num_heads: int, *, top_k: int, block: int) -> None:
        self.pattern, self.seq_len, self.num_heads = pattern, seq_len, num_heads
        self.top_k, self.block = top_k, block
        self._kept: dict[int, Tensor | None] = {}

    def of_layer(self, layer: int) -> Tensor | None:
        """Bool (H, S, S), or None for plain causal attention."""
        if layer not in self._kept:
            self._kept[layer] = self._make(layer)
        return self._kept[layer]

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

    def by_content(self, q: Tensor, k: Tensor) -> Tensor:
        """Bool (B, H, S, S): the blocks that `choose_blocks` picks for each sequence; q, k (B, S, H, D)."""
        num_blocks = -(-self.seq_len // self.block)
        means = [x.detach().unflatten(1, (num_blocks, self.block)).mean(2) for x in (q, k)]
        rows = list(range(num_blocks))
        chosen = torch.stack([choose_blocks(*pair, rows, self.top_k) for pair in zip(*means, strict=True)])
        wide = chosen.repeat_interleave(self.block, 2).repeat_interleave(self.block, 3)
        return wide & torch.ones(self.seq_len, self.seq_len, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k, v (B, S, H, D) to out (B, S, H, D); a query that sees nothing gives 0, as in rings."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    if mask is None:
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    blind = ~mask.any(-1)
    bias = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    if bool(blind.any()):
        bias = bias.masked_fill(blind.unsqueeze(-1), 0.0)
    out = F.scaled_dot_product_attention(*heads, attn_mask=bias if bias.dim() == 4 else bias.unsqueeze(0))
    if bool(blind.any()):
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
    return out.transpose(1, 2)


class Layer(nn.Module):
    """Attention and SwiGLU; half of the channels that attention reads are those of the token before.

    That shift (as in many small recurrent and convolutional mixers) is the same for every pattern. It makes
    looking up what followed a token a matter of one layer, so that a minute of training shows it.
    """

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 2 * config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def heads(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, S, H, D) of x (B, S, width)."""
        x = self.attention_norm(x)
        own, before = x.chunk(2, dim=-1)
        x = torch.cat([own, F.pad(before, (0, 0, 1, 0))[:, :-1]], dim=-1)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return _turned(q, turn), _turned(k, turn), v

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], masks: Masks, layer: int) -> Tensor:
        q, k, v = self.heads(x, turn)
        mask = masks.by_content(q, k) if masks.top_k else masks.of_layer(layer)
        x = x + self.output(attend(q, k, v, mask).flatten(2))
        gate, up = self.up(self.ffn_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class SmallModel(nn.Module):
    """tokens (B, S) to logits (B, S, vocab_size)."""

    def __init__(self, config: SmallConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        with torch.no_grad():
            self.embedding.weight.mul_(0.1)

    def turn(self, seq_len: int) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        angles = torch.arange(seq_len)[:, None] * self.config.rope_theta ** (-torch.arange(half) / half)
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

    def forward(self, tokens: Tensor, masks: Masks) -> Tensor:
        x, turn = self.embedding(tokens), self.turn(tokens.size(1))
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, masks, number)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
