"""A run's model as a config of transformers: the built-in decoder as a Llama, or with experts as a GLM-4-MoE, which it
is but for the names; and a run's pattern as sliding windows by layer."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule, Window
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT
from elastic_ring.data.tokenizer import BYTE_TOKENIZER, BYTES, folder_digest
from elastic_ring.errors import StorageFailed
from elastic_ring.integrations.transformers.checks import config_of, trace
from elastic_ring.integrations.transformers.model import BLOCK_TOKENS
from elastic_ring.integrations.transformers.module import build
from elastic_ring.model.config import ModelConfig

log = logging.getLogger(__name__)

BY_LAYER = frozenset({"gemma2", "ministral", "qwen2", "qwen3", "smollm3"})
"""Model types whose `layer_types` say which layers have a window, and nothing beside it. In others they also choose a
rotary embedding (gemma3, olmo3), or whether there is one (cohere2, exaone4)."""
IN_ALL = frozenset({"mistral", "phi3", "phimoe"})
"""Model types whose `sliding_window` holds for all layers; None for no window."""
SAME_MODEL = {"llama": ("mistral", "ministral"), "mistral": ("ministral",)}
"""Model types that differ only in windows."""
NOTE = "elastic_ring"
"""The config's key that says what is lost."""
END = "<|endoftext|>"
_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
_SLICE = re.compile(r"(^head|\.ffn)\.\d+(?=\.)")
_OF_EXPERTS = {
    "ffn.experts.gate_up": "mlp.experts.gate_up_proj",
    "ffn.experts.down": "mlp.experts.down_proj",
    "ffn.balance_bias": "mlp.gate.e_score_correction_bias",
}


