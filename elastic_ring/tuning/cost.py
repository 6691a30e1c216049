"""What is known of a pattern before any training: density, bytes on the wire of a ring, and features of quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.autolayout.model_layout import Call, forward_bytes
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.train.startup.layouts import Layouts, attention_calls
from elastic_ring.train.task import TrainingTask

COARSE_BLOCKS = 128
"""Features are counted in so many blocks of a sequence."""


class Costs:
    """Of the patterns of one task on rings of `cp` ranks."""

    def __init__(self, task: TrainingTask, cp: int, device_type: str) -> None:
        self._task, self._cp, self._device_type = task, cp, device_type
        self.calls: Sequence[Call] = attention_calls(replace(task, pattern=None))
        self.num_layers = 1 + max(call[0] for call in self.calls)

    def of(self, text: str) -> dict[str, Any]:
        """{"density", "bytes" that all ranks of a ring receive in a forward pass, "features"}. Raises ValueError for a
        pattern that does not fit the model or the length."""
        pattern, context = parse_pattern(text), self._task.step.context_tokens
        _, num_heads, num_kv_heads, _ = self.calls[0]
        pattern.check(self.num_layers, num_heads, num_kv_heads)
        layers = [pattern.of_layer(layer).heads(num_heads, num_kv_heads) for layer in range(self.num_layers)]
        reach = {rules: self._reach(rules) for rules in dict.fromkeys(layers)}
        density = pattern.density(context, self.num_layers, num_heads, num_kv_heads)
        share = layers.count((Dense(),)) / self.num_layers
        features = (density, math.log(density), share, sum(reach[rules] for rules in layers) / self.num_layers)
        return {"density": density, "bytes": self._bytes(pattern), "features": features}

    def _reach(self, rules: tuple[Rule, ...]) -> float:
        """How far back the kept keys lie, added up, as a share of dense's; 1 where content chooses."""
        if any(rule.awaits_content for rule in rules):
            return 1.0
        context = self._task.step.context_tokens
        kept = SparsePattern(rules, -(-context // COARSE_BLOCKS)).kinds(context) != 0
        back = np.tril(np.subtract.outer(np.arange(len(kept)), np.arange(len(kept))))
        return float((back * kept).sum() / max(1, back.sum()))

    def _bytes(self, pattern: LayerPatterns) -> int:
        if self._cp == 1:
            return 0
        task = replace(self._task, pattern=pattern)
        layout = Layouts(task).choice(self._cp, self._device_type).layout
        itemsize = getattr(torch, task.step.param_dtype).itemsize
        return forward_bytes(pattern, tuple(self.calls), layout, itemsize=itemsize)
