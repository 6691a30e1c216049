"""The built-in decoder: RMSNorm, rotary embedding on global positions, grouped-query attention, SwiGLU.

Attention is a callable argument; rings and process groups must not enter this module. The model can be built on the
meta device, because its parameters are filled by `init` and it has no buffers; each of `blocks` is one FSDP2 unit.
`fused_ops` computes a layer's operations around attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from elastic_ring.attention.layers import AttentionFn, of_layer
from elastic_ring.attention.recomputation import OffloadedTensor
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.fused_ops import EAGER, compiled, rms_norm, rotated
from elastic_ring.model.loss import chunked_cross_entropy


@dataclass(frozen=True)
class Rotation:
    """cos and sin (B, S, 1, D/2) of the rotary angles, fp32 or wider.

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
        return rotated(x, self.cos, self.sin)


class SelfAttention(nn.Module):
    """The projection weights around attention; `Block` computes with them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, inner_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key = nn.Linear(config.width, inner_kv, bias=False)
        self.value = nn.Linear(config.width, inner_kv, bias=False)
        self.output = nn.Linear(inner, config.width, bias=False)


class FeedForward(nn.Module):
    """The weights of SwiGLU (Shazeer 2020); `Block` computes with them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)


class Block(nn.Module):
    """One layer, with activation checkpointing if the config asks for it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.checkpoint_activations = config.checkpoint_activations
        self.offload_activations = config.offload_activations
        self.compile_blocks = config.compile_blocks
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation, attention: AttentionFn) -> Tensor:
        """x (B, S, width) -> (B, S, width)."""
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return self._compute(x, rotation, attention)
        # Checkpoint inside forward, so that FSDP2's hooks on the block see one call. There is no dropout, so no RNG
        # state. Attention with a `recomputation` context reuses its saved result: it dominates a long context's cost.
        own = getattr(attention, "recomputation", None)
        contexts = noop_context_fn if own is None else own
        if own is not None and self.offload_activations:
            contexts = partial(own, offload=True)
        start = OffloadedTensor(x)
        out: Tensor = checkpoint(
            self._from_start,
            start,
            rotation,
            attention,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        )
        if self.offload_activations:
            start.leave()
        return out

    def _from_start(self, start: OffloadedTensor, rotation: Rotation, attention: AttentionFn) -> Tensor:
        return self._compute(start.tensor(), rotation, attention)

    def _compute(self, x: Tensor, rotation: Rotation, attention: AttentionFn) -> Tensor:
        pieces, own, ffn = compiled() if self.compile_blocks else EAGER, self.attention, self.ffn
        q, k, v = pieces.before(
            x,
            self.attention_norm.weight,
            own.query.weight,
            own.key.weight,
            own.value.weight,
            rotation.cos,
            rotation.sin,
            self.norm_eps,
            self.head_dim,
        )
        # Flatten outside the compiled ops: the memory layout of attention's result depends on the sequence's documents.
        attended = attention(q, k, v).flatten(2)
        return pieces.after(
            x,
            attended,
            own.output.weight,
            self.ffn_norm.weight,
            ffn.gate.weight,
            ffn.up.weight,
            ffn.down.weight,
            self.norm_eps,
        )


class _ZeroAttention(torch.autograd.Function):
    """A placeholder for attention in warm-up: zeros of the right shapes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.zeros_like(q, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in ctx.saved_tensors)


class Transformer(nn.Module):
    """The decoder. Parameters are uninitialised until `init.initialise_module` fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.loss_chunk_tokens = config, config.loss_chunk_tokens
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.to(getattr(torch, config.dtype))

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        document_ids: Tensor,
        attention: AttentionFn,
        targets: None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        document_ids: Tensor,
        attention: AttentionFn,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

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
        x = rms_norm(x, self.final_norm.weight, self.config.norm_eps)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        return chunked_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), self.loss_chunk_tokens)

    def warm_up_kernels(
        self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype, *, validates: bool = False
    ) -> None:
        """Compile the layers' kernels on `device` for slices (1, S) of these `lengths` in `dtype`.

        With `validates`, also for passes without gradients. Does nothing where `compile_blocks` is off. The module may
        be on meta: one layer is materialised for it. Takes the memory of one layer in a step.
        """
        if not self.config.compile_blocks:
            return
        with torch.device("meta"):
            block = Block(self.config).to(dtype)
        block.to_empty(device=device)
        for param in block.parameters():
            nn.init.zeros_(param)
        for num_tokens in lengths:
            positions = torch.arange(num_tokens, device=device).unsqueeze(0)
            rotation = Rotation.at(positions, self.config.head_dim, self.config.rope_theta, dtype)
            x = torch.zeros(1, num_tokens, self.config.width, dtype=dtype, device=device)
            block(x.clone().requires_grad_(), rotation, _ZeroAttention.apply).backward(x)
            block.zero_grad()
            if validates:
                with torch.no_grad():
                    block(x, rotation, _ZeroAttention.apply)
