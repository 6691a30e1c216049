"""Which configs may train on a ring: read, looked at, and followed through one pass on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elastic_ring.data.manifest import Manifest
from elastic_ring.data.tokenizer import FAST, folder_digest
from elastic_ring.files import plain_json, read_small, shown_url
from elastic_ring.integrations.transformers.module import TracedRing, class_of

NUM_TRACED_TOKENS = 16


def read_config(folder: Path) -> Mapping[str, Any]:
    """The content of a folder's config.json. Raises ValueError."""
    path = folder / "config.json"
    try:
        found = plain_json(read_small(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model folder {str(folder)!r}: its config.json cannot be read ({error}); give a folder as save_pretrained "
            "writes it"
        ) from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError(f"{path} has no model_type: give the config of a transformers model")
    return found


def config_of(plain: dict[str, Any]) -> Any:
    """The `PreTrainedConfig` of a config's dictionary. Raises ValueError for a type that transformers does not know."""
    from transformers import CONFIG_MAPPING

    kind = plain.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind!r}: this version of transformers does not know it; code from the folder is never run"
        )
    return CONFIG_MAPPING[kind].from_dict(plain)


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raises ValueError where the folder's tokenizer has a token that the model has no row for."""
    path = folder / FAST
    if not path.exists():
        return
    from tokenizers import Tokenizer

    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: cannot be read as a tokenizer ({error})") from error
    token, largest = max(tokens.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise ValueError(
            f"{path}: token {largest} ({token!r}) is outside the model's vocabulary of {vocab_size}: enlarge the "
            "embeddings of the saved model (resize_token_embeddings), or give the tokenizer that belongs to it"
        )


def check_same_tokenizer(folder: Path, uri: str, manifest: Manifest) -> None:
    """Raises ValueError where a corpus was prepared with another tokenizer than the one beside the model."""
    if not (folder / FAST).exists() or folder_digest(folder, manifest.end_of_document) == manifest.tokenizer_sha256:
        return
    raise ValueError(
        f"{shown_url(uri)} was prepared with another tokenizer than that in {str(folder)!r}, so its tokens mean "
        f"something else to the model: prepare it with --tokenizer {folder}, or name a folder without {FAST}"
    )


def check_config(config: Any) -> None:
    """Raises ValueError for what the config alone shows."""
    base, kind = class_of(config), f"model_type={config.model_type!r}"
    if not base._supports_attention_backend:
        raise ValueError(f"{kind} does not attend through transformers' AttentionInterface: choose a decoder that does")
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "vision_config"):
        raise ValueError(f"{kind} has more than a decoder of text: give the config of its text model")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{kind} is quantised (quantization_config): give weights in float32, bfloat16 or float16")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob"):
        if getattr(config, name, 0.0):
            raise ValueError(f"{kind} {name}={getattr(config, name)}: rings train without dropout; set it to 0.0")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{kind} use_bidirectional_attention=True: rings of a trainer are causal")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"{kind} rope_type={part['rope_type']!r} depends on the largest position at hand, and a rank sees its "
                "own slice only: choose default, linear, llama3 or yarn"
            )
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise ValueError(f"{kind} layer_types has {', '.join(sorted(others))}: rings have full and sliding attention")


def trace(model: Any, config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window, as the layers give it to the attention in a pass on the meta device.

    Raises ValueError for layers that do not attend through the interface, or ask for what a ring does not have.
    """
    kind, traced = f"model_type={config.model_type!r}", TracedRing()
    integers = torch.zeros(1, NUM_TRACED_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            model(integers, positions=integers, document_ids=integers, attention=traced)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{kind}: a pass on the meta device fails ({type(error).__name__}: {error}): the config's sizes must fit "
            "each other, and the forward pass must not depend on values of tensors"
        ) from error
    missing = set(range(config.num_hidden_layers)) - set(traced.windows)
    if missing:
        raise ValueError(
            f"{kind}: layer {min(missing)} does not attend through transformers' AttentionInterface, so its tokens "
            "would see their own slice only; choose a decoder that attends in every layer"
        )
    return tuple(traced.windows[layer] for layer in range(config.num_hidden_layers))
