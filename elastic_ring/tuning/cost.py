"""What all kinds of trials share: a pattern's task and its costs, which no training has to tell, and their reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.autolayout.model_layout import Call, forward_bytes
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.config import ScalingConfig
from elastic_ring.train.startup.layouts import Layouts, attention_calls
from elastic_ring.train.task import TrainingTask
from elastic_ring.tuning.space import pattern_of

COARSE_BLOCKS = 128
"""Features are counted in so many blocks of a sequence."""
METRICS = ("loss", "step_s", "bytes")
NUM_REPORTS = 4
REJECTED_LOSS = 1e9
"""Optuna refuses what is not finite."""
NOTHING: Mapping[str, Any] = {"density": 1.0, "bytes": 0}
"""In place of `Costs.of`, for a pattern that does not fit."""


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


@dataclass(frozen=True)
class Asked:
    """What all trials of a search share."""

    task: TrainingTask
    scaling: ScalingConfig
    folder: str
    """Where the search was begun: relative paths of data count from there, and Tune gives each trial a folder."""

    def of(self, config: Mapping[str, Any], num_layers: int) -> tuple[str, TrainingTask]:
        """A trial's pattern and its task: under a seed of its own also other first values and another order."""
        task, text = self.task, pattern_of(config, self.task.step.context_tokens, num_layers)
        seed, initial = int(config.get("seed", task.step.seed)), task.initial
        if is_dataclass(initial) and any(field.name == "seed" for field in fields(initial)):
            initial = replace(initial, seed=seed)
        step = replace(task.step, seed=seed)
        return text, replace(task, pattern=parse_pattern(text), step=step, initial=initial)


def result_of(
    text: str,
    task: TrainingTask,
    about: Mapping[str, Any],
    losses: list[float],
    step_s: float | None,
    steps: int,
    rejected: str,
) -> dict[str, Any]:
    """What a trial reports; `about`: as `Costs.of`; without losses, and without a time, a value that loses."""
    return {
        "pattern": text,
        "seed": task.step.seed,
        "loss": losses[-1] if losses else REJECTED_LOSS,
        "losses": losses,
        "step_s": REJECTED_LOSS if step_s is None else step_s,
        **{name: about[name] for name in ("density", "bytes")},
        "tokens": task.step.global_batch * task.step.context_tokens * steps,
        "rejected": rejected,
    }
