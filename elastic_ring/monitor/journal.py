"""The append-only journal of a run: JSON lines that are on disk before a command is sent.

Handles lines and files, not their meaning: the messages belong to `control/`. Replaying, compressing or sending a
journal must not enter this module.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from elastic_ring.errors import JournalDamaged, OtherFormat, RecordDamaged, StaleMessage, StorageFailed
from elastic_ring.files import plain_json, sync_directory
from elastic_ring.state.storage.backend import ONCE

MAX_LINE_BYTES = 1 << 22
"""A writer makes no longer line (1,024 members make 31 KB); a stranger's file may be one."""
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
FORMAT = 2
"""Of journal.jsonl, metrics.jsonl and attempts.jsonl. Lines of format 1 had no number."""
_END = re.compile(
    rb'(?P<writer>,"writer":"[0-9a-f]{8}")?(?:,"format":([0-9]{1,9}))?,"seq":([0-9]{1,18}),"prev":"([0-9a-f]{8})","crc":"(?P<crc>[0-9a-f]{8})"}\n$'
)
_END_OF_FORMAT_1 = re.compile(rb',"crc":"([0-9a-f]{8})"}\n$')
CRC_KEY_BYTES = len(b',"crc":"')
DAMAGED, OUT_OF_ORDER = "is damaged", "does not follow the line before it: a line is missing, doubled or moved"
Retried = Callable[[Callable[[], None], Callable[[Exception], bool]], None]
"""Carries out a write, again while it fails and its error is not final."""


