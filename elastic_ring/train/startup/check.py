"""Start-up checks: the model computes the same on a ring as on one rank, and GPUs can run its pattern.

A model that calls plain attention would train on a ring without an error, each rank attending to its own slice only.
One short sequence shows it before the first step. Where passes have several sequences, two in one pass must give
the sums of their losses and gradients. `check_pattern` needs no GPU and no Ray, and starts nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, check_documents
from elastic_ring.attention.kernels.registry import covering, sparse_form
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.content import chosen_without_host
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_blocks import cut_blocks
from elastic_ring.data.loader import joined, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.errors import ElasticRingError
from elastic_ring.train.optim import is_balance
from elastic_ring.train.startup.layouts import AUTO, Layouts, attention_shapes
from elastic_ring.train.task import Batch, TrainingTask, attention_of, batch_of
from elastic_ring.train.wrap import copy_masters, local_of

log = logging.getLogger(__name__)

NUM_SAMPLED_SEQUENCES = 16
TOKENS_PER_RANK = 24
PATTERNED_TOKENS_PER_RANK = 2 * BLOCK_TOKENS
"""Whole blocks, of which a zigzag layout cuts a rank's share in two: what kernels over blocks run fastest."""
TOLERANCE = {"float32": 5e-3, "bfloat16": 0.3}
TOLERANCE_OF_FOLDER = {"float32": 1e-4, "bfloat16": 0.05}
"""Relative L2 norms of errors. bfloat16 rounds each number by up to 2**-9; a dozen roundings between a gradient and the
loss, which may differ on a ring, add up to 12 * 2**-8 = 0.05 at worst. A model folder has no code of its own that
could round more often."""
SMALLEST_SHARE = {"float32": 1e-3, "bfloat16": 0.02}
"""Of a folder, a gradient below this share of the largest is compared with that share: it is a sum that cancels."""


class ModelRefused(ElasticRingError):
    """The model or loss cannot be trained on a ring as it is; the message says what to change."""


GradientsOf = Callable[[Tensor], list[Tensor]]
"""loss -> this rank's shards of its gradient; none stays in the model."""


def check_model(task: TrainingTask, groups: Any, state: Any, gradients_of: GradientsOf | None = None) -> None:
    """Compare loss and gradient of one short sequence at cp = 1 and on the ring. Raises ModelRefused.

    Model folders are compared as they train, with dropout; own models in `eval()`, where their generators differ
    between ranks. `gradients_of`: FSDP2's if left out.
    """
    model: nn.Module = state.model
    gradients_of = gradients_of or partial(_gradients_of, model)
    copy_masters(model)
    whole, cp = state.loader.source.read(0), groups.mesh.cp
    is_patterned = task.pattern is not None and task.pattern.any_sparse
    each = PATTERNED_TOKENS_PER_RANK if is_patterned else TOKENS_PER_RANK
    num_tokens = min(task.step.context_tokens, each * cp)
    starts = tuple(start for start in whole.document_starts if start < num_tokens)
    ends = num_tokens in whole.document_starts or (num_tokens == task.step.context_tokens and whole.ends_document)
    sample = Sample(whole.tokens[: num_tokens + 1], starts, ends, whole.padding)
    _refuse_changing_buffers(task, state, sample, groups)
    of_folder = hasattr(model, "dropout_masks")
    model.train(of_folder)
    # Other tokens with the same documents.
    turned = Sample(sample.tokens[::-1].copy(), sample.document_starts, sample.ends_document, sample.padding)
    for samples in [(sample,)] if task.step.micro_batch == 1 else [(sample,), (sample, turned)]:
        passes = [_pass(task, state, [own], groups, gradients_of, cp=1) for own in samples]
        results, gradients = zip(*passes, strict=True)
        if cp == len(samples) == 1:
            continue
        alone = torch.stack(results).sum(0)
        alone_gradient = [reduce(torch.add, shares) / cp for shares in zip(*gradients, strict=True)]
        del gradients
        ring, ring_gradient = _pass(task, state, samples, groups, gradients_of, cp=cp)
        _sum(groups, ring)
        # At cp = 1 every rank of the ring computed the whole sequence, and FSDP2 summed their gradients.
        parts = torch.stack(
            [
                torch.stack([vector_norm(each, dtype=torch.float64).square() for each in (ring_share - share, share)])
                for ring_share, share in zip(ring_gradient, alone_gradient, strict=True)
            ]
        ).to(state.device)
        _sum(groups, parts)
        # Per parameter: at the start, attention's are a small part of the total gradient.
        error, norm = parts[:, 0].sqrt(), parts[:, 1].sqrt()
        counted, dtype = norm > 1e-6 * norm.max().clamp_min(1e-30), task.step.param_dtype
        if of_folder:
            norm = norm.clamp_min(float(norm.max()) * SMALLEST_SHARE[dtype])
        worst = float((error[counted] / norm[counted]).max()) if bool(counted.any()) else 0.0
        where = "on a ring" if len(samples) == 1 else f"with sequences_per_pass={task.step.micro_batch}"
        _compare((TOLERANCE_OF_FOLDER if of_folder else TOLERANCE)[dtype], alone, ring, worst, where)
    model.train()


def _sum(groups: Any, tensor: Tensor) -> None:
    if groups.shard.size() == 1:
        return
    with groups.launching():
        work = groups.shard.allreduce([tensor])
    work.wait()


