"""Builds the attention of one pass and the batch for the user's loss. No step and no state in here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import HopBuffers, Wire
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.two_level import Hosts
from elastic_ring.attention.ring import Observer, RingAttention
from elastic_ring.attention.ring_plans import PlanCache
from elastic_ring.data.loader import Slice
from elastic_ring.train.task import Batch, TrainingTask


def attention_of(
    task: TrainingTask,
    piece: Slice,
    layout: Layout,
    cp_rank: int,
    group: Any,
    observer: Observer | None = None,
    kernel_cache: Path | None = None,
    buffers: HopBuffers | None = None,
    check: Callable[[], None] | None = None,
    plans: PlanCache | None = None,
    kv_wire: Wire | None = None,
    hosts: Hosts | None = None,
) -> RingAttention | PatternedAttention:
    """The attention of one pass: dense with the task's kernel, or as its pattern says. `layout`: the layout of `piece`.

    `check` raises once the group has been aborted; `plans` keeps the plans of sequences of one generation.
    `kv_wire` replaces the task's. `hosts`: of each rank of the ring, None if not known.
    """
    wire = kv_wire or task.step.kv_wire
    if task.pattern is not None:
        return PatternedAttention(
            task.pattern,
            layout,
            cp_rank,
            group,
            document_starts=piece.document_starts,
            observer=observer,
            backend=task.step.kernel or None,
            deterministic=task.step.deterministic,
            cache_dir=kernel_cache,
            buffers=buffers,
            check=check,
            plans=plans,
            kv_wire=wire,
            hosts=hosts,
        )
    kernel, pattern = task.step.kernel or None, Pattern(causal=True, document_starts=piece.document_starts)
    place = (layout, cp_rank, piece.document_starts, kernel, task.step.deterministic, wire, hosts)
    kept = (PlanCache() if plans is None else plans).of(place, lambda: plan(pattern, layout))
    return RingAttention(
        kept.schedule,
        cp_rank,
        group,
        backend=kernel,
        deterministic=task.step.deterministic,
        cache_dir=kernel_cache,
        observer=observer,
        buffers=buffers,
        plans=kept,
        kv_wire=wire,
        hosts=hosts,
    )


def batch_of(piece: Slice, attention: RingAttention | PatternedAttention, device: torch.device) -> Batch:
    """The batch for the user's loss, on `device`."""
    here = piece.to(device)
    return Batch(here.tokens, here.targets, here.positions, here.document_ids, attention)
