"""The pattern of each layer: plain data without ring, length or documents, so it stays valid when the ring is resized.

Text forms belong in `parse`; kernels, hops and planning belong in the rings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from elastic_ring.attention.patterns.families import longnet_text
from elastic_ring.attention.patterns.rules import Dense, Rule, Union
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern, rules_text


@dataclass(frozen=True)
class LayerGroup:
    """The rules of the layers `layers` (None: all other layers).

    One rule applies to all heads; several are one per query head. With `dealt`, K/V head i and its query heads follow
    `rules[i % len(rules)]`.
    """

    rules: tuple[Rule, ...]
    layers: tuple[int, ...] | None = None
    dealt: bool = False

    def __str__(self) -> str:
        shifted = longnet_text(self.rules) if self.dealt else None
        return shifted or rules_text(self.rules)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Rule, ...]:
        """One rule per query head, or one for all. Raises `ValueError` if the number of rules does not fit."""
        if len(set(self.rules)) == 1:
            return self.rules[:1]
        if self.dealt:
            sharing = num_heads // num_kv_heads
            return tuple(self.rules[head // sharing % len(self.rules)] for head in range(num_heads))
        return SparsePattern(self.rules).rules(num_heads)


@dataclass(frozen=True)
class LayerPatterns:
    """The pattern of every layer. Raises `ValueError` if a layer is named twice or two groups have no layers."""

    groups: tuple[LayerGroup, ...]
    block: int = DEFAULT_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups=(): a pattern needs rules for at least one group of layers")
        if sum(group.layers is None for group in self.groups) > 1:
            raise ValueError("two groups of rules for all other layers: name the layers of all groups but one")
        named = [layer for group in self.groups for layer in group.layers or ()]
        for layer in named:
            if layer < 0 or named.count(layer) > 1:
                raise ValueError(f"layer {layer}: name each layer once, counted from 0")
        for group in self.groups:
            SparsePattern(group.rules, self.block)

    @property
    def same_everywhere(self) -> bool:
        """Whether all layers follow the same rules, so that calls need no layer index."""
        return len(self.groups) == 1 and self.groups[0].layers is None

    @property
    def any_dense(self) -> bool:
        """Whether some layer runs on the dense ring."""
        return any(set(group.rules) == {Dense()} for group in self.groups)

    @property
    def any_sparse(self) -> bool:
        return any(set(group.rules) != {Dense()} for group in self.groups)

    def of_layer(self, layer: int) -> LayerGroup:
        """The group of `layer`. Raises `ValueError` if no group covers it."""
        named = [group for group in self.groups if layer in (group.layers or ())]
        fitting = named or [group for group in self.groups if group.layers is None]
        if not fitting:
            raise ValueError(f"layer {layer}: the pattern has no rules for it; add a group without layers for the rest")
        return fitting[0]

    def check(self, num_layers: int, num_heads: int, num_kv_heads: int) -> None:
        """Raises `ValueError` unless the pattern fits a causal model of this size."""
        ahead = next((rule for group in self.groups for rule in group.rules if rule.num_ahead), None)
        if ahead is not None:
            raise ValueError(
                f"{ahead}: training is causal, and no query sees {ahead.num_ahead} later keys; leave ahead out"
            )
        beyond = [layer for group in self.groups for layer in group.layers or () if layer >= num_layers]
        if beyond:
            raise ValueError(f"layer {beyond[0]}: the model has layers 0 to {num_layers - 1}; name one of these")
        for layer in range(num_layers):
            self.of_layer(layer).heads(num_heads, num_kv_heads)

    def density(self, seq_len: int, num_layers: int, num_heads: int, num_kv_heads: int) -> float:
        """The kept share (0 to 1) of the causal pairs of one document of `seq_len` tokens, averaged over layers; an
        upper bound if `density_is_bound`."""
        heads = [self.of_layer(layer).heads(num_heads, num_kv_heads) for layer in range(num_layers)]
        return sum(SparsePattern(rules, self.block).density(seq_len) for rules in heads) / num_layers

    @property
    def density_is_bound(self) -> bool:
        """Whether static and content-chosen rules are joined, whose keys may overlap."""
        rules = [rule for group in self.groups for rule in group.rules]
        return any(rule.awaits_content for rule in rules if isinstance(rule, Union))

    @property
    def identity(self) -> str:
        """A text key that is equal in every process for equal patterns; functions count by their qualified name."""
        return _identity(self)

    def __str__(self) -> str:
        """The short form that `parse.parse_pattern` reads, as far as the short form can express the pattern."""
        parts = [
            f"{group}{'' if group.layers is None else '@' + ','.join(map(str, group.layers))}" for group in self.groups
        ]
        return ";".join(parts) + (f" in blocks of {self.block}" if self.block != DEFAULT_BLOCK_TOKENS else "")


def _identity(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_identity, value)) + ")"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={_identity(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({fields})"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
