"""The module that trains: a class of transformers whose attention goes through a ring and whose loss is in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from elastic_ring.attention.layers import of_layer
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.traffic import carries_latents
from elastic_ring.experts.exchange import balancing_loss
from elastic_ring.integrations.transformers import layers
from elastic_ring.integrations.transformers.dropout import has_dropout, install_masks
from elastic_ring.model.config import KNOWN_TYPES
from elastic_ring.model.loss import chunked_cross_entropy
from elastic_ring.train.wrap import largest_list

NAME = "elastic_ring"
LONG_ROPE = "longrope"
WHOLE_SLICE = 1 << 40
"""More tokens than any slice has."""
IDLE = frozenset({"is_causal", "output_attentions", "output_router_logits", "position_ids", "use_cache"})
"""Arguments of transformers' attention that change nothing here. Any other is refused unless it is None."""


@dataclass
class TracedRing:
    """Stands for a ring in a pass on the meta device: records which layers call, and computes nothing. `tables` are the
    ids of the embeddings' weights that the pass reads."""

    windows: dict[int, int | None] = field(default_factory=dict)
    dropout_rates: set[float] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    options: RingOptions = field(default_factory=partial(RingOptions, sequence_seeds=(0,)))
    softcaps: set[float] = field(default_factory=set)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return torch.empty_like(q)

    def documents(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions, positions


def attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any = None,
    *,
    ring: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface through a ring: q (B, H, S, D), k and v (B, H_kv, S, D) to (B, S, H, D).

    Windows are in the ring's pattern. Rings scale by 1 / sqrt(D); another `scaling` goes into q. Values narrower than
    keys are padded with zeros. Raises ValueError for arguments that rings lack.
    """
    kind, layer = type(module).__name__, int(module.layer_idx)
    own = getattr(getattr(ring, "options", None), "softcap", softcap or 0.0)
    if own != (softcap or 0.0) and not isinstance(ring, TracedRing):
        raise ValueError(
            f"{kind}: layer {layer} caps its scores at {softcap}, and its ring at {own}: give both the same"
        )
    if dropout and not isinstance(ring, TracedRing):
        raise ValueError(f"{kind}: attention on rings has no dropout, and {dropout} is set; set it to 0.0")
    if ring is None:
        raise ValueError(
            f"{kind}: layer {layer} gives its attention nothing that its model is called with, a ring neither; choose "
            "another model"
        )
    if attention_mask is not None:
        raise ValueError(f"{kind}: layer {layer} has a mask of its own, which rings do not read; choose another model")
    unknown = sorted(name for name, value in options.items() if name not in IDLE and value is not None)
    if unknown:
        raise ValueError(
            f"{kind}: layer {layer} gives {', '.join(unknown)} to its attention, which rings do not have; choose "
            "another model"
        )
    if not (getattr(module, "is_causal", True) and options.get("is_causal", True) is not False):
        raise ValueError(f"{kind}: layer {layer} is not causal, and rings of a trainer are; choose a decoder")
    if isinstance(ring, TracedRing):
        ring.windows[layer] = sliding_window
        ring.softcaps.add(softcap or 0.0)
        ring.dropout_rates.add(dropout)
    usual, width = q.size(-1) ** -0.5, v.size(-1)
    if scaling is not None and abs(scaling - usual) > 1e-9 * usual:
        q = q * (scaling / usual)
    beside, attention = {} if s_aux is None else {"sinks": s_aux}, of_layer(ring, layer)
    if getattr(module, "expand_kv", None) is _apart:
        width = module.v_head_dim
        up = module.kv_b_proj.weight
        # Hops carry what keys and values are projected from: where there are hops, it is less, and the projection is a
        # plain one.
        if (
            getattr(attention, "takes_latents", False)
            and _projects_plainly(module, q.size(3))
            and carries_latents(q.size(1), q.size(3), k.size(3) + v.size(3))
            and (up.shape[1:], up.dtype) == (k.shape[3:], k.dtype)
        ):
            k, v = torch.cat((k, v), -1).chunk(2, -1)
            beside["up"] = up
        else:
            k, v = type(module).expand_kv(module, k, v)
    if "up" not in beside and width < q.size(-1):  # rings send keys and values in one frame
        v = nn.functional.pad(v, (0, q.size(-1) - width))
    out = attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **beside)
    return out[..., :width], None


def _projects_plainly(module: Any, head_dim: int) -> bool:
    up = module.kv_b_proj
    return module.v_head_dim <= head_dim and (type(up), up.bias) == (nn.Linear, None)


def latent_of(model: Any) -> int:
    """The numbers of a token that hops carry in place of K and V; 0 where they carry these."""
    module = next((each for each in model.modules() if getattr(each, "expand_kv", None) is _apart), None)
    if module is None or not _projects_plainly(module, module.qk_head_dim):
        return 0
    numbers = int(module.kv_lora_rank + module.qk_rope_head_dim)
    return numbers if carries_latents(module.num_heads, module.qk_head_dim, numbers) else 0


def _apart(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rotated


def build(config: Any) -> Any:
    """The module of a config, in float32, with attention on rings. Raises ValueError for a config of no decoder."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, attend)  # here, so that every worker's process does it
    ExpertsInterface.register(NAME, layers.compute)
    model = _ring_class(class_of(config))._from_config(
        config, dtype=torch.float32, attn_implementation=NAME, experts_implementation=NAME
    )
    for _, experts in layers.expert_modules(model):  # the attributes that `experts.exchange` reads of a layer
        experts.experts_per_token, experts.width = layers.top_k_of(config), int(config.hidden_size)
        experts.exchange, experts.meter, experts.adapters = None, None, {}
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            # Latent attention (DeepSeek-V2, arXiv:2405.04434) calls the attention before keys are projected up.
            module.expand_kv = _apart
    model.long_ropes = [module for module in model.modules() if LONG_ROPE in rope_types(module)]
    for rope in model.long_ropes:
        rope.forward = partial(_rotation_by_document, rope, rope.forward)
    layers.fuse_layers(model, config.model_type)
    if has_dropout(model, config):
        install_masks(model)
    return model


def rope_types(module: Any) -> set[str]:
    """The kinds of rotary embedding of a module of transformers that computes it; empty for others."""
    kinds = getattr(module, "rope_type", None) or ()
    return {*kinds.values()} if isinstance(kinds, Mapping) else {kinds} if isinstance(kinds, str) else set()


def _rotation_by_document(
    module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, ...]:
    """LongRoPE (arXiv:2402.13753) of packed documents: each token has the long or the short factors by the length of
    its own document, as transformers chooses for a sequence of that document alone. Positions count from its start."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    rope = module.config.rope_parameters
    rope = rope if layer_type is None else rope[layer_type]
    if rope["rope_type"] != LONG_ROPE:
        return tuple(forward(x, position_ids, **options))
    original = int(rope["original_max_position_embeddings"])
    is_long = module.document_lengths > original
    # Transformers chooses by the largest position of a call. The short ones last: it keeps what it chose in a buffer.
    long = forward(x, nn.functional.pad(position_ids, (0, 1), value=original), **options)
    short = forward(x, position_ids.masked_fill(is_long, 0), **options)
    return tuple(torch.where(is_long[..., None], a[:, :-1], b) for a, b in zip(long, short, strict=True))


def class_of(config: Any) -> Any:
    """The causal language model of a config. Raises ValueError where transformers has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type={config.model_type!r} is no causal language model of transformers: give a decoder"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def checkpoint_layers(model: Any, *, checkpoint_activations: bool = True) -> None:
    """Give each layer the switch `checkpoint_activations`: keep its inputs and its attention's result only, and
    recompute the rest in backward."""
    layer: Any
    for number, layer in enumerate(largest_list(model)):
        layer.number, layer.dropout_masks = number, model.dropout_masks
        layer.checkpoint_activations = checkpoint_activations
        layer.forward = partial(_checkpointed, layer, layer.forward)


@lru_cache(maxsize=16)
def _ring_class(base: Any) -> Any:
    """A causal language model whose forward pass takes a batch's parts, as `elastic_ring.model.loss` calls it."""

    def forward(
        self: Any,
        tokens: Tensor,
        *,
        positions: Tensor,
        document_ids: Tensor,
        attention: Any,
        targets: Tensor | None = None,
    ) -> Any:
        # The loss is computed in here because FSDP2 keeps the head's weight gathered only there.
        if self.training and self.dropout_masks is not None:
            self.dropout_masks.begin(attention, positions)
        if self.restarts_positions or self.long_ropes:
            positions, lengths = attention.documents(positions)
            for rope in self.long_ropes:
                rope.document_lengths = lengths
        named = {"input_ids": tokens, "position_ids": positions, "ring": attention, "use_cache": False}
        if targets is None or self.config.model_type not in KNOWN_TYPES:
            logits = base.forward(self, **named).logits
            if targets is None:
                return logits
            logits, targets = logits.flatten(0, 1).float(), targets.flatten()
            loss = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            return loss, (targets != -100).sum()
        balances = self.training and layers.has_balancing_loss(self.config)
        output = self.base_model(**named, **({"output_router_logits": True} if balances else {}))
        hidden = output.last_hidden_state
        cap = getattr(self.config, "final_logit_softcapping", None)
        divisor = getattr(self.config, "logits_scaling", 1.0)
        if divisor != 1.0:
            hidden = hidden / divisor
        head = self.get_output_embeddings()
        loss, num_targets = chunked_cross_entropy(
            hidden.flatten(0, 1), head.weight, targets.flatten(), self.loss_chunk_tokens, softcap=cap, bias=head.bias
        )
        if balances:
            logits, top_k = tuple(output.router_logits), layers.top_k_of(self.config)
            balance = balancing_loss(logits, top_k, getattr(attention, "group", None), num_targets)
            loss = loss + float(self.config.router_aux_loss_coef) * balance
        return loss, num_targets

    # Under the base's own module: transformers takes classes of other modules for custom code.
    settings = {"loss_chunk_tokens": 1024, "restarts_positions": False, "dropout_masks": None, "long_ropes": ()}
    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__, **settings})


def _checkpointed(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs inside the layer's hooks, so that FSDP2 sees one call."""
    if layer.dropout_masks is not None:
        forward = layer.dropout_masks.of_layer(layer.number, forward)
    if not (layer.checkpoint_activations and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = getattr(kwargs.get("ring"), "recomputation", noop_context_fn)
    return checkpoint(
        partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
