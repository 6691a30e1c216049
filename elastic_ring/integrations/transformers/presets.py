"""The built-in decoder as transformers' Llama, or with experts as its GLM-4-MoE, which it is but for the names: config,
names, tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT
from elastic_ring.data.tokenizer import BYTES, ByteTokenizer, folder_digest
from elastic_ring.errors import StorageFailed
from elastic_ring.model.config import ModelConfig
from elastic_ring.validation import from_plain

log = logging.getLogger(__name__)

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


def shape_of_run(recorded: Mapping[str, Any]) -> ModelConfig | None:
    """The built-in decoder of a run with this config.json; None for a run of another model."""
    shape = recorded.get("model")
    return from_plain(ModelConfig, shape) if shape else None


def config_of_preset(shape: ModelConfig, context_tokens: int, end_of_document: int | None) -> dict[str, Any]:
    """As the config.json of a Llama says it, or of a GLM-4-MoE. Raises ValueError for experts that it cannot say."""
    plain = _llama_config(shape, context_tokens, end_of_document)
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
        "rope_parameters": {**plain["rope_parameters"], "partial_rotary_factor": 1.0},
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


def _llama_config(shape: ModelConfig, context_tokens: int, end_of_document: int | None) -> dict[str, Any]:
    return {
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
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context_tokens,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
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


def tokens_of_run(recorded: Mapping[str, Any]) -> tuple[str, int | None]:
    """(tokenizer, end of a document) of the data in a run's config.json: `bytes`, a folder, or "" where none is known.

    A prepared corpus names its tokenizer in its manifest, as long as that can be read.
    """
    data = recorded.get("data", {})
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
    if manifest.tokenizer_sha256 == ByteTokenizer().sha256:
        return BYTES, end
    folder = Path(str(manifest.about.get("tokenizer", "")))
    is_same = folder.is_dir() and folder_digest(folder, end) == manifest.tokenizer_sha256
    return str(folder) if is_same else "", end


def byte_tokenizer(context_tokens: int) -> Any:
    """One token a byte, and one for the end of a document, as a `PreTrainedTokenizerFast`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({sign: byte for byte, sign in enumerate(_signs())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    assert made.token_to_id(END) == END_OF_DOCUMENT
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=context_tokens
    )


def _signs() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers: itself where it can be seen (GPT-2's table)."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + others.index(byte)) for byte in range(256)]
