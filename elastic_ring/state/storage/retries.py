"""Retries failed calls to a file system or an object store: with growing pauses, within a limit, and reports the wait.

This is the one place that waits for storage. docs/guarantees.md has a table of who waits for how long, and what
follows. What to try is not here.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from elastic_ring.wording import cut

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
TELL_AFTER_S, TELL_AGAIN_S = 3.0, 60.0
"""Seconds from the first failure to the first report, and between reports."""
TOLD_CHARS = 400


def ignore(text: str) -> None:
    """For those whose log is enough."""


@dataclass(frozen=True)
class Retries:
    """`limit_s`: the last attempt begins so long after the first one failed; 0 for a single attempt.

    `tell` gets a line for a person once an attempt has failed for TELL_AFTER_S, and then now and again. `pause`
    waits so many seconds; a true answer ends the attempts.
    """

    limit_s: float
    tell: Callable[[str], None] = ignore
    pause: Callable[[float], object] = lambda pause_s: time.sleep(pause_s)

    def __call__(
        self,
        attempt: Callable[[], T],
        is_final: Callable[[Exception], bool],
        before_next: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        """The result of the first attempt that succeeds; else the last one's error, with how long was tried."""
        begun, failed_s, pause_s, num_failed, told_s = time.monotonic(), 0.0, FIRST_PAUSE_S, 0, -TELL_AGAIN_S
        while True:
            try:
                return attempt()
            except Exception as error:
                num_failed += 1
                now_s = time.monotonic() - begun
                if num_failed == 1:  # which may have been slow: it also opens the connection
                    failed_s = now_s
                left_s = failed_s + self.limit_s - now_s
                if left_s <= 0 or is_final(error):
                    if num_failed > 1:
                        error.add_note(f"{num_failed} attempts in {now_s:.1f} s")
                    raise
                level = logging.WARNING if num_failed == 1 else logging.INFO
                logger.log(level, "attempt %d failed, again for %.0f s: %s", num_failed, left_s, error)
                if now_s - failed_s >= TELL_AFTER_S and now_s - told_s >= TELL_AGAIN_S:
                    told_s = now_s
                    self.tell(f"waits for storage, for {left_s:.0f} s more: {shortened(error)}")
                before_next(error)
                # Many writers that a store turned away at once do not come back at once.
                if self.pause(min(pause_s * random.uniform(0.5, 1.0), left_s)):
                    raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


ONCE = Retries(0.0)
"""For those that do not wait."""


def shortened(error: BaseException) -> str:
    """An error in one line of a length that a console can show."""
    return cut(" ".join(f"{type(error).__name__}: {error}".split()), TOLD_CHARS)
