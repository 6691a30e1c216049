"""The sizes of a model folder by its config.json alone, as `integrations.transformers` reads them off the module.

No torch and no transformers in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Window
from elastic_ring.attention.plan.traffic import carries_latents
from elastic_ring.cli.settings import TrainSettings
from elastic_ring.files import check_model_links, plain_json, read_small
from elastic_ring.forecast.sizing.step_time import Latent
from elastic_ring.model.config import KNOWN_TYPES, ModelConfig, num_parameters

ALL_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe"})
"""Types whose layers all have the window; others go by `layer_types`."""
BLOCK_TOKENS = 128
MAY_BE_0 = frozenset({"moe_layer_end_index", "qk_rope_head_dim", "shared_expert_intermediate_size", "v_head_dim"})


class FolderConfig(BaseModel):
    """What sizes follow from in a decoder's config.json; null and most zeros count as left out."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: str
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    # latent attention
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    # experts
    num_experts: int = Field(
        0, validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )
    experts_per_token: int = Field(0, validation_alias=AliasChoices("num_experts_per_tok", "moe_k"))
    expert_width: int = Field(0, validation_alias="moe_intermediate_size")
    shared_width: int = Field(0, validation_alias="shared_expert_intermediate_size")
    num_shared: int = Field(0, validation_alias=AliasChoices("n_shared_experts", "moe_num_shared_experts"))
    first_layer: int = Field(0, validation_alias=AliasChoices("first_k_dense_replace", "moe_layer_start_index"))
    last_layer: int = Field(-1, validation_alias="moe_layer_end_index")
    every_layers: int = Field(1, validation_alias=AliasChoices("decoder_sparse_step", "moe_layer_interval"))
    mlp_only_layers: list[int] = []
    # windows
    sliding_window: int = 0
    sliding_window_pattern: int = 6
    layer_types: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, plain: Mapping[str, object]) -> dict[str, object]:
        return {
            key: value
            for key, value in plain.items()
            if value or value is False or (value == 0 and key in MAY_BE_0) or key == "tie_word_embeddings"
        }

    def model(self, settings: ModelConfig) -> ModelConfig:
        is_left_out = "tie_word_embeddings" not in self.model_fields_set
        model = ModelConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_hidden_layers,
            width=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.qk_head_dim
            or self.qk_nope_head_dim + self.qk_rope_head_dim
            or self.head_dim
            or self.hidden_size // self.num_attention_heads,
            ffn_width=self.intermediate_size,
            tie_embeddings=self.model_type.startswith("gemma") if is_left_out else bool(self.tie_word_embeddings),
            checkpoint_activations=settings.checkpoint_activations,
            loss_chunk_tokens=settings.loss_chunk_tokens,
        )
        if not self.num_experts:
            return model
        if not self.experts_per_token:
            raise ValueError("config.json does not say how many experts a token goes to")
        layers = range(self.num_hidden_layers)
        last = layers[-1] if self.last_layer == -1 else self.last_layer
        with_experts = [
            layer
            for layer in layers
            if self.first_layer <= layer <= last
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.every_layers == 0
        ]
        width = self.expert_width or self.intermediate_size
        return replace(
            model,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_width=width,
            shared_width=self.shared_width if "shared_width" in self.model_fields_set else width * self.num_shared,
            num_dense_layers=len(layers) - len(with_experts),
        )

    def latent(self, model: ModelConfig) -> tuple[int, Latent | None]:
        """(by how many parameters latent attention differs from projections as wide as its queries, what hops carry)
        of DeepSeek-V3 (arXiv:2412.19437), with hops as `integrations.transformers` chooses."""
        rank, rope, value, of_q = self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim, self.q_lora_rank
        if not rank:
            return 0, None
        for name in ("qk_rope_head_dim", "v_head_dim"):
            if name not in self.model_fields_set:
                raise ValueError(f"config.json has no {name}")
        heads, width = model.num_heads, model.width
        queries = of_q * (width + 1 + heads * model.head_dim) if of_q else width * heads * model.head_dim
        up = rank * heads * (model.head_dim - rope + value)
        keys = width * (rank + rope) + rank + up
        wide = 2 * width * model.head_dim * (heads + model.num_kv_heads)
        number = model.num_layers * (queries + keys + heads * value * width - wide)
        return number, Latent(rank + rope, up) if carries_latents(heads, model.head_dim, rank + rope) else None

    def windows(self, settings: TrainSettings) -> LayerPatterns | None:
        """As `RingModel.pattern`: windows that are as long as the sequence are none."""
        window, layers = self.sliding_window, range(self.num_hidden_layers)
        if not window or window >= settings.step.context_tokens or settings.windows == "dense":
            return None
        # Published configs of Gemma's types do not have the layers that these begin with.
        every = {"gemma2": 2, "gemma3_text": self.sliding_window_pattern}.get(self.model_type)
        if self.model_type in ALL_WINDOWS:
            with_window = tuple(layers)
        elif self.layer_types or every is None:
            with_window = tuple(layer for layer, kind in enumerate(self.layer_types) if kind == "sliding_attention")
        else:
            with_window = tuple(layer for layer in layers if (layer + 1) % every)
        if not with_window:
            return None
        rule: Rule = Window(window)
        if settings.windows == "blocks":
            rule = BigBird(window=Window(window).num_blocks(BLOCK_TOKENS), globals=0, randoms=0)
        rest = tuple(layer for layer in layers if layer not in with_window)
        return LayerPatterns(
            (LayerGroup((rule,), with_window), *([LayerGroup((Dense(),), rest)] if rest else [])),
        )


def sizes_of(settings: TrainSettings) -> tuple[ModelConfig, LayerPatterns | None, int, Latent | None]:
    """(sizes, windows shorter than a sequence, parameters, latents that hops carry). Raises ValueError for a folder
    that does not say them."""
    folder = Path(str(settings.model_folder)).expanduser()
    try:
        check_model_links(folder)
        plain = plain_json(read_small(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-folder {folder}: its config.json cannot be read ({error})") from error
    kind = plain.get("model_type") if isinstance(plain, dict) else None
    if kind not in KNOWN_TYPES:
        raise ValueError(
            f"--model-folder {folder}: model_type={kind!r}: forecast are {', '.join(sorted(KNOWN_TYPES))}; give a "
            "preset's sizes instead: --model.num-layers ..."
        )
    try:
        config = FolderConfig.model_validate(plain)
        model = config.model(settings.model)
        of_latents, latent = config.latent(model)
        return model, config.windows(settings), num_parameters(model) + of_latents, latent
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        reason = f"config.json has no {name}" if first["type"] == "missing" else f"{name}: {first['msg']}"
        raise ValueError(f"--model-folder {folder}: {reason}") from error
    except ValueError as error:
        raise ValueError(f"--model-folder {folder}: {error}") from error
