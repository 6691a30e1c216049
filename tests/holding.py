"""A process of its own that holds something, for tests of who may take it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def holding(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs `command`, which prints "held" once it holds what it is to hold, and kills it at the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "held"
            yield process
        finally:
            process.kill()
