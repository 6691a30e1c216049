"""The space of patterns that is searched: family, density, block size and mix of layers, as points with names.

A point becomes a text that `attention.spec` reads, scaled to a length. Nothing is measured in here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tune.quality.families import Family

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("near", "strided", "bigbird", "hierarchical"),
    "keep": (0.08, 0.15, 0.25, 0.4),
    "num_blocks": (32, 16),
    "mix": ("all", "last dense"),
}
"""`keep` is about the density of a sparse layer; `num_blocks` how many blocks a sequence has."""


@dataclass(frozen=True)
class Candidate:
    """One point of the space."""

    family: str
    keep: float
    num_blocks: int
    mix: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Candidate:
        """Raises `ValueError` for a value that the space does not have."""
        for axis, values in AXES.items():
            if config[axis] not in values:
                raise ValueError(f"{axis}={config[axis]!r}: the space has {', '.join(map(str, values))}")
        return cls(**{axis: config[axis] for axis in AXES})

    @property
    def name(self) -> str:
        return f"{self.family}/{self.keep}/{self.num_blocks}/{self.mix}"

    def rule(self, seq_len: int) -> str:
        """The rule of its sparse layers for sequences of `seq_len` tokens."""
        blocks, unit = self.num_blocks, f"unit={seq_len // self.num_blocks}"
        row = max(1, round(self.keep * blocks / 2))  # blocks that a row keeps beside its own, on average
        if self.family == "near":
            # A window that keeps `keep` of the triangle: 1 - (1 - w)^2 of it.
            window = max(8, round(seq_len * (1 - (1 - self.keep) ** 0.5)))
            return f"sinks:{max(1, seq_len // 128)}+window:{window}"
        if self.family == "strided":
            return f"strided:{max(2, round(1 / self.keep))},{max(1, row // 2)},{unit}"
        if self.family == "bigbird":
            return f"bigbird:{max(1, row // 2 + row % 2)},{int(row > 1)},{max(0, row // 2)},{unit}"
        return f"hierarchical:{max(1, round(self.keep * blocks / 4))},{unit}"

    def text(self, seq_len: int) -> str:
        """The whole pattern, for a model of two layers."""
        return self.rule(seq_len) + (";dense@1" if self.mix == "last dense" else "")

    def scaled(self, seq_len: int) -> Family:
        return Family(self.name, self.text(seq_len), seq_len // self.num_blocks)

    def file(self, seq_len: int, measured: Mapping[str, float]) -> str:
        """What `--pattern FILE` takes, with what was measured beside it."""
        groups: list[dict[str, Any]] = [{"rule": self.rule(seq_len)}]
        if self.mix == "last dense":
            groups.append({"layers": [1], "rule": "dense"})
        found = {"block": seq_len // self.num_blocks, "groups": groups, "about": f"{self.name} at {seq_len} tokens"}
        return json.dumps({**found, "measured": dict(measured)}, indent=1)


def candidates() -> Iterator[Candidate]:
    """Every point, in a fixed order."""
    for values in itertools.product(*AXES.values()):
        yield Candidate(**dict(zip(AXES, values, strict=True)))
