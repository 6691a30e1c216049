"""Sends and receives of one NCCL group that go out together, or not at all once the group has been given up.

NCCL collects the operations between a start and an end in the calling thread. Whatever breaks off in between, or
an abort that frees the group just then, leaves that thread collecting for ever: all its later operations, of any
group, are never launched. So nothing of NCCL is touched until all operations are there, and an abort waits for
those that are being launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

from torch import Tensor

LAUNCH_S = 0.2  # the most that an abort waits: a launch may itself wait for a peer that has died


class LaunchGate:
    """What stands between launches and the abort of their group. `check` raises once it has been given up."""

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
        """No launch is under way inside, or one that does not end."""
        taken = self._lock.acquire(timeout=LAUNCH_S)
        try:
            yield
        finally:
            if taken:
                self._lock.release()


class JoinedGroup:
    """A backend's sends and receives as the exchange and the transfer use them: posted, then launched at the end."""

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
        """Forget what was posted, after an error among it: none of it is launched."""
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
