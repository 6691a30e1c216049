"""GPUs of one host that reach each other's memory, as the exchange by copy engines sees them, made of threads.

Host memory is the GPUs', an address an address; a stream for copies is a thread that does what was put on it, in order;
the kernels' stream is the rank's own thread, which so waits for flags itself. Below the driver's three calls, torch's
streams and its symmetric memory everything is the product's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from experiments import peer_memory

TIMEOUT_S = 60


class ModelledEvent:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def wait(self) -> None:
        assert self.passed.wait(TIMEOUT_S), "what a stream waits for never came"


class ModelledStream:
    """`later` puts work on it: done at once where it is the kernels', else by its own thread."""

    def __init__(self, host: ModelledHost, *, kernels: bool = False) -> None:
        self.cuda_stream = self
        self._kernels = kernels
        self._errors: list[BaseException] = host.errors
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        if not kernels:
            host.streams.append(self)
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()

    def later(self, work: Callable[[], None]) -> None:
        work() if self._kernels else self._work.put(work)

    def record_event(self) -> ModelledEvent:
        event = ModelledEvent()
        self.later(event.passed.set)
        return event

    def wait_event(self, event: ModelledEvent) -> None:
        self.later(event.wait)

    def wait_stream(self, other: ModelledStream) -> None:
        self.wait_event(other.record_event())

    def close(self) -> None:
        self._work.put(None)
        self.thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)
                return


class ModelledHost:
    """The GPUs of `cp` ranks, and the calls that each made, by name. Ranks are threads that `begin`."""

    def __init__(self, cp: int) -> None:
        self.cp = cp
        self.calls: list[Counter[str]] = [Counter() for _ in range(cp)]
        self.streams: list[ModelledStream] = []
        self.errors: list[BaseException] = []
        self._flags = threading.Condition()
        self._here = threading.local()
        self._barrier = threading.Barrier(cp, timeout=TIMEOUT_S)
        self._mapped: list[torch.Tensor] = []  # for good: a peer's late write must find it
        self._meeting: dict[int, torch.Tensor] = {}

    def begin(self, cp_rank: int) -> None:
        self._here.cp_rank, self._here.kernels = cp_rank, ModelledStream(self, kernels=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of torch's streams, its symmetric memory and the driver."""
        memory = "torch._C._distributed_c10d._SymmetricMemory"
        with (
            mock.patch.object(peer_memory, "_driver", return_value=self),
            mock.patch.object(torch.cuda, "current_stream", self._current_stream),
            mock.patch.object(torch.cuda, "Stream", self._copies_stream),
            mock.patch.object(torch.cuda, "synchronize"),
            mock.patch("torch.distributed._symmetric_memory.enable_symm_mem_for_group"),
            mock.patch(memory, self),
        ):
            yield
        for stream in self.streams:
            stream.close()
        assert not self.errors, self.errors

    def _current_stream(self, *_: Any) -> ModelledStream:
        self._count("current_stream")
        stream: ModelledStream = self._here.kernels
        return stream

    def _copies_stream(self, *_: Any, **__: Any) -> ModelledStream:
        return ModelledStream(self)

    def _count(self, name: str) -> None:
        if hasattr(self._here, "cp_rank"):
            self.calls[self._here.cp_rank][name] += 1

    # ------------------------------------------------------------ the driver

    def cuStreamWriteValue32(self, stream: ModelledStream, address: int, value: int, flags: int) -> tuple[int]:
        self._count("raise")

        def write() -> None:
            with self._flags:
                ctypes.c_int32.from_address(address).value = value
                self._flags.notify_all()

        stream.later(write)
        return (0,)

    def cuStreamWaitValue32(self, stream: ModelledStream, address: int, value: int, flags: int) -> tuple[int]:
        assert flags == 0, "until it is at least `value`"
        self._count("wait")
        flag = ctypes.c_int32.from_address(address)

        def wait() -> None:
            with self._flags:
                assert self._flags.wait_for(lambda: flag.value >= value, TIMEOUT_S), "a flag that nobody raised"

        stream.later(wait)
        return (0,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, num_bytes: int, stream: ModelledStream) -> tuple[int]:
        self._count("copy")
        stream.later(lambda: ctypes.memmove(target, source, num_bytes) and None)
        return (0,)

    # ------------------------------------------------------------ symmetric memory

    def empty_strided_p2p(self, shape: tuple[int, ...], *about: Any) -> torch.Tensor:
        return torch.full(shape, 77).to(about[1])  # whoever reads what was not written sees it

    def rendezvous(self, own: torch.Tensor, name: str) -> ModelledHandle:
        self._meeting[self._here.cp_rank] = own
        self._mapped.append(own)
        self._barrier.wait()
        buffers = [self._meeting[rank] for rank in range(self.cp)]
        self._barrier.wait()
        return ModelledHandle(buffers, self._barrier)


class ModelledHandle:
    def __init__(self, buffers: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._buffers, self._barrier = buffers, barrier

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self._buffers[rank].shape == shape, "not all ranks grow alike"
        return self._buffers[rank]

    def barrier(self) -> None:
        self._barrier.wait()
