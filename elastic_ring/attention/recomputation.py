"""Activation checkpointing without a second run of attention: what a ring gave in forward, it gives again in backward.

An attention is most of a long context's work, its result a small part of what a layer would keep. No kernel and no
hop in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from elastic_ring.attention.parked import Parked

Result = tuple[torch.Tensor, torch.Tensor, int]
"""out (B, S, H, D), lse (B, S, H) as backward wants it, and the call's number."""
Kept = tuple[Parked, Parked, int]
"""The same while it waits."""


class KeepsResults:
    """The base of rings: `_forward` runs `_run_forward`, or gives what an earlier run of the same call gave."""

    _record: list[Kept] | None = None
    _replay: Iterator[Kept] | None = None

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What `torch.utils.checkpoint` takes as `context_fn`: `out` and `lse` of the calls in the first context are
        kept and given again, call by call, in the second, whose kernels and hops need not run once more. With
        `offload` they wait in host memory."""
        kept: list[Kept] = []
        return self.recording(kept, offload=offload), self.replaying(kept)

    @contextmanager
    def recording(self, kept: list[Kept], *, offload: bool = False) -> Iterator[None]:
        outer, self._record = self._record, kept
        try:
            yield
        finally:
            self._record = outer
        for *tensors, _ in kept if offload else ():
            for tensor in tensors:
                tensor.leave()

    @contextmanager
    def replaying(self, kept: list[Kept]) -> Iterator[None]:
        outer, self._replay = self._replay, iter(kept)
        try:
            yield
        finally:
            self._replay = outer

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        if self._replay is not None:
            out, lse, call_index = next(self._replay)
            return out.tensor().detach(), lse.tensor(), call_index
        result = self._run_forward(q, k, v, scale)
        if self._record is not None:
            self._record.append((Parked(result[0].detach()), Parked(result[1]), result[2]))
        return result

    def _run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        raise NotImplementedError
