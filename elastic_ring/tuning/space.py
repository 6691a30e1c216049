"""The search space of patterns: family, density, block size and mix of layers, as named points.

A point becomes a text for `attention.patterns.parse`, scaled to a length and a number of layers. A ring's layout is
chosen separately from `LAYOUTS` and needs no training. Nothing is measured in here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks
from elastic_ring.tuning.quality.families import Family

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("window", "near", "strided", "bigbird", "hierarchical", "longnet"),
    "keep": (0.12, 0.2, 0.35),
    "num_blocks": (64, 32),
    "mix": ("all", "last dense", "near first"),
}
"""`keep`: density of a sparse layer; `num_blocks`: blocks per sequence; `mix`: which layers differ: the last is dense,
or the first half keeps only near keys.
"""

LAYOUTS = ("zigzag", "contiguous")
"""Sequence layouts that training supports; all layers share one."""

OFF = 0.2
"""Largest relative distance of a family's density from `keep`; beyond it the point does not exist."""

_COUNTED_TOKENS = 512
_GRAINS = 64
"""Window sizes are multiples of 1 / _GRAINS of the sequence; the sinks are one such unit."""


def _strided(step: int, num_blocks: int, unit: int) -> str:
    return f"strided:{step},{max(2, round(num_blocks / (2 * step)))},unit={unit}"


def _longnet(step: int, num_blocks: int, unit: int) -> str:
    return f"longnet:{step * unit}/1,{2 * step * unit}/2,{num_blocks * unit}/4,unit={unit}"


def _window(step: int, num_blocks: int, unit: int) -> str:
    grain = num_blocks * unit // _GRAINS
    return f"sinks:{grain}+window:{step * grain}"


# Family -> (its rule for a step, blocks of a sequence and tokens of a block; the steps). No step of a family keeps a
# query's own block alone.
_LADDERS: dict[str, tuple[Callable[[int, int, int], str], Callable[[int], range]]] = {
    "window": (_window, lambda num_blocks: range(2, _GRAINS // 2)),
    "near": (lambda step, _, unit: f"bigbird:{step},1,0,unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "strided": (_strided, lambda num_blocks: range(2, num_blocks)),
    "bigbird": (lambda s, _, unit: f"bigbird:{s + 1},1,{s},unit={unit}", lambda num_blocks: range(1, num_blocks // 3)),
    "hierarchical": (lambda s, _, unit: f"hierarchical:{s},unit={unit}", lambda num_blocks: range(2, num_blocks // 2)),
    "longnet": (_longnet, lambda num_blocks: range(1, num_blocks // 4 + 1)),
}


@dataclass(frozen=True)
class Candidate:
    """One point of the search space."""

    family: str
    keep: float
    num_blocks: int
    mix: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Candidate:
        """From a config by axis. Raises: ValueError for a value outside the space."""
        for axis, values in AXES.items():
            if config[axis] not in values:
                raise ValueError(f"{axis}={config[axis]!r}: the space has {', '.join(map(str, values))}")
        return cls(**{axis: config[axis] for axis in AXES})

    @property
    def name(self) -> str:
        return f"{self.family}/{self.keep}/{self.num_blocks}/{self.mix}"

    def rule(self, seq_len: int, family: str | None = None) -> str:
        """The rule of the sparse layers for `seq_len` tokens: the family's rule with the density nearest to `keep`."""
        chosen = family or self.family
        return _LADDERS[chosen][0](_nearest(chosen, self.keep, self.num_blocks)[0], self.num_blocks, self.unit(seq_len))

    def unit(self, seq_len: int) -> int:
        """Block size in tokens. Raises: ValueError for a length that does not divide into such blocks."""
        if seq_len % _GRAINS:
            raise ValueError(f"{seq_len} tokens: take a multiple of {_GRAINS}, so that patterns scale to it exactly")
        return seq_len // self.num_blocks

    def groups(self, seq_len: int, num_layers: int = 2) -> list[tuple[str, tuple[int, ...] | None]]:
        """(rule, its layers; None: all layers not in another group)."""
        own, near = self.rule(seq_len), self.rule(seq_len, "near")
        found: list[tuple[str, tuple[int, ...] | None]] = [(own, None)]
        if self.mix == "last dense":
            found.append(("dense", (num_layers - 1,)))
        elif self.mix == "near first" and near != own and num_layers > 1:
            found.append((near, tuple(range(num_layers // 2))))
        return found

    def layers(self, seq_len: int, num_layers: int = 2) -> list[str]:
        """The rule of every layer."""
        groups = self.groups(seq_len, num_layers)
        named = {layer: rule for rule, layers in groups for layer in layers or ()}
        return [named.get(layer, groups[0][0]) for layer in range(num_layers)]

    def text(self, seq_len: int, num_layers: int = 2) -> str:
        """The whole pattern in its short form."""
        parts = self.groups(seq_len, num_layers)
        return ";".join(rule + ("" if at is None else "@" + ",".join(map(str, at))) for rule, at in parts)

    def scaled(self, seq_len: int) -> Family:
        return Family(self.name, self.text(seq_len), self.unit(seq_len))

    def file(self, seq_len: int, num_layers: int, layout: str, measured: Mapping[str, float]) -> str:
        """The content of a `--pattern` file, with the measurements included."""
        groups = [
            {"rule": rule} if at is None else {"layers": list(at), "rule": rule}
            for rule, at in self.groups(seq_len, num_layers)
        ]
        about = f"{self.name} at {seq_len} tokens, {num_layers} layers; layout {layout}; measured with 2 layers"
        found = {"block": self.unit(seq_len), "groups": groups, "about": about}
        return json.dumps({**found, "measured": dict(measured)}, indent=1)

    def refused_by_gpus(self, seq_len: int, num_layers: int, cp: int) -> str:
        """Why a ring of `cp` GPUs cannot run it at `seq_len` tokens; empty if it can."""
        pattern = LayerPatterns(parse_pattern(self.text(seq_len, num_layers)).groups, self.unit(seq_len))
        try:
            for layout in LAYOUTS:
                check_layer_blocks(pattern, make_layout(layout, seq_len, cp))
        except ValueError as error:
            return str(error)
        return ""


@lru_cache(maxsize=256)
def _nearest(family: str, keep: float, num_blocks: int) -> tuple[int, float]:
    """The family's step whose density is nearest to `keep`, and that density."""
    make, steps = _LADDERS[family]
    unit = _COUNTED_TOKENS // num_blocks
    return min(
        ((step, _density(make(step, num_blocks, unit), unit)) for step in steps(num_blocks)),
        key=lambda found: (abs(found[1] - keep), found[0]),
    )


@lru_cache(maxsize=1024)
def _density(rule: str, unit: int) -> float:
    return Family(rule, rule, unit).density(_COUNTED_TOKENS, 1, 4)


def candidates() -> Iterator[Candidate]:
    """Every point, in a fixed order. Points that keep the same keys at any length are listed once."""
    seen: set[str] = set()
    for values in itertools.product(*AXES.values()):
        candidate = Candidate(**dict(zip(AXES, values, strict=True)))
        parts = (candidate.family, "near") if candidate.mix == "near first" else (candidate.family,)
        found = [_nearest(part, candidate.keep, candidate.num_blocks)[1] for part in parts]
        text = candidate.text(_COUNTED_TOKENS)
        if all(abs(density - candidate.keep) <= OFF * candidate.keep for density in found) and text not in seen:
            seen.add(text)
            yield candidate
