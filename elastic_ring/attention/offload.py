"""A tensor that waits in host memory between the forward and the backward pass.

What activation checkpointing keeps of a layer is its input (and attention's result); at long contexts that is a good
part of a GPU's memory. The way there runs beside the computation, the way back in its stream. No autograd in here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OffloadedTensor:
    """`tensor()` returns the tensor itself until `leave()`, then a new device copy with equal bits.

    `leave` starts the copy to the host on a separate stream and drops the tensor; its memory is reused only after the
    copy is complete.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad
        self._host: Tensor | None = None
        self._copied: Any = None

    def leave(self) -> None:
        assert self._tensor is not None, "it has left already"
        tensor, self._tensor = self._tensor.detach(), None
        if self._device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        here, aside = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(aside)
        self._copied = aside.record_event()

    def tensor(self) -> Tensor:
        """A copy requires a gradient where the tensor did: what is computed from it keeps the same for backward."""
        if self._tensor is not None:
            return self._tensor
        assert self._host is not None
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        back = self._host.to(self._device, non_blocking=True, copy=True)
        return back.requires_grad_(self._needs_grad)
