"""A shard's tensors in host memory, as a step left them: behind checkpoints and behind copies in peers' memory.

What is on a GPU is copied into pinned memory beside the training that follows. A GPU's engine for copies to the host
stays with one stream as long as that has a copy queued: beside 3 GB in pieces of 8 MiB, two queued at a time, a read of
4 bytes waited 59 of 60 ms (`benchmarks/probes/probe_copy_engine.py`, one H100). So one piece is queued once the last is
done: whoever else copies to the host, the training's stream above all, should come in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""0.6 ms at 50 GB/s."""


class HostSnapshot:
    """A snapshot of rank `cp_rank` of a ring; `fill` begins it."""

    def __init__(self, cp_rank: int) -> None:
        self.cp_rank = cp_rank
        self._lock = threading.Lock()
        self._left: list[tuple[Tensor, Tensor]] = []
        self._stream: Any = None
        self._begin: Any = None
        self._error: Exception | None = None

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any) -> None:
        """`pairs` are (contiguous host memory, tensor), of equally many bytes. Tensors in host memory are copied now,
        those of a GPU on `stream`, behind what the current stream does now, once a thread waits for it."""
        for place, tensor in pairs:
            if tensor.is_cuda:
                self._left.append((place, tensor))
            elif tensor.numel():
                raw(place).copy_(raw(tensor))
        if self._left:
            self._stream, self._begin = stream, torch.cuda.current_stream(stream.device).record_event()

    def wait(self) -> float:
        """Until the shard may be changed or freed by anybody; returns how long that took, in seconds. The first call
        copies, so it should not be the thread that trains."""
        if not self._left:
            return 0.0
        begun = time.monotonic()
        with self._lock:
            try:
                if self._left:
                    self._copy()
            except (MemoryError, RuntimeError) as error:
                self._error = error
            self._left = []
        return time.monotonic() - begun

    def finish(self) -> None:
        """Until all of it is in host memory. Raises what broke the copy off: MemoryError or RuntimeError."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        num_bytes = 0
        # Of this device, or leaving the stream would open a context on GPU 0 in a thread that has chosen none.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begin)
            try:
                for place, tensor in self._left:
                    there, here = (raw(each).split(PIECE_BYTES) for each in (place, tensor))
                    for to, piece in zip(there, here, strict=True):
                        to.copy_(piece, non_blocking=True)
                        num_bytes += piece.numel()
                        if num_bytes >= PIECE_BYTES:
                            self._stream.synchronize()
                            num_bytes = 0
            finally:  # what is queued still reads the tensors, also where the next piece failed
                self._stream.synchronize()


def raw(tensor: Tensor) -> Tensor:
    """Its bytes (uint8), without a copy where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
