"""The space of a search: patterns as the texts that `--pattern` takes, from a mapping of axes to their values, and a
pattern's costs before any training.

`pattern` lists texts of the user's; names in braces are axes of their own: {"pattern": "sinks:64+window:{w}", "w":
[512, 1024]}. `family`, `density` and `block` (tokens) make rules of a family; `layers` says which layers follow a rule:
"{rule};dense@{last}". One value in place of a list is one point, as a trial of Ray Tune gets it. No measuring in here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from string import Formatter

import numpy as np
import torch

from elastic_ring.attention.autolayout import Call, forward_bytes
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.files import MAX_TOML_BYTES, plain_toml, read_small
from elastic_ring.train.startup.layouts import Layouts, attention_calls
from elastic_ring.train.task import TrainingTask

DENSE = "dense"
Value = str | int | float
Axes = Mapping[str, Value | Sequence[Value]]
FAMILIES: tuple[Value, ...] = ("window", "near", "strided", "bigbird", "hierarchical", "longnet")
DENSITIES: tuple[Value, ...] = (0.12, 0.2, 0.35)
"""Of a layer that follows the rule; default blocks follow from the context."""
LAYERS: tuple[Value, ...] = ("{rule}", "{rule};dense@{last}", "{rule};dense@{half}")
OWN = {"pattern", "family", "density", "block", "layers", "seed"}
OFF = 0.2
"""Largest relative distance of a family's density from the one asked for; beyond it the point does not exist."""
GRAINS, MOST_STEPS, COUNTED_BLOCK = 64, 64, 8
"""Windows are multiples of 1 / GRAINS of the context. A family has up to MOST_STEPS sizes, counted in blocks of 8."""
COARSE_BLOCKS = 128
"""Number of blocks of a sequence in which features are counted."""


