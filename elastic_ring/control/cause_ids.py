"""Unique ids for events. The commands and log lines that an event leads to repeat its id."""

from __future__ import annotations

import itertools
import os


class CauseIds:
    """Issues `PREFIX.PID.1`, `PREFIX.PID.2`, ... without repetition. Thread-safe."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}.{os.getpid()}"
        self._numbers = itertools.count(1)  # `next` is atomic; `+= 1` on an attribute is not

    def __call__(self) -> str:
        return f"{self._prefix}.{next(self._numbers)}"
