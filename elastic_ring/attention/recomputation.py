"""Activation checkpointing without a second run of attention: what a ring gave in forward, it gives again in backward.

An attention is most of a long context's work, its result a small part of what a layer would keep. No kernel and no
hop in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from elastic_ring.attention.parked import Parked


class Result(NamedTuple):
    """out (B, S, H, D), lse (B, S, H) as backward wants it, the call's number, and what was fetched for it, where
    backward is not to fetch it again."""

    out: torch.Tensor
    lse: torch.Tensor
    call_index: int
    keys: torch.Tensor | None = None


class Kept(NamedTuple):
    """The same while it waits."""

    out: Parked
    lse: Parked
    call_index: int
    keys: Parked | None


class KeepsResults:
    """The base of rings: `_forward` runs `run_forward`, or gives what an earlier run of the same call gave."""

    _record: list[Kept] | None = None
    _replay: Iterator[Kept] | None = None

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What `torch.utils.checkpoint` takes as `context_fn`: `out` and `lse` of the calls in the first context are
        kept, with fetched keys that wait for backward, and given again, call by call, in the second, whose kernels and
        hops need not run once more. With `offload` they wait in host memory."""
        kept: list[Kept] = []
        return self.recording(kept, offload=offload), self.replaying(kept)

    @contextmanager
    def recording(self, kept: list[Kept], *, offload: bool = False) -> Iterator[None]:
        outer, self._record = self._record, kept
        try:
            yield
        finally:
            self._record = outer
        for each in kept if offload else ():
            for parked in (each.out, each.lse, each.keys):
                if parked is not None:
                    parked.leave()

    @contextmanager
    def replaying(self, kept: list[Kept]) -> Iterator[None]:
        outer, self._replay = self._replay, iter(kept)
        try:
            yield
        finally:
            self._replay = outer

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        if self._replay is not None:
            kept = next(self._replay)
            keys = None if kept.keys is None else kept.keys.tensor()
            return Result(kept.out.tensor().detach(), kept.lse.tensor(), kept.call_index, keys)
        result = self.run_forward(q, k, v, scale)
        if self._record is not None:
            fetched = None if result.keys is None else Parked(result.keys)
            self._record.append(Kept(Parked(result.out.detach()), Parked(result.lse), result.call_index, fetched))
        return result

    def run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        raise NotImplementedError
