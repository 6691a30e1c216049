"""Checks before a run on GPUs that the block-sparse kernels can run its pattern, on its data, with its settings.

Reads settings and some sequences of a user-defined source. Needs no GPU and no Ray, and starts nothing.
"""

from __future__ import annotations

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, check_documents
from elastic_ring.attention.kernels.registry import covering, sparse_form
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.startup.warm import attention_shapes
from elastic_ring.train.task import TrainingTask

NUM_SEQUENCES_LOOKED_AT = 16


def check_pattern(task: TrainingTask, cp: int, layouts: Layouts | None = None) -> None:
    """Raises ValueError for a pattern that the block-sparse kernels of GPUs cannot run with these settings."""
    if task.pattern is None or not task.pattern.any_sparse:
        return
    step = task.step
    what = f"pattern={str(task.pattern)!r} on device='cuda' with context_tokens={step.context_tokens}"
    if step.param_dtype != "bfloat16":
        raise ValueError(f"{what}: sparse kernels take bfloat16, not {step.param_dtype}; set param_dtype='bfloat16'")
    try:
        task.pattern.check_blocks((layouts or Layouts(task)).choice(cp, "cuda").layout)
        check_places(task.data)
    except ValueError as error:
        raise ValueError(f"{what}: {error}. Or train on device='cpu', or leave pattern out: dense attention") from error
    pinned = sparse_form(step.kernel)
    able = [kernel for kernel in covering("tables") if pinned in (None, kernel.name)]
    for _, _, head_dim in attention_shapes(task):
        reasons = [kernel.refusal("cuda", torch.bfloat16, head_dim, step.deterministic) for kernel in able]
        if all(reasons):
            listed = "; ".join(f"{kernel.name} {reason}" for kernel, reason in zip(able, reasons, strict=True))
            unpin = f", or kernel={step.kernel!r} to have one chosen" if pinned else ""
            raise ValueError(
                f"{what}: no sparse kernel for the model: {listed}. Leave pattern out for dense attention{unpin}"
            )


def check_places(data: SourceConfig) -> None:
    """Raises ValueError where documents begin inside a block of the block-sparse kernels.

    Of a source without `align_tokens` only some sequences are read; a later one may still stop the run.
    """
    align_tokens = getattr(data, "align_tokens", None)
    if align_tokens is None:
        source = open_source(data)
        for sample_id in range(0, source.num_sequences, -(-source.num_sequences // NUM_SEQUENCES_LOOKED_AT)):
            check_documents(source.read(sample_id).document_starts)
    elif align_tokens % BLOCK_TOKENS:
        raise ValueError(
            f"align_tokens={align_tokens} of the data: documents must begin with a block of {BLOCK_TOKENS} tokens;"
            f" set align_tokens={BLOCK_TOKENS}, and each is filled up with tokens that are no targets"
        )
