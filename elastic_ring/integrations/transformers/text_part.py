"""The text model inside a multimodal config or folder, taken by itself.

The multimodal class, built on the meta device, says where its text model is and under which names a folder stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from elastic_ring.files import cut
from elastic_ring.integrations.transformers.checks import config_of, read_object
from elastic_ring.integrations.transformers.module import class_of
from elastic_ring.integrations.transformers.weights import FolderWeights, StoredNames, stored_names

TEXT = "text_config"
Value = TypeVar("Value")
SAME_FOR_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text models without a causal class of their own, and the decoder that each is for text: the three rotary positions of
an image are one there."""
OF_IMAGES = ("mrope_section", "mrope_interleaved")
NO_PART = ("transformers_version", "architectures", "_name_or_path")


@dataclass(frozen=True)
class TextPart:
    """The text model of a multimodal one: its config, and the prefix of its names in that by its own prefix."""

    outer_type: str
    config: Mapping[str, object]
    prefixes: Mapping[str, str]
    outer: Any
    """The multimodal module on the meta device."""

    @classmethod
    def of(cls, plain: Mapping[str, object]) -> TextPart | None:
        """None for a config that has no text model inside. Raises ValueError for one that cannot be taken apart."""
        outer = config_of(plain)
        if TEXT not in type(outer).sub_configs:
            return None
        kind, inner = f"model_type={outer.model_type!r}", outer.get_text_config()
        config = {key: value for key, value in inner.to_dict().items() if key not in NO_PART}
        own_type = config["model_type"]
        if (quantised := getattr(outer, "quantization_config", None)) is not None:  # refused as a text model's own
            config["quantization_config"] = quantised
        config["model_type"] = SAME_FOR_TEXT.get(own_type, own_type)
        if own_type in SAME_FOR_TEXT:
            rope = config.get("rope_parameters") or {}
            config["rope_parameters"] = {key: value for key, value in rope.items() if key not in OF_IMAGES}
        try:
            base = class_of(config_of(config))
        except ValueError as error:
            reason = f"{kind} has more than a decoder of text, and its text model stays in it"
            raise ValueError(f"{reason}: {error}") from None
        try:
            with torch.device("meta"):
                model = _outer_class(outer)._from_config(outer, dtype=torch.float32)
            text, head = model.get_decoder(), model.get_output_embeddings()
            names = {id(module): name for name, module in model.named_modules()}
            is_tied = head is not None and head.weight is model.get_input_embeddings().weight
        except Exception as error:  # each family fails in its own way, and some in many lines
            reason = cut(" ".join(str(error).split()), 300)
            raise ValueError(
                f"{kind} has more than a decoder of text, and its module cannot be built to take that out "
                f"({type(error).__name__}: {reason}); give the config of its text model"
            ) from error
        if type(text) is base:
            prefixes = {"": f"{names[id(text)]}."}
        elif own_type in SAME_FOR_TEXT or type(text) in _classes_below(base):
            prefixes = {f"{base.base_model_prefix}.": f"{names[id(text)]}.", "lm_head.": f"{names.get(id(head))}."}
        else:
            raise ValueError(
                f"{kind} has more than a decoder of text, and its {type(text).__name__} is no {base.__name__}: give "
                "the folder of a text model"
            )
        return cls(outer.model_type, {**config, "tie_word_embeddings": is_tied}, prefixes, model)

    def names(self, keys: Iterable[str]) -> StoredNames:
        """As `stored_names`, of the text model in a folder of the whole."""
        whole = stored_names(self.outer, keys)
        return StoredNames(self._own(whole.names), self._own(whole.pieces))

    def _own(self, of_whole: Mapping[str, Value]) -> dict[str, Value]:
        return {
            own + name.removeprefix(prefix): value
            for name, value in of_whole.items()
            for own, prefix in self.prefixes.items()
            if name.startswith(prefix)
        }


def _outer_class(config: Any) -> Any:
    from transformers.models.auto import modeling_auto

    for task in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM"):
        if (base := getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING").get(type(config), None)) is not None:
            return base
    raise ValueError("transformers has no class of it that generates text")


def _classes_below(base: Any) -> tuple[Any, ...]:
    """The class of a causal model's body."""
    from transformers import MODEL_MAPPING

    return (MODEL_MAPPING.get(base.config_class, None),)


def read_config(folder: Path) -> Any:
    """The config of a model's folder. Raises ValueError for one that cannot be read."""
    return read_object(folder / "config.json", "give a model folder as save_pretrained writes it")


def fitted_weights(folder: Path, model: Any, part: TextPart | None) -> FolderWeights | None:
    """The folder's weights for `model`, which may be the `part` of a multimodal folder; None without weights.
    Raises ValueError where they do not fit."""
    stored = FolderWeights.open(folder)
    if stored is None or part is None:
        return stored and stored.fitted(model, stored_names(model, stored.files))
    names = part.names(stored.files)
    used = {*names.names.values(), *(key for rows in names.pieces.values() for row in rows for key in row)}
    own = replace(
        stored,
        files={key: stored.files[key] for key in stored.files if key in used},
        shapes={key: stored.shapes[key] for key in stored.shapes if key in used},
    )
    return own.fitted(model, names)
