"""What a decoder computes for one sequence, for plans and for the utilisation (MFU). No torch in here."""

from __future__ import annotations

from functools import partial
from typing import Any

from elastic_ring.model.config import ModelConfig, active_parameters


def model_flops(config: ModelConfig, context_tokens: int, density: float = 1.0, num_active: int | None = None) -> float:
    """6 for each parameter and token that are multiplied (rows of a table that is only read are not), and 6 S^2 H D for
    each layer: the causal half of attention, forward + backward as 1 + 2, of which a pattern keeps the share
    `density`. `num_active`: the parameters of a token, where the config does not say all of them."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    dense = 6.0 * ((num_active or active_parameters(config)) - table) * context_tokens
    return dense + density * 6.0 * context_tokens**2 * config.num_heads * config.head_dim * config.num_layers


def flops_of(model: Any, context_tokens: int) -> float | None:
    """FLOP of one sequence of a factory of the built-in decoder, `partial(Transformer, config)`; None for others."""
    given = model.args if isinstance(model, partial) else ()
    configs = [one for one in given if isinstance(one, ModelConfig)]
    return model_flops(configs[0], context_tokens) if len(configs) == 1 else None
