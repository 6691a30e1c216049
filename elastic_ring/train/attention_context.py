"""Builds the attention of one pass and the batch for the user's loss. No step and no state in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Wire
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering.ring_plans import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.data.loader import Slice
from elastic_ring.train.task import Batch, TrainingTask


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
) -> RingAttention | PatternedAttention:
    """The attention of one pass: dense with the task's kernel, or as its pattern says. `layout`: the layout of `piece`.

    The task fills in what `options` leave to it: kernel, `deterministic` and the wire, unless `kv_wire` replaces that.
    `plans` keeps the plans of sequences of one generation.
    """
    options = replace(
        RingOptions() if options is None else options,
        backend=task.step.kernel or None,
        deterministic=task.step.deterministic,
        kv_wire=kv_wire or task.step.kv_wire,
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
