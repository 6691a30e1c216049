"""The rings of a Ray Train worker group: dp x cp ranks of torch's default group, and the attention of a slice.

What ElasticRingTrainer's workers rebuild in a recovery is made once here: a worker group ends with its first loss.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.plan.plan_cache import LRUCache
from elastic_ring.attention.ring import NUM_PLANS
from elastic_ring.config import Timeouts
from elastic_ring.data.loader import Slice
from elastic_ring.mesh import Mesh
from elastic_ring.train.attention_context import attention_of, batch_of
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
        limit = timedelta(seconds=Timeouts().collective_s)
        groups = [dist.new_group(list(mesh.ring(dp_rank)), timeout=limit) for dp_rank in range(mesh.dp)]
        self.ring: Any = groups[self.coordinate.dp_rank] if mesh.cp > 1 else None
        self.task = _agreed(task, device)
        self.layout = Layouts(self.task).choice(mesh.cp, device.type).layout
        self._buffers, self._plans = HopBuffers(), LRUCache(NUM_PLANS)

    def batch(self, piece: Slice) -> Batch:
        """One sequence's slice with the ring's attention, for a loss function."""
        attention = attention_of(
            self.task, piece, self.layout, self.coordinate.cp_rank, self.ring, buffers=self._buffers, plans=self._plans
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


def _agreed(task: TrainingTask, device: torch.device) -> TrainingTask:
    """The task with one attention kernel for all ranks; CPUs have the same one anyway."""
    if device.type == "cpu":
        return task
    kernels = KernelAgreement(task, device.type, None)
    kernels.look(attention_shapes(task))
    return kernels.settle(task, dist.new_group(backend="gloo"), holds=False)