def _window(step: int, num_blocks: int, unit: int) -> str:
    grain = max(1, num_blocks * unit // GRAINS)
    return f"sinks:{grain}+window:{step * grain}"


# Family -> (its rule for a size, blocks of a sequence and tokens of a block; the sizes). None keeps a query's own block
# alone.
_LADDERS: dict[Value, tuple[Callable[[int, int, int], str], Callable[[int], range]]] = {
    "window": (_window, lambda num_blocks: range(2, GRAINS // 2)),
    "near": (lambda step, _, unit: f"bigbird:{step},1,0,unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "strided": (
        lambda step, num_blocks, unit: f"strided:{step},{max(2, round(num_blocks / (2 * step)))},unit={unit}",
        lambda num_blocks: range(2, num_blocks),
    ),
    "bigbird": (lambda s, _, unit: f"bigbird:{s + 1},1,{s},unit={unit}", lambda num_blocks: range(1, num_blocks // 3)),
    "hierarchical": (lambda s, _, unit: f"hierarchical:{s},unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "longnet": (
        lambda s, blocks, unit: f"longnet:{s * unit}/1,{2 * s * unit}/2,{blocks * unit}/4,unit={unit}",
        lambda num_blocks: range(1, num_blocks // 4 + 1),
    ),
}


def read_space(path: Path) -> Axes:
    """The axes of a TOML file. Raises ValueError."""
    try:
        return plain_toml(read_small(path, MAX_TOML_BYTES, is_asked=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"--space {path}: cannot be read as TOML ({error})") from error


def patterns(space: Axes, step: StepConfig, num_layers: int, *, whole_blocks: bool) -> list[str]:
    """Every pattern of the space once, in a fixed order. `whole_blocks`: default blocks are multiples of 128 tokens.

    Raises ValueError for an axis that nothing uses, for a text that is no pattern of a model of so many layers, and for
    a space without a point.
    """
    axes = {name: tuple(value) if isinstance(value, list | tuple) else (value,) for name, value in space.items()}
    rules = list(_own_patterns(axes))
    if "pattern" not in axes or {"family", "density", "block"} & axes.keys():
        rules += _family_patterns(axes, step.context_tokens, whole_blocks)
    texts = dict[str, None]()
    for rule in rules:
        is_whole = ";" in rule or "@" in rule
        for template in ("{rule}",) if is_whole else axes.get("layers", ("{rule}",) if axes else LAYERS):
            text = _fill(str(template), {"rule": rule, "last": num_layers - 1, "half": num_layers // 2})
            parse_pattern(text)
            texts[text] = None
    if not texts:
        raise ValueError(
            f"the space {dict(space)} has no pattern at {step.context_tokens} tokens: give other densities or blocks"
        )
    return list(texts)


def _own_patterns(axes: Mapping[str, Sequence[Value]]) -> Iterator[str]:
    """The user's texts, with the values of the axes that they name."""
    used = set[str]()
    for text in map(str, axes.get("pattern", ())):
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
        used |= set(names)
        for values in itertools.product(*(axes.get(name, ()) for name in names)):
            yield _fill(text, dict(zip(names, values, strict=True)))
        if missing := [name for name in names if name not in axes]:
            raise ValueError(f"pattern {text!r} names {missing[0]}, which is no axis of the space; give its values")
    if unused := sorted(axes.keys() - OWN - used):
        raise ValueError(
            f"{unused[0]}={list(axes[unused[0]])}: no pattern of the space names {{{unused[0]}}}; leave it out"
        )


def _fill(text: str, values: Mapping[str, Value]) -> str:
    try:
        return text.format_map(values)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{text!r}: names {error}; known are {', '.join(values)}") from error


def _family_patterns(axes: Mapping[str, Sequence[Value]], context_tokens: int, whole_blocks: bool) -> Iterator[str]:
    least = 128 if whole_blocks else 1
    blocks = axes.get("block", sorted({max(least, context_tokens // num // least * least) for num in (64, 32)}))
    points = itertools.product(axes.get("family", FAMILIES), axes.get("density", DENSITIES), blocks)
    for family, density, block in points:
        if family not in _LADDERS:
            raise ValueError(
                f"family={family!r}: must be one of {', '.join(map(str, _LADDERS))}; others are written as a pattern"
            )
        num_blocks, density = context_tokens // int(block), float(density)
        step, kept = _nearest_size(family, density, num_blocks)
        if step and abs(kept - density) <= OFF * density:
            yield _LADDERS[family][0](step, num_blocks, int(block))


@lru_cache(maxsize=256)
def _nearest_size(family: Value, density: float, num_blocks: int) -> tuple[int, float]:
    """The family's size whose density is nearest, and that density; 0 where the context has too few blocks."""
    make, sizes = _LADDERS[family]
    every = sizes(num_blocks)
    steps = every[:: -(-len(every) // MOST_STEPS) or 1]
    kept = ((step, _density(make(step, num_blocks, COUNTED_BLOCK), num_blocks)) for step in steps)
    return min(kept, key=lambda size: (abs(size[1] - density), size[0]), default=(0, 1.0))


@lru_cache(maxsize=4096)
def _density(rule: str, num_blocks: int) -> float:
    pattern = LayerPatterns(parse_pattern(rule).groups, COUNTED_BLOCK)
    return pattern.density(num_blocks * COUNTED_BLOCK, 1, 4, 4)


# ------------------------------------------------------------ known before any training


@dataclass(frozen=True)
class PatternCost:
    """`bytes`: that all ranks of a ring receive in a forward pass; `features`: to predict the loss, density first."""

    density: float
    bytes: int
    features: tuple[float, ...] = ()


class PatternCosts:
    """The costs of patterns of one task on rings of `cp` ranks."""

    def __init__(self, task: TrainingTask, cp: int, device_type: str) -> None:
        self._task, self._cp, self._device_type = task, cp, device_type
        self.calls: Sequence[Call] = attention_calls(replace(task, pattern=None))
        self.num_layers = 1 + max(call[0] for call in self.calls)

    def cost(self, text: str) -> PatternCost:
        """Raises ValueError for a pattern that does not fit the model or the length."""
        pattern, context = parse_pattern(text), self._task.step.context_tokens
        _, num_heads, num_kv_heads, _ = self.calls[0]
        pattern.check(self.num_layers, num_heads, num_kv_heads)
        layers = [pattern.of_layer(layer).heads(num_heads, num_kv_heads) for layer in range(self.num_layers)]
        reach = {rules: self._reach(rules) for rules in dict.fromkeys(layers)}
        density = pattern.density(context, self.num_layers, num_heads, num_kv_heads)
        share = layers.count((Dense(),)) / self.num_layers
        features = (density, math.log(density), share, sum(reach[rules] for rules in layers) / self.num_layers)
        num_bytes = 0
        if self._cp > 1:
            task = replace(self._task, pattern=pattern)
            layout = Layouts(task).choice(self._cp, self._device_type).layout
            itemsize = getattr(torch, task.step.param_dtype).itemsize
            num_bytes = forward_bytes(pattern, tuple(self.calls), layout, itemsize=itemsize)
        return PatternCost(density, num_bytes, features)

    def _reach(self, rules: tuple[Rule, ...]) -> float:
        """The summed distances of the kept keys as a share of dense attention's; 1 where content chooses."""
        if any(rule.awaits_content for rule in rules):
            return 1.0
        context = self._task.step.context_tokens
        kept = SparsePattern(rules, -(-context // COARSE_BLOCKS)).kinds(context) != 0
        back = np.tril(np.subtract.outer(np.arange(len(kept)), np.arange(len(kept))))
        return float((back * kept).sum() / max(1, back.sum()))


@dataclass(frozen=True)
class SearchTask:
    """What all trials of a search share. `folder`: relative paths of data count from it, because Tune gives each trial
    a folder of its own."""

    task: TrainingTask
    scaling: ScalingConfig
    folder: str

    def trial(self, config: Mapping[str, Value], num_layers: int) -> tuple[str, TrainingTask]:
        """A trial's pattern and its task. A seed in `config` also changes the first values and the order of samples."""
        task = self.task
        [text, *_] = patterns({"layers": "{rule}", **config}, task.step, num_layers, whole_blocks=False)
        seed, initial = int(config.get("seed", task.step.seed)), task.initial
        if is_dataclass(initial) and hasattr(initial, "seed"):
            initial = replace(initial, seed=seed)
        step = replace(task.step, seed=seed)
        return text, replace(task, pattern=parse_pattern(text), step=step, initial=initial)
