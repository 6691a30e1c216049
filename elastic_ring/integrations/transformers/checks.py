"""Checks which configs may train on a ring: by their settings, and by one traced pass on the meta device."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elastic_ring.config import StepConfig
from elastic_ring.data.tokenizer import FAST
from elastic_ring.files import cut, plain_json, read_small
from elastic_ring.integrations.transformers.module import TracedRing, class_of

NUM_TRACED_TOKENS = 16
OTHER_PARTS = frozenset({"text_config", "vision_config", "audio_config", "audio_encoder_config", "audio_encoder"})
"""Configs inside a config whose model has more than a decoder of text."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd", "num_attention_heads", "n_head"), 2**20),
    "vocab_size": 2**26,
    "depth": 4096,
}
"""Sizes that no decoder exceeds: building a model of a stranger's config must end."""


def read_object(path: Path, way_out: str) -> Any:
    """The object in a file of JSON. Raises ValueError with the way out."""
    try:
        content = plain_json(read_small(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {way_out}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is no object; {way_out}")
    return content


def config_of(plain: Mapping[str, object]) -> Any:
    """The `PreTrainedConfig` of a config's dictionary. Raises ValueError for a type that transformers does not know."""
    from transformers import CONFIG_MAPPING

    kind = plain.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind!r}: this version of transformers does not know it; code from the folder is never run"
        )
    parts = [part for name, part in plain.items() if name.endswith("_config") and isinstance(part, Mapping)]
    for (name, most), part in product(MOST.items(), (plain, *parts)):
        value = part.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name}={cut(repr(value), 60)}: must be a whole number of 1 to {most:,}")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(plain))
    except Exception as error:  # each config checks in its own way
        raise ValueError(f"model_type={kind!r}: its config cannot be read ({cut(str(error), 300)})") from error


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


def check_config(config: Any) -> None:
    """Raises ValueError for a config that rings do not train."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base, kind = class_of(config), f"model_type={config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False) or OTHER_PARTS & {*config.sub_configs}:
        raise ValueError(f"{kind} has more than a decoder of text: give the config of its text model")
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"{kind} layer_types has {', '.join(sorted(unknown))}: rings have full and sliding attention")
    if not base._supports_attention_backend:
        raise ValueError(f"{kind} does not attend through transformers' AttentionInterface: choose a decoder that does")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{kind} is quantised (quantization_config): give weights in float32, bfloat16 or float16")
    if getattr(config, "index_topk", None):
        raise ValueError(f"{kind} index_topk={config.index_topk}: an indexer chooses tokens, which rings do not have")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{kind} use_bidirectional_attention=True: rings of a trainer are causal")
    for part in _rope_parts(config):
        if part.get("rope_type") == "dynamic":
            raise ValueError(
                f"{kind} rope_type={part['rope_type']!r} depends on the largest position at hand, and a rank sees its "
                "own slice only: choose default, linear, llama3, longrope or yarn"
            )
        if part.get("rope_type", "default") not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise ValueError(f"{kind} rope_type={part['rope_type']!r}: this version of transformers does not know it")


def _rope_parts(config: Any) -> Iterator[Any]:
    """The settings of a config's rotary embedding, and those of its kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    yield from (rope, *(value for value in rope.values() if isinstance(value, Mapping)))


def num_positions(model: Any, config: Any, traced: TracedRing) -> int:
    """Rows of the table of positions that the module reads; 0 without one."""
    tables = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module.weight) in traced.tables
        if "position" in name or name.endswith("wpe")
    ]
    return min([*tables, int(config.max_position_embeddings)]) if tables else 0


def softcap_of(config: Any, traced: TracedRing) -> float:
    """The cap of the scores, 0 without one. Raises ValueError where layers differ."""
    if len(traced.softcaps) > 1:
        raise ValueError(
            f"model_type={config.model_type!r}: its layers cap scores at {sorted(traced.softcaps)}; give one"
        )
    return max(traced.softcaps, default=0.0)


def check_skipped_layers(config: Any) -> None:
    """Raises ValueError for layers that a pass of training skips at random; a trace may find any of them."""
    for name, value in config.to_dict().items():
        if value and re.search(r"layer_?drop$", name):
            kind = f"model_type={config.model_type!r}"
            raise ValueError(f"{kind} {name}={value}: rings skip no layers at random; set it to 0.0")


def check_dropout(config: Any, traced: TracedRing) -> None:
    """Raises ValueError for dropout that a pass of training has in its attention."""
    kind, dropout_rates = f"model_type={config.model_type!r}", traced.dropout_rates - {0.0}
    if dropout_rates:
        settings = [
            f"{name}={value}"
            for name, value in config.to_dict().items()
            if "drop" in name and value in [*dropout_rates]
            if not re.search(r"^(classifier|summary)_|emb|hidden|resid", name)
        ]
        named = ", ".join(settings) or f"dropout={max(dropout_rates)}"
        raise ValueError(f"{kind} {named}: attention on rings has no dropout; set it to 0.0")


def check_step(config: Any, step: StepConfig) -> None:
    """Raises ValueError for a context in which the config has scales that rings do not compute."""
    kind, context = f"model_type={config.model_type!r}", step.context_tokens
    scales, floor = getattr(config, "attn_temperature_tuning", False), getattr(config, "floor_scale", None)
    num_tokens = context * step.micro_batch  # Llama 4 counts positions from the start of a pass
    if scales and floor and num_tokens >= floor and not all(config.no_rope_layers):
        raise ValueError(
            f"{kind} attn_temperature_tuning={scales} scales queries of a pass of floor_scale={floor} tokens or more, "
            f"by their places in it: set context_tokens={context} x sequences_per_pass={step.micro_batch} to less"
        )


def config_windows(config: Any) -> list[int | None]:
    """Each layer's sliding window by the config, where transformers has masks with windows for its type."""
    number, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    is_masked = hasattr(sys.modules[class_of(config).__module__], "create_sliding_window_causal_mask")
    if not window or not is_masked or not getattr(config, "use_sliding_window", True):
        return [None] * number
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * number
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


class _RecordCalls(TorchFunctionMode):
    """Records the rates of dropout and the tables of embeddings that a pass uses."""

    def __init__(self, traced: TracedRing) -> None:
        super().__init__()
        self.traced = traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name == "embedding":
            self.traced.tables.add(id(args[1]))
        elif name == "scaled_dot_product_attention":
            self.traced.dropout_rates.add(options.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        elif "dropout" in name and options.get("training", True):
            self.traced.dropout_rates.add(options.get("p", args[1] if len(args) > 1 else 0.0))
        return func(*args, **options)


def trace(model: Any, config: Any) -> tuple[tuple[int | None, ...], TracedRing]:
    """(each layer's sliding window, as the layer gives it to the attention or as the config has it in its mask, the
    trace) of a pass of training on the meta device.

    Raises ValueError for layers that do not attend through the interface, or ask for what a ring does not have.
    """
    kind, traced = f"model_type={config.model_type!r}", TracedRing()
    integers = torch.zeros(1, NUM_TRACED_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _RecordCalls(traced):
            model.train()(integers, positions=integers, document_ids=integers, attention=traced)
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
    windows = []
    for layer, of_config in enumerate(config_windows(config)):
        of_layer = traced.windows[layer]
        if of_layer and of_config and of_layer != of_config:
            raise ValueError(
                f"{kind} sliding_window={of_config}: layer {layer} gives its attention a window of {of_layer}, so that "
                "none is sure; choose another model"
            )
        windows.append(of_layer or of_config)
    return tuple(windows), traced
