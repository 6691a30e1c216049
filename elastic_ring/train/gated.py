"""FSDP2's exchanges, launched through the gate that an abort shuts.

An abort frees NCCL's communicators. Where a thread is just then in the middle of launching something on one, its later
operations, of any group, may never be launched. So nothing is launched once the abort has begun, and the abort waits
for what is being launched.
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

Launching = Callable[[], AbstractContextManager[None]]
"""Entered round each launch; raises GroupAborted once the groups have been given up."""


class GatedAllGather(DefaultAllGather):
    """As torch's own, inside `launching`."""

    def __init__(self, launching: Launching) -> None:
        super().__init__()
        self._launching = launching

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._launching():
            return super().__call__(output_tensor, input_tensor, group, async_op)


class GatedReduceScatter(DefaultReduceScatter):
    """As torch's own, inside `launching`."""

    def __init__(self, launching: Launching) -> None:
        super().__init__()
        self._launching = launching

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        with self._launching():
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def gate(model: nn.Module, launching: Launching) -> None:
    """Have all of a wrapped module's exchanges go through `launching`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(GatedAllGather(launching))
            module.set_custom_reduce_scatter(GatedReduceScatter(launching))
