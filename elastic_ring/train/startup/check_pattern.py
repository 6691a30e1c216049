"""Checks before a run on GPUs that their kernels can run its pattern, with its settings, and says what slows it down.

Reads settings and some sequences of a user-defined source. Needs no GPU and no Ray, and starts nothing.
"""

from __future__ import annotations

import logging

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, check_documents
from elastic_ring.attention.kernels.registry import covering, sparse_form
from elastic_ring.attention.patterns.content import chosen_without_host
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_blocks import cut_blocks
from elastic_ring.data.source import SourceConfig, open_source
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
    layout = (layouts or Layouts(task)).choice(cp, "cuda").layout
    of_data, causes = _cut_by_documents(task.data), dict[str, None]()
    for group in task.pattern.groups:
        if set(group.rules) == {Dense()}:
            continue
        cut = [*cut_blocks(SparsePattern(group.rules, task.pattern.block), layout), *of_data]
        causes.update(dict.fromkeys(cut))
        if cut and chosen_without_host(group.rules):
            raise ValueError(
                f"{what}: {group} chooses whole blocks of {BLOCK_TOKENS} tokens only, but {'; and '.join(cut)}. Or"
                " leave fetch_all out: the host then chooses, and blocks may be cut"
            )
    if causes:
        log.warning(
            'blocks of %d tokens are cut: they are padded and masked, which takes attention longer; "On GPUs" in'
            " docs/patterns.md says how long. %s",
            BLOCK_TOKENS,
            "; and ".join(causes),
        )
    pinned = sparse_form(step.kernel)
    able = [kernel for kernel in covering("masked_tables" if causes else "tables") if pinned in (None, kernel.name)]
    for _, _, head_dim in attention_shapes(task):
        reasons = [kernel.refusal("cuda", torch.bfloat16, head_dim, step.deterministic) for kernel in able]
        if all(reasons):
            listed = "; ".join(f"{kernel.name} {reason}" for kernel, reason in zip(able, reasons, strict=True))
            unpin = f", or kernel={step.kernel!r} to have one chosen" if pinned else ""
            raise ValueError(
                f"{what}: no sparse kernel for the model: {listed}. Leave pattern out for dense attention{unpin}"
            )


def _cut_by_documents(data: SourceConfig) -> list[str]:
    """How documents cut blocks, with a way out. Of a source without `align_tokens` some sequences are read: a later one
    may still cut blocks."""
    align_tokens = getattr(data, "align_tokens", None)
    if align_tokens is not None:
        if align_tokens % BLOCK_TOKENS == 0:
            return []
        return [
            f"documents of the data begin inside blocks, align_tokens={align_tokens}; set align_tokens={BLOCK_TOKENS}, "
            "and each is filled up with tokens that are no targets"
        ]
    source = open_source(data)
    looked_at = range(0, source.num_sequences, -(-source.num_sequences // NUM_SEQUENCES_LOOKED_AT))
    starts = {start for sample_id in looked_at for start in source.read(sample_id).document_starts}
    try:
        check_documents(tuple(sorted(starts)))
    except ValueError as error:
        return [str(error)]
    return []
