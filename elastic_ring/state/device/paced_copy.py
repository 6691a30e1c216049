"""Copies of a shard's tensors from a GPU into pinned memory, beside the training that follows.

A GPU has one engine for copies to the host, which takes them in turn: behind 6 GB of a snapshot any other one waits for
120 ms, and with it the stream, or the host, that asked for it. So only a few pieces are queued at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""0.6 ms at 50 GB/s."""

NUM_QUEUED = 2
"""Pieces that are queued at a time: while one is copied the next is ready."""


class PacedCopy:
    """Copies of tensors into host memory, on `stream` behind what the current stream does now."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any) -> None:
        """`pairs` are (host memory, tensor), of equally many bytes; host memory is contiguous."""
        self._pairs, self._stream = list(pairs), stream
        self._begin = torch.cuda.current_stream(stream.device).record_event()
        self._end: Any = None
        self._lock = threading.Lock()

    def queue(self) -> None:
        """Queue all of it, piece by piece; the first call does, another thread's waits for that. Returns once the last
        pieces are queued. The thread that takes a snapshot must not be the one that trains."""
        with self._lock:
            if self._end is None:
                self._stream.wait_event(self._begin)
                self._copy()
                self._end, self._pairs = self._stream.record_event(), []

    def wait_on_device(self) -> None:
        """What the current stream does next comes after all copies. The host waits until they are queued."""
        self.queue()
        self._end.wait()

    def wait(self) -> None:
        """Until all of it is in host memory."""
        self.queue()
        self._end.synchronize()

    def _copy(self) -> None:
        queued: deque[Any] = deque()
        num_bytes = 0
        with torch.cuda.stream(self._stream):
            for place, tensor in self._pairs:
                there, here = (_raw(each).split(PIECE_BYTES) for each in (place, tensor))
                for to, piece in zip(there, here, strict=True):
                    to.copy_(piece, non_blocking=True)
                    num_bytes += piece.numel()
                    if num_bytes >= PIECE_BYTES:
                        queued.append(self._stream.record_event())
                        num_bytes = 0
                    if len(queued) > NUM_QUEUED:
                        queued.popleft().synchronize()


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
