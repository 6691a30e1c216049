"""The shape of the built-in decoder: a frozen dataclass, its presets, and its parameter count. No torch in here."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from elastic_ring.validation import Must, PositiveInt, settings

GONE = "compile_blocks"
"""A setting that earlier versions had, off by default. Their records name it; identities still say that it is off."""


@settings
class ModelConfig:
    """The shape of a Llama-like decoder. Raises ValueError for sizes that do not fit together."""

    _prefix: ClassVar[str] = "ModelConfig "

    vocab_size: PositiveInt
    """Vocabulary size in tokens."""
    num_layers: PositiveInt
    """Decoder blocks."""
    width: PositiveInt
    """Width of the residual stream."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads; divides num_heads."""
    head_dim: PositiveInt
    """Width of a head; even."""
    ffn_width: PositiveInt
    """Inner width of SwiGLU."""
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False), Must("a finite number above 1")] = 10_000.0
    """Base of the rotary embedding."""
    norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a finite number above 0")] = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Use the token embedding as the output projection too; `elastic_ring.load_weights` loads such weights."""
    checkpoint_activations: bool = True
    """Keep only each block's input and attention output; recompute the rest in backward."""
    offload_activations: bool = False
    """Keep checkpointed activations in host memory between forward and backward."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the parameters as built; FSDP2 computes in `step_config.param_dtype`."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: each KV head "
                "serves a whole number of query heads; choose num_kv_heads that divides num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig head_dim={self.head_dim}: rotary embedding turns pairs, choose an even one")
        if self.offload_activations and not self.checkpoint_activations:
            raise ValueError(
                "ModelConfig offload_activations=True moves what checkpointing keeps, and checkpoint_activations=False "
                "keeps it all: set that to True"
            )


def built_in(model: Any) -> ModelConfig | None:
    """The shape of a factory `partial(Transformer, config)` of the built-in decoder; None for others."""
    made = model.func if isinstance(model, partial) else None
    if getattr(made, "__module__", "") != "elastic_ring.model.transformer":
        return None
    given = [*model.args, *model.keywords.values()]
    return given[0] if len(given) == 1 and isinstance(given[0], ModelConfig) else None


def num_parameters(config: ModelConfig) -> int:
    """The parameter count of `Transformer(config)`, without building it."""
    attention = 2 * config.width * config.head_dim * (config.num_heads + config.num_kv_heads)
    block = attention + 3 * config.width * config.ffn_width + 2 * config.width
    embeddings = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return embeddings + config.num_layers * block + config.width


def preset(name: str) -> ModelConfig:
    """A named size: laptop, 100m, 1b, 8b, 70b, 1t. `dataclasses.replace` changes a field."""
    table = {
        # Vocabulary: bytes and an end-of-document token. For a context of 2,048.
        "laptop": ModelConfig(257, 4, 128, 4, 2, 32, 384),
        "100m": ModelConfig(32_768, 12, 768, 12, 4, 64, 2_048, tie_embeddings=True),
        "1b": ModelConfig(128_256, 16, 2_048, 32, 8, 64, 5_760, rope_theta=500_000.0, tie_embeddings=True),
        "8b": ModelConfig(128_256, 32, 4_096, 32, 8, 128, 14_336, rope_theta=500_000.0),
        "70b": ModelConfig(128_256, 80, 8_192, 64, 8, 128, 28_672, rope_theta=500_000.0),
        "1t": ModelConfig(128_256, 136, 24_576, 192, 16, 128, 81_920, rope_theta=500_000.0),
    }
    if name not in table:
        raise ValueError(f"model preset {name!r}: choose one of {', '.join(table)}")
    return table[name]
