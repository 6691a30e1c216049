"""The gradient of a step: the accumulation of each parameter's shares, and their sum over the rings.

A share arrives when autograd has computed it, or when FSDP2 has summed it over the ring. It is added to one flat buffer
at once, or with a few others, so that little is held twice. In the last pass of a step each bucket of the buffer may be
summed over the rings while the backward pass goes on (Li et al. 2020, arXiv:2006.15704). All ranks sum the buckets in
the same order, from the end of the model to its beginning.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.errors import UserCodeFailed
from elastic_ring.train.optim import is_balance
from elastic_ring.train.wrap import local_of

log = logging.getLogger(__name__)

BUCKET_ELEMENTS = 16 << 20
BUCKET_ELEMENTS_ON_DEVICE = 64 << 20
TOGETHER_BYTES = 64 << 20
"""Shares of whole parameters are moved to the buffer together, in one launch: a launch for each parameter costs the
host more than the copies take."""

Sum = Callable[[Tensor], Any]
"""Starts the sum of a tensor over the rings, in place; returns its work."""


@dataclass
class Gradient:
    """The gradient of this rank's slices: one flat fp32 buffer with a view per parameter.

    `step`: the step for which it is complete, i.e. summed over the ring (FSDP2) and over the rings by the members of
    generation `membership_id` (term, generation). A vote applies only to the gradient of the same members. `buckets`:
    ranges of the buffer, with the names of their parameters. `num_counts`: the number of its first elements that are
    experts' loads, which the gradient's norm leaves out.
    """

    flat: Tensor
    views: dict[str, Tensor]
    buckets: list[tuple[slice, frozenset[str]]]
    num_counts: int = 0
    step: int | None = None
    membership_id: tuple[int, int] = (0, 0)
    _params: dict[str, nn.Parameter] = field(default_factory=dict)
    _collects: bool = False
    _in_host: bool = False
    _written: set[str] = field(default_factory=set)
    _shares: Counter[str] = field(default_factory=Counter)  # of the last pass, by parameter
    _each_once: bool = False
    _sum: Sum | None = None
    _works: list[Any] = field(default_factory=list)
    _moving: tuple[list[Tensor], list[Tensor]] = field(
        default_factory=lambda: ([], [])
    )  # views, and their first shares
    _moving_bytes: int = 0

    @classmethod
    def like(cls, params: Mapping[str, Tensor], device: torch.device) -> Gradient:
        flat = torch.zeros(sum(p.numel() for p in params.values()), dtype=torch.float32, device=device)
        most = BUCKET_ELEMENTS_ON_DEVICE if flat.is_cuda else BUCKET_ELEMENTS
        views: dict[str, Tensor] = {}
        buckets: list[tuple[slice, frozenset[str]]] = []
        begin = end = 0
        names: list[str] = []
        for name, param in sorted(params.items(), key=lambda item: not is_balance(item[0])):  # stable
            views[name] = flat[end : end + param.numel()].view(param.shape)
            names.append(name)
            end += param.numel()
            if end - begin >= most:
                buckets.append((slice(begin, end), frozenset(names)))
                begin, names = end, []
        if end > begin:
            buckets.append((slice(begin, end), frozenset(names)))
        return cls(flat, views, buckets, sum(view.numel() for name, view in views.items() if is_balance(name)))

    # ------------------------------------------------------------ a generation

    def attach(self, model: nn.Module, *, in_host: bool) -> None:
        """Collect the gradients of `model`'s parameters from now on. `in_host`: FSDP2 keeps them in host memory, and
        they are collected at the end of the step."""
        self._params = {name: param for name, param in model.named_parameters() if name in self.views}
        self._in_host, self._each_once = in_host, False
        if not in_host:
            for name, param in self._params.items():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(partial(self._collect, name))

    def detach(self) -> None:
        """Drop the module; the buffer stays. Waits for aborted sums, at most for the group's timeout: gloo's threads
        may write to the buffer until they have ended."""
        self._params, self._collects, self._sum = {}, False, None
        self._moving, self._moving_bytes = ([], []), 0
        for work in self._works if not self.flat.is_cuda else ():
            try:
                work.wait()
            except RuntimeError as error:
                log.debug("a sum over the rings was aborted: %s", error)
        self._works.clear()

    # ------------------------------------------------------------ a step

    def begin(self) -> None:
        """Start with no shares."""
        self.step, self._collects, self._sum = None, True, None
        self._written.clear()
        self._works.clear()
        self._moving, self._moving_bytes = ([], []), 0
        for param in self._params.values():
            param.grad = None

    def begin_pass(self, beside: Sum | None = None) -> None:
        """With `beside`, in the last pass, buckets are summed as soon as they are complete, if the step before has
        shown that each parameter of this module gets its share in one piece."""
        self._shares.clear()
        self._sum = beside if self._each_once else None

    @property
    def slopes(self) -> Tensor:
        """The gradient of the loss, the part with a norm."""
        return self.flat[self.num_counts :]

    @property
    def counts(self) -> Tensor:
        return self.flat[: self.num_counts]

    def shares(self) -> list[Tensor]:
        """The shares collected so far, in the order of the parameters."""
        if self._in_host:
            return [local_of(param.grad) for param in self._params.values() if param.grad is not None]
        self._move()
        return [view for name, view in self.views.items() if name in self._written]

    def end(self) -> None:
        """All passes are over: parameters without a gradient have zeros."""
        self._collects = False
        self._each_once = set(self._shares.values()) == {1}
        for name, param in self._params.items():
            if self._in_host and param.grad is not None:
                self._add(name, param.grad)
                param.grad = None
            elif name not in self._written:
                self.views[name].zero_()
        self._move()

    def finish(self, start: Sum) -> None:
        """Wait until all buckets are summed over the rings."""
        while len(self._works) < len(self.buckets):
            self._start(start)
        for work in self._works:
            work.wait()
        self._works.clear()

    # ------------------------------------------------------------ parts

    def _collect(self, name: str, param: Tensor) -> None:
        """The parameter's hook: called in FSDP2's stream once its gradient is summed over the ring, on a ring of one
        once it is computed."""
        if not self._collects or param.grad is None:
            return
        started = self.buckets[len(self.buckets) - len(self._works) :]
        if self._sum is not None and any(name in names for _, names in started):
            raise UserCodeFailed(
                f"parameter {name} has its gradient in several pieces in this step and had it in one in the step "
                "before: a model must use its parameters equally often in each step"
            )
        self._add(name, param.grad)
        param.grad = None
        self._shares[name] += 1
        if self._sum is not None:
            while len(self._works) < len(self.buckets) and self._next[1] <= self._shares.keys():
                self._start(self._sum)

    def _add(self, name: str, grad: Any) -> None:
        view, share = self.views[name], local_of(grad)
        if share is not grad:  # FSDP2's, in a stream of its own
            view.add_(share) if name in self._written else view.copy_(share)
            self._written.add(name)
            return
        if name in self._written:
            self._move()
            view.add_(share)
            return
        self._written.add(name)
        for row, tensor in zip(self._moving, (view, share), strict=True):
            row.append(tensor)
        self._moving_bytes += share.nbytes
        if self._moving_bytes >= TOGETHER_BYTES:
            self._move()

    def _move(self) -> None:
        """Copy waiting shares to the buffer."""
        if self._moving_bytes:
            with torch.no_grad():
                torch._foreach_copy_(*self._moving)
        self._moving, self._moving_bytes = ([], []), 0

    @property
    def _next(self) -> tuple[slice, frozenset[str]]:
        return self.buckets[len(self.buckets) - 1 - len(self._works)]

    def _start(self, start: Sum) -> None:
        self._move()
        self._works.append(start(self.flat[self._next[0]]))
