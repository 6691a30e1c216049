"""An optimizer's step whose state waits in host memory and visits the device in buckets, a few parameters at a time.

The step is the optimizer's own, on the parameters' device: each parameter gets the bits that it gets when the state
stays there. On a CPU the copies are plain ones. Nothing here knows what the state means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BUCKET_ELEMENTS = 32 << 20


def step_from_host(optimizer: Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    """One step with the gradient of each parameter. All tensors of the state are in host memory before and after.

    `optimizer` must treat each parameter by itself, whatever others a step has, as AdamW does. The state of at most two
    buckets is on the device at a time. Returns once all of it is in host memory again.
    """
    way_back = _WayBack(next(iter(gradients)).device)
    for bucket in _buckets(list(gradients)):
        waiting = {param: optimizer.state.get(param, {}) for param in bucket}
        for param, state in waiting.items():
            param.grad = gradients[param]
            if state:  # else the optimizer makes it, on the device
                optimizer.state[param] = {key: _on(param.device, value) for key, value in state.items()}
        optimizer.step()
        for param, state in waiting.items():
            param.grad = None
            if param in optimizer.state:
                optimizer.state[param] = way_back.take(optimizer.state[param], state)
        way_back.begin()
    way_back.finish()


def _buckets(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of at most BUCKET_ELEMENTS in all, or a single larger one."""
    bucket: list[Tensor] = []
    for param in params:
        if bucket and sum(other.numel() for other in bucket) + param.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(param)
    if bucket:
        yield bucket


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True, copy=True) if isinstance(value, Tensor) else value


class _WayBack:
    """Copies from the device to host memory; from a GPU beside the next bucket's way there and its step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: list[tuple[Tensor, Tensor]] = []  # (host memory, tensor on the device)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._arrived: Any = None  # the event behind those under way

    def take(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter as it will be in host memory, in that of `before` if it is pinned."""
        found = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[key] = self._place_for(value, before.get(key))
                self._next.append((found[key], value))
        return found

    def _place_for(self, value: Tensor, before: Any) -> Tensor:
        """Host memory that nobody else reads; what came from a peer or a file is not pinned, and copied slowly."""
        fits = isinstance(before, Tensor) and (before.shape, before.dtype) == (value.shape, value.dtype)
        if fits and not before.is_cuda and (self._stream is None or before.is_pinned()):
            return before
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=self._stream is not None)

    def begin(self) -> None:
        """Copy what was taken, once that of the time before has arrived."""
        if self._stream is None:
            self._copy()
            return
        here = torch.cuda.current_stream(self._stream.device)
        if self._arrived is not None:
            here.wait_event(self._arrived)  # its memory on the device is used again by this stream
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            self._copy()
            self._arrived = self._stream.record_event()

    def _copy(self) -> None:
        for place, value in self._next:
            place.copy_(value, non_blocking=True)
        self._under_way, self._next = self._next, []

    def finish(self) -> None:
        """Until all has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
        self._under_way = []
