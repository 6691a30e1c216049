"""Activation checkpointing without recomputing attention: a ring's forward results are replayed in backward.

At long contexts attention is most of the work, and its result a small part of a layer's activations. Results, and the
layers' inputs, may wait in host memory: the way there runs beside the computation, the way back in its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class OffloadedTensor:
    """`tensor()` returns the tensor itself until `leave()`, then a new device copy with equal bits.

    `leave` starts the copy to the host on a separate stream and drops the tensor; its memory is reused only after the
    copy is complete.
    """

    def __init__(self, tensor: torch.Tensor, num_readers: int = 1) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._device = tensor.device
        self._needs_grad = tensor.requires_grad
        self._host: torch.Tensor | None = None
        self._copied: Any = None
        self._back: torch.Tensor | None = None  # until `num_readers` have had it
        self._num_readers = self._num_left = num_readers

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

    def tensor(self) -> torch.Tensor:
        """The tensor, or its device copy, which requires a gradient as the tensor did; `num_readers` calls after
        `leave` share one copy."""
        if self._tensor is not None:
            return self._tensor
        assert self._host is not None
        if self._back is None:
            if self._copied is not None:
                torch.cuda.current_stream(self._device).wait_event(self._copied)
            copy = self._host.to(self._device, non_blocking=True, copy=True)
            self._back, self._num_left = copy.requires_grad_(self._needs_grad), self._num_readers
        back, self._num_left = self._back, self._num_left - 1
        if not self._num_left:
            self._back = None
        return back


class Start:
    """The input of a unit of a layer: `x` as FSDP2 gives it to the unit in forward, in backward the `kept` copy.

    `contexts` as `torch.utils.checkpoint` takes them."""

    def __init__(self, kept: OffloadedTensor, contexts: Contexts = noop_context_fn) -> None:
        self._kept, self._contexts = kept, contexts

    def recomputed(self, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """compute(x), keeping nothing. Inside a unit's forward, so that FSDP2's hooks see one call."""
        inputs: list[torch.Tensor] = [x]  # taken by the first run
        # There is no dropout, so no state of random numbers.
        out: torch.Tensor = checkpoint(
            lambda: compute(inputs.pop() if inputs else self._kept.tensor()),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._contexts,
        )
        return out


class Result(NamedTuple):
    """out (B, S, H, D), lse (B, S, H) for backward, the call's number, and fetched keys that backward reuses."""

    out: torch.Tensor
    lse: torch.Tensor
    call_index: int
    keys: torch.Tensor | None = None


class SavedResult(NamedTuple):
    """A `Result` kept for the backward pass."""

    out: OffloadedTensor
    lse: OffloadedTensor
    call_index: int
    keys: OffloadedTensor | None


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for the time of the block."""
    outer = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, outer)


class RecomputableRing:
    """Base class of rings: `_forward` runs `run_forward`, or replays the saved result of the same call."""

    _record: list[SavedResult] | None = None
    _replay: Iterator[SavedResult] | None = None

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """A `context_fn` of `torch.utils.checkpoint`: `out` and `lse` of the calls in the first context are kept, with
        fetched keys that wait for backward, and replayed, call by call, in the second, whose kernels and hops need not
        run once more. With `offload` they wait in host memory."""
        kept: list[SavedResult] = []
        return self.recording(kept, offload=offload), self.replaying(kept)

    @contextmanager
    def recording(self, kept: list[SavedResult], *, offload: bool = False) -> Iterator[None]:
        with swapped(self, "_record", kept):
            yield
        for each in kept if offload else ():
            for offloaded in (each.out, each.lse, each.keys):
                if offloaded is not None:
                    offloaded.leave()

    def replaying(self, kept: list[SavedResult]) -> AbstractContextManager[None]:
        return swapped(self, "_replay", iter(kept))

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, up: torch.Tensor | None = None
    ) -> Result:
        if self._replay is not None:
            kept = next(self._replay)
            keys = None if kept.keys is None else kept.keys.tensor()
            return Result(kept.out.tensor().detach(), kept.lse.tensor(), kept.call_index, keys)
        result = self.run_forward(q, k, v, scale, up)
        if self._record is not None:
            out, lse = OffloadedTensor(result.out.detach()), OffloadedTensor(result.lse)
            fetched = None if result.keys is None else OffloadedTensor(result.keys)
            self._record.append(SavedResult(out, lse, result.call_index, fetched))
        return result

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, up: torch.Tensor | None = None
    ) -> Result:
        raise NotImplementedError
