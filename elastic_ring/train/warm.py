"""Warming a spare: everything that is slow the first time is done once, on something tiny.

The user's model is built on the meta device only; a spare must not hold a whole model in memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastic_ring.attention.kernels.table import select
from elastic_ring.attention.layout import make_layout
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.schedule import plan
from elastic_ring.state.shard import Shard, digest_of
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.wrap import local_params

WIDTH = 8


def warm_up(task: TrainingTask) -> None:
    """Import, build, wrap, step and pack once. Uses a process group of one rank and leaves none behind."""
    select(torch.device("cpu"), torch.float32, 64, deterministic=True)
    with torch.device("meta"):
        task.model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _one_step(DeviceMesh("cpu", [0]))
    finally:
        dist.destroy_process_group()


def _one_step(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    attention = RingAttention(plan(Pattern(), make_layout("zigzag", WIDTH, 1)), 0, None)
    x = model(torch.ones(1, WIDTH, WIDTH)).unsqueeze(2)
    attention(x, x, x).sum().backward()
    params = local_params(model)
    shard = Shard(0, params, torch.optim.AdamW(list(params.values()), foreach=True))
    shard.apply({name: torch.zeros_like(p) for name, p in params.items()}, 0.0)
    _, tensors = shard.pack()
    digest_of(shard.counters, tensors)
