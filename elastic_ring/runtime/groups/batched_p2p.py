"""Batched sends and receives of one NCCL group: launched together, or not at all once the group is aborted.

Between a group start and a group end NCCL collects the operations of the calling thread. An exception in between, or an
abort that frees the group, leaves the thread collecting for ever: it never launches another operation of any group. So
NCCL is called only once all operations are known, and an abort waits for a launch under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

from torch import Tensor

LAUNCH_S = 0.2  # how long an abort waits: the launch may itself wait for a dead peer


class LaunchGate:
    """Serialises launches with the abort of their group. `check` raises once the group is aborted."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = Lock()

    @contextmanager
    def launching(self) -> Iterator[None]:
        with self._lock:
            self._check()
            yield

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Inside no launch is under way, or one that did not end within LAUNCH_S."""
        acquired = self._lock.acquire(timeout=LAUNCH_S)
        try:
            yield
        finally:
            if acquired:
                self._lock.release()


class BatchedGroup:
    """A backend's sends and receives for exchanges and transfers: posted one by one, launched at the end."""

    def __init__(self, backend: Any, launching: Callable[[], AbstractContextManager[None]]) -> None:
        self.backend = backend
        self._launching = launching
        self._posted: list[tuple[Callable[..., Any], list[Tensor], int, int]] = []

    def rank(self) -> int:
        return int(self.backend.rank())

    def size(self) -> int:
        return int(self.backend.size())

    def allreduce(self, tensors: list[Tensor]) -> Any:
        with self._launching():
            return self.backend.allreduce(tensors)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> None:
        self._posted.append((self.backend.send, tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> None:
        self._posted.append((self.backend.recv, tensors, src, tag))

    def _start_coalescing(self) -> None:
        self._posted = []

    def drop(self) -> None:
        """Discard what was posted, after an error: none of it is launched."""
        self._posted = []

    def _end_coalescing(self) -> Any:
        posted, self._posted = self._posted, []
        with self._launching():
            self.backend._start_coalescing()
            try:
                for operation, tensors, peer, tag in posted:
                    operation(tensors, peer, tag)
            finally:
                work = self.backend._end_coalescing()
            return work
