"""The append-only story of a run: JSON lines on disk before a command leaves, and the counter of terms.

Knows lines and files, not what is in them: the control core's messages stay in `control/`. Replaying a
journal, compressing it or sending it anywhere must not enter this module.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from elastic_ring.errors import JournalDamaged, RunFailed

LOOK_S, QUIET_S = 0.01, 0.2
"""How often a half line is looked at, and how long it stays one before its writer counts as dead."""
_TERM_NAME = re.compile(r"[0-9]{6,}")


class Journal:
    """One writer's end of a journal. The constructor touches no file; `open` does.

    Appends go through one `os.write` on an O_APPEND descriptor, so that lines of two writers (an old
    coordinator that was frozen and its successor) never mix inside a line.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.path = Path(path)
        self.durable = durable
        self._fd: int | None = None

    def open(self) -> Journal:
        """Create the file, or cut off a torn last line of a crashed writer. Raises JournalDamaged."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        created = not self.path.exists()
        whole_bytes = 0 if created else _whole_bytes(self.path)
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not created and _is_torn(fd, whole_bytes):
            os.ftruncate(fd, whole_bytes)
            os.fdatasync(fd)
        if created:
            sync_directory(self.path.parent)
        self._fd = fd
        return self

    def append(self, record: dict[str, Any], *, sync: bool = True) -> None:
        """Write one line; with `durable` and `sync` it and all before it are on disk when this returns.

        Raises: RunFailed when the line cannot be written whole (a full disk); the part of it that got
        onto the disk is a torn last line, which `open` cuts off. The journal is closed by then.
        """
        assert self._fd is not None, "Journal.append before open"
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            num_written = os.write(self._fd, line)
            if self.durable and sync:
                os.fdatasync(self._fd)
        except OSError as error:
            self.close()
            raise RunFailed(f"cannot write the journal {self.path}: {error}", path=str(self.path)) from error
        if num_written != len(line):
            self.close()  # a line after half a line would be damage in the middle
            raise RunFailed(
                f"the journal {self.path} took only {num_written} of {len(line)} bytes: is the disk full?",
                path=str(self.path),
            )

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Journal:
        return self if self._fd is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records in order; a missing file has none, a torn last line is not one.

    Raises: JournalDamaged with the line number when any other line is not a JSON object.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for record, _ in _lines(file, path):
            yield record


def claim_term(directory: str | os.PathLike[str]) -> int:
    """The next term, 1 for the first. Files `terms/000001`, ... are made with O_EXCL: no two callers get one.

    The directory must be on a file system where O_EXCL excludes (every local one, NFS since version 3).
    """
    folder = Path(directory) / "terms"
    folder.mkdir(parents=True, exist_ok=True)
    term = max((int(name) for name in os.listdir(folder) if _TERM_NAME.fullmatch(name)), default=0)
    while True:
        term += 1
        try:
            fd = os.open(folder / f"{term:06d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
        os.close(fd)
        # A term that a power cut could forget might be handed out again.
        sync_directory(folder)
        return term


def newest_term(directory: str | os.PathLike[str], known: int) -> int:
    """The newest term that was claimed; cheap when that is still `known`, the caller's own."""
    folder = Path(directory) / "terms"
    while (folder / f"{known + 1:06d}").exists():
        known += 1
    return known


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Make a new or renamed name in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_torn(fd: int, whole_bytes: int) -> bool:
    """Whether what follows the last whole line will never be one.

    A live writer, an old coordinator that does not know yet of its successor, may have appended since that line was
    read, and be at the next one: its lines end, sooner or later, and a crashed writer's stays as it is.
    """
    seen, since = b"", time.monotonic()
    while True:
        rest = os.pread(fd, os.fstat(fd).st_size - whole_bytes, whole_bytes)
        if not rest or b"\0" in rest:
            return bool(rest)
        if b"\n" in rest:
            return False
        if rest != seen:
            seen, since = rest, time.monotonic()
        elif time.monotonic() - since > QUIET_S:
            return True
        time.sleep(LOOK_S)


def _whole_bytes(path: Path) -> int:
    end_bytes = 0
    with path.open("rb") as file:
        for _, end_bytes in _lines(file, path):  # noqa: B007  the last value is the answer
            pass
    return end_bytes


def _lines(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole record and the offset of its end.

    Torn means: without a newline, or with a hole of NUL bytes (a power cut may keep the file's new length
    and lose the page), and in either case last. Anything else that does not parse is damage: dropping it
    silently would forget a command that has already left.
    """
    end_bytes = 0
    hole = 0
    for number, line in enumerate(file, start=1):
        if hole:
            raise _damaged(path, hole)
        if not line.endswith(b"\n"):
            # Asking for more could give the line's other half, if its writer is alive and at it just now.
            return
        if b"\0" in line:
            hole = number
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise _damaged(path, number) from error
        if not isinstance(record, dict):
            raise _damaged(path, number)
        end_bytes += len(line)
        yield record, end_bytes


def _damaged(path: str | os.PathLike[str], line: int) -> JournalDamaged:
    return JournalDamaged(f"line {line} of {path} is not a JSON object", path=str(path), line=line)
