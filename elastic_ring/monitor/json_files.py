"""The small JSON files of a run, whole or damaged: each ends with the digest of its own text.

What the files say, and what a run does without one, must not enter this module.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from elastic_ring.errors import OtherFormat, RecordDamaged
from elastic_ring.files import plain_json, read_small, sync_directory
from elastic_ring.monitor.journal import FORMAT

DAMAGED = ".damaged-"
"""In the name of a file that was set aside, before a number."""
_FORMAT, _DIGEST, _NO_DIGEST = "format", "sha256", 64 * "0"


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A JSON object that ends with its format and the digest of the whole text, taken with zeros in its place."""
    body = {key: value for key, value in content.items() if key not in (_FORMAT, _DIGEST)}
    buffer = io.BytesIO()
    writer = io.TextIOWrapper(buffer, encoding="utf-8", newline="\n")
    json.dump({**body, _FORMAT: FORMAT, _DIGEST: _NO_DIGEST}, writer, indent=1, allow_nan=False)
    writer.write("\n")
    writer.detach()
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest().encode()  # no copy: a summary may have a million losses
    buffer.seek(buffer.getvalue().rindex(_NO_DIGEST.encode()))
    buffer.write(digest)
    return buffer.getvalue()


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The content that `json_bytes` wrote. Raises: RecordDamaged; OtherFormat."""
    try:
        content = plain_json(data)
    except ValueError as error:
        raise RecordDamaged(f"{where} is not JSON: {error}" if data else f"{where} is empty", path=where) from error
    if not isinstance(content, dict):
        raise RecordDamaged(f"{where} is not a JSON object", path=where)
    digest = str(content.pop(_DIGEST, "")) or _NO_DIGEST
    zeroed = _NO_DIGEST.encode().join(data.rsplit(digest.encode(errors="replace"), 1))
    if hashlib.sha256(zeroed).hexdigest() != digest:
        raise RecordDamaged(f"{where} is not what was written: it has another digest", path=where)
    if (number := content.pop(_FORMAT, 1)) != FORMAT:
        raise OtherFormat.of(where, number, FORMAT)
    return content


@contextmanager
def as_written(where: str) -> Iterator[None]:
    """Wraps the reading of a record's content. Raises: RecordDamaged for content that no run writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        reason = f"{where} is no record of a run ({type(error).__name__}: {error})"
        raise RecordDamaged(reason, path=where) from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The content of a run's JSON file; None where there is none. Raises RecordDamaged."""
    try:
        data = read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RecordDamaged(str(error), path=str(path)) from error
    return parse_json(data, str(path))


def readable_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """As `read_json`, for a file that a run can do without: empty if it is missing or damaged."""
    try:
        return read_json(path) or {}
    except RecordDamaged:
        return {}


def set_aside(path: Path, why: str) -> str:
    """Rename a damaged file, so that a new one can take its place. Returns a line for the log."""
    free = (path.with_name(f"{path.name}{DAMAGED}{number}") for number in count(1))
    kept = next(other for other in free if not other.exists())
    path.rename(kept)
    sync_directory(path.parent)
    return f"{why}; it is set aside as {kept.name}"
