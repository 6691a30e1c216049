"""FSDP2's collectives, launched inside a gate that an abort closes.

An abort frees NCCL's communicators. If a thread is launching an operation on one of them at that moment, its later
operations, of any group, may never be launched. So no launch starts once the abort has begun, and the abort waits for
the launches under way. Imported only where a module is wrapped: FSDP2 takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from elastic_ring.train.generation import ExchangeWaits

Launching = Callable[[], AbstractContextManager[None]]
"""A context for each launch; raises GroupAborted once the groups have been aborted."""


class TimedWork(dist.Work):
    """A collective under way on the host; `waits` counts its wait."""

    def __init__(self, work: dist.Work, waits: ExchangeWaits) -> None:
        super().__init__()
        self._work, self._waits = work, waits

    def wait(self, *timeout: Any) -> bool:
        with self._waits.waiting():
            return self._work.wait(*timeout)


class AbortableAllGather(DefaultAllGather):
    """torch's collective, launched inside `launching`."""

    def __init__(self, launching: Launching, waits: ExchangeWaits | None = None) -> None:
        super().__init__()
        self._launching, self._waits = launching, waits or ExchangeWaits()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if output_tensor.is_cuda:
            with self._launching():
                return super().__call__(output_tensor, input_tensor, group, async_op)
        with self._launching(), self._waits.waiting():
            work = super().__call__(output_tensor, input_tensor, group, async_op)
        return TimedWork(work, self._waits) if work is not None else None


class AbortableReduceScatter(DefaultReduceScatter):
    """torch's collective, launched inside `launching`."""

    def __init__(self, launching: Launching, waits: ExchangeWaits | None = None) -> None:
        super().__init__()
        self._launching, self._waits = launching, waits or ExchangeWaits()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        with self._launching(), self._waits.waiting():
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def make_abortable(model: nn.Module, launching: Launching, waits: ExchangeWaits | None = None) -> None:
    """Launch all collectives of an FSDP2-wrapped module inside `launching`; `waits` counts the waits."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AbortableAllGather(launching, waits))
            module.set_custom_reduce_scatter(AbortableReduceScatter(launching, waits))
