"""The rules of one call of `ring_attention`, in the forms that users write. No tensors, groups or plans."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ring.attention.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import read_pattern
from elastic_ring.attention.patterns.rules import Rule

PatternLike = str | Rule | Sequence[Rule] | LayerPatterns
"""A short form or file, a rule for all heads, a rule for each query head, or a pattern of layers that are alike."""


def patterns_of(pattern: PatternLike) -> LayerPatterns:
    """Raises `ValueError` for what is no pattern, and for one whose layers differ."""
    if isinstance(pattern, str):
        found = read_pattern(pattern)
    elif isinstance(pattern, LayerPatterns):
        found = pattern
    else:
        rules = (pattern,) if isinstance(pattern, Rule) else tuple(pattern)
        if not all(isinstance(rule, Rule) for rule in rules):
            raise ValueError(f"pattern={pattern!r}: give a short form such as sinks:64+window:512, or rules")
        found = LayerPatterns((LayerGroup(rules),))
    if not found.same_everywhere:
        raise ValueError(f"pattern={found}: names layers, and one call is of one layer; give the rules of one group")
    return found
