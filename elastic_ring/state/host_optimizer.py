"""An optimizer step whose state is in host memory and visits the device in buckets, a few parameters at a time.

The optimizer computes it on the device: bits are the same as with its state there. Nothing here depends on the state's
meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_ring.state import pinned

BUCKET_ELEMENTS = 32 << 20


def step_from_host(
    optimizer: Optimizer, gradients: Mapping[Tensor, Tensor], device: torch.device, *, with_params: bool = False
) -> None:
    """Take one step on `device`, which has the gradients. All tensors of the state are in host memory before and after,
    with `with_params` the parameters, too.

    `optimizer` must treat each parameter independently of the others, as AdamW does. At most two buckets are on the
    device at a time. Returns once all of the state is in host memory again.
    """
    way_back = _WayBack(device)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for bucket in batched((param for group in groups for param in group), BUCKET_ELEMENTS):
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
                way_back.queue.append((param, visitor))
        way_back.begin()
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = params
    way_back.finish()


def batched(tensors: Iterable[Tensor], limit_elements: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of at most so many elements in all, or a single larger one."""
    batch: list[Tensor] = []
    for tensor in tensors:
        if batch and sum(other.numel() for other in batch) + tensor.numel() > limit_elements:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True, copy=True) if isinstance(value, Tensor) else value


class _WayBack:
    """Copies from the device to host memory; from a GPU concurrently with the next bucket's copy and step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.queue: list[tuple[Tensor, Tensor]] = []  # (host memory, tensor on the device)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._arrived: Any = None  # the event behind those under way

    def take_state(self, state: Mapping[str, object], before: Mapping[str, object]) -> dict[str, object]:
        """Queue copies of one parameter's state; returns it in host memory, that of `before` where it fits."""
        places = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                place = before.get(key)
                # State from a peer or a file is not pinned, and would be copied slowly.
                fits = isinstance(place, Tensor) and (place.shape, place.dtype) == (value.shape, value.dtype)
                is_fast = isinstance(place, Tensor) and (self._stream is None or place.is_pinned())
                if not isinstance(place, Tensor) or place.is_cuda or not (fits and is_fast):
                    place = pinned.empty_like(value)
                self.queue.append((place, value))
                places[key] = place
        return places

    def begin(self) -> None:
        """Start the queued copies, once the previous ones have arrived."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self._stream.device)
            if self._arrived is not None:
                here.wait_event(self._arrived)  # its memory on the device is used again by this stream
            self._stream.wait_stream(here)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for place, value in self.queue:
                place.copy_(value, non_blocking=True)
        if self._stream is not None:
            self._arrived = self._stream.record_event()
        self._under_way, self.queue = self.queue, []

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._under_way = []
