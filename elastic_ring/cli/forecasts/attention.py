"""The model of a forecast: the sizes of a preset or a model folder, and a pattern's share of a ring's attention.

Counted by the exact plan: pairs of the slowest rank, bytes and messages. No torch in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypedDict

import numpy as np

from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import read_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import head_groups, owned_positions, rank_hops
from elastic_ring.cli.settings import TrainSettings
from elastic_ring.config import StepConfig
from elastic_ring.data.filesystem import at_submission
from elastic_ring.data.manifest import read_manifest
from elastic_ring.forecast.sizing.step_time import Attention, Latent
from elastic_ring.model.config import ModelConfig

BALANCED = 1.05
"""Up to this ratio of the ranks' largest to mean pairs, `--layout auto` goes by bytes."""


class ModelWork(TypedDict):
    """Fields of a `Scenario` that follow from the model, its pattern and its data."""

    model: ModelConfig
    pattern: Callable[[int], Attention] | None
    built_in: bool
    num_own: int | None
    latent: Latent | None


def work_of(settings: TrainSettings) -> ModelWork:
    """Raises ValueError for adapters, and for patterns and folders without a forecast."""
    if settings.lora is not None:
        raise ValueError(
            f"--lora {settings.lora}: adapters are not forecast; leave it out for an upper bound of memory and time"
        )
    model, patterns, number, latent = settings.model, None, None, None
    if settings.model_folder is not None:
        from elastic_ring.cli.forecasts.folders import sizes_of

        model, patterns, number, latent = sizes_of(settings)
        latent = latent if settings.step.linears == "native" else None  # else hops carry keys
    if settings.pattern is not None:
        patterns = read(settings.pattern, model)
    attention: Callable[[int], Attention] | None = None
    if patterns is not None and patterns.any_sparse:
        attention = attention_of(patterns, model, settings.step, model.num_kv_heads if latent is None else 1)
    elif (share := within_documents(settings)) < 1.0:
        attention = SameForAnyRing(Attention(density=share))
    return ModelWork(
        model=model, pattern=attention, built_in=settings.model_folder is None, num_own=number, latent=latent
    )


@dataclass(frozen=True)
class SameForAnyRing:
    attention: Attention

    def __call__(self, cp: int) -> Attention:
        return self.attention


def within_documents(settings: TrainSettings) -> float:
    """The share of the causal pairs that lie within one document of a prepared corpus; 1.0 for data without a manifest.

    Sources count by their tokens, without weights. Sequences of S tokens begin anywhere: the pieces of a document of L
    tokens have L² (1 - L / 3S) / 2 pairs in the mean, (S L - S² / 3) / 2 if it is longer than a sequence."""
    if settings.data.source != "prepared":
        return 1.0
    context, share = settings.step.context_tokens, 0.0
    manifest = at_submission(lambda: read_manifest(settings.data.uri))
    for power, num_tokens in enumerate(manifest.tokens_by_length):
        length = 1.5 * 2**power
        keys = length * (1 - length / (3 * context)) if length < context else context - context**2 / (3 * length)
        share += num_tokens / manifest.num_tokens * keys / context
    return share or 1.0


def read(text: str, model: ModelConfig) -> LayerPatterns:
    """A pattern as `train` takes it. Raises ValueError for one that does not fit the model."""
    try:
        patterns = read_pattern(text)
        patterns.check(model.num_layers, model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"--pattern: {error}") from error
    return patterns


def attention_of(
    patterns: LayerPatterns, model: ModelConfig, step: StepConfig, sent_heads: int
) -> Callable[[int], Attention]:
    """A cached function of the ring's length. `sent_heads`: heads that hops carry, 1 for a latent. `--layout auto`
    counts as zigzag or contiguous: among balanced ones the one with fewer bytes."""
    names = ("zigzag", "contiguous") if step.layout == "auto" else (step.layout,)

    heads, number = model.num_heads, model.num_layers
    layers = Counter(patterns.of_layer(index).heads(heads, model.num_kv_heads) for index in range(number))

    def counted(layout: Layout) -> Attention:
        parts = [
            (times / number, _of_rules(rules, patterns.block, heads, sent_heads, layout))
            for rules, times in layers.items()
        ]
        density = sum(share * layer.density for share, layer in parts)
        return Attention(
            density,
            sum(share * layer.density * layer.slowest for share, layer in parts) / density,
            sum(share * layer.fetched for share, layer in parts),
            sum(share * (layer.hops or 0.0) for share, layer in parts),
            sum(share * layer.sparse for share, layer in parts),
            any(layer.is_bound for _, layer in parts),
        )

    @cache
    def at(cp: int) -> Attention:
        choices = [counted(make_layout(name, step.context_tokens, cp)) for name in names]
        return min(choices, key=lambda attention: (max(attention.slowest, BALANCED), attention.fetched))

    return at


def _of_rules(rules: tuple[Rule, ...], block: int, num_heads: int, sent_heads: int, layout: Layout) -> Attention:
    """The attention of a layer. If content chooses the keys, all of them may be fetched."""
    cp, length = layout.cp, layout.seq_len
    if set(rules) == {Dense()}:
        return Attention(hops=cp - 1)
    pattern = SparsePattern(rules, block)
    pairs = pattern.row_pairs(length)
    density = float(pairs.sum()) / (length * (length + 1) / 2 * len(rules))
    if any(rule.awaits_content for rule in rules):
        return Attention(density, hops=cp - 1, sparse=1.0, is_bound=True)
    groups = head_groups(pattern.rules(num_heads), sent_heads)
    owned, tokens, hops = owned_positions(layout), 0, 0
    for rank in {0, cp // 2, cp - 1} if cp > 1 else ():
        rank_plan = rank_hops(pattern, layout, rank, groups, owned)
        rows = [sum(len(g.kv_heads) * hop.num_fetched_tokens(i) for i, g in enumerate(groups)) for hop in rank_plan]
        tokens, hops = max(tokens, sum(rows)), max(hops, sum(map(bool, rows)))
    whole = sent_heads * (length - length // cp) or 1
    until = np.concatenate([[0], np.cumsum(pairs)])
    own = [sum(int(until[stop] - until[start]) for start, stop in segments) for segments in layout.segments]
    return Attention(density, max(own) * cp / max(1, sum(own)), tokens / whole, hops, 1.0)
