"""What tests that interrupt a process need of signals."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """For `preexec_fn`: a background shell starts its commands with Ctrl-C ignored, which children would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
