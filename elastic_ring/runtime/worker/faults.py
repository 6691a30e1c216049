"""Injects planned faults into the worker's own process, with real signals and exits.

A fault fires once in a run: the worker asks the coordinator first, and only one request is granted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from elastic_ring.faults import EXCHANGES, Fault

log = logging.getLogger(__name__)

SLOW_FACTOR, SLOW_LEAST_S, SLOW_MOST_S = 4.0, 0.02, 0.25
"""The delay of each part of a slow process's passes: a multiple of its own time, so that it stays the slowest on a busy
machine too, within bounds below the time after which silence counts as a stall."""
ANSWER_LEAVES_S = 0.02
SLOW_SAVE_S = 5.0
"""The delay of a file, or a manifest, of a checkpoint with slow@...,phase=upload or commit."""

Ask = Callable[[int], bool]
"""Asks the coordinator for the fault with this index; False when it has fired already."""


class Injector:
    """The planned faults of one worker."""

    def __init__(self, faults: Sequence[Fault], ask: Ask, notify: Callable[[str], None]) -> None:
        self._left = dict(enumerate(faults))
        self._ask = ask
        self._notify = notify
        self._is_slow = False
        self._pass_since: float | None = None
        self.flip: Callable[[str, bool], None] = lambda phase, stays: None
        """Flips one bit of this phase's result, once or from now on."""
        self.poison: Callable[[], None] = lambda: None
        """Makes every later call to this worker's GPU fail, in this process only."""

    def check(self, *, phase: str, step: int, rank: int, hop: int | None = None, role: str | None = None) -> None:
        """Fire the faults planned for this phase, step and rank."""
        if self._is_slow:  # wait for a multiple of the time since the last check within a pass
            if self._pass_since is not None:
                passed_s = time.monotonic() - self._pass_since
                time.sleep(min(max(SLOW_FACTOR * passed_s, SLOW_LEAST_S), SLOW_MOST_S))
            self._pass_since = time.monotonic() if phase in ("forward", "backward", *EXCHANGES) else None
        for index, fault in list(self._left.items()):
            if fault.matches(step=step, phase=phase, rank=rank, hop=hop, role=role):
                del self._left[index]
                if self._ask(index):
                    self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        log.warning("planned fault %s fires in pid %d", fault, os.getpid())
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "gil":
                # A PyDLL call keeps the GIL: no Python runs in this process any more, and it uses no CPU.
                ctypes.PyDLL(None).sleep(1 << 20)
            case "raise":
                raise RuntimeError(f"planned fault {fault}")
            case "exit":
                os._exit(3)
            case "kill-node":
                signal_node(signal.SIGKILL)
            case "freeze-node":
                signal_node(signal.SIGSTOP)
            case "flip" | "wrong":
                self.flip(fault.phase, fault.kind == "wrong")
            case "poison":
                self.poison()
            case "slow" if fault.phase == "upload":
                time.sleep(SLOW_SAVE_S)
            case "slow":
                self._is_slow = True
            case _:  # the coordinator carries out drain and its own faults
                self._notify(fault.kind)


def inject_into_coordinator(kind: str) -> None:
    """Fire the coordinator's own fault, in the deciding thread that grants it: nothing is decided in between, however
    short the phase is. The answer has time to leave."""
    signals = {"kill-coordinator": signal.SIGKILL, "freeze-coordinator": signal.SIGSTOP}
    if kind in signals:
        time.sleep(ANSWER_LEAVES_S)
        os.kill(os.getpid(), signals[kind])


def signal_node(number: signal.Signals) -> None:
    """Send a signal to this worker's raylet and all processes that it started, this one last.

    SIGSTOP is a host that vanishes: its sockets stay open and nothing answers.
    """
    raylet = psutil.Process(os.getppid())
    children = [process for process in raylet.children(recursive=True) if process.pid != os.getpid()]
    for process in (raylet, *children):
        process.send_signal(number)
    os.kill(os.getpid(), number)
