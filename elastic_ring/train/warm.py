"""Warming a spare: everything that is slow the first time is done once, on something tiny.

The user's model is built on the meta device only; a spare must not hold a whole model in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastic_ring.attention import block_proof
from elastic_ring.attention.block_kernels import SparseKernel, select_sparse, sparse_form
from elastic_ring.attention.exchange import Group
from elastic_ring.attention.kernels.backend import Backend
from elastic_ring.attention.kernels.self_test import rehearse
from elastic_ring.attention.kernels.table import select
from elastic_ring.attention.layers import LayerPatterns, of_layer
from elastic_ring.attention.layout import make_layout
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.rehearsal import rehearse_lengths
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.schedule import plan
from elastic_ring.data.loader import slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.state.device_squares import squared_norm
from elastic_ring.state.shard import Shard, digest_of
from elastic_ring.train.compiling import rehearse_model
from elastic_ring.train.task import Batch, TrainingTask
from elastic_ring.train.transaction import attention_of
from elastic_ring.train.wrap import local_params

log = logging.getLogger(__name__)

WIDTH = 8
NUM_PROBE_TOKENS = 16


def warm_up(task: TrainingTask) -> None:
    """Import, build, wrap, step and pack once. Uses a process group of one rank and leaves none behind."""
    select(torch.device("cpu"), torch.float32, 64, deterministic=True)
    with torch.device("meta"):
        task.model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _one_step(DeviceMesh("cpu", [0]), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def warm_up_device(
    task: TrainingTask, device: torch.device, shapes: Sequence[tuple[int, int, int]], cp: int
) -> None:
    """The same on one GPU: its context, NCCL's first group there, the kernels for attention of these `shapes`, for each
    length that a ring of `cp` ranks brings where they are compiled by length, and what the model compiles.

    The calling thread's current device becomes `device`. Leaves no group and no cached memory behind.
    """
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _one_step(DeviceMesh("cuda", [0]), device)
        torch.cuda.synchronize(device)
    finally:
        dist.destroy_process_group()
    for shape in shapes:
        if any(kernel.by_length for kernel in _warm_kernels(task, device, shape)):
            rehearse_attention(task, device, shape, cp)
    rehearse_model(task, device, cp)
    torch.cuda.empty_cache()


def _warm_kernels(
    task: TrainingTask, device: torch.device, shape: tuple[int, int, int]
) -> list[Backend | SparseKernel]:
    """The kernels that attention of this shape (query heads, K/V heads, head dim) will choose, loaded."""
    step, dtype = task.step, getattr(torch, task.step.param_dtype)
    group, head_dim = shape[0] // shape[1], shape[2]
    warmed: list[Backend | SparseKernel] = []
    if task.pattern is None or task.pattern.any_dense:
        backend = select(device, dtype, head_dim, step.deterministic, step.kernel or None, group=group)
        failure = rehearse(backend, str(device), dtype, head_dim, group)
        log.info("%s: attention kernel %s, %s", device, backend.name, failure or "warm")
        warmed.append(backend)
    if task.pattern is not None and task.pattern.any_sparse:
        kernel = select_sparse(head_dim, dtype, step.deterministic, sparse_form(step.kernel))
        failure = block_proof.rehearse(kernel, head_dim, dtype, str(device), group)
        log.info("%s: sparse attention kernel %s, %s", device, kernel.name, failure or "warm")
        warmed.append(kernel)
    return warmed


def rehearse_attention(task: TrainingTask, device: torch.device, shape: tuple[int, int, int], cp: int) -> None:
    """Attention of every place on a ring of `cp` ranks, once, for a sequence that is one document.

    `shape`: query heads, K/V heads, head dim. Too little memory on a GPU that others use is no error.
    """
    layout = make_layout(task.step.layout, task.step.context_tokens, cp)
    sample = Sample(tokens=np.zeros(task.step.context_tokens + 1, dtype=np.int64), document_starts=(0,))

    def attentions(cp_rank: int, group: Group | None) -> list[Any]:
        piece = slice_sample(sample, layout, cp_rank, sample_id=0, index_in_batch=0)
        attention = attention_of(task, piece, layout, cp_rank, group)
        return [of_layer(attention, layer) for layer in kinds_of_layers(task.pattern)]

    dtype = getattr(torch, task.step.param_dtype)
    try:
        num_ranks = rehearse_lengths(attentions, layout, shape, dtype, device)
    except torch.OutOfMemoryError as error:
        log.warning("%s: too little memory to rehearse attention beside others: %s", device, error)
        return
    log.info("%s: attention rehearsed for the slices of %d ranks", device, num_ranks)


def kinds_of_layers(pattern: LayerPatterns | None) -> tuple[int, ...]:
    """One layer for each group of rules."""
    if pattern is None:
        return (0,)
    named = {layer for group in pattern.groups for layer in group.layers or ()}
    others = next(layer for layer in range(len(named) + 1) if layer not in named)
    return tuple(others if group.layers is None else group.layers[0] for group in pattern.groups)


def attention_shapes(task: TrainingTask) -> tuple[tuple[int, int, int], ...]:
    """(query heads, K/V heads, head dim) of the model's attention calls, each once, found without memory: by its
    loss on the meta device, which ends where it first looks at a value."""
    found: dict[tuple[int, int, int], None] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found[q.size(2), k.size(2), q.size(3)] = None
        return torch.empty_like(q)

    with torch.device("meta"), torch.no_grad():
        model = task.model()
        integers = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.int64)
        try:
            task.loss(model, Batch(integers, integers, integers, integers.int(), attention))
        except Exception as error:  # a value was read, or the user's code wants more than shapes
            log.info("the pass on the meta device ended after %d kinds of attention: %s", len(found), error)
    return tuple(found)


def _one_step(mesh: DeviceMesh, device: torch.device) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    on_gpu = device.type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32, cast_forward_inputs=on_gpu
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    attention = RingAttention(plan(Pattern(), make_layout("zigzag", WIDTH, 1)), 0, None, backend="reference")
    x = model(torch.ones(1, WIDTH, WIDTH, device=device)).unsqueeze(2)
    attention(x, x, x).sum().backward()
    params = local_params(model)
    shard = Shard(0, params, torch.optim.AdamW(list(params.values()), foreach=not on_gpu, fused=on_gpu))
    squared_norm(torch.ones(WIDTH, device=device))
    shard.apply({name: torch.zeros_like(p) for name, p in params.items()}, 0.0)
    _, tensors = shard.pack()
    digest_of(shard.counters, tensors)
