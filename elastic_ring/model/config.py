"""The shape of the built-in decoder, its presets, parameters and FLOPs, and the known types of Hugging Face's models.

No torch in here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from elastic_ring.validation import Flag, Must, NonNegativeInt, PositiveInt, settings

EXPERT_FIELDS = ("num_experts", "experts_per_token", "expert_width", "shared_width", "num_dense_layers")
UNIT_PARAMETERS = 1 << 30
"""About the most parameters of the built-in decoder that FSDP2 gathers at a time: larger modules are gathered in parts,
and their larger matrices are built in slices, which are parameters of their own in every ring and checkpoint."""
_TILE = 128
KNOWN_TYPES = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text", "glm4_moe"),
        *("gpt_oss", "granitemoe", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_moe", "smollm3"),
    }
)
"""Hugging Face model types whose config gives all of the model's sizes (`unit/forecast/test_forecast_models.py`
compares each with its module). Their logits are `lm_head(hidden)`, with a softcap where the config has
`final_logit_softcapping` and divided where it has `logits_scaling`: their loss is computed in chunks of tokens. Other
types make the logits of a whole slice at once, as transformers does."""


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
    offload_activations: Annotated[bool, Flag("offload_activations")] = False
    """Keep checkpointed activations in host memory between forward and backward."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the parameters as built; FSDP2 computes in `step_config.param_dtype`."""
    num_experts: NonNegativeInt = 0
    """Experts of a layer, which take the place of its feed-forward part; 0: none."""
    experts_per_token: NonNegativeInt = 0
    """Experts that each token takes."""
    expert_width: NonNegativeInt = 0
    """Inner width of one expert."""
    shared_width: NonNegativeInt = 0
    """Inner width of the feed-forward part beside the experts that takes every token; 0: none."""
    num_dense_layers: NonNegativeInt = 0
    """First layers that have a feed-forward part of ffn_width and no experts."""

    def __post_init__(self) -> None:
        if self.num_experts:
            if not self.expert_width:
                raise ValueError("ModelConfig expert_width=0: give the inner width of one expert beside num_experts")
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ValueError(
                    f"ModelConfig experts_per_token={self.experts_per_token}: a token takes 1 to "
                    f"num_experts={self.num_experts} experts"
                )
            if self.num_dense_layers >= self.num_layers:
                raise ValueError(
                    f"ModelConfig num_dense_layers={self.num_dense_layers} of num_layers={self.num_layers}: at least "
                    "one layer has experts; lower it, or leave num_experts out"
                )
        elif fields := [name for name in EXPERT_FIELDS[1:] if getattr(self, name)]:
            raise ValueError(
                f"ModelConfig {fields[0]}={getattr(self, fields[0])}: says how experts are, and num_experts=0: give "
                "both or none (a preset with experts gives it too)"
            )
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

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def is_parted(self, layer: int) -> bool:
        """Whether attention and the slices of the feed-forward part are gathered one after the other."""
        return not self.has_experts(layer) and block_parameters(self, layer) > UNIT_PARAMETERS

    @property
    def has_own_tables(self) -> bool:
        """Whether the embedding and the head, or its slices, are gathered on their own."""
        return not self.tie_embeddings and 2 * self.vocab_size * self.width > UNIT_PARAMETERS

    @property
    def ffn_slices(self) -> tuple[int, ...]:
        """Inner widths of the slices of a feed-forward part."""
        return _slices(self.ffn_width, 3 * self.width)

    @property
    def head_slices(self) -> tuple[int, ...]:
        """Tokens of the vocabulary that each slice of the head scores."""
        return _slices(self.vocab_size, self.width) if self.has_own_tables else (self.vocab_size,)

    @property
    def sliced(self) -> dict[str, tuple[int, ...]]:
        """The slices of each module that is built in slices, which the names of its parameters show."""
        ffn = {"ffn": self.ffn_slices} if any(map(self.is_parted, range(self.num_layers))) else {}
        return ffn | ({"head": self.head_slices} if len(self.head_slices) > 1 else {})


