"""FSDP2's collectives, launched under the gate that an abort closes.

An abort frees NCCL's communicators. If a thread is launching an operation on one of them at that moment, its later
operations, of any group, may never be launched. So no launch starts once the abort has begun, and the abort waits for
the launches under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

Launching = Callable[[], AbstractContextManager[None]]
"""A context for each launch; raises GroupAborted once the groups have been aborted."""


class ExchangeWaits:
    """How long the host has waited for FSDP2's exchanges, in seconds. On a GPU it does not wait."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - begun


class TimedWork(dist.Work):
    """A collective under way on the host, whose wait is counted."""

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
