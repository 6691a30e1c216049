"""When each stage of a start began and how long it took, as the process that starts notes it. No I/O in here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

Stage = tuple[str, float, float]
"""What was done, when it began in Unix seconds, and how many seconds it took."""


class Stages:
    """Stages of one process, one after another. `ended` may be read by any thread."""

    def __init__(self, first: str, since_unix_s: float | None = None) -> None:
        """`first`: what is done from `since_unix_s` on, by default from the beginning of this process."""
        self._what, self._since_s = first, process_unix_s() if since_unix_s is None else since_unix_s
        self.ended: list[Stage] = []

    def begin(self, what: str) -> None:
        """The stage before ends; with an empty text no other begins."""
        now = time.time()
        if self._what:
            self.ended.append((self._what, self._since_s, now - self._since_s))
        self._what, self._since_s = what, now


def process_unix_s() -> float:
    """When this process began."""
    return float(psutil.Process().create_time())


def in_order(since_unix_s: float, took_s: Sequence[tuple[str, float]]) -> list[Stage]:
    """Stages whose lengths alone are known, from a moment on; those that took no time are left out."""
    found: list[Stage] = []
    for what, seconds in took_s:
        if seconds > 0:
            found.append((what, since_unix_s, seconds))
            since_unix_s += seconds
    return found
