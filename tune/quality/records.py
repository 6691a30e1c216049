"""The file of a comparison: one JSON object a line, added to by several processes, gone on with after any end.

Nothing is measured in here, and what a line means is the affair of who writes it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Records = dict[tuple[str, str, int], dict[str, Any]]
"""The lines of a file by (part, family, seed); of two for the same, the later."""

_BEGINS = b'{"part": '


def finished(path: Path) -> Records:
    """The lines of an earlier run. A last one without its end, of a process that was killed, is none. Raises
    `ValueError` for a file of something else."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: _whole_bytes(path, data)]
    found = {}
    try:
        for line in whole.decode("utf-8").splitlines():
            record = json.loads(line)
            found[record["part"], record["family"], record["seed"]] = record
    except (ValueError, KeyError, TypeError) as error:
        raise _no_file_of_this_job(path, error) from error
    return found


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line, in place of one that was cut off."""
    with locked(path) as file:
        write(path, file, record)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """The file, made where there is none and to be written to by `write`; meanwhile no other process writes to it, so
    that what `finished` reads within still holds when `write` adds to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, which writes first
        yield file


def write(path: Path, file: BinaryIO, record: dict[str, Any]) -> None:
    """Add one line to a file that is `locked`. Raises `ValueError` for a file of something else."""
    file.seek(0)
    file.truncate(_whole_bytes(path, file.read()))
    file.write(json.dumps(record).encode("utf-8") + b"\n")
    file.flush()


def _whole_bytes(path: Path, data: bytes) -> int:
    """Up to the end of the last whole line. Raises `ValueError` where what follows cannot be the beginning of one."""
    end = data.rfind(b"\n") + 1
    cut = data[end:]
    if cut[: len(_BEGINS)] != _BEGINS[: len(cut)]:
        raise _no_file_of_this_job(path, "its last line is none of its lines")
    return end


def _no_file_of_this_job(path: Path, why: object) -> ValueError:
    return ValueError(f"--out {path}: not a file of this job ({why}); name another")
