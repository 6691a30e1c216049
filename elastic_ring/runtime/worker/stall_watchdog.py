"""Detects a step that makes no progress.

gloo ends an exchange that takes too long. NCCL queues exchanges on the device: a thread that waits for one waits for
the device, without a limit, as it does for a slow kernel. So progress is read from three sources: the stamps of the
training thread at each phase and hop, events on the device behind these stamps, and on a CPU the thread's CPU time.
While one of them moves, the step is healthy, however long it takes. What follows from a stall is not decided here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

LOOK_S = 1.0
KEPT_MARKS = 1 << 16  # more than the hops of one step, at whose end the host waits for a result

MembershipId = tuple[int, int]
"""(term, generation)."""


@dataclass(frozen=True)
class StallDetected:
    """A step that makes no progress. `moved`: the progress numbers at that moment."""

    term: int
    generation: int
    why: str
    moved: tuple[int, ...] | None = None


class StallWatchdog:
    """Judges whether the running step makes progress.

    The training thread calls `begin` and `end`, the heartbeat thread `look`, which reads the numbers of `moved`, takes
    no lock and queries no device: nothing that hangs can block the heartbeat.
    """

    def __init__(self, limit_s: float, moved: Callable[[], tuple[int, ...]]) -> None:
        self._limit_s, self._moved = limit_s, moved
        self._period_s = min(LOOK_S, limit_s / 8)
        self.under_way: MembershipId | None = None
        self._last: tuple[MembershipId, tuple[int, ...]] | None = None
        self._stalled_s = 0.0
        self._looked_at = 0.0

    def begin(self, membership_id: MembershipId) -> None:
        """Steps of this generation run from here on."""
        self.under_way = membership_id

    def halt(self) -> None:
        """No steps run. For the control thread, while the training thread is paused or abandoned."""
        self.under_way = None

    def end(self, membership_id: MembershipId) -> None:
        """The steps of this generation have ended; a call for another generation changes nothing."""
        if self.under_way == membership_id:
            self.under_way = None

    def look(self, now: float) -> StallDetected | None:
        """A stall longer than the limit; reported again each time the limit passes once more.

        Time between two calls counts at most two periods: a starved or stopped process could not make progress.
        """
        since_s = now - self._looked_at
        if since_s < self._period_s:
            return None
        self._looked_at = now
        under_way = self.under_way
        state = None if under_way is None else (under_way, self._moved())
        if under_way is None or state is None or state != self._last:
            self._last, self._stalled_s = state, 0.0
            return None
        self._stalled_s += min(since_s, 2 * self._period_s)
        if self._stalled_s <= self._limit_s:
            return None
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return StallDetected(*under_way, f"nothing has moved for {stalled_s:.0f} s", state[1])

    def holds(self, stall: StallDetected) -> bool:
        """Whether the stall still lasts."""
        is_current = self.under_way == (stall.term, stall.generation)
        return is_current and (stall.moved is None or stall.moved == self._moved())


class DeviceMarks:
    """CUDA events behind the work that the training thread has queued; each completed one shows progress.

    The training thread calls `leave` (the autograd thread during a backward pass). `look` runs in a thread of its own:
    a query may block while the driver's queue is full.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._free: list[tuple[Any, Any]] = []
        self._device: Any = None
        self.num_passed = 0

    def move_to(self, device: torch.device) -> None:
        """Use another device, before work is queued on it: an event belongs to the device that first recorded it."""
        self._device = device
        self._free = [own for own in self._free if own[0] == device]

    def set_device(self) -> None:
        """Make that device current in the calling thread: threads default to GPU 0 and would open a context there."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def leave(self) -> None:
        """Mark this place in the current stream."""
        if len(self._ahead) >= KEPT_MARKS:
            return
        device, event = self._device, None
        while self._free and event is None:
            own, free = self._free.pop()
            event = free if own == device else None
        event = self._make_event() if event is None else event
        event.record()
        self._ahead.append((device, event))

    def look(self) -> None:
        """Count the completed events. A failed device completes none; the training thread gets its error."""
        try:
            while self._ahead and self._ahead[0][1].query():
                passed = self._ahead.popleft()
                self.num_passed += 1
                if passed[0] == self._device:
                    self._free.append(passed)
        except RuntimeError as error:
            log.warning("querying an event on the device failed: %s", error)
            self._ahead.clear()


def look_at_device(
    marks: DeviceMarks,
    stall_watchdog: StallWatchdog,
    exchange_error: Callable[[], str],
    report: Callable[[StallDetected], None],
) -> None:
    """The body of a thread: count completed events, and report a broken link of the running generation's groups, once
    per generation. NCCL is configured to end nothing by itself then."""
    reported: MembershipId | None = None
    while True:
        try:
            marks.set_device()
            marks.look()
            membership_id = stall_watchdog.under_way
            if membership_id is not None and membership_id != reported and (error := exchange_error()):
                reported = membership_id
                report(StallDetected(*membership_id, error))
        except Exception:
            # Without this thread a long step looks like a stall.
            log.exception("the device watch failed once; it goes on")
        time.sleep(LOOK_S / 2)


LEAST_S = 5.0
"""A shorter silence is a busy machine."""
CPU_SHARE = 0.1
"""A process that used more of the CPU than this share of a silence has run: a compiler kept the GIL."""


class PauseWatch:
    """Notes for how long this process did not run. One thread calls `beat` several times a second; any, `within_s`."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._cpu_s = clock, cpu_s
        self._last = clock(), cpu_s()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=64)

    def beat(self) -> None:
        pause = self._since_last()
        if pause is not None:
            self._pauses.append(pause)
        self._last = self._clock(), self._cpu_s()

    def within_s(self, begun_s: float) -> float:
        """Seconds since `begun_s` in which this process did not run."""
        pauses, last = list(self._pauses), self._since_last()  # the thread that beats may wake up after this one
        ends = {begin: end for begin, end in (*pauses, *([last] if last else []))}
        return sum(max(0.0, end - max(begin, begun_s)) for begin, end in ends.items())

    def _since_last(self) -> tuple[float, float] | None:
        (before_s, cpu_before_s), now_s = self._last, self._clock()
        silent_s = now_s - before_s
        if silent_s < LEAST_S or self._cpu_s() - cpu_before_s > CPU_SHARE * silent_s:
            return None
        return before_s, now_s


class StepProgress:
    """Signs that a step moves, read by any thread: marks behind the device's work, and waits for data or peers; and
    this process's own pauses, which are no part of a step."""

    def __init__(self) -> None:
        self.marks, self.pauses, self.num_data_waits = DeviceMarks(), PauseWatch(), 0
