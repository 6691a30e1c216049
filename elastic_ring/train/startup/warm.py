"""Warms up a worker: does everything once that is slow the first time, on tiny inputs.

The user's model is built on the meta device only; a spare must not hold a whole model in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.kernels.verify import warm_up_kernels
from elastic_ring.attention.layers import of_layer
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.warmup import warm_up_lengths, warm_up_sums, warm_up_variants
from elastic_ring.data.loader import joined, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.sampling.order import pass_sizes
from elastic_ring.model import fp8
from elastic_ring.state.device_sums import squared_norm
from elastic_ring.state.shard import Shard, digest_of
from elastic_ring.train.memory import is_out_of_memory
from elastic_ring.train.startup.compilations import EVENTS
from elastic_ring.train.startup.kernels import chosen_kernels
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import TrainingTask, attention_of
from elastic_ring.train.wrap import largest_list, local_params, meta_model

log = logging.getLogger(__name__)

WIDTH = 8


def warm_up(task: TrainingTask) -> None:
    """Import, build, wrap, step and pack once. Uses a process group of one rank and destroys it."""
    select(torch.device("cpu"), torch.float32, 64, deterministic=True)
    meta_model(task)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _one_step(DeviceMesh("cpu", [0]), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def warm_up_device(
    task: TrainingTask,
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]],
    cp: int,
    cache_dir: Path | None,
    kernels: dict[str, str],
    *,
    first_group: bool = True,
) -> str:
    """Warm up one GPU: its context, NCCL's first group, the kernels for attention of these `shapes` (query heads, K/V
    heads, head dim) in each length class. Kernels that are compiled by length run for each length of a ring of `cp`
    ranks; with `cp` 0 nothing large is allocated. Without `first_group`, in a process that has groups, no other group
    is made, and the device may be a CPU.

    The chosen kernels are added to `kernels` first; with a proof in `cache_dir` choosing allocates nothing. Returns the
    wrong result of a chosen kernel on this GPU, empty if there is none. The calling thread's current device becomes
    `device`. Leaves no group and no cached memory behind, whatever is raised.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        if task.step.linears == "fp8":
            with compiling_for("linear layers in 8 bits"):
                layers = (task.units or largest_list)(meta_model(task))
                fp8.warm_up(device, getattr(torch, task.step.param_dtype), fp8.use_fp8(layers))
        proofs, by_length, dense = _choose(task, device, shapes, cache_dir, kernels)
        if first_group:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            try:
                _one_step(DeviceMesh("cuda", [0]), device)
                torch.cuda.synchronize(device)
            finally:
                dist.destroy_process_group()
        for name, proof in proofs.items():
            with compiling_for(name):
                failure = proof()
            log.info("%s: %s, %s", device, name, failure or "warm")
            if failure is not None:
                return f"{name}: {failure}"
        for shape, kernel in dense.items():
            begun, group, dtype = time.monotonic(), shape[0] // shape[1], getattr(torch, task.step.param_dtype)
            with compiling_for(f"attention kernel {kernel.name}"):
                num_tiles = warm_up_variants(kernel, str(device), dtype, shape[2], group, cp, task.step.context_tokens)
            warm_up_sums(device, dtype, shape)
            if on_gpu:
                torch.cuda.synchronize(device)
            log.info(
                "%s: %s ran %d tiles of all length classes in %.1f s",
                device,
                kernel.name,
                num_tiles,
                time.monotonic() - begun,
            )
        if cp:
            for shape in by_length:
                with compiling_for(f"attention over {task.step.context_tokens} tokens"):
                    warm_up_attention(task, device, shape, cp, cache_dir)
        elif by_length:
            log.info(
                "%s is shared with other workers: no long sequence in the warm-up; compiled kernels come from disk",
                device,
            )
    finally:
        if on_gpu:
            torch._C._cuda_clearCublasWorkspaces()  # or each GPU keeps one
            torch.cuda.empty_cache()
    return ""


@contextmanager
def compiling_for(subject: str) -> Iterator[None]:
    """Announce compilations inside this context as being for `subject`."""
    EVENTS.attach()
    EVENTS.subject = subject
    try:
        yield
    finally:
        EVENTS.subject = ""


