"""What local files and object stores share: file records, uploads, bytes in pieces, and retries of failed requests.

Retries are the one place that waits for storage: docs/guarantees.md has a table of who waits for how long, and what
follows. What to try is not here.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from elastic_ring.files import cut

T = TypeVar("T")
logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
TELL_AFTER_S, TELL_AGAIN_S = 3.0, 60.0
"""Seconds from the first failure to the first report, and between reports."""
MAX_ERROR_CHARS = 400
PROBE = ".write-test"


@dataclass(frozen=True)
class StoredFile:
    """A file by its name under the storage's root. `sha256` is of the bytes that were handed to the store."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A listed file. `path`: the backend's; from `Storage` the name under its root."""

    path: str
    num_bytes: int
    modified_unix_s: float


@dataclass(frozen=True)
class Upload:
    """A multipart upload that is neither completed nor aborted. `path` as in `Entry`."""

    path: str
    upload_id: str
    begun_unix_s: float


def pieces(chunks: Iterable[bytes | memoryview], num_bytes: int = PIECE_BYTES) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of exactly `num_bytes`, but for the last; large chunks are not copied."""
    kept = bytearray()
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        if kept:
            missing = num_bytes - len(kept)
            kept += rest[:missing]
            rest = rest[missing:]
            if len(kept) == num_bytes:
                yield memoryview(kept)
                kept = bytearray()
        while len(rest) >= num_bytes:
            yield rest[:num_bytes]
            rest = rest[num_bytes:]
        kept += rest
    if kept:
        yield memoryview(kept)


def ignore(text: str) -> None:
    """A `tell` that does nothing: the log is enough."""


@dataclass(frozen=True)
class Retries:
    """Repeats a failing call, with growing pauses.

    `limit_s`: the last attempt begins so long after the first failure; 0 for a single attempt. `tell` gets a line for
    a person once the call has failed for TELL_AFTER_S, and again every TELL_AGAIN_S. `pause` waits so many seconds; a
    true result ends the attempts.
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
        """The first result of `attempt`; raises its last error with a note of attempts and time, at once if final."""
        begun, failed_s, pause_s, num_failed, reported_s = time.monotonic(), 0.0, FIRST_PAUSE_S, 0, -TELL_AGAIN_S
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
                if now_s - failed_s >= TELL_AFTER_S and now_s - reported_s >= TELL_AGAIN_S:
                    reported_s = now_s
                    self.tell(f"waits for storage, for {left_s:.0f} s more: {one_line(error)}")
                before_next(error)
                # Jitter: many clients that a store turned away at once do not come back at once.
                if self.pause(min(pause_s * random.uniform(0.5, 1.0), left_s)):
                    raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


ONCE = Retries(0.0)


def one_line(error: BaseException) -> str:
    """An error in one line that fits a console."""
    return cut(" ".join(f"{type(error).__name__}: {error}".split()), MAX_ERROR_CHARS)
