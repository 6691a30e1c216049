"""The sizes of a model folder by its config.json alone, as `integrations.transformers` reads them off the module. No
torch and no transformers in here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Window
from elastic_ring.attention.plan.traffic import carries_latents
from elastic_ring.cli.settings import TrainSettings
from elastic_ring.files import plain_json, read_small
from elastic_ring.forecast.sizing.step_time import Latent
from elastic_ring.model.config import KNOWN_TYPES, ModelConfig, num_parameters

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k")
ALL_WINDOWS, NO_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe"}), frozenset({"qwen2_moe"})
"""Types whose layers all have the window, or none whatever the config says; others go by `layer_types`."""
BLOCK_TOKENS = 128


def sizes_of(settings: TrainSettings) -> tuple[ModelConfig, LayerPatterns | None, int, Latent | None]:
    """(sizes, windows that a sequence notices, parameters, latents that hops carry). Raises ValueError
    for a folder that does not say them."""
    folder = Path(str(settings.model_folder)).expanduser()
    try:
        plain = plain_json(read_small(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-folder {folder}: its config.json cannot be read ({error})") from error
    if not isinstance(plain, dict) or plain.get("model_type") not in KNOWN_TYPES:
        kind = plain.get("model_type") if isinstance(plain, dict) else None
        raise ValueError(
            f"--model-folder {folder}: model_type={kind!r}: forecast are {', '.join(sorted(KNOWN_TYPES))}; give a "
            "preset's sizes instead: --model.num-layers ..."
        )
    try:
        model = _model(plain, settings.model)
        number = num_parameters(model) + _beside(plain, model)
        return model, _windows(plain, settings, model.num_layers), number, _latent(plain, model)
    except KeyError as error:
        raise ValueError(f"--model-folder {folder}: config.json has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model-folder {folder}: {error}") from error


def _model(plain: Mapping[str, Any], settings: ModelConfig) -> ModelConfig:
    heads, width = int(plain["num_attention_heads"]), int(plain["hidden_size"])
    latent = plain.get("qk_head_dim") or plain.get("qk_nope_head_dim", 0) + plain.get("qk_rope_head_dim", 0)
    tied = plain.get("tie_word_embeddings", str(plain["model_type"]).startswith("gemma"))
    return ModelConfig(
        vocab_size=int(plain["vocab_size"]),
        num_layers=int(plain["num_hidden_layers"]),
        width=width,
        num_heads=heads,
        num_kv_heads=int(plain.get("num_key_value_heads") or heads),
        head_dim=int(latent or plain.get("head_dim") or width // heads),
        ffn_width=int(plain["intermediate_size"]),
        tie_embeddings=bool(tied),
        checkpoint_activations=settings.checkpoint_activations,
        loss_chunk_tokens=settings.loss_chunk_tokens,
        **_experts(plain),
    )


def _experts(plain: Mapping[str, Any]) -> dict[str, Any]:
    number = next((int(plain[key]) for key in NUM_EXPERTS if plain.get(key)), 0)
    if not number:
        return {}
    width = int(plain.get("moe_intermediate_size") or plain["intermediate_size"])
    shared = plain.get("shared_expert_intermediate_size")
    if shared is None:
        shared = width * (plain.get("n_shared_experts") or plain.get("moe_num_shared_experts") or 0)
    return {
        "num_experts": number,
        "experts_per_token": next(int(plain[key]) for key in TOP_K if plain.get(key)),
        "expert_width": width,
        "shared_width": int(shared),
        "num_dense_layers": sum(not _has_experts(plain, layer) for layer in range(int(plain["num_hidden_layers"]))),
    }


def _has_experts(plain: Mapping[str, Any], layer: int) -> bool:
    first = plain.get("first_k_dense_replace") or plain.get("moe_layer_start_index") or 0
    every = plain.get("decoder_sparse_step") or plain.get("moe_layer_interval") or 1
    last = plain.get("moe_layer_end_index", layer)
    is_dense = layer in (plain.get("mlp_only_layers") or ())
    return first <= layer <= (layer if last == -1 else last) and not is_dense and (layer + 1) % every == 0


def _beside(plain: Mapping[str, Any], model: ModelConfig) -> int:
    """By how many parameters latent attention (DeepSeek-V3, arXiv:2412.19437) differs from projections as wide as its
    queries."""
    rank = plain.get("kv_lora_rank")
    if not rank:
        return 0
    heads, rope = model.num_heads, int(plain["qk_rope_head_dim"])
    value, of_q = int(plain["v_head_dim"]), plain.get("q_lora_rank")
    queries = of_q * (model.width + 1 + heads * model.head_dim) if of_q else model.width * heads * model.head_dim
    keys = model.width * (rank + rope) + rank + rank * heads * (model.head_dim - rope + value)
    wide = 2 * model.width * model.head_dim * (heads + model.num_kv_heads)
    return model.num_layers * (queries + keys + heads * value * model.width - wide)


def _latent(plain: Mapping[str, Any], model: ModelConfig) -> Latent | None:
    """As `integrations.transformers` chooses what hops carry."""
    rank, rope = int(plain.get("kv_lora_rank") or 0), int(plain.get("qk_rope_head_dim") or 0)
    if not rank or not carries_latents(model.num_heads, model.head_dim, rank + rope):
        return None
    return Latent(rank + rope, rank * model.num_heads * (model.head_dim - rope + int(plain["v_head_dim"])))


def _layer_types(plain: Mapping[str, Any], num_layers: int) -> list[str]:
    """The config's, else those that Gemma's types begin with: published configs do not have them."""
    every = {"gemma2": 2, "gemma3_text": plain.get("sliding_window_pattern") or 6}.get(plain["model_type"])
    if plain.get("layer_types") or every is None:
        return plain.get("layer_types") or []
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def _windows(plain: Mapping[str, Any], settings: TrainSettings, num_layers: int) -> LayerPatterns | None:
    """As `RingModel.pattern`: windows that are as long as the sequence are none."""
    window = plain.get("sliding_window")
    if not window or window >= settings.step.context_tokens or settings.windows == "dense":
        return None
    kind = plain["model_type"]
    kinds = ["sliding_attention"] * num_layers if kind in ALL_WINDOWS else _layer_types(plain, num_layers)
    rule: Rule = Window(int(window))
    if settings.windows == "blocks":
        rule = BigBird(window=Window(int(window)).num_blocks(BLOCK_TOKENS), globals=0, randoms=0)
    with_window = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if not with_window or kind in NO_WINDOWS:
        return None
    groups = [LayerGroup((rule,), with_window)]
    rest = tuple(layer for layer in range(num_layers) if layer not in with_window)
    return LayerPatterns((*groups, *([LayerGroup((Dense(),), rest)] if rest else [])))
