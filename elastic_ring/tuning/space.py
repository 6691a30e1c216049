"""What a search tries: patterns as the texts that `--pattern` takes, from a mapping of axes to their values.

`pattern` lists texts of the user's; names in braces are axes of their own: {"pattern": "sinks:64+window:{w}", "w":
[512, 1024]}. `family`, `density` and `block` (tokens) make rules of a family; `layers` says which layers follow a rule:
"{rule};dense@{last}". One value in place of a list is one point, as a trial of Ray Tune gets it. Nothing is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.files import MAX_TOML_BYTES, plain_toml, read_small

DENSE = "dense"
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "family": ("window", "near", "strided", "bigbird", "hierarchical", "longnet"),
    "density": (0.12, 0.2, 0.35),
    "layers": ("{rule}", "{rule};dense@{last}", "{rule};dense@{half}"),
}
"""`density`: of a layer that follows the rule; blocks follow from the context."""
OWN = {"pattern", "family", "density", "block", "layers", "seed"}
OFF = 0.2
"""Largest relative distance of a family's density from the one asked for; beyond it the point does not exist."""
GRAINS, MOST_STEPS, COUNTED_BLOCK = 64, 64, 8
"""Windows are multiples of 1 / GRAINS of the context. A family is tried at so many sizes, in blocks of 8 tokens."""


def _strided(step: int, num_blocks: int, unit: int) -> str:
    return f"strided:{step},{max(2, round(num_blocks / (2 * step)))},unit={unit}"


def _longnet(step: int, num_blocks: int, unit: int) -> str:
    return f"longnet:{step * unit}/1,{2 * step * unit}/2,{num_blocks * unit}/4,unit={unit}"


def _window(step: int, num_blocks: int, unit: int) -> str:
    grain = max(1, num_blocks * unit // GRAINS)
    return f"sinks:{grain}+window:{step * grain}"


# Family -> (its rule for a size, blocks of a sequence and tokens of a block; the sizes). None keeps a query's own block
# alone.
_LADDERS: dict[str, tuple[Callable[[int, int, int], str], Callable[[int], range]]] = {
    "window": (_window, lambda num_blocks: range(2, GRAINS // 2)),
    "near": (lambda step, _, unit: f"bigbird:{step},1,0,unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "strided": (_strided, lambda num_blocks: range(2, num_blocks)),
    "bigbird": (lambda s, _, unit: f"bigbird:{s + 1},1,{s},unit={unit}", lambda num_blocks: range(1, num_blocks // 3)),
    "hierarchical": (lambda s, _, unit: f"hierarchical:{s},unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "longnet": (_longnet, lambda num_blocks: range(1, num_blocks // 4 + 1)),
}


def read_space(path: Path) -> dict[str, Any]:
    """The axes of a TOML file. Raises ValueError."""
    try:
        return plain_toml(read_small(path, MAX_TOML_BYTES, is_asked=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"--space {path}: cannot be read as TOML ({error})") from error


def patterns(space: Mapping[str, Any], context_tokens: int, num_layers: int, *, whole_blocks: bool) -> list[str]:
    """Every pattern of the space once, in a fixed order. `whole_blocks`: default blocks are multiples of 128 tokens.

    Raises ValueError for an axis that nothing uses, for what is no pattern of a model of so many layers, and for a
    space without a point.
    """
    asked = {name: tuple(value) if isinstance(value, list | tuple) else (value,) for name, value in space.items()}
    of_family = {"family", "density", "block"} & asked.keys()
    rules = [
        *_own(asked),
        *(() if "pattern" in asked and not of_family else _of_families(asked, context_tokens, whole_blocks)),
    ]
    found = dict[str, None]()
    for rule in rules:
        is_whole = ";" in rule or "@" in rule
        for template in ("{rule}",) if is_whole else asked.get("layers", DEFAULTS["layers"]):
            text = _filled(template, {"rule": rule, "last": num_layers - 1, "half": num_layers // 2})
            parse_pattern(text)
            found[text] = None
    if not found:
        raise ValueError(
            f"the space {dict(space)} has no pattern at {context_tokens} tokens: give other densities or blocks"
        )
    return list(found)


def pattern_of(config: Mapping[str, Any], context_tokens: int, num_layers: int) -> str:
    """The text of one trial's config. Raises ValueError."""
    given = {"layers": "{rule}", **config}
    return patterns(given, context_tokens, num_layers, whole_blocks=False)[0]


def _own(asked: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """The user's texts, with the values of the axes that they name."""
    used = set[str]()
    for text in asked.get("pattern", ()):
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
        used |= set(names)
        axes = [asked.get(name, ()) for name in names]
        for values in itertools.product(*axes):
            yield _filled(text, dict(zip(names, values, strict=True)))
        if missing := [name for name in names if name not in asked]:
            raise ValueError(f"pattern {text!r} names {missing[0]}, which is no axis of the space; give its values")
    if unused := sorted(asked.keys() - OWN - used):
        raise ValueError(
            f"{unused[0]}={list(asked[unused[0]])}: no pattern of the space names {{{unused[0]}}}; leave it out"
        )


def _filled(text: str, values: Mapping[str, Any]) -> str:
    try:
        return text.format_map(values)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{text!r}: names {error}; known are {', '.join(values)}") from error


def _of_families(asked: Mapping[str, Sequence[Any]], context_tokens: int, whole_blocks: bool) -> Iterator[str]:
    least = 128 if whole_blocks else 1
    usual = sorted({max(least, context_tokens // num // least * least) for num in (64, 32)})
    axes = (
        asked.get("family", DEFAULTS["family"]),
        asked.get("density", DEFAULTS["density"]),
        asked.get("block", usual),
    )
    for family, density, block in itertools.product(*axes):
        if family not in _LADDERS:
            raise ValueError(
                f"family={family!r}: must be one of {', '.join(_LADDERS)}; others are written as a pattern"
            )
        num_blocks = context_tokens // int(block)
        step, kept = _nearest(family, float(density), num_blocks)
        if step and abs(kept - density) <= OFF * density:
            yield _LADDERS[family][0](step, num_blocks, int(block))


@lru_cache(maxsize=256)
def _nearest(family: str, density: float, num_blocks: int) -> tuple[int, float]:
    """The family's size whose density is nearest, and that density; 0 where the context has too few blocks."""
    make, sizes = _LADDERS[family]
    every = sizes(num_blocks)
    tried = every[:: -(-len(every) // MOST_STEPS) or 1]
    kept = ((step, _density(make(step, num_blocks, COUNTED_BLOCK), num_blocks)) for step in tried)
    return min(kept, key=lambda found: (abs(found[1] - density), found[0]), default=(0, 1.0))


@lru_cache(maxsize=4096)
def _density(rule: str, num_blocks: int) -> float:
    pattern = LayerPatterns(parse_pattern(rule).groups, COUNTED_BLOCK)
    return pattern.density(num_blocks * COUNTED_BLOCK, 1, 4, 4)
