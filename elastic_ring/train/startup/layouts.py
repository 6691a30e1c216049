"""The layout of a run's tokens: as set, or with "auto" the best for the model's attention.

Every process computes the same layout for the same ring from the task alone. No ranks and no groups in here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic_ring.attention.autolayout import Call, LayoutChoice, choose_layout
from elastic_ring.attention.layers import WHICH_LAYER, PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, contiguous, make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.costs import CostModel
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.task import AttentionFn, Batch, TrainingTask, refuse_tokens

log = logging.getLogger(__name__)

AUTO = "auto"
NUM_PROBE_TOKENS = 16


class Layouts:
    """The layouts of one task by ring size, each chosen once: a pure function of task, ring size and device type."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._calls: tuple[Call, ...] | None = None
        self._chosen: dict[tuple[int, str], LayoutChoice] = {}
        self._repeated: dict[tuple[int, str, int], Layout] = {}

    def of_pass(self, cp: int, device_type: str, num_sequences: int) -> Layout:
        """The layout of so many sequences that are computed together; otherwise as `choice`."""
        key = (cp, device_type, num_sequences)
        if key not in self._repeated:
            self._repeated[key] = self.choice(cp, device_type).layout.repeated(num_sequences)
        return self._repeated[key]

    def choice(self, cp: int, device_type: str) -> LayoutChoice:
        """For rings of `cp` ranks on "cpu" or "cuda" (whole blocks first). Logs the reason of a choice by "auto".

        Raises `ValueError` for a pattern that does not fit the model's layers or heads.
        """
        if (cp, device_type) not in self._chosen:
            self._chosen[cp, device_type] = self._choose(cp, device_type)
        return self._chosen[cp, device_type]

    def _choose(self, cp: int, device_type: str) -> LayoutChoice:
        step, pattern = self._task.step, self._task.pattern
        if step.layout != AUTO:
            return LayoutChoice(make_layout(step.layout, step.context_tokens, cp), f"{step.layout}, as set")
        if self._calls is None:
            self._calls = () if pattern is None else attention_calls(self._task)
        choice = choose_layout(
            pattern,
            self._calls,
            step.context_tokens,
            cp,
            self._task.cost_model or CostModel(),
            itemsize=getattr(torch, step.param_dtype).itemsize,
            whole_blocks=device_type == "cuda",
        )
        log.info("layout auto at cp=%d: %s", cp, choice.why)
        return choice


def check_layers(task: TrainingTask) -> None:
    """Raises `ValueError` if the model attends in a layer without rules or with other heads than its rules, if layers
    differ and the model does not name the calling layer, and if the built-in decoder under its own loss lacks a layer
    that has rules. Other models may call some layers for longer sequences only: rules of uncalled layers are logged.
    """
    if task.pattern is None:
        return
    traced = _meta_pass(task)
    if traced.unnamed and not task.pattern.same_everywhere:
        raise ValueError(WHICH_LAYER)
    for layer, num_heads, num_kv_heads, _ in traced.calls:
        task.pattern.of_layer(layer).heads(num_heads, num_kv_heads)
    called = {call[0] for call in traced.calls}
    missing = {layer for group in task.pattern.groups for layer in group.layers or ()} - called
    if not missing or not called:
        return
    problem = (
        f"pattern={str(task.pattern)!r} has rules for layer {min(missing)}, but the model attends in layers "
        f"{', '.join(map(str, sorted(called)))}"
    )
    if traced.num_layers is not None and max(missing) >= traced.num_layers:
        raise ValueError(f"{problem}: name one of these")
    if traced.ended:
        log.warning("%s; checked with one pass over %d tokens", problem, NUM_PROBE_TOKENS)


def check_rows(task: TrainingTask) -> None:
    """Raises `ValueError` if the data has tokens without a row in the model's table: the embedding to which the model
    gives the batch's tokens. Unknown for models that change tokens first, and for data without `vocab_size`."""
    tokens = getattr(task.data, "vocab_size", None)
    if tokens is not None:
        refuse_tokens(tokens, min(_meta_pass(task).rows, default=None))


def attention_calls(task: TrainingTask) -> tuple[Call, ...]:
    """(layer, query heads, K/V heads, head dim) of the model's attention calls in order, from a pass of its loss on the
    meta device, which ends at the first read of a value. Without a pattern, calls are numbered as layers."""
    return _meta_pass(task).calls


def attention_shapes(task: TrainingTask) -> tuple[tuple[int, int, int], ...]:
    """(query heads, K/V heads, head dim) of the model's attention calls, each once, as `attention_calls` finds them."""
    return tuple(dict.fromkeys(call[1:] for call in attention_calls(task)))


@dataclass(frozen=True)
class _Traced:
    """A pass on the meta device: its attention calls, whether some named no layer, whether the model's forward returned
    (the loss may still read values), the number of layers, None if unknown, and the rows of each table that tokens were
    looked up in."""

    calls: tuple[Call, ...]
    unnamed: bool
    ended: bool
    num_layers: int | None
    rows: tuple[int, ...]


def _meta_pass(task: TrainingTask) -> _Traced:
    calls: list[Call] = []
    unnamed: list[int] = []
    ended: list[bool] = []
    rows: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int | None = None, sinks: Tensor | None = None) -> Tensor:
        if layer is None:
            unnamed.append(len(calls))
        calls.append((len(calls) if layer is None else layer, q.size(2), k.size(2), q.size(3)))
        return torch.empty_like(q)

    attend.documents = lambda positions: (positions, positions)  # type: ignore[attr-defined]  # as a ring's
    options = RingOptions(softcap=task.softcap, sequence_seeds=(0,))  # dropout needs seeds
    attend.options = options  # type: ignore[attr-defined]
    with torch.device("meta"), torch.no_grad():
        model = task.model()
        model.register_forward_hook(lambda *_: ended.append(True))
        tokens, integers = (torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.int64) for _ in range(2))

        def looked_up(table: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and inputs[0] is tokens:
                rows.append(cast(nn.Embedding, table).num_embeddings)

        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(looked_up)
        attention: AttentionFn = attend if task.pattern is None else _TracingAttention(task, attend, options)
        try:
            loss = copy.deepcopy(task.loss)  # a stateful loss must not see this pass
            loss(model, Batch(tokens, integers, integers, integers.int(), attention))
        except Exception as error:  # the user's code read a value
            log.debug("the pass on the meta device ended after %d attention calls: %s", len(calls), error)
    num_layers = None
    if type(model) is Transformer and task.loss is language_model_loss:
        num_layers = model.config.num_layers
    return _Traced(tuple(calls), bool(unnamed), bool(ended), num_layers, tuple(rows))


class _TracingAttention(PatternedAttention):
    """Takes the place of the ring's attention: records which layer calls, and computes nothing."""

    def __init__(self, task: TrainingTask, attend: Callable[..., Tensor], options: RingOptions) -> None:
        assert task.pattern is not None
        super().__init__(task.pattern, contiguous(NUM_PROBE_TOKENS, 1), 0, None, options)
        self._attend_any = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        return self._attend_any(q, k, v)

    def layer(self, index: int) -> AttentionFn:
        def attend(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
            return self._attend_any(q, k, v, index)

        return attend
