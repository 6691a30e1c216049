"""The rings of a Ray Train worker group: dp x cp ranks of torch's default group, and the attention of a slice.

What ElasticRingTrainer's workers rebuild in a recovery is made once here: a worker group ends with its first loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.lowering.ring_plans import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.config import Timeouts
from elastic_ring.data.loader import Slice
from elastic_ring.integrations.ray_train.engine import Zero3Engine
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu.device import kernel_cache
from elastic_ring.train.attention_context import attention_of, batch_of
from elastic_ring.train.startup.check import check_model
from elastic_ring.train.startup.kernels import KernelAgreement
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.startup.warm import attention_shapes
from elastic_ring.train.task import Batch, TrainingTask


class Rings:
    """This rank's ring, its layout and its attention."""

    def __init__(self, task: TrainingTask, mesh: Mesh, device: torch.device) -> None:
        """Collective over torch's default group, which has `mesh.size` ranks."""
        self.mesh, self.device = mesh, device
        self.coordinate = mesh.coordinate(dist.get_rank())
        groups = [_group(mesh.ring(dp_rank), device) for dp_rank in range(mesh.dp)]
        self.ring: Any = groups[self.coordinate.dp_rank] if mesh.cp > 1 else None
        if device.type == "cuda" and self.ring is not None:
            # NCCL connects at a group's first operation, for which all its ranks must come: not every hop has them all.
            dist.all_reduce(torch.zeros(1, device=device), group=self.ring)
        self.task = _agreed(task, device)
        self.layout = Layouts(self.task).choice(mesh.cp, device.type).layout
        self._buffers, self._plans = HopBuffers(), PlanCache()
        self._kernel_cache = kernel_cache() if device.type == "cuda" else None

    def batch(self, piece: Slice) -> Batch:
        """One sequence's slice with the ring's attention, for a loss function."""
        attention = attention_of(
            self.task,
            piece,
            self.layout,
            self.coordinate.cp_rank,
            self.ring,
            RingOptions(cache_dir=self._kernel_cache, buffers=self._buffers),
            plans=self._plans,
        )
        return batch_of(piece, attention, self.device)

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks, in fp64. Collective."""
        summed = self.add(torch.tensor(values, dtype=torch.float64))
        return summed.tolist()

    def add(self, values: Tensor) -> Tensor:
        summed = values.to(self.device)
        dist.all_reduce(summed)
        return summed

    def check(self, engine: Zero3Engine, source: Any) -> None:
        """Whether the model attends to all of the sequence, by the first of `source`. Collective.

        Raises ModelRefused.
        """
        groups = SimpleNamespace(
            mesh=self.mesh,
            global_rank=dist.get_rank(),
            ring=self.ring,
            check=lambda: None,
            launching=nullcontext,
            shard=SimpleNamespace(allreduce=self._add_over_a_ring, size=dist.get_world_size),
        )
        state = SimpleNamespace(
            model=engine.module,
            loader=SimpleNamespace(source=source),
            device=self.device,
            options=SimpleNamespace(kernel_cache=self._kernel_cache),
        )
        check_model(self.task, groups, state, engine.gradients_of)

    def _add_over_a_ring(self, tensors: Sequence[Tensor]) -> Any:
        """Sums that all rings have alike; the shards of one parameter lie on all ranks."""
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self.mesh.dp
        return SimpleNamespace(wait=lambda: None)


def _group(ranks: Sequence[int], device: torch.device) -> Any:
    options = None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True  # hops must not wait for the blocks of a kernel that is running
    limit = timedelta(seconds=Timeouts().collective_s)
    return dist.new_group(list(ranks), timeout=limit, pg_options=options)


def _agreed(task: TrainingTask, device: torch.device) -> TrainingTask:
    """The task with one attention kernel for all ranks; CPUs have the same one anyway."""
    if device.type == "cpu":
        return task
    kernels = KernelAgreement(task, device.type, kernel_cache())
    kernels.look(attention_shapes(task))
    return kernels.settle(task, dist.new_group(backend="gloo"), holds=False)
