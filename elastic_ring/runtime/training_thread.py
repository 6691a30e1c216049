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
    """Carries out orders in turn. `parked` is set while it has none.

    An order may park early (`park`), before it has told anyone of its end; the next one may then come before
    the first has returned, and its return must not count for the next.
    """

    def __init__(self, name: str) -> None:
        self.parked = threading.Event()
        self.parked.set()
        self._orders: queue.Queue[tuple[int, Callable[[], None]]] = queue.Queue()
        self._given = self._current = 0
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._given += 1
            self.parked.clear()
            self._orders.put((self._given, work))

    def park(self) -> None:
        """Called by an order: nothing of the training's state is touched any more."""
        with self._lock:
            if self._current == self._given:
                self.parked.set()

    @property
    def is_this(self) -> bool:
        """Whether the caller runs in this thread; false in one that was left behind."""
        return threading.current_thread() is self._thread

    def leave(self) -> None:
        """Give it up: should it ever come back from its wait, it ends, and does nothing on its way."""
        self._left.set()

    def release(
        self, abort: Callable[[threading.Event, float], bool], may_leave: Callable[[], bool], timeout_s: float
    ) -> str:
        """Have the thread return from its order: `parked`, `stuck` (in a wait that nothing ends) or `busy`.

        `abort(parked, for_s)` fails every exchange until `parked` is set or the time is over; `may_leave()` says
        whether the thread stands where its state is whole.
        """
        deadline, spent_ns = time.monotonic() + timeout_s, -1
        while not abort(self.parked, LOOK_S):
            before, spent_ns = spent_ns, self._cpu_ns()
            if spent_ns == before and may_leave() and self._waits_natively():
                return "stuck"
            if time.monotonic() > deadline:
                return "busy"
        return "parked"

    def _waits_natively(self) -> bool:
        """Whether it sleeps, and in an exchange, not for data, Ray or a lock: by its innermost Python frame.

        A thread that is only starved of a CPU, or waits for a disk or for memory, does not sleep.
        """
        stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] != "S":
            return False
        frame = sys._current_frames().get(self._thread.ident or 0)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING_IN)

    @property
    def cpu_ticks(self) -> int:
        """The same for any thread that asks, at any time: in ticks of the kernel, and 0 once the thread is gone."""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return 0
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def _cpu_ns(self) -> int:
        """Time on a CPU so far; a thread that computes is not stuck, however long it takes."""
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident or 0))

    def _run(self) -> None:
        while not self._left.is_set():
            self._current, work = self._orders.get()
            try:
                work()
            except Exception:
                log.exception("order failed")
            finally:
                self.park()
