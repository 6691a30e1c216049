"""How long a rank works itself in a step, without its waits for other ranks and for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic_ring.attention.comm.ledger import HopTally
from elastic_ring.data.loader import Loader


class ExchangeWaits:
    """How long the host has waited for FSDP2's exchanges, in seconds. On a GPU it does not wait."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - begun


class WorkClock:
    """From its construction to `stop`.

    On a CPU: wall time without the waits for hops, for FSDP2's exchanges and for data. On a GPU it runs only in steps
    whose hops are timed (`is_watched`): the stream's time without its stalls for hops; those for FSDP2's exchanges,
    which are prefetched, count as work.
    """

    def __init__(self, device: torch.device, waits: ExchangeWaits, loader: Loader, is_watched: bool) -> None:
        self._waits, self._loader = waits, loader
        self._begun: Any = None
        self._ended: Any = None
        self._hops: HopTally | None = None
        self._on_gpu = device.type == "cuda"
        self._work_s = 0.0
        if self._on_gpu and is_watched:
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begun.record()
        elif not self._on_gpu:
            self._work_s = -self._now_s()

    def stop(self, hops: HopTally) -> None:
        self._hops = hops
        if self._ended is not None:
            self._ended.record()
        elif not self._on_gpu:
            self._work_s += self._now_s() - (hops.figures()["exposed_hop_wait_s"] or 0.0)

    def per_sequence_s(self, num_sequences: int) -> float:
        """Work for each sequence, in seconds; 0 if it was not measured. Call after the device is synchronized."""
        if self._ended is not None and self._hops is not None:
            if not self._ended.query():
                return 0.0
            stalled_s = self._hops.figures()["exposed_hop_wait_s"] or 0.0
            self._work_s = float(self._begun.elapsed_time(self._ended)) / 1e3 - stalled_s
        return max(0.0, self._work_s) / num_sequences if num_sequences else 0.0

    def _now_s(self) -> float:
        return time.perf_counter() - self._waits.waited_s - self._loader.waited_s