class Journal:
    """The writing end of a journal. The constructor touches no file; `open` does.

    Each line is one `os.write` on an O_APPEND descriptor, so lines of two writers (a coordinator that was frozen and
    its successor) never interleave. A writer's first line has a random number, so that equal records of two writers
    are no doubled line. Threads may append.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True, retries: Retried = ONCE) -> None:
        """`retries`: how a write that fails is tried again."""
        self.path = Path(path)
        self.durable = durable
        self._retries = retries
        self._fd: int | None = None
        self._link = Link()
        self._writer = ""  # of the next line, if it is the first one
        self._end_bytes = 0  # of the last line that was written
        self._num_durable = 0
        self._lock = threading.Lock()

    def open(self, after: Place | None = None) -> Journal:
        """Create the file, or truncate an incomplete last line of a crashed writer. The lines before `after`, if given,
        are read already. Raises: JournalDamaged; RecordDamaged for a link, behind which a stranger's file may be."""
        created, whole_bytes = not self.path.exists(), 0
        if not created:
            with opened(self.path) as file:
                whole_bytes, self._link = _end_of(file, self.path, after or Place())
        if self.path.is_symlink():
            raise RecordDamaged(f"{self.path} is a link: remove it, or give another folder", path=str(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if not created and _is_torn(fd, whole_bytes):
            os.ftruncate(fd, whole_bytes)
            os.fdatasync(fd)
        if created:
            sync_directory(self.path.parent)
        self._fd, self._writer = fd, secrets.token_hex(4)
        return self

    def append(self, record: dict[str, Any], *, sync: bool = True) -> StoredLine:
        """Write one line; with `durable` and `sync`, it and all lines before it are on disk when this returns.

        If the disk takes only a part of the line, the rest is tried as often as a whole line. Raises: StorageFailed
        when it cannot be written completely. The journal is then closed; the next `open` truncates the incomplete line.
        """
        assert self._fd is not None, "Journal.append before open"
        fd = self._fd
        with self._lock:
            return self._write(fd, record, sync)

    def _write(self, fd: int, record: dict[str, Any], sync: bool) -> StoredLine:
        line, self._link = chained(record, self._link, self._writer)
        self._writer, rest = "", memoryview(line)
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
        except OSError as error:
            raise self._failed(error) from error
        if self.durable and sync:
            self.sync()
        self._end_bytes = end_bytes
        return StoredLine(record, end_bytes - len(line), Place(end_bytes, self._link))

    def is_cut(self) -> bool:
        """Whether the file no longer has all that was written, or is another one, which then gets the next line: a
        reader sees by that line's number that others are missing. False where the file is away."""
        with self._lock, suppress(OSError):
            if self._fd is None:
                return False
            own, now = os.fstat(self._fd), os.stat(self.path)
            if os.path.samestat(own, now) and now.st_size >= self._end_bytes:
                return False
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._end_bytes = 0
            return True
        return False

    def sync(self) -> int:
        """All lines are on disk when this returns: so many. Raises StorageFailed, which closes the journal."""
        number = self._link.number
        if self._fd is not None and self._num_durable != number:
            try:
                os.fdatasync(self._fd)  # not tried again: the kernel may have dropped what it could not write
            except OSError as error:
                raise self._failed(error) from error
            self._num_durable = number
        return number

    def _failed(self, error: OSError) -> StorageFailed:
        self.close()  # a line after an incomplete one would be damage in the middle
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        return StorageFailed(
            f"cannot write the journal {self.path}: {error}{notes}. Free space there or make it writable, and submit "
            "the run again",
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


class Link(NamedTuple):
    """The place of the next line: its number from 0, and the checksum of the line before it (0 for the first)."""

    number: int = 0
    crc: int = 0


class Place(NamedTuple):
    """The end of a line in its file, and the link of the line after it."""

    end_bytes: int = 0
    link: Link = Link()


class StoredLine(NamedTuple):
    """A record, where its line begins, and the place after it; `after.link.crc` is the line's checksum."""

    record: dict[str, Any]
    start_bytes: int
    after: Place


def chained(record: Mapping[str, object], link: Link, writer: str = "") -> tuple[bytes, Link]:
    """The line of a record that is not empty at `link`, and the link of the line after it.

    A line ends with its number, the checksum of the line before it and its own; the first one names the format.
    `writer`: of a writer's first line.
    """
    text = json.dumps(record, separators=(",", ":")).encode()[:-1]
    head = b',"writer":"%s"' % writer.encode() if writer else b""
    head += b',"format":%d' % FORMAT if not link.number else b""
    text += head + b',"seq":%d,"prev":"%08x"' % link
    crc = zlib.crc32(text)
    return text + b',"crc":"%08x"}\n' % crc, Link(link.number + 1, crc)


class Flaw(NamedTuple):
    """A line, counted from 1, that cannot be used or does not follow the line before it."""

    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line} {self.problem}"


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records in order; none for a missing file. An incomplete last line is skipped.

    Raises: JournalDamaged with the number of the first line that is damaged, or does not follow the line before it;
    as `opened`; OtherFormat.
    """
    if not os.path.exists(path):
        return
    with opened(path) as file:
        for line in Lines(file, path):
            yield line.record


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """The file for reading. Raises RecordDamaged for something else than a file, which would block, and for a file
    longer than a run writes; FileNotFoundError."""
    if os.path.islink(path) and not os.path.exists(path):
        raise RecordDamaged(f"{os.fspath(path)} is a link to nothing: remove it", path=str(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(fd)
    wrong = "is no regular file" if not stat.S_ISREG(about.st_mode) else ""
    wrong = wrong or (f"has more than {MAX_BYTES} bytes" if about.st_size > MAX_BYTES else "")
    if wrong:
        os.close(fd)
        raise RecordDamaged(f"{os.fspath(path)} {wrong}: remove it, or give another folder", path=str(path))
    return open(fd, "rb")


def salvage_file(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[Flaw]]:
    """The intact records, and the lines that are damaged or before which others are missing; nothing without a file.

    An incomplete last line is neither. Raises as `opened`; OtherFormat.
    """
    if not os.path.exists(path):
        return [], []
    flaws: list[Flaw] = []
    with opened(path) as file:
        return [line.record for line in Lines(file, path, flaws)], flaws


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


def _end_of(file: BinaryIO, path: Path, after: Place) -> Place:
    """The end of the last complete line, which is `after` or behind it. Raises: JournalDamaged."""
    size, lines = os.fstat(file.fileno()).st_size, Lines(file, path, after=after)
    for line in lines:
        if line.after.end_bytes >= size:  # a live writer may be quicker than this reader
            break
    return lines.after


class Lines:
    """Iterates over the lines of a file that follow `after`. The place behind the newest of them is then in `after`.

    An incomplete (torn) line has no newline, or has NUL bytes (a power loss may keep the file's new length and lose
    the page), and is the last. Any other flaw goes to `flaws`, or raises: skipping it could forget a command that was
    sent.

    Two writers (a coordinator that was frozen, and its successor) make the chain fork: both go on from the last line
    that the successor has read. So a line may also follow an earlier line of the first branch, or another branch's end.
    Behind `after` a fork that begins before it counts as a flaw.
    """

    def __init__(
        self,
        file: BinaryIO,
        path: str | os.PathLike[str],
        flaws: list[Flaw] | None = None,
        after: Place = Place(),  # noqa: B008  immutable
    ) -> None:
        self._file, self._path, self._flaws, self.after = file, path, flaws, after
        self._first = max(0, after.link.number - 1)
        self._crcs = array("I", [after.link.crc] if after.link.number else [])  # of the first branch, from _first on
        self._num_damaged = 0  # lines since the last intact one
        self._forks: set[Link] = set()  # first lines of other branches, by what follows them
        self._tips: set[Link] = set()  # their ends

    def __iter__(self) -> Iterator[StoredLine]:
        hole, end_bytes = 0, self.after.end_bytes
        self._file.seek(end_bytes)
        for number, line in enumerate(iter(partial(self._file.readline, MAX_LINE_BYTES + 1), b""), start=1):
            if hole:
                self._report(Flaw(hole, DAMAGED))
                self._num_damaged += 1
                hole = 0
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    self._report(Flaw(number, DAMAGED))
                # Stop: if the writer is alive, another read could return the rest of this line as a line.
                return
            start_bytes, end_bytes = end_bytes, end_bytes + len(line)
            if b"\0" in line:
                hole = number
                continue
            if (parsed := _parsed(line, self._path)) is None:
                self._report(Flaw(number, DAMAGED))
                self._num_damaged += 1
                continue
            record, link, crc = parsed
            if not self._follows(link, crc):
                self._report(Flaw(number, OUT_OF_ORDER))
            self._num_damaged = 0
            self.after = Place(end_bytes, Link(link.number + 1, crc))
            yield StoredLine(record, start_bytes, self.after)

    def _follows(self, link: Link, crc: int) -> bool:
        """Enter a line into its branch. False if it is missing a predecessor, or is there already."""
        crcs, after, num_lines = self._crcs, Link(link.number + 1, crc), self._first + len(self._crcs)
        if self._num_damaged and link.number == num_lines + self._num_damaged:  # the lines between are reported
            crcs.extend([link.crc] * self._num_damaged)
            num_lines = link.number
        if link == Link(num_lines, crcs[-1] if crcs else 0):
            crcs.append(crc)
            return True
        at = link.number - self._first
        is_flawed = after in self._forks or (0 <= at < len(crcs) and crcs[at] == crc)
        if link in self._tips:
            self._tips.remove(link)
        elif 0 <= at < len(crcs) and link.crc == (crcs[at - 1] if at else 0 if not self._first else -1):
            self._forks.add(after)
        else:
            is_flawed = True
        self._tips.add(after)
        return not is_flawed

    def _report(self, flaw: Flaw) -> None:
        if self._flaws is None:
            reason = f"line {flaw.line} of {self._path} {flaw.problem}; the run's next submission sets it aside"
            raise JournalDamaged(reason, path=str(self._path), line=flaw.line)
        self._flaws.append(flaw)


def line_at(file: BinaryIO, start_bytes: int) -> StoredLine | None:
    """The line that begins there; None for a damaged one, or none. Raises OtherFormat."""
    file.seek(start_bytes)
    line = file.readline(MAX_LINE_BYTES + 1)
    parsed = _parsed(line, "the journal") if line.endswith(b"\n") else None
    if parsed is None:
        return None
    record, link, crc = parsed
    return StoredLine(record, start_bytes, Place(start_bytes + len(line), Link(link.number + 1, crc)))


def _parsed(line: bytes, path: str | os.PathLike[str]) -> tuple[dict[str, Any], Link, int] | None:
    """The record of a line, its link and its checksum; None for a damaged one. Raises OtherFormat."""
    try:
        record = plain_json(line, MAX_LINE_BYTES)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    end = _END.search(line)
    if end is None:
        old = _END_OF_FORMAT_1.search(line)
        if old is not None and zlib.crc32(line[: old.start()] + b"}") == int(old[1], 16):
            raise OtherFormat.of(path, 1, FORMAT)
        return None
    writer, format_digits, number, previous, crc = end.groups()
    if zlib.crc32(line[: end.start("crc") - CRC_KEY_BYTES]) != int(crc, 16):
        return None
    if format_digits and int(format_digits) != FORMAT:
        raise OtherFormat.of(path, int(format_digits), FORMAT)
    for key in ("format", "seq", "prev", "crc", *(("writer",) if writer else ())):
        record.pop(key, None)
    if not _has_right_types(record):
        return None
    return record, Link(int(number), int(previous, 16)), int(crc, 16)


def _has_right_types(record: Mapping[str, Any]) -> bool:
    are_right = all(isinstance(record[key], kinds) for key, kinds in _TYPES.items() if key in record)
    are_right = are_right and all(isinstance(command, dict) for command in record.get("commands", ()))
    return are_right and (record.get("note") != "term" or {"term", "num_lines"} <= record.keys())
