"""The training task: the user's model, loss and data, with the settings of a step; the batch and attention of a pass.

The task is sent to every worker. No step and no state in here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic_ring.attention.comm.exchange import Wire
from elastic_ring.attention.layers import AttentionFn, PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.config import StepConfig
from elastic_ring.costs import CostModel
from elastic_ring.data.loader import Slice
from elastic_ring.data.sampling.validation import LOSS, PERPLEXITY, ValidationSet, check_sets, holds_out, measured
from elastic_ring.data.source import SourceConfig
from elastic_ring.files import shown_plain
from elastic_ring.model.config import ModelConfig, ModelSizes, built_in, model_flops
from elastic_ring.model.dropout import sequence_seed
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.optim import OptimConfig, OptimizerFactory, Schedule


@dataclass(frozen=True)
class Batch:
    """One rank's slice of the sequences of one pass, end to end. tokens, targets, positions, document_ids: (1,
    S_local).

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
    """First values by name, the same on every mesh. They are read in one thread, not always the main one."""

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor: ...


class FrozenValues(Initial, Protocol):
    """The values of frozen parameters by name, the same on every mesh and at any time."""

    def check(self) -> None:
        """Raises ValueError if they have changed since the run began, or cannot be read."""


@dataclass(frozen=True)
class ModelParts:
    """A model factory's defaults for the trainer, whose own arguments come first.

    A factory with a method `ring_parts(step_config)` returns it. `vocab_size` bounds the tokens of the data; `files`,
    name -> text, are written into the run's folder. `check_data` raises ValueError for data of another tokenizer.
    `frozen` has the values of parameters that need no gradient. `flops` of one sequence, forward and backward, with
    dense causal attention: for the utilisation (MFU). `sizes`: for the plan of a rank and the forecast of a step; None
    if unknown. `model`: the factory for these settings, where it is another. `softcap`: as in `RingOptions`.
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
    model: Callable[[], nn.Module] | None = None
    softcap: float = 0.0


def parts_of(model: Any, step: StepConfig) -> ModelParts:
    """The parts of the factory `model`, or defaults. Only the built-in decoder has a known FLOP count."""
    bring = getattr(model, "ring_parts", None)
    if bring is not None:
        return bring(step)
    shape = built_in(model)
    if shape is None:
        return ModelParts()
    return ModelParts(flops=model_flops(shape, step.context_tokens), sizes=ModelSizes(shape, is_built_in=True))


def density_of(pattern: LayerPatterns, model: ModelConfig, step: StepConfig) -> float:
    """The share of the causal pairs of a whole sequence that the model's layers keep."""
    return pattern.density(step.context_tokens, model.num_layers, model.num_heads, model.num_kv_heads)


@dataclass(frozen=True)
class TrainingTask:
    """Everything a worker needs to know of the training itself; picklable.

    `model()` builds the module; it may be built on the meta device. `initial=None` takes the module's own
    initialisation under the run's seed, which holds the whole model in memory once per rank. `units` names
    the submodules that FSDP2 gathers one at a time; by default the items of the largest `ModuleList`.
    `pattern` None is dense causal attention. `cost_model` is for `layout="auto"`; None: an H200's. `metrics` are
    functions like `loss`, for the held-out sequences. `lr_schedule` gives a step's rate in place of `optim`. `flops`:
    of one sequence, as in `ModelParts`; None if unknown. `asks_callbacks`: after each validation training waits for the
    driver's callbacks. With `frozen` parameters that need no gradient are no state: they are in no shard, checkpoint,
    heal or copy, and each member reads its rows of them from there. `validation` has sets by name; without any the
    held-out sequences are the only set. `softcap`: of the attention's scores.
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
    softcap: float = 0.0

    @property
    def num_held_out(self) -> int:
        """Sequences of the data that are not trained on."""
        return self.step.num_val_sequences if self.step.validates and holds_out(self.validation) else 0


def description_of(task: TrainingTask) -> dict[str, Any]:
    """The task's entry in config.json, for readers of its weights: pattern, kind of data, the decoder's shape."""
    shape, data = built_in(task.model), shown_plain(json.loads(json.dumps(vars(task.data), default=str)))
    if data.get("packing") == "stream":  # as runs on record have it
        data = {name: value for name, value in data.items() if name not in ("packing", "long_documents")}
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
    check_sets(task.validation, task.step)
    measured(task.validation, task.metrics)
    if task.initial is not None and not hasattr(task.initial, "tensor"):
        raise ValueError(f"initial={task.initial!r}: give an object whose tensor(name, shape, rows) has first values")


def check_vocabulary(parts: ModelParts, data: SourceConfig) -> None:
    """Raises ValueError for data with tokens that the model has no row for, or of another tokenizer."""
    refuse_tokens(getattr(data, "vocab_size", None), parts.vocab_size)
    if parts.check_data is not None:
        parts.check_data(data)


def refuse_tokens(tokens: int | None, rows: int | None) -> None:
    """Raises ValueError if both numbers are known and there are more tokens than rows."""
    if rows is not None and tokens is not None and tokens > rows:
        raise ValueError(
            f"data.vocab_size={tokens} is more than the model's {rows}: the model needs a row for each "
            "token; prepare the data with the model's own tokenizer, or give a model with a larger vocabulary"
        )


# ---------------------------------------------------------------- one pass


def attention_of(
    task: TrainingTask,
    piece: Slice,
    layout: Layout,
    cp_rank: int,
    group: Any,
    options: RingOptions | None = None,
    *,
    plans: PlanCache | None = None,
    kv_wire: Wire | None = None,
    step: int | None = None,
) -> RingAttention | PatternedAttention:
    """The attention of one pass: dense with the task's kernel, or by its pattern. `layout`: the layout of `piece`.

    The task sets kernel, `deterministic`, softcap and wire of `options`; `kv_wire` replaces the wire. `plans` caches
    the plans of one generation. A pass of training says its `step`, from which dropout draws.
    """
    indices = piece.indices_in_batch
    options = replace(
        RingOptions() if options is None else options,
        backend=task.step.kernel or None,
        deterministic=task.step.deterministic,
        softcap=task.softcap,
        kv_wire=kv_wire or task.step.kv_wire,
        sequence_seeds=() if step is None else tuple(sequence_seed(task.step.seed, step, i) for i in indices),
    )
    starts = piece.document_starts
    if task.pattern is not None:
        return PatternedAttention(task.pattern, layout, cp_rank, group, options, document_starts=starts, plans=plans)
    pattern = Pattern(causal=True, document_starts=starts)
    place = (layout, cp_rank, pattern, options.plan_key)
    kept = (PlanCache() if plans is None else plans).of(place, lambda: plan(pattern, layout))
    return RingAttention(kept.schedule, cp_rank, group, options, plans=kept)


def batch_of(piece: Slice, attention: RingAttention | PatternedAttention, device: torch.device) -> Batch:
    """The batch for the user's loss, on `device`."""
    here = piece.to(device)
    return Batch(here.tokens, here.targets, here.positions, here.document_ids, attention)
