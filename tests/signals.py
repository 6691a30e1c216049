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
    """What nohup starts ignores SIGHUP, and so would what is tested within it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
