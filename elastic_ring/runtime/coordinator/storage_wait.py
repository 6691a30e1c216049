"""The deciding thread's wait for the run's folder: a full or read-only disk, a mount that is away.

No command may leave before its journal line is on disk, so the thread can decide nothing meanwhile. The wait is no
hang: others answer beats for the thread, its clock stands still, so that no deadline passes, and followers of the run
get a message. Training goes on. No decisions here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from elastic_ring.config import RunConfig
from elastic_ring.runtime.coordinator.run_spec import Clock
from elastic_ring.state.storage.backend import Retries, ignore

T = TypeVar("T")

HELD_S = 0.1
"""A shorter wait is the disk's ordinary time."""


class StorageWait:
    """Tries a write of the deciding thread again; to be called as `Retries` is."""

    def __init__(self, run: RunConfig, clock: Clock) -> None:
        self._limit_s = run.checkpoint_config.fail_after_s
        self._clock = clock
        self._since_s: float | None = None
        self._gives_up = threading.Event()
        self.tell: Callable[[str], None] = ignore

    @property
    def is_waiting(self) -> bool:
        """Whether the deciding thread is in a write, and not for longer than it may be. Asked by any thread."""
        since_s = self._since_s
        return since_s is not None and time.monotonic() - since_s <= self._limit_s

    def give_up(self) -> None:
        """The run is to end: the next attempt is the last."""
        self._gives_up.set()

    @contextmanager
    def declared(self) -> Iterator[None]:
        """Around anything that may hang in the folder's file system."""
        begun_s = self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None
            waited_s = time.monotonic() - begun_s
            if waited_s > HELD_S:
                self._clock.hold(waited_s)

    def __call__(
        self,
        attempt: Callable[[], T],
        is_final: Callable[[Exception], bool],
        before_next: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        """As `Retries`."""
        with self.declared():
            retries = Retries(self._limit_s, lambda text: self.tell(f"the run's folder {text}; training goes on"))
            return retries(attempt, lambda error: self._gives_up.is_set() or is_final(error), before_next)
