"""The training task: the user's model, loss and data, with the settings of a step. Sent to every worker."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from elastic_ring.attention.layers import AttentionFn
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.config import StepConfig
from elastic_ring.costs import CostModel
from elastic_ring.data.sampling.validation import LOSS, PERPLEXITY, ValidationSet, check_sets, holds_out, measured
from elastic_ring.data.source import SourceConfig
from elastic_ring.files import shown_plain
from elastic_ring.model.config import ModelSizes, built_in
from elastic_ring.model.flops import flops_of
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.optim import OptimConfig, OptimizerFactory, Schedule


@dataclass(frozen=True)
class Batch:
    """One rank's slice of a sequence, or of those of one pass end to end. tokens, targets, positions, document_ids:
    (1, S_local).

    A target of -100 counts for nothing. `positions` are indices in the token's own global sequence. `attention` is the
    ring's: a model that calls plain scaled-dot-product attention would see its own slice only. Where layers
    follow different patterns, layer i calls `attention.layers.of_layer(attention, i)`.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    attention: AttentionFn


LossFunction = Callable[[nn.Module, Batch], tuple[Tensor, int | Tensor]]
"""(model, batch) -> (sum of the loss over this slice's targets, number of targets). A sum, never a mean."""


class Initial(Protocol):
    """First values by name, the same on every mesh. One thread asks for them, which need not be the main one."""

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor: ...


class FrozenValues(Initial, Protocol):
    """The values of frozen parameters by name, the same on every mesh and at any time."""

    def check(self) -> None:
        """Raises ValueError where they are no longer those that the run began with, or cannot be read."""


@dataclass(frozen=True)
class ModelParts:
    """What a model's factory brings along for the trainer, which takes its own arguments first.

    A factory with a method `ring_parts(step_config)` returns it. `vocab_size` bounds the tokens of the data; `files`,
    name -> text, are written into the run's folder. `check_data` raises ValueError for data whose tokens mean something
    else to the model. `frozen` has the values of parameters that need no gradient. `flops` of one sequence, forward and
    backward, with dense causal attention: from it comes the metric of utilisation (MFU). `sizes` is for the plan of a
    rank and the forecast of a step; None for a model without them.
    """

    loss: LossFunction = language_model_loss
    initial: Initial | None = None
    pattern: LayerPatterns | None = None
    vocab_size: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    flops: float | None = None
    check_data: Callable[[SourceConfig], None] | None = None
    frozen: FrozenValues | None = None
    sizes: ModelSizes | None = None


def parts_of(model: Any, step: StepConfig) -> ModelParts:
    """The parts that the factory `model` brings along, or defaults. Only our own decoder has a known FLOP count."""
    bring = getattr(model, "ring_parts", None)
    if bring is not None:
        return bring(step)
    shape = built_in(model)
    sizes = None if shape is None else ModelSizes(shape, is_built_in=True)
    return ModelParts(flops=flops_of(model, step.context_tokens), sizes=sizes)


@dataclass(frozen=True)
class TrainingTask:
    """Everything a worker needs to know of the training itself; picklable.

    `model()` builds the module; it may be built on the meta device. `initial=None` takes the module's own
    initialisation under the run's seed, which holds the whole model in memory once per rank. `units` names
    the submodules that FSDP2 gathers one at a time; by default the items of the largest `ModuleList`.
    `pattern` None is dense causal attention. `cost_model` is for `layout="auto"`; None: an H200's. `metrics` are
    functions like `loss`, for the held-out sequences. `lr_schedule` gives a step's rate in place of `optim`. `flops`:
    of one sequence, as in `ModelParts`; None where that is not known. `asks_callbacks`: after each validation training
    waits for what the driver's callbacks want. With `frozen` parameters that need no gradient are no state: they are in
    no shard, checkpoint, heal or copy, and each member reads its rows of them from there. `validation` has sets by
    name; without any the held-out sequences are the one set.
    """

    model: Callable[[], nn.Module]
    data: SourceConfig
    step: StepConfig
    optim: OptimConfig
    loss: LossFunction = language_model_loss
    optimizer: OptimizerFactory | None = None
    initial: Initial | None = None
    units: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    pattern: LayerPatterns | None = None
    cost_model: CostModel | None = None
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)
    lr_schedule: Schedule | None = None
    flops: float | None = None
    asks_callbacks: bool = False
    frozen: FrozenValues | None = None
    validation: Mapping[str, ValidationSet] = field(default_factory=dict)

    @property
    def num_held_out(self) -> int:
        """Sequences of the data that are not trained on."""
        return self.step.num_val_sequences if self.step.validates and holds_out(self.validation) else 0


def description_of(task: TrainingTask) -> dict[str, Any]:
    """The task's entry in config.json, for readers of its weights: pattern, kind of data, the decoder's shape."""
    shape, data = built_in(task.model), shown_plain(json.loads(json.dumps(vars(task.data), default=str)))
    return {
        **({} if task.pattern is None else {"pattern": str(task.pattern)}),
        **({} if shape is None else {"model": vars(shape)}),
        "data": {**data, "source": type(task.data).__qualname__},
    }


def check_parts(task: TrainingTask) -> None:
    """Raises ValueError for parts of a task that have the wrong type. Calls none of them."""
    if isinstance(task.model, nn.Module):
        raise ValueError(
            f"model is a {type(task.model).__name__}, already built: give a class, a function or "
            "functools.partial(Model, settings) that builds it, since every worker builds its own"
        )
    for name in ("model", "loss", "optimizer", "units", "lr_schedule"):
        part = getattr(task, name)
        if not callable(part) and not (part is None and name in ("optimizer", "units", "lr_schedule")):
            raise ValueError(f"{name}={part!r}: give a function, or a class of a module that workers can import")
    if not all(hasattr(task.data, name) for name in ("open", "context_tokens")):
        raise ValueError(
            f"data is a {type(task.data).__name__}: give StdlibText, TextFiles, TokenShards or a source of your own, "
            "after elastic_ring.data.source.SourceConfig"
        )
    if not isinstance(task.pattern, LayerPatterns | None):
        raise ValueError(f"pattern={task.pattern!r}: give a short form such as 'window:512', or LayerPatterns")
    for name, metric in task.metrics.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (LOSS, PERPLEXITY) or not callable(metric):
            raise ValueError(
                f"metrics={{{name!r}: {metric!r}}}: give functions by names of small letters, digits and _, other than "
                f"{LOSS} and {PERPLEXITY}"
            )
    if task.metrics and not task.step.validates:
        raise ValueError(
            f"metrics has {', '.join(task.metrics)}, and val_every_steps=0 never validates: set it above 0"
        )
    check_sets(task.validation, task.step.validates, task.step.context_tokens)
    measured(task.validation, task.metrics)
    if task.initial is not None and not hasattr(task.initial, "tensor"):
        raise ValueError(f"initial={task.initial!r}: give an object whose tensor(name, shape, rows) has first values")


def check_vocabulary(parts: ModelParts, data: SourceConfig) -> None:
    """Raises ValueError where the data has tokens that the model has no row for, or that are another tokenizer's."""
    refuse_tokens(getattr(data, "vocab_size", None), parts.vocab_size)
    if parts.check_data is not None:
        parts.check_data(data)


def refuse_tokens(tokens: int | None, rows: int | None) -> None:
    """Raises ValueError where both numbers are known and there are more tokens than rows."""
    if rows is not None and tokens is not None and tokens > rows:
        raise ValueError(
            f"data.vocab_size={tokens} is more than the model's {rows}: the model needs a row for each "
            "token; prepare the data with the model's own tokenizer, or give a model with a larger vocabulary"
        )
