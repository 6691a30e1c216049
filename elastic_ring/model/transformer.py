"""The built-in decoder: RMSNorm, rotary embedding on global positions, grouped-query attention, SwiGLU or experts.

Attention is a callable argument; rings and process groups must not enter this module. The model can be built on the
meta device, because its parameters are filled by `init` and it has no buffers. Each of `blocks` is one FSDP2 unit, or
has `own_units`, which are called like modules, so that FSDP2's hooks see them.
On GPUs Liger's kernels compute norms, rotary embedding and SwiGLU where they are installed (`model.liger`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from elastic_ring.attention.layers import AttentionFn, of_layer
from elastic_ring.attention.recomputation import Contexts, OffloadedTensor, Start
from elastic_ring.model import liger
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.feed_forward import FeedForward, MoE, SlicedFeedForward, rms_norm
from elastic_ring.model.head import Head, SlicedHead


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding (Su et al. 2021), which pairs halves as GPT-NeoX does: cos and sin (B, S, 1, D/2) of the angles,
    fp32 or wider.

    Not a tensor argument, because FSDP2's mixed precision would cast it to bfloat16, too coarse for angles.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
        """For global positions (B, S). Computes angles in fp64: at position 10**6 fp32 is off by 0.03 rad."""
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64).unsqueeze(-1) * theta ** (-pairs / head_dim)
        kept = torch.promote_types(dtype, torch.float32)
        return cls(angles.cos().to(kept).unsqueeze(2), angles.sin().to(kept).unsqueeze(2))

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x (B, S, H, D)."""
        first, second = x.to(self.cos.dtype).chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, first * self.sin + second * self.cos)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def of_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (B, S, H, D) and k (B, S, H_kv, D), which nothing else may read."""
        if liger.fits(q, k) and self.cos.dtype == torch.float32:
            return liger.rope_of_halves(q, k, self.cos.squeeze(2), self.sin.squeeze(2))
        return self(q), self(k)


class SelfAttention(nn.Module):
    """The projections around attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, inner_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key = nn.Linear(config.width, inner_kv, bias=False)
        self.value = nn.Linear(config.width, inner_kv, bias=False)
        self.output = nn.Linear(inner, config.width, bias=False)

    def heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Normed x (B, S, width) to q (B, S, H, D), k and v (B, S, H_kv, D)."""
        shape = (x.size(0), x.size(1), -1, self.head_dim)
        q, k, v = (linear(x).view(shape) for linear in (self.query, self.key, self.value))
        return *rotation.of_heads(q, k), v

    def forward(
        self, x: Tensor, norm: nn.RMSNorm, rotation: Rotation, attention: AttentionFn, start: Start | None = None
    ) -> Tensor:
        """x (B, S, width) that `norm` is still to norm -> (B, S, width)."""
        compute = partial(self._compute, norm, rotation, attention)
        return compute(x) if start is None else start.recomputed(compute, x)

    def _compute(self, norm: nn.RMSNorm, rotation: Rotation, attention: AttentionFn, x: Tensor) -> Tensor:
        q, k, v = self.heads(rms_norm(x, norm), rotation)
        out: Tensor = self.output(attention(q, k, v).flatten(2))
        return out


class Block(nn.Module):
    """One layer, with activation checkpointing if the config asks for it."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.checkpoint_activations = config.checkpoint_activations
        self.offload_activations = config.offload_activations
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.is_parted = config.is_parted(layer)
        self.ffn: nn.Module
        if self.is_parted:
            self.ffn = SlicedFeedForward(config.width, config.ffn_slices)
        else:
            self.ffn = MoE(config) if config.has_experts(layer) else FeedForward(config.width, config.ffn_width)

    def own_units(self) -> list[nn.Module]:
        """Modules that are gathered apart from the rest of the block."""
        return [self.attention, *self.ffn.children()] if self.is_parted else []

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionFn) -> Tensor:
        """x (B, S, width) -> (B, S, width)."""
        # Attention with a `recomputation` context reuses its saved result: it dominates a long context's cost.
        own = getattr(attention, "recomputation", None)
        contexts: Contexts = noop_context_fn if own is None else own
        if own is not None and self.offload_activations:
            contexts = partial(own, offload=True)
        keeps_all = not (self.checkpoint_activations and torch.is_grad_enabled())
        if self.is_parted and keeps_all:
            x = x + self.attention(x, self.attention_norm, rotation, attention)
            return x + self.ffn(x, self.ffn_norm, None)
        if self.is_parted:
            # Each part recomputes itself, so that it is gathered once in backward; the tensor between them is kept,
            # too.
            first = OffloadedTensor(x)
            x = x + self.attention(x, self.attention_norm, rotation, attention, Start(first, contexts))
            second = OffloadedTensor(x, len(list(self.ffn.children())))
            x = x + self.ffn(x, self.ffn_norm, Start(second))
            for part in (first, second) if self.offload_activations else ():
                part.leave()
            return x
        compute = partial(self._compute, rotation, attention)
        if keeps_all:
            return compute(x)
        kept = OffloadedTensor(x)
        out = Start(kept, contexts).recomputed(compute, x)
        if self.offload_activations:
            kept.leave()
        return out

    def _compute(self, rotation: Rotation, attention: AttentionFn, x: Tensor) -> Tensor:
        x = x + self.attention(x, self.attention_norm, rotation, attention)
        out: Tensor = x + self.ffn(rms_norm(x, self.ffn_norm))
        return out


class Transformer(nn.Module):
    """The decoder. Parameters are uninitialised until `init.initialise_module` fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.loss_chunk_tokens = config, config.loss_chunk_tokens
        self._has_own_tables = config.has_own_tables
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        slices = config.head_slices
        self.head = Head(config.width, slices[0]) if len(slices) == 1 else SlicedHead(config.width, slices)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.to(getattr(torch, config.dtype))

    def own_units(self) -> list[nn.Module]:
        """Modules outside the blocks that are gathered on their own."""
        if not self._has_own_tables:
            return []
        return [self.embedding, *(self.head.children() if isinstance(self.head, SlicedHead) else (self.head,))]

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        document_ids: Tensor,
        attention: AttentionFn,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (B, S, vocab_size); with targets, (loss sum, number of targets) as 0-dim tensors instead.

        tokens, positions, targets: int64 (B, S); document_ids: int32 (B, S). `positions` count in the global sequence;
        targets of -100 do not count. `document_ids` are passed to every model and unused here, because `attention`
        already separates documents. The loss is computed inside forward because FSDP2 keeps the head's weight gathered
        only there.
        """
        x = self.embedding(tokens)
        rotation = Rotation.at(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, of_layer(attention, index))
        x = rms_norm(x, self.final_norm)
        result: Tensor | tuple[Tensor, Tensor] = self.head(x, targets, self.loss_chunk_tokens)
        return result
