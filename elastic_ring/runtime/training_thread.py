"""The thread that trains: one order after another, and a way out when it can no longer be reached.

Gloo has a wait that nothing ends before its timeout: a peer that dies in the middle of a large message takes
the message with it, and whoever waits for that message is never woken. Such a thread sleeps in native code,
does no harm there, and is left behind for a new one; its state is whole, because no shard changes in a wait.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed

log = logging.getLogger(__name__)

LOOK_S = 0.4  # longer than any wait that ends by itself: one try of the store's client
_OWN_CODE = str(Path(__file__).parents[1])
_WAITING_IN = (f"{Path(torch.distributed.__file__).parent}/", f"{_OWN_CODE}/")


class TrainingThread:
    """Carries out orders in turn. `parked` is set while it has none."""

    def __init__(self, name: str) -> None:
        self.parked = threading.Event()
        self.parked.set()
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._left: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        self.parked.clear()
        self._orders.put(work)

    @property
    def is_this(self) -> bool:
        """Whether the caller runs in this thread; false in one that was left behind."""
        return threading.current_thread() is self._thread

    def leave(self) -> None:
        """Give it up: should it ever come back from its wait, it ends, and does nothing on its way."""
        self._left.set()

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def release(self, abort: Callable[[threading.Event, float], bool], timeout_s: float) -> str:
        """Have the thread return from its order: `parked`, `stuck` (in a wait that nothing ends) or `busy`.

        `abort(parked, for_s)` fails every exchange until `parked` is set or the time is over.
        """
        deadline, spent_ns = time.monotonic() + timeout_s, -1
        while not abort(self.parked, LOOK_S):
            before, spent_ns = spent_ns, self._cpu_ns()
            if spent_ns == before and self._waits_natively():
                return "stuck"
            if time.monotonic() > deadline:
                return "busy"
        return "parked"

    def _waits_natively(self) -> bool:
        """Whether its innermost Python frame is one that waits for an exchange, not for data, Ray or a lock."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING_IN)

    def _cpu_ns(self) -> int:
        """Time on a CPU so far; a thread that computes is not stuck, however long it takes."""
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident or 0))

    def _run(self) -> None:
        while not self._left.is_set():
            work = self._orders.get()
            try:
                work()
            except Exception:
                log.exception("order failed")
            finally:
                self.parked.set()
