"""Trying again what a disk or an object store refused: with growing pauses, within a limit. What to try is not here."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Retries:
    """`limit_s`: no attempt begins later than that after the first one failed; 0 for a single attempt."""

    limit_s: float

    def __call__(
        self,
        attempt: Callable[[], T],
        is_final: Callable[[Exception], bool],
        before_next: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        """The result of the first attempt that succeeds; else the last one's error, with how long was tried."""
        begun, last_s, pause_s, num_failed = time.monotonic(), 0.0, FIRST_PAUSE_S, 0
        while True:
            try:
                return attempt()
            except Exception as error:
                num_failed += 1
                waited_s = time.monotonic() - begun
                if num_failed == 1:  # which may have been slow: it also opens the connection
                    last_s = waited_s + self.limit_s
                if is_final(error) or waited_s + pause_s > last_s:
                    if num_failed > 1:
                        error.add_note(f"{num_failed} attempts in {waited_s:.1f} s")
                    raise
                level = logging.WARNING if num_failed == 1 else logging.INFO
                logger.log(level, "attempt %d failed, again in %.1f s: %s", num_failed, pause_s, error)
                before_next(error)
            # Many writers that a store turned away at once do not come back at once.
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
