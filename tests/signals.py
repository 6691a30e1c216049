"""What tests that interrupt a process need of signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def heed_interrupts() -> None:
    """For `preexec_fn`: a background shell starts its commands with Ctrl-C ignored, which children would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def heeding_hangups() -> Iterator[None]:
    """Children of nohup ignore SIGHUP, and those of a background shell SIGINT: within, both have Python's handlers. So
    has SIGUSR1, which a library may have taken in a process of many tests."""
    warning = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, warning or signal.SIG_DFL)
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, interrupt)
