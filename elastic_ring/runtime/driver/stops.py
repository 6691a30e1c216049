"""Signals that stop a command. Light to import: no Ray, no run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPED = "stopped"
SAVED = f"{STOPPED}, with a checkpoint of step"
UNSAVED = f"{STOPPED}, without a new checkpoint"
AT_ONCE = f"{STOPPED} at once"
EARLY = f"{STOPPED} before training began"
HEAD_IS_GONE = f"{STOPPED}; the head of the Ray cluster is gone"
LEFT = f"{STOPPED} while Ray was left"
"""How the last line of a command that is stopped begins."""


class StopSignal(KeyboardInterrupt):
    """A signal that leaves a run the time for a checkpoint; Ctrl-C leaves none."""


def _stop(number: int, frame: object) -> None:
    raise StopSignal


@contextmanager
def heeding(stop: Callable[[int, object], None] = _stop) -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGUSR1 (a warning of SLURM's) raise StopSignal, and SIGINT KeyboardInterrupt; or `stop` is
    called at each.

    SIGHUP stays ignored in a process that was started so (nohup), and SIGUSR1 is left to its handler. SIGINT counts
    also in one that a script started with `&`, which ignores it. Again after Ray is started, which takes SIGTERM.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, _stop):
            numbers.append(signal.SIGUSR1)
        for number in numbers:
            is_interrupt = number == signal.SIGINT and stop is _stop
            before[number] = signal.signal(number, signal.default_int_handler if is_interrupt else stop)
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler or signal.SIG_DFL)
