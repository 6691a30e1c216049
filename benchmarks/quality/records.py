"""The result file of a comparison: JSON lines, appended by several processes, resumed after a crash.

Nothing is measured in here; the caller defines what a line means.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Records = dict[tuple[str, str, int], dict[str, Any]]
"""The lines of a file by (part, family, seed); the last one counts."""

_BEGINS = b'{"part": '


def finished(path: Path) -> Records:
    """The complete lines of earlier runs; an incomplete last line is ignored.

    Raises: ValueError for a file of another kind.
    """
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
    """Append one line; overwrites an incomplete last line."""
    with locked(path) as file:
        write(path, file, record)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Create or open the file and lock it against other processes, so that `finished` stays valid until `write`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, which writes first
        yield file


def write(path: Path, file: BinaryIO, record: dict[str, Any]) -> None:
    """Append one line to a `locked` file. Raises: ValueError for a file of another kind."""
    file.seek(0)
    file.truncate(_whole_bytes(path, file.read()))
    file.write(json.dumps(record).encode("utf-8") + b"\n")
    file.flush()


def _whole_bytes(path: Path, data: bytes) -> int:
    """Bytes up to the end of the last complete line. Raises: ValueError where the rest cannot be an incomplete line."""
    end = data.rfind(b"\n") + 1
    cut = data[end:]
    if cut[: len(_BEGINS)] != _BEGINS[: len(cut)]:
        raise _no_file_of_this_job(path, "its last line is none of its lines")
    return end


def _no_file_of_this_job(path: Path, why: object) -> ValueError:
    return ValueError(f"--out {path}: not a file of this job ({why}); name another")
