"""The families that quality, speed and bytes are compared over: the same shape at any length, near one density.

A family is a text for `attention.patterns.parse`, so that `--pattern` takes what was measured. No training and no
timing in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.quality.small.model import Masks
from elastic_ring.attention.layers import AttentionFn, PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern


@dataclass(frozen=True)
class Family:
    """`text` for `parse_pattern`, in blocks of `block` tokens."""

    name: str
    text: str
    block: int

    def pattern(self) -> LayerPatterns:
        return LayerPatterns(parse_pattern(self.text).groups, self.block)

    def density(self, seq_len: int, num_layers: int, num_heads: int) -> float:
        """Density for one document."""
        return self.pattern().density(seq_len, num_layers, num_heads, num_heads)

    def masks(self, seq_len: int, num_heads: int) -> Masks:
        return Masks(self.pattern(), seq_len, num_heads)

    def layers(self, layout: Layout, num_layers: int, head_dim: int) -> list[AttentionFn]:
        """The attention of each layer on one process, one for all where they are alike; heads of `head_dim`."""
        pattern = self.pattern()
        ring = PatternedAttention(pattern, layout, 0, None)
        num_different = num_layers if len({pattern.of_layer(i) for i in range(num_layers)}) > 1 else 1
        return [ring.layer(i) for i in range(num_different)]
