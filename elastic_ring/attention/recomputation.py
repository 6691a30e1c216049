"""Activation checkpointing without recomputing attention: a ring's forward results are replayed in backward.

At long contexts attention is most of the work, and its result a small part of a layer's activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from elastic_ring.attention.offload import OffloadedTensor


class Result(NamedTuple):
    """out (B, S, H, D), lse (B, S, H) as backward wants it, the call's number, and what was fetched for it, where
    backward is not to fetch it again."""

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


class RecomputableRing:
    """Base class of rings: `_forward` runs `run_forward`, or replays the saved result of the same call."""

    _record: list[SavedResult] | None = None
    _replay: Iterator[SavedResult] | None = None

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What `torch.utils.checkpoint` takes as `context_fn`: `out` and `lse` of the calls in the first context are
        kept, with fetched keys that wait for backward, and given again, call by call, in the second, whose kernels and
        hops need not run once more. With `offload` they wait in host memory."""
        kept: list[SavedResult] = []
        return self.recording(kept, offload=offload), self.replaying(kept)

    @contextmanager
    def recording(self, kept: list[SavedResult], *, offload: bool = False) -> Iterator[None]:
        outer, self._record = self._record, kept
        try:
            yield
        finally:
            self._record = outer
        for each in kept if offload else ():
            for offloaded in (each.out, each.lse, each.keys):
                if offloaded is not None:
                    offloaded.leave()

    @contextmanager
    def replaying(self, kept: list[SavedResult]) -> Iterator[None]:
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
            fetched = None if result.keys is None else OffloadedTensor(result.keys)
            self._record.append(
                SavedResult(
                    OffloadedTensor(result.out.detach()), OffloadedTensor(result.lse), result.call_index, fetched
                )
            )
        return result

    def run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        raise NotImplementedError
