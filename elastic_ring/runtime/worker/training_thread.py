"""The training thread: carries out one order after another, and can be abandoned when it is stuck.

If a peer dies in the middle of a large message, gloo may wait for that message until its timeout, and an abort does not
end the wait. Such a thread sleeps in native code and does no harm; it is abandoned and a new thread takes over. The
state is consistent, because no shard changes during a wait.
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
_OWN_CODE = str(Path(__file__).parents[2])
_WAITING_IN = (f"{Path(torch.distributed.__file__).parent}/", f"{_OWN_CODE}/")


class TrainingThread:
    """Carries out orders in turn. `paused` is set while it has none.

    An order may call `pause` before it reports its end. The next order may then arrive before the first has returned,
    whose return must not count as the end of the second.
    """

    def __init__(self, name: str) -> None:
        self.paused = threading.Event()
        self.paused.set()
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
            self.paused.clear()
            self._orders.put((self._given, work))

    def pause(self) -> None:
        """Called by an order once it no longer touches the training state."""
        with self._lock:
            if self._current == self._given:
                self.paused.set()

    @property
    def is_this(self) -> bool:
        """Whether the caller runs in this thread; false in an abandoned one."""
        return threading.current_thread() is self._thread

    def leave(self) -> None:
        """Abandon the thread: if its wait ever returns, it ends without doing anything."""
        self._left.set()

    def release(
        self, abort: Callable[[threading.Event, float], bool], may_leave: Callable[[], bool], timeout_s: float
    ) -> str:
        """Make the thread return from its order. Returns `paused`, `stuck` (in a wait that cannot be ended) or `busy`.

        `abort(paused, for_s)` fails every exchange until `paused` is set or the time is over; `may_leave()` returns
        whether the training state is consistent where the thread is.
        """
        deadline, spent_ns = time.monotonic() + timeout_s, -1
        while not abort(self.paused, LOOK_S):
            before, spent_ns = spent_ns, self._cpu_ns()
            if spent_ns == before and may_leave() and self._waits_natively():
                return "stuck"
            if time.monotonic() > deadline:
                return "busy"
        return "paused"

    def _waits_natively(self) -> bool:
        """Whether it sleeps in an exchange, not for data, Ray or a lock, by its innermost Python frame.

        A thread that waits for a CPU, a disk or memory is not in the sleeping state.
        """
        stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] != "S":
            return False
        frame = sys._current_frames().get(self._thread.ident or 0)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING_IN)

    @property
    def cpu_ticks(self) -> int:
        """CPU time in kernel ticks; may be read from any thread. 0 once the thread is gone."""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return 0
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def _cpu_ns(self) -> int:
        """CPU time so far: a thread that computes is not stuck."""
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident or 0))

    def _run(self) -> None:
        while not self._left.is_set():
            self._current, work = self._orders.get()
            try:
                work()
            except Exception:
                log.exception("order failed")
            finally:
                self.pause()