def _choose(
    task: TrainingTask,
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]],
    cache_dir: Path | None,
    kernels: dict[str, str],
) -> tuple[dict[str, Callable[[], str | None]], list[tuple[int, int, int]], dict[tuple[int, int, int], Kernel]]:
    """Choose the kernels for attention of these shapes, and enter their names into `kernels`.

    Returns the tests that also load them, the shapes whose kernels are compiled by length, and the dense kernels.
    """
    dtype = getattr(torch, task.step.param_dtype)
    proofs: dict[str, Callable[[], str | None]] = {}
    by_length: dict[tuple[int, int, int], None] = {}
    dense: dict[tuple[int, int, int], Kernel] = {}
    for shape, cover, kernel in chosen_kernels(task, shapes, device, cache_dir):
        (num_heads, num_kv_heads, head_dim), sparse = shape, "" if cover == "causal" else "sparse "
        masked = "masked " if cover == "masked_tables" else ""
        of_shape = f"{num_heads}/{num_kv_heads} heads of {head_dim}"
        kernels[f"{masked}{sparse}attention, {of_shape}"] = (
            kernel.name if sparse else f"{kernel.name} {kernel.version()}"
        )
        by_length.update({shape: None} if kernel.by_length else {})
        dense.update({} if sparse else {shape: kernel})
        proofs[f"{sparse}attention kernel {kernel.name}, {of_shape}"] = partial(
            warm_up_kernels, kernel, str(device), dtype, head_dim, num_heads // num_kv_heads
        )
    return proofs, list(by_length), dense


def warm_up_attention(
    task: TrainingTask, device: torch.device, shape: tuple[int, int, int], cp: int, cache_dir: Path | None = None
) -> None:
    """Run attention of every rank of a ring of `cp` once, for sequences that are one document, and for each number of
    them that a pass may have.

    `shape`: query heads, K/V heads, head dim. Running out of memory on a shared GPU is not an error.
    """
    layouts, num_tokens = Layouts(task), task.step.context_tokens
    sample = Sample(tokens=np.zeros(num_tokens + 1, dtype=np.int64), document_starts=(0,))

    def attentions(layout: Layout, size: int, cp_rank: int, group: Group | None) -> list[Any]:
        whole = layouts.of_pass(cp, device.type, 1)
        piece = joined([slice_sample(sample, whole, cp_rank, sample_id=0, index_in_batch=0)] * size, num_tokens)
        attention = attention_of(task, piece, layout, cp_rank, group, RingOptions(cache_dir=cache_dir))
        return [of_layer(attention, layer) for layer in kinds_of_layers(task.pattern)]

    dtype, num_ranks = getattr(torch, task.step.param_dtype), 0
    try:
        for size in pass_sizes(task.step):
            layout = layouts.of_pass(cp, device.type, size)
            num_ranks += warm_up_lengths(partial(attentions, layout, size), layout, shape, dtype, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("%s: too little memory to warm up attention beside others: %s", device, error)
        return
    log.info("%s: attention warmed up for the slices of %d ranks", device, num_ranks)


def kinds_of_layers(pattern: LayerPatterns | None) -> tuple[int, ...]:
    """One layer of each group of rules, without groups that content routes: their lengths are known at run time."""
    if pattern is None:
        return (0,)
    named = {layer for group in pattern.groups for layer in group.layers or ()}
    unnamed = next(layer for layer in range(len(named) + 1) if layer not in named)
    planned = [group for group in pattern.groups if not any(rule.awaits_content for rule in group.rules)]
    return tuple(unnamed if group.layers is None else group.layers[0] for group in planned)


def _one_step(mesh: DeviceMesh, device: torch.device) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    on_gpu = device.type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32, cast_forward_inputs=on_gpu
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    attention = RingAttention(
        plan(Pattern(), make_layout("zigzag", WIDTH, 1)), 0, None, RingOptions(backend="reference")
    )
    x = model(torch.ones(1, WIDTH, WIDTH, device=device)).unsqueeze(2)
    attention(x, x, x).sum().backward()
    params = local_params(model)
    shard = Shard(0, params, torch.optim.AdamW(list(params.values()), foreach=not on_gpu, fused=on_gpu))
    squared_norm(torch.ones(WIDTH, device=device))
    shard.apply({name: torch.zeros_like(p) for name, p in params.items()}, 0.0)
    _, tensors = shard.pack()
    digest_of(shard.counters, tensors)
