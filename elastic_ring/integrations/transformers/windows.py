"""A run's pattern as a config of transformers says it: sliding windows by layer, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule, Window
from elastic_ring.integrations.transformers.checks import config_of, config_windows, trace
from elastic_ring.integrations.transformers.model import BLOCK_TOKENS
from elastic_ring.integrations.transformers.module import build

BY_LAYER = frozenset({"gemma2", "ministral", "qwen2", "qwen3", "smollm3"})
"""Model types whose `layer_types` say which layers have a window, and nothing beside it. In others they also choose a
rotary embedding (gemma3, olmo3), or whether there is one (cohere2, exaone4)."""
IN_ALL = frozenset({"mistral", "phi3", "phimoe"})
"""Model types whose `sliding_window` holds for all layers; None for no window."""
SAME_MODEL = {"llama": ("mistral", "ministral"), "mistral": ("ministral",)}
"""Model types that differ only in windows."""
NOTE = "elastic_ring"
"""The config's key that says what is lost."""


def with_pattern(
    plain: Mapping[str, Any], pattern: str, context_tokens: int, *, allow_dense: bool
) -> tuple[dict[str, Any], str]:
    """(config, what it does not say, if anything) for a run of the config `plain` that trained with `pattern`, in the
    words of its config.json ("" for none).

    Raises ValueError where layers would see more than they were trained with, unless `allow_dense` asks for that.
    """
    found = {key: value for key, value in plain.items() if key not in (NOTE, "architectures")}
    own = [_noticed(window, context_tokens) for window in _windows(found)]
    trained = list(zip(_rules(pattern, len(own)), own, strict=True))
    said = [_said(rules, window, context_tokens) for rules, window in trained]
    told = []
    if any(_in_blocks(rules, window) for rules, window in trained):
        told.append(
            f"trained with windows of whole blocks of {BLOCK_TOKENS} tokens, up to {2 * BLOCK_TOKENS - 2} "
            "more than the config's, which are written"
        )
    sizes = Counter(window for window in said if isinstance(window, int))
    kept = sizes.most_common(1)[0][0] if sizes else None  # a config has one size
    wanted = [window if window == kept else None for window in said]
    made = _config(found, wanted, own, context_tokens)
    if made is None or wanted != said:
        lost = Counter(_text(window) for window in said if window is not None and (made is None or window != kept))
        text = ", ".join(f"{rule} in {number} of {len(own)} layers" for rule, number in lost.items())
        if not allow_dense:
            raise ValueError(
                f"the run trained with {text}, which no config of transformers says for a {found['model_type']}: the "
                "exported model would attend to all earlier tokens there, and be another model. Give --allow-dense "
                "(allow_dense=True) to export it so, or keep the weights as they are"
            )
        told.append(f"trained with {text}; the exported model attends to all earlier tokens there")
        made = made or _config(found, [None] * len(own), own, context_tokens)
    if made is None:
        raise ValueError(
            f"the run trained without the windows of its config, and transformers has no {found['model_type']} without "
            "windows: keep the weights as they are"
        )
    return {**made, **({NOTE: {"pattern": pattern, "lost": "; ".join(told)}} if told else {})}, "; ".join(told)


def _rules(pattern: str, num_layers: int) -> list[tuple[Rule, ...] | str]:
    """The rules of each layer's heads, or their text where it cannot be read back, as of functions."""
    if not pattern:
        return [(Dense(),)] * num_layers
    try:
        layers = parse_pattern(pattern.partition(" in blocks of ")[0])  # a block's size changes no key
        return [layers.of_layer(layer).rules for layer in range(num_layers)]
    except ValueError:
        return [pattern] * num_layers


def _said(rules: tuple[Rule, ...] | str, own: int | None, context_tokens: int) -> int | str | None:
    """A layer's window, None where it saw all, or the text of what no window says."""
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


def _text(window: int | str | None) -> str:
    return window if isinstance(window, str) else str(Window(window or 1))


def _config(
    plain: dict[str, Any], wanted: Sequence[int | None], own: Sequence[int | None], context_tokens: int
) -> dict[str, Any] | None:
    """The config whose layers have the windows `wanted`; None where transformers has none."""
    if list(wanted) == list(own):
        return plain
    shapes = _shapes(plain)
    beyond = max(context_tokens, int(plain.get("max_position_embeddings") or 0))
    for tried in _candidates(plain, wanted, beyond):
        windows = [_noticed(window, beyond) for window in _windows(tried)]
        if windows == list(wanted) and _shapes(tried) == shapes:
            return tried
    return None


def _candidates(plain: dict[str, Any], wanted: Sequence[int | None], beyond: int) -> Iterator[dict[str, Any]]:
    from transformers import CONFIG_MAPPING

    sizes = [window for window in wanted if window is not None]
    for kind in (plain["model_type"], *SAME_MODEL.get(plain["model_type"], ())):
        tried = {**plain, "model_type": kind}
        if kind not in CONFIG_MAPPING:
            continue
        if kind in IN_ALL and (not sizes or None not in wanted):
            yield {**tried, "sliding_window": sizes[0] if sizes else None}
        elif kind in BY_LAYER:
            types = ["full_attention" if window is None else "sliding_attention" for window in wanted]
            size = sizes[0] if sizes else plain.get("sliding_window")
            yield {**tried, "layer_types": types, "sliding_window": size, "use_sliding_window": bool(sizes)}
        elif "layer_types" in plain and "sliding_window" in plain:  # which layers have one must stay
            yield {**tried, "sliding_window": sizes[0] if sizes else beyond}


def _windows(plain: dict[str, Any]) -> list[int | None]:
    config = config_of(plain)
    with torch.device("meta"):
        windows, _ = trace(build(config), config)
    return [window or own for window, own in zip(windows, config_windows(config), strict=True)]


def _shapes(plain: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(param.shape) for name, param in build(config_of(plain)).named_parameters()}