def config_of_preset(shape: ModelConfig, context_tokens: int, end_of_document: int | None) -> dict[str, object]:
    """As the config.json of a Llama has it, or of a GLM-4-MoE. Raises ValueError for experts that neither can have."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    plain = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context_tokens,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
    }
    if not shape.num_experts:
        return plain
    num_shared, rest = divmod(shape.shared_width, shape.expert_width)
    if rest:
        raise ValueError(
            f"shared_width={shape.shared_width} is no multiple of expert_width={shape.expert_width}, and no config of "
            "transformers says that: load the weights into your own module (elastic_ring.load_weights)"
        )
    return plain | {
        "model_type": "glm4_moe",
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "n_shared_experts": num_shared or 1,  # it has one at least; `export` writes zeros for it
        "first_k_dense_replace": shape.num_dense_layers,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    }


def name_of_preset(name: str) -> str:
    """A parameter's name in transformers' Llama or GLM-4-MoE, the same for all slices of one. Raises ValueError for one
    that the built-in decoder does not have."""
    name = _SLICE.sub(r"\1", name)
    if name in _OUTER:
        return _OUTER[name]
    blocks, _, rest = name.partition(".")
    number, _, inside = rest.partition(".")
    if blocks == "blocks" and inside in _OF_EXPERTS:
        return f"model.layers.{number}.{_OF_EXPERTS[inside]}"
    part, _, kind = inside.rpartition(".")
    if blocks != "blocks" or kind != "weight" or part not in _IN_BLOCK:
        raise ValueError(f"the run's weights are not those of the built-in decoder: it has no {name}")
    return f"model.layers.{number}.{_IN_BLOCK[part]}.weight"


def tokens_of_run(data: Any) -> tuple[str, int | None]:
    """(tokenizer, end of a document) of `data` in a run's config.json: `bytes`, a folder, or "" where none is known.

    A prepared corpus names its tokenizer in its manifest, as long as that can be read.
    """
    source, end = data.get("source"), data.get("end_of_document")
    if source in ("StdlibText", "TextFiles"):
        return BYTES, END_OF_DOCUMENT
    if source == "TokenShards":
        return BYTES if (data["vocab_size"], end) == (BYTE_VOCAB_SIZE, END_OF_DOCUMENT) else "", end
    if source != "PreparedTokens":
        return "", None
    try:
        manifest = read_manifest(data["uri"])
    except (ValueError, StorageFailed) as error:
        log.warning("the corpus does not say which tokenizer it has: %s", error)
        return "", None
    end = manifest.end_of_document
    if manifest.tokenizer_sha256 == BYTE_TOKENIZER.sha256:
        return BYTES, end
    folder = Path(str(manifest.about.get("tokenizer", "")))
    is_same = folder.is_dir() and folder_digest(folder, end) == manifest.tokenizer_sha256
    return str(folder) if is_same else "", end


def byte_tokenizer(context_tokens: int) -> Any:
    """One token a byte, and one for the end of a document, as a `PreTrainedTokenizerFast`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE({sign: byte for byte, sign in sorted(bytes_to_unicode().items())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    assert tokenizer.token_to_id(END) == END_OF_DOCUMENT
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=context_tokens
    )


# ------------------------------------------------------------ sliding windows


def with_pattern(
    plain: Mapping[str, Any], pattern: str, context_tokens: int, *, allow_dense: bool
) -> tuple[dict[str, Any], str]:
    """(config, what it does not say, if anything) for a run of the config `plain` that trained with `pattern`, in the
    words of its config.json ("" for none).

    Raises ValueError where layers would see more than they were trained with, unless `allow_dense` asks for that.
    """
    config = {key: value for key, value in plain.items() if key not in (NOTE, "architectures")}
    own = [_noticed(window, context_tokens) for window in _windows(config)]
    rules: list[tuple[Rule, ...] | str] = [pattern or (Dense(),)] * len(own)
    with suppress(ValueError):  # of functions, which cannot be read back
        if pattern:
            layers = parse_pattern(pattern.partition(" in blocks of ")[0])  # a block's size changes no key
            rules = [layers.of_layer(layer).rules for layer in range(len(own))]
    trained = list(zip(rules, own, strict=True))
    windows = [_window_or_rule(of_layer, window, context_tokens) for of_layer, window in trained]
    losses: list[str] = []
    if any(_in_blocks(of_layer, window) for of_layer, window in trained):
        losses.append(
            f"trained with windows of whole blocks of {BLOCK_TOKENS} tokens, up to {2 * BLOCK_TOKENS - 2} "
            "more than the config's, which are written"
        )
    sizes = Counter(window for window in windows if isinstance(window, int))
    kept = sizes.most_common(1)[0][0] if sizes else None  # a config has one size
    possible = [window if window == kept else None for window in windows]
    exported = _config(config, possible, own, context_tokens)
    if exported is None or possible != windows:
        lost = Counter(
            window if isinstance(window, str) else str(Window(window))
            for window in windows
            if window is not None and (exported is None or window != kept)
        )
        text = ", ".join(f"{rule} in {number} of {len(own)} layers" for rule, number in lost.items())
        if not allow_dense:
            raise ValueError(
                f"the run trained with {text}, which no config of transformers says for a {config['model_type']}: the "
                "exported model would attend to all earlier tokens there, and be another model. Give --allow-dense "
                "(allow_dense=True) to export it so, or keep the weights as they are"
            )
        losses.append(f"trained with {text}; the exported model attends to all earlier tokens there")
        exported = exported or _config(config, [None] * len(own), own, context_tokens)
    if exported is None:
        raise ValueError(
            f"the run trained without the windows of its config, and transformers has no {config['model_type']} "
            "without windows: keep the weights as they are"
        )
    note = "; ".join(losses)
    return {**exported, **({NOTE: {"pattern": pattern, "lost": note}} if losses else {})}, note


def _window_or_rule(rules: tuple[Rule, ...] | str, own: int | None, context_tokens: int) -> int | str | None:
    """A layer's window, None where it saw all, or the text of rules that are no window."""
    if _in_blocks(rules, own):
        return own
    if isinstance(rules, str) or len(set(rules)) > 1:
        return rules if isinstance(rules, str) else "+".join(sorted({str(rule) for rule in rules}))
    rule = rules[0]
    if isinstance(rule, Window):
        return _noticed(rule.tokens, context_tokens)
    return None if isinstance(rule, Dense) else str(rule)


def _noticed(window: int | None, context_tokens: int) -> int | None:
    """None for a window that holds all of a sequence."""
    return window if window is not None and window < context_tokens else None


def _in_blocks(rules: tuple[Rule, ...] | str, own: int | None) -> bool:
    """Whether a layer trained with the config's window, rounded up (`windows="blocks"`)."""
    return own is not None and rules == (BigBird(Window(own).num_blocks(BLOCK_TOKENS), 0, 0),)


def _config(
    plain: dict[str, Any], windows: Sequence[int | None], own: Sequence[int | None], context_tokens: int
) -> dict[str, Any] | None:
    """The config whose layers have these windows; None where transformers has none."""
    if list(windows) == list(own):
        return plain
    from transformers import CONFIG_MAPPING

    shapes, own_type = _shapes(plain), plain["model_type"]
    beyond = max(context_tokens, int(plain.get("max_position_embeddings") or 0))
    sizes = [window for window in windows if window is not None]
    for kind in (own_type, *SAME_MODEL.get(own_type, ())):
        candidate = {**plain, "model_type": kind}
        if kind not in CONFIG_MAPPING:
            continue
        if kind in IN_ALL and (not sizes or None not in windows):
            candidate["sliding_window"] = sizes[0] if sizes else None
        elif kind in BY_LAYER:
            candidate["layer_types"] = ["full_attention" if each is None else "sliding_attention" for each in windows]
            candidate["sliding_window"] = sizes[0] if sizes else plain.get("sliding_window")
            candidate["use_sliding_window"] = bool(sizes)
        elif "layer_types" in plain and "sliding_window" in plain:  # which layers have one must stay
            candidate["sliding_window"] = sizes[0] if sizes else beyond
        else:
            continue
        in_candidate = [_noticed(window, beyond) for window in _windows(candidate)]
        if in_candidate == list(windows) and _shapes(candidate) == shapes:
            return candidate
    return None


def _windows(plain: Mapping[str, Any]) -> list[int | None]:
    config = config_of(plain)
    with torch.device("meta"):
        return [*trace(build(config), config)[0]]


def _shapes(plain: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(param.shape) for name, param in build(config_of(plain)).named_parameters()}
