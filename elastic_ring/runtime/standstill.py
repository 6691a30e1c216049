"""Notices a step that has stopped moving, where nothing else would.

gloo ends an exchange that takes too long. NCCL's are queued on the device: a thread that waits for one waits for the
device, without a limit, and looks like one whose kernels are slow. So three things are looked at: the stamps that the
training thread leaves at each phase and hop, events that the device passes behind them, and on a CPU the time that the
thread computes. While one of them moves, the step is well, however long it takes. Nothing here decides what follows.
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
KEPT_MARKS = 1 << 16  # hops of one step: the host reads a result at its end, and runs ahead no further

Cast = tuple[int, int]
"""(term, generation)."""


@dataclass(frozen=True)
class StoodStill:
    """The heart's word to the control thread. `moved` is what had moved when it was given."""

    term: int
    generation: int
    why: str
    moved: tuple[int, ...] | None = None


class Standstill:
    """Judges whether the step under way still moves.

    `begin` and `end` are the training thread's, `look` is the heart's: it reads numbers, takes no lock and asks no
    device, so that nothing which hangs can hang the heart. `moved` gives the numbers.
    """

    def __init__(self, limit_s: float, moved: Callable[[], tuple[int, ...]]) -> None:
        self._limit_s, self._moved = limit_s, moved
        self._period_s = min(LOOK_S, limit_s / 8)
        self._under_way: Cast | None = None
        self._last: tuple[Cast, tuple[int, ...]] | None = None
        self._stood_s = 0.0
        self._looked_at = 0.0

    def begin(self, cast: Cast) -> None:
        """From here on steps of this generation are under way."""
        self._under_way = cast

    @property
    def under_way(self) -> Cast | None:
        """The generation whose steps are under way."""
        return self._under_way

    def halt(self) -> None:
        """None are, whoever began: the control thread's, while the training thread is parked or left behind."""
        self._under_way = None

    def end(self, cast: Cast) -> None:
        """No more; of another generation it says nothing."""
        if self._under_way == cast:
            self._under_way = None

    def look(self, now: float) -> StoodStill | None:
        """What to say, if it has stood for longer than the limit; said again after as long again.

        Time in which nobody looked counts as one look at most: a process that was starved or stopped cannot have moved.
        """
        since_s = now - self._looked_at
        if since_s < self._period_s:
            return None
        self._looked_at = now
        under_way = self._under_way
        state = None if under_way is None else (under_way, self._moved())
        if under_way is None or state is None or state != self._last:
            self._last, self._stood_s = state, 0.0
            return None
        self._stood_s += min(since_s, 2 * self._period_s)
        if self._stood_s <= self._limit_s:
            return None
        stood_s, self._stood_s = self._stood_s, 0.0
        return StoodStill(*under_way, f"nothing has moved for {stood_s:.0f} s", state[1])

    def holds(self, told: StoodStill) -> bool:
        """Whether what was said is still so."""
        if self._under_way != (told.term, told.generation):
            return False
        return told.moved is None or told.moved == self._moved()


class DeviceMarks:
    """Events behind the work that the training thread has queued: a device that passes them works on.

    `leave` is the training thread's (autograd's while a backward pass runs), `look` belongs to a thread of its own:
    where a queue of the driver is full, asking it may wait for it.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._free: list[tuple[Any, Any]] = []
        self._device: Any = None
        self.num_passed = 0

    def move_to(self, device: torch.device) -> None:
        """Before anything is queued on another device: an event belongs to the one where it was first recorded."""
        self._device = device
        self._free = [own for own in self._free if own[0] == device]

    def come_along(self) -> None:
        """Choose that device in the calling thread: one that has chosen none makes a context on the first."""
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
        """Count what has been passed. A device that has failed passes nothing; the training thread learns of it."""
        try:
            while self._ahead and self._ahead[0][1].query():
                passed = self._ahead.popleft()
                self.num_passed += 1
                if passed[0] == self._device:
                    self._free.append(passed)
        except RuntimeError as error:
            log.warning("a mark on the device: %s", error)
            self._ahead.clear()


def look_at_device(
    marks: DeviceMarks, standstill: Standstill, exchange_error: Callable[[], str], tell: Callable[[StoodStill], None]
) -> None:
    """The body of a thread: count marks, and tell of what the groups of a running generation know of a broken link,
    once for each. NCCL ends nothing by itself then: nobody has told it to."""
    told: Cast | None = None
    while True:
        try:
            marks.come_along()
            marks.look()
            cast = standstill.under_way
            if cast is not None and cast != told and (error := exchange_error()):
                told = cast
                tell(StoodStill(*cast, error))
        except Exception:
            # Without this thread a long step looks like one that stands still.
            log.exception("a look at the device failed")
        time.sleep(LOOK_S / 2)
