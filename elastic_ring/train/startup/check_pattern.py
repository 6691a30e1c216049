"""Checks before a run on GPUs that their kernels can run its pattern, with its settings, and says what slows it down.

Reads settings and some sequences of a user-defined source. Needs no GPU and no Ray, and starts nothing.
"""

from __future__ import annotations

import logging

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, check_documents
from elastic_ring.attention.kernels.registry import covering, sparse_form
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.patterns.content import top_ks_of
from elastic_ring.data.source import open_source
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.startup.warm import attention_shapes
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

NUM_SEQUENCES_LOOKED_AT = 16


def check_pattern(task: TrainingTask, cp: int, layouts: Layouts | None = None) -> None:
    """Raises ValueError for a pattern that GPUs cannot run with these settings; logs what cuts blocks."""
    if task.pattern is None or not task.pattern.any_sparse:
        return
    step = task.step
    what = f"pattern={str(task.pattern)!r} on device='cuda' with context_tokens={step.context_tokens}"
    if step.param_dtype != "bfloat16":
        raise ValueError(f"{what}: sparse kernels take bfloat16, not {step.param_dtype}; set param_dtype='bfloat16'")
    cut = _what_cuts_blocks(task, (layouts or Layouts(task)).choice(cp, "cuda").layout)
    if cut and _chooses_without_host(task):
        raise ValueError(f"{what}: {cut}. Or leave fetch_all out: the host then chooses, and blocks may be cut")
    if cut:
        log.warning("blocks are padded and masked, which takes up to a third as long again: %s", cut)
    pinned = sparse_form(step.kernel)
    able = [kernel for kernel in covering("masked_tables" if cut else "tables") if pinned in (None, kernel.name)]
    for _, _, head_dim in attention_shapes(task):
        reasons = [kernel.refusal("cuda", torch.bfloat16, head_dim, step.deterministic) for kernel in able]
        if all(reasons):
            listed = "; ".join(f"{kernel.name} {reason}" for kernel, reason in zip(able, reasons, strict=True))
            unpin = f", or kernel={step.kernel!r} to have one chosen" if pinned else ""
            raise ValueError(
                f"{what}: no sparse kernel for the model: {listed}. Leave pattern out for dense attention{unpin}"
            )


def _what_cuts_blocks(task: TrainingTask, layout: Layout) -> str:
    """The first thing that does, with a way out; empty for none. Documents of a source without `align_tokens` are read
    in some sequences only: a later one may still cut blocks."""
    align_tokens = getattr(task.data, "align_tokens", None)
    starts: list[tuple[int, ...]] = [(0,)]
    if align_tokens is None:
        source = open_source(task.data)
        chosen = range(0, source.num_sequences, -(-source.num_sequences // NUM_SEQUENCES_LOOKED_AT))
        starts += [source.read(sample_id).document_starts for sample_id in chosen]
    try:
        assert task.pattern is not None
        task.pattern.check_blocks(layout)
        for each in starts:
            check_documents(each)
    except ValueError as error:
        return str(error)
    if align_tokens is not None and align_tokens % BLOCK_TOKENS:
        return (
            f"align_tokens={align_tokens} of the data: documents begin inside blocks of {BLOCK_TOKENS} tokens; set"
            f" align_tokens={BLOCK_TOKENS}, and each is filled up with tokens that are no targets"
        )
    return ""


def _chooses_without_host(task: TrainingTask) -> bool:
    groups = () if task.pattern is None else task.pattern.groups
    return any(top_k.fetch_all for group in groups for rule in group.rules for top_k in top_ks_of(rule))
