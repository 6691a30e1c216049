"""The append-only journal of a run: JSON lines that are on disk before a command is sent.

Handles lines and files, not their meaning: the messages belong to `control/`. Replaying, compressing or sending a
journal must not enter this module.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from elastic_ring.errors import JournalDamaged, RecordDamaged, StaleMessage, StorageFailed
from elastic_ring.files import plain_json, sync_directory
from elastic_ring.state.storage.backend import ONCE

MAX_LINE_BYTES = 1 << 26
"""A writer makes no longer line; a stranger's file may be one."""
MAX_BYTES = 1 << 32
"""The most bytes of a journal or of metrics: millions of steps, and small enough for a reader's memory."""
LOOK_S, QUIET_S = 0.01, 0.2
"""Seconds between looks at an incomplete line, and without change until its writer counts as dead."""
_TYPES: dict[str, tuple[type, ...]] = {
    "note": (str,),
    "term": (int,),
    "num_lines": (int,),
    "now": (int, float),
    "attempt": (str,),
    "commands": (list,),
    "loss_hex": (str,),
}
"""Types of the fields that decide which lines count, so that readers need not check. A line of other types is
damaged."""
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"}\n$')
Retried = Callable[[Callable[[], None], Callable[[Exception], bool]], None]
"""Carries out a write, again while it fails and its error is not final."""


class Journal:
    """The writing end of a journal. The constructor touches no file; `open` does.

    Each line is one `os.write` on an O_APPEND descriptor, so lines of two writers (a coordinator that was frozen and
    its successor) never interleave.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True, retries: Retried = ONCE) -> None:
        """`retries`: how a write that fails is tried again."""
        self.path = Path(path)
        self.durable = durable
        self._retries = retries
        self._fd: int | None = None

    def open(self) -> Journal:
        """Create the file, or truncate an incomplete last line of a crashed writer. Raises: JournalDamaged."""
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
        """Write one line; with `durable` and `sync`, it and all lines before it are on disk when this returns.

        If the disk takes only a part of the line, the rest is tried as often as a whole line. Raises: StorageFailed
        when it cannot be written completely. The journal is then closed; the next `open` truncates the incomplete line.
        """
        assert self._fd is not None, "Journal.append before open"
        fd = self._fd
        rest = memoryview(line_of(record))
        end_bytes = -1  # of the part that is written

        def put() -> None:
            nonlocal rest, end_bytes
            while rest:
                if end_bytes >= 0 and os.fstat(fd).st_size != end_bytes:
                    raise StaleMessage(f"another coordinator writes {self.path}: this one exits")
                rest = rest[os.write(fd, rest) :]
                end_bytes = os.lseek(fd, 0, os.SEEK_CUR)

        try:
            self._retries(put, _is_final)
            if self.durable and sync:
                os.fdatasync(fd)  # not tried again: the kernel may have dropped what it could not write
        except OSError as error:
            self.close()  # a line after an incomplete one would be damage in the middle
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
            raise StorageFailed(
                f"cannot write the journal {self.path}: {error}{notes}. Free space there or make it writable, and "
                "submit the run again",
                path=str(self.path),
            ) from error

    def sync(self) -> None:
        """All lines are on disk when this returns."""
        if self._fd is not None:
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Journal:
        return self if self._fd is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def line_of(record: Mapping[str, Any]) -> bytes:
    """A journal's line: the record, not empty, with a checksum of its bytes, so that a wrong one shows."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return text[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(text)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records in order; none for a missing file. An incomplete last line is skipped.

    Raises: JournalDamaged with the line number when any other line is not a JSON object; as `opened`.
    """
    if not os.path.exists(path):
        return
    with opened(path) as file:
        for record, _ in _lines(file, path):
            yield record


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """The file for reading. Raises RecordDamaged for something else than a file, which would block, and for a file
    longer than a run writes; FileNotFoundError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(fd)
    wrong = "is no regular file" if not stat.S_ISREG(about.st_mode) else ""
    wrong = wrong or (f"has more than {MAX_BYTES} bytes" if about.st_size > MAX_BYTES else "")
    if wrong:
        os.close(fd)
        raise RecordDamaged(f"{os.fspath(path)} {wrong}: remove it, or give another folder", path=str(path))
    return open(fd, "rb")


def parse(data: bytes, name: str) -> Iterator[dict[str, Any]]:
    """The records in a journal's bytes; as `read`, which says `name` instead of a path."""
    for record, _ in _lines(io.BytesIO(data), name):
        yield record


def salvage(data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """The records that are right, and the numbers of the damaged lines. An incomplete last line is neither."""
    damaged: list[int] = []
    records = [record for record, _ in _lines(io.BytesIO(data), "", damaged.append)]
    return records, damaged


def salvage_file(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """As `salvage`, of a file; none for a missing one. Raises as `opened`."""
    if not os.path.exists(path):
        return [], []
    damaged: list[int] = []
    with opened(path) as file:
        return [record for record, _ in _lines(file, path, damaged.append)], damaged


def _is_final(error: Exception) -> bool:
    """Whether the disk will never take the line."""
    return not isinstance(error, OSError) or error.errno in (errno.EBADF, errno.EFBIG, errno.EINVAL)


def _is_torn(fd: int, whole_bytes: int) -> bool:
    """Whether what follows the last complete line will stay incomplete.

    A live writer (a coordinator that does not know its successor yet) may be writing right now: its lines get
    completed, while a crashed writer's line does not change any more.
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
    with opened(path) as file:
        for _, end_bytes in _lines(file, path):  # noqa: B007  the last value is the answer
            pass
    return end_bytes


def _lines(
    file: BinaryIO, path: str | os.PathLike[str], damaged: Callable[[int], None] | None = None
) -> Iterator[tuple[dict[str, Any], int]]:
    """Each complete record and the offset of its end.

    An incomplete (torn) line has no newline, or has NUL bytes (a power loss may keep the file's new length and lose
    the page), and is the last. Any other damaged line goes to `damaged`, or raises: skipping it could forget a command
    that was sent.
    """

    def tell(number: int) -> None:
        if damaged is None:
            told = f"line {number} of {path} is damaged; the run's next submission sets it aside"
            raise JournalDamaged(told, path=str(path), line=number)
        damaged(number)

    end_bytes = 0
    hole = 0
    is_signed = False
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
        if hole:
            tell(hole)
            hole = 0
        if not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                tell(number)
            # Stop: if the writer is alive, another read could return the rest of this line as a line.
            return
        if b"\0" in line:
            hole = number
            continue
        record, was_signed = record_of(line), is_signed
        is_signed = _CRC.search(line) is not None
        if record is None or (was_signed and not is_signed):  # a wrong byte in the checksum's name takes it away
            tell(number)
            is_signed = was_signed
            continue
        end_bytes += len(line)
        yield record, end_bytes


def record_of(line: bytes) -> dict[str, Any] | None:
    """What a line says; None for one that is damaged. Lines of earlier versions have no checksum."""
    try:
        record = plain_json(line, MAX_LINE_BYTES)
    except ValueError:
        return None
    if not isinstance(record, dict) or not _has_right_types(record):
        return None
    found = _CRC.search(line)
    if found is None:
        return record
    del record["crc"]
    return record if zlib.crc32(line[: found.start()] + b"}") == int(found[1], 16) else None


def _has_right_types(record: Mapping[str, Any]) -> bool:
    right = all(isinstance(record[key], kinds) for key, kinds in _TYPES.items() if key in record)
    right = right and all(isinstance(command, dict) for command in record.get("commands", ()))
    return right and (record.get("note") != "term" or {"term", "num_lines"} <= record.keys())
