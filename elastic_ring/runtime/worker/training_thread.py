"""The training thread: carries out one order after another, can be abandoned when it is stuck, and classifies its
errors.

If a peer dies in the middle of a large message, gloo may wait for that message until its timeout, and an abort does not
end the wait. Such a thread sleeps in native code and does no harm; it is abandoned and a new thread takes over. The
state is consistent, because no shard changes during a wait. What follows from an error the control core decides.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed

from elastic_ring.errors import (
    CheckpointDamaged,
    DigestMismatch,
    ElasticRingError,
    LossSpike,
    StorageFailed,
    TooManySkipped,
    WeightsDamaged,
)
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.train.memory import chain, describe_shortage, is_out_of_host_memory, is_out_of_memory
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.startup.kernels import KernelMismatch
from elastic_ring.train.vote import ComputedWrongly, MustGoBack, ReplicasDiverged

log = logging.getLogger(__name__)

LOOK_S = 0.4  # longer than any wait that ends by itself: one try of the store's client
_OWN_CODE = str(Path(__file__).parents[2])
_WAITING_IN = (f"{Path(torch.distributed.__file__).parent}/", f"{_OWN_CODE}/")
_KINDS: tuple[tuple[type[ElasticRingError], str], ...] = (
    (TooManySkipped, "skipped"),
    (LossSpike, "spike"),
    (MustGoBack, "back"),
    (DigestMismatch, "peer"),  # received data is not used; the next build sends it again
    (CheckpointDamaged, "checkpoint"),
    (StorageFailed, "storage"),  # it was waited for
    (ComputedWrongly, "corrupt"),
    (ModelRefused, "check"),
    (ReplicasDiverged, "check"),
    (WeightsDamaged, "check"),
)


class TrainingThread:
    """Carries out orders in turn. `paused` is set while it has none.

    An order may call `pause` before it reports its end. The next order may then arrive before the first has returned,
    whose return must not count as the end of the second.
    """

    def __init__(self, name: str) -> None:
        self.paused = threading.Event()
        self.paused.set()
        self._orders: queue.Queue[tuple[int, Callable[[], None]]] = queue.Queue()
        self._num_orders = self._current = 0
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._num_orders += 1
            self.paused.clear()
            self._orders.put((self._num_orders, work))

    def pause(self) -> None:
        """Called by an order once it no longer touches the training state."""
        with self._lock:
            if self._current == self._num_orders:
                self.paused.set()

    @property
    def is_this(self) -> bool:
        """Whether the caller runs in this thread; false in an abandoned one."""
        return threading.current_thread() is self._thread

    def abandon(self) -> None:
        """If the thread's wait ever returns, it ends without doing anything."""
        self._abandoned.set()

    def release(
        self, abort: Callable[[threading.Event, float], bool], may_abandon: Callable[[], bool], timeout_s: float
    ) -> str:
        """Make the thread return from its order. Returns `paused`, `stuck` (in a wait that cannot be ended) or `busy`.

        `abort(paused, for_s)` fails every exchange until `paused` is set or the time is over; `may_abandon()` returns
        whether the training state is consistent where the thread is.
        """
        deadline, spent_ns = time.monotonic() + timeout_s, -1
        while not abort(self.paused, LOOK_S):
            # A thread that computes is not stuck.
            before = spent_ns
            spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident or 0))
            if spent_ns == before and may_abandon() and self._stat()[0] == "S":
                # It sleeps; a thread that waits for a CPU, a disk or memory does not. By its innermost Python frame, it
                # may do so for data, Ray or a lock, and not in an exchange.
                frame = sys._current_frames().get(self._thread.ident or 0)
                if frame is not None and frame.f_code.co_filename.startswith(_WAITING_IN):
                    return "stuck"
            if time.monotonic() > deadline:
                return "busy"
        return "paused"

    @property
    def cpu_ticks(self) -> int:
        """CPU time in kernel ticks; may be read from any thread. 0 once the thread is gone."""
        try:
            fields = self._stat()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])

    def _stat(self) -> list[str]:
        """The fields of the thread's /proc stat, from its state on."""
        stat = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        return stat.rpartition(")")[2].split()

    def _run(self) -> None:
        while not self._abandoned.is_set():
            self._current, work = self._orders.get()
            try:
                work()
            except Exception:
                log.exception("order failed")
            finally:
                self.pause()


def error_kind(
    error: BaseException, device_failed: Callable[[], bool] = lambda: False, *, healing: bool = False
) -> str:
    """The kind of `MemberFailed` for an exception: whose failure it is.

    `device_failed` probes the device; it is called only before the user's code is blamed. `healing`: in a build that
    brings this worker its peers' state. There the model fits and its kernel runs on other devices, so a device without
    memory and a kernel mismatch are this device's failures. Elsewhere a lack of memory is neither the device's failure
    nor the user's. A host's lack never is the device's: a replacement would share the host.
    """
    for types, kind in _KINDS:
        if isinstance(error, types):
            return kind
    if isinstance(error, KernelMismatch):
        return "device" if healing else "check"
    if is_transport_error(error) and not is_out_of_memory(error) and not is_out_of_host_memory(error):
        return "peer"  # an exchange that failed for lack of memory is no peer's failure
    if is_out_of_memory(error):
        return "device" if healing or device_failed() else "memory"
    if is_out_of_host_memory(error):
        return "memory"
    is_device_error = any(isinstance(link, torch.AcceleratorError) for link in chain(error))
    return "device" if is_device_error or device_failed() else "user"


def error_text(error: BaseException, kind: str = "user") -> str:
    """The user's traceback, the message of our own error, a device error's first line, or the requests for memory."""
    if kind == "memory":
        return describe_shortage(error)
    if isinstance(error, ElasticRingError):
        return str(error)
    if kind == "device":
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "".join(traceback.format_exception(error))