def _slices(rows: int, row_parameters: int) -> tuple[int, ...]:
    """Rows of each slice: whole tiles in all but the last."""
    number = -(-rows * row_parameters // UNIT_PARAMETERS)
    each = rows if number == 1 else -(-rows // (number * _TILE)) * _TILE
    return tuple(min(each, rows - first) for first in range(0, rows, each))


@dataclass(frozen=True)
class ModelSizes:
    """A model's sizes for plans and forecasts. `config`: as the built-in decoder has them; `num_parameters`: if these
    do not give all; `num_trained`: parameters of adapters on a frozen base; `latent`: numbers of a token that hops
    carry in place of K and V; `one_a_pass`: why a pass takes one sequence only; empty if it may take more."""

    config: ModelConfig
    num_parameters: int | None = None
    num_trained: int | None = None
    latent: int = 0
    is_built_in: bool = False
    one_a_pass: str = ""


def built_in(model: Any) -> ModelConfig | None:
    """The shape of a factory `partial(Transformer, config)` of the built-in decoder; None for others."""
    if not isinstance(model, partial) or getattr(model.func, "__module__", "") != "elastic_ring.model.transformer":
        return None
    match [*model.args, *model.keywords.values()]:
        case [ModelConfig() as config]:
            return config
    return None


def num_parameters(config: ModelConfig) -> int:
    """The parameter count of `Transformer(config)`, without building it."""
    embeddings = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return embeddings + sum(block_parameters(config, layer) for layer in range(config.num_layers)) + config.width


def active_parameters(config: ModelConfig) -> int:
    """The parameters that one token is multiplied with, or that are read for it."""
    unused = (config.num_experts - config.experts_per_token) * 3 * config.width * config.expert_width
    return num_parameters(config) - unused * (config.num_layers - config.num_dense_layers if config.num_experts else 0)


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one layer's experts, without its router."""
    return config.num_experts * 3 * config.width * config.expert_width


def block_parameters(config: ModelConfig, layer: int) -> int:
    """Parameters of one block."""
    attention = 2 * config.width * config.head_dim * (config.num_heads + config.num_kv_heads)
    beside = attention + 2 * config.width
    if not config.has_experts(layer):
        return beside + 3 * config.width * config.ffn_width
    router = config.num_experts * (config.width + 1)
    return beside + expert_parameters(config) + router + 3 * config.width * config.shared_width


def model_flops(config: ModelConfig, num_tokens: int, density: float = 1.0, num_active: int | None = None) -> float:
    """FLOP of one sequence, forward and backward: 6 for each parameter and token that are multiplied (rows of a table
    that is only read are not), and 6 S^2 H D for each layer, the causal half of attention, of which a pattern keeps the
    share `density`. `num_active`: the parameters of a token, if the config does not give all of them."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    dense = 6.0 * ((num_active or active_parameters(config)) - table) * num_tokens
    return dense + density * 6.0 * num_tokens**2 * config.num_heads * config.head_dim * config.num_layers


def preset(name: str) -> ModelConfig:
    """A named size: laptop, 100m, 1b, 8b, 70b, 1t; with experts moe-laptop, 30b-a3b, 1t-moe. `dataclasses.replace`
    changes a field."""
    # Vocabulary: bytes and an end-of-document token. For a context of 2,048.
    laptop = ModelConfig(257, 4, 128, 4, 2, 32, 384)
    table = {
        "laptop": laptop,
        "100m": ModelConfig(32_768, 12, 768, 12, 4, 64, 2_048, tie_embeddings=True),
        "1b": ModelConfig(128_256, 16, 2_048, 32, 8, 64, 5_760, rope_theta=500_000.0, tie_embeddings=True),
        "8b": ModelConfig(128_256, 32, 4_096, 32, 8, 128, 14_336, rope_theta=500_000.0),
        "70b": ModelConfig(128_256, 80, 8_192, 64, 8, 128, 28_672, rope_theta=500_000.0),
        "1t": ModelConfig(128_256, 136, 24_576, 192, 16, 128, 81_920, rope_theta=500_000.0),
        "moe-laptop": replace(laptop, num_experts=8, experts_per_token=2, expert_width=128, shared_width=128),
        # The shapes of Qwen3-30B-A3B, and of Kimi K2 with grouped-query instead of latent attention.
        "30b-a3b": ModelConfig(
            *(151_936, 48, 2_048, 32, 4, 128, 6_144),
            rope_theta=1_000_000.0,
            num_experts=128,
            experts_per_token=8,
            expert_width=768,
        ),
        "1t-moe": ModelConfig(
            *(163_840, 61, 7_168, 64, 8, 128, 18_432),
            rope_theta=50_000.0,
            num_experts=384,
            experts_per_token=8,
            expert_width=2_048,
            shared_width=2_048,
            num_dense_layers=1,
        ),
    }
    if name not in table:
        raise ValueError(f"model preset {name!r}: choose one of {', '.join(table)}")
    return table[name]
