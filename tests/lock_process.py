"""A process that holds a lock, for tests of who may take it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def lock_process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs `command`, which prints "locked" once it holds its lock, and kills it at the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "locked"
            yield process
        finally:
            process.kill()