def _compare(tolerance: float, alone: Tensor, ring: Tensor, gradient_error: float, where: str) -> None:
    if alone[1] != ring[1]:
        raise ModelRefused(
            f"the loss counted {int(alone[1])} targets of each sequence alone on one rank and {int(ring[1])} {where}: "
            "count the targets of the slice that is passed in (those that are not -100)"
        )
    loss_error = float(abs(ring[0] - alone[0]) / abs(alone[0]).clamp_min(1e-30))
    if loss_error > tolerance or gradient_error > tolerance:
        raise ModelRefused(
            f"{where} the model gives another result than on one rank with each sequence alone (loss differs by "
            f"{loss_error:.2e} relative, gradient by {gradient_error:.2e}, allowed {tolerance:.0e}): it must attend "
            "through batch.attention, take positions from batch.positions, and let no token see another in any other "
            "way"
        )


def _pass(
    task: TrainingTask, state: Any, samples: Sequence[Sample], groups: Any, gradients_of: GradientsOf, *, cp: int
) -> tuple[Tensor, list[Tensor]]:
    """((loss sum, number of targets), local gradient of each parameter) of one pass with these samples."""
    result = task.loss(state.model, _batch(task, state, samples, groups, cp))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].dim() == 0):
        raise ModelRefused(
            f"the loss function returned {type(result).__name__}: return (sum of the loss as a tensor without "
            "dimensions, number of targets as an int)"
        )
    loss, num_targets = result
    if isinstance(num_targets, Tensor) and num_targets.dim():
        raise ModelRefused(
            f"the loss function returned {tuple(num_targets.shape)} numbers of targets: return their sum, an int or a "
            "tensor without dimensions"
        )
    sums = torch.tensor([float(loss.detach()), float(int(num_targets))], dtype=torch.float64, device=loss.device)
    return sums, gradients_of(loss)


def _gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    for param in model.parameters():
        param.grad = None
    loss.backward()
    gradients = [
        local_of(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1).float()
        for name, p in model.named_parameters()
        # Counts: one token that is torn between two experts is a large share of them.
        if p.requires_grad and not is_balance(name)
    ]
    for param in model.parameters():
        param.grad = None
    return gradients


def _batch(task: TrainingTask, state: Any, samples: Sequence[Sample], groups: Any, cp: int) -> Batch:
    cp_rank = groups.mesh.coordinate(groups.global_rank).cp_rank if cp > 1 else 0
    # A layout chosen for the whole context would not fit; any layout that splits the sequence serves here.
    name = "zigzag" if task.step.layout == AUTO else task.step.layout
    layout = make_layout(name, len(samples[0].tokens) - 1, cp)
    slices = [slice_sample(sample, layout, cp_rank, sample_id=0, index_in_batch=0) for sample in samples]
    piece = joined(slices, layout.seq_len)
    attention = attention_of(
        task,
        piece,
        layout.repeated(len(samples)),
        cp_rank,
        groups.ring if cp > 1 else None,
        RingOptions(cache_dir=state.options.kernel_cache, check=groups.check),
        kv_wire="native",  # one rank sends nothing, so that only unrounded keys compare
        step=0,
    )
    return batch_of(piece, attention, state.device)


def _refuse_changing_buffers(task: TrainingTask, state: Any, sample: Sample, groups: Any) -> None:
    """Raises ModelRefused for buffers that a forward pass changes: they would differ between rings and after a
    re-run."""
    model: nn.Module = state.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not before:
        return
    with torch.no_grad():
        task.loss(model, _batch(task, state, [sample], groups, groups.mesh.cp))
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise ModelRefused(
            f"the forward pass changes the buffer {changed[0]}: such state would drift apart between rings; use a "
            "layer without running statistics, or keep it out of the module's buffers"
        )


# ---------------------------------------------------------------- patterns on GPUs


def check_pattern(task: TrainingTask, cp: int, layouts: Layouts | None = None) -> None:
    """Raises ValueError for a pattern that GPUs cannot run with these settings; logs what cuts blocks."""
    if task.pattern is None or not task.pattern.any_sparse:
        return
    step = task.step
    setting = f"pattern={str(task.pattern)!r} on device='cuda' with context_tokens={step.context_tokens}"
    if step.param_dtype != "bfloat16":
        raise ValueError(f"{setting}: sparse kernels take bfloat16, not {step.param_dtype}; set param_dtype='bfloat16'")
    layout = (layouts or Layouts(task)).choice(cp, "cuda").layout
    of_data, causes = _cut_by_documents(task.data), dict[str, None]()
    for group in task.pattern.groups:
        if set(group.rules) == {Dense()}:
            continue
        cut = [*cut_blocks(SparsePattern(group.rules, task.pattern.block), layout), *of_data]
        causes.update(dict.fromkeys(cut))
        if cut and chosen_without_host(group.rules):
            raise ValueError(
                f"{setting}: {group} chooses whole blocks of {BLOCK_TOKENS} tokens only, but {'; and '.join(cut)}. Or"
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
        reasons = [
            kernel.refusal("cuda", torch.bfloat16, head_dim, step.deterministic, softcap=task.softcap)
            for kernel in able
        ]
        if all(reasons):
            listed = "; ".join(f"{kernel.name} {reason}" for kernel, reason in zip(able, reasons, strict=True))
            unpin = f", or kernel={step.kernel!r} to have one chosen" if pinned else ""
            raise ValueError(
                f"{setting}: no sparse kernel for the model: {listed}. Leave pattern out for dense attention{unpin}"
            )


def _cut_by_documents(data: SourceConfig) -> list[str]:
    """How documents cut blocks, with a way out. Of a source without `align_tokens` it samples some sequences: others
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
    sampled = range(0, source.num_sequences, -(-source.num_sequences // NUM_SAMPLED_SEQUENCES))
    starts = {start for sample_id in sampled for start in source.read(sample_id).document_starts}
    try:
        check_documents(tuple(sorted(starts)))
    except ValueError as error:
        return [str(error)]
    return []
