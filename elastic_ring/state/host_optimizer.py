"""An optimizer's step whose state waits in host memory and visits the device in buckets, a few parameters at a time.

The step is the optimizer's own, on the device: each parameter gets the bits that it gets when the state stays there. On
a CPU the copies are plain ones. Nothing here knows what the state means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_ring.state import pinned

BUCKET_ELEMENTS = 32 << 20


def step_from_host(
    optimizer: Optimizer, gradients: Mapping[Tensor, Tensor], device: torch.device, *, with_params: bool = False
) -> None:
    """One step on `device` with the gradient of each parameter, which is there; `with_params`: parameters are not, and
    visit it, too. All tensors of the state are in host memory before and after.

    `optimizer` must treat each parameter by itself, whatever others a step has, as AdamW does. What visits for at most
    two buckets is on the device at a time. Returns once all of it is in host memory again.
    """
    way_back = _WayBack(device)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for bucket in _buckets([param for group in groups for param in group]):
        waiting = {param: optimizer.state.get(param, {}) for param in bucket}
        visitors = {param: _on(device, param) if with_params else param for param in bucket}
        for param, visitor in visitors.items():
            visitor.grad = gradients[param]
            if waiting[param]:  # else the optimizer makes it, on the device
                optimizer.state[visitor] = {key: _on(device, value) for key, value in waiting[param].items()}
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [visitors[param] for param in params if param in visitors]
        optimizer.step()
        for param, visitor in visitors.items():
            visitor.grad = None
            state = optimizer.state.pop(visitor) if with_params else optimizer.state[param]
            optimizer.state[param] = way_back.take_state(state, waiting[param])
            if with_params:
                way_back.take(visitor, param)
        way_back.begin()
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
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

    def take(self, value: Tensor, place: Tensor) -> Tensor:
        """`place`, to which `value` will be copied."""
        self._next.append((place, value))
        return place

    def take_state(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter as it will be in host memory; reuses the memory of `before` if it is pinned."""
        return {
            key: self.take(value, self._place_for(value, before.get(key))) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def _place_for(self, value: Tensor, before: Any) -> Tensor:
        """Host memory that nobody else reads; what came from a peer or a file is not pinned, and copied slowly."""
        fits = isinstance(before, Tensor) and (before.shape, before.dtype) == (value.shape, value.dtype)
        if fits and not before.is_cuda and (self._stream is None or before.is_pinned()):
            return before
        if self._stream is None:
            return torch.empty(value.shape, dtype=value.dtype)
        return pinned.empty(value.numel() * value.element_size()).view(value.dtype).view(value.shape)

    def begin(self) -> None:
        """Copy the taken state, once the previous copy has arrived."""
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
