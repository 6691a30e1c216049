"""File systems by URI, for reading: local paths and s3:// through pyarrow.fs, every other scheme through fsspec.

A failed read is a ValueError where the file is absent or damaged: the user mends it. It is a StorageFailed where the
storage is away, refuses or is slow: `patiently` tries again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from elastic_ring.config import Timeouts, environment
from elastic_ring.errors import StorageFailed
from elastic_ring.files import shown_url
from elastic_ring.state.storage.backend import Retries, ignore, one_line
from elastic_ring.state.storage.folder import SUBMIT_S

T = TypeVar("T")

READ_ERRORS = (OSError, EOFError, pa.ArrowException)
"""Errors of pyarrow, of the file system and of the format."""
NUM_READS = 3
"""Reads after which data counts as damaged: bytes may also change on their way."""
_ABSENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_WRONG_NAME = (errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP)
_CLIENTS = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "google", "gcsfs", "requests", "s3fs", "urllib3"})
_WRONG_REQUESTS = ("ParamValidationError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
_AWS = "AWS Error"
_AWS_ABSENT = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
_AWS_REFUSED = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT",
    "HTTP status code 403",
)


def is_away(error: BaseException) -> bool:
    """Whether a read failed by its storage, and may succeed later; else the file is absent, damaged or misnamed."""
    if isinstance(error, StorageFailed):
        return True
    if isinstance(error, _ABSENT):
        return False
    if isinstance(error, OSError):
        if error.errno is not None:
            return error.errno not in _WRONG_NAME
        # pyarrow has no number for an answer of a store; a damaged file is an OSError without one, too.
        text = str(error)
        return isinstance(error, (ConnectionError, TimeoutError)) or (
            _AWS in text and not any(code in text for code in _AWS_ABSENT)
        )
    return _is_of_client(error) and type(error).__name__ not in _WRONG_REQUESTS


def _is_of_client(error: BaseException) -> bool:
    """Whether a store's client library has raised it: each has its own classes."""
    return type(error).__module__.partition(".")[0] in _CLIENTS


def reading(name: str, action: Callable[[], T], *, problem: str = "cannot be read") -> T:
    """Carry out one read. Raises StorageFailed where the storage failed, ValueError where the file is at fault; both
    say `name`."""
    try:
        return action()
    except StorageFailed:
        raise
    except Exception as error:
        raise_if_away(error, name, problem)
        if isinstance(error, READ_ERRORS) or _is_of_client(error):
            raise ValueError(shown_url(f"{name}: {problem}: {error}")) from error
        raise


def raise_if_away(error: BaseException, name: str, problem: str = "cannot be read") -> None:
    """Raises StorageFailed that says `name` where the storage has failed: its file is neither absent nor damaged, and
    leaving it out would lose existing data."""
    if is_away(error):
        raise StorageFailed(shown_url(f"{name} {problem}: {one_line(error)}"), path=shown_url(name)) from error


def patiently(action: Callable[[], T], limit_s: float = Timeouts.storage_s, tell: Callable[[str], None] = ignore) -> T:
    """`action`, again for `limit_s` while its storage fails. Raises StorageFailed after that, and what else it raises.

    `action` may belong to a user's own source, whose OSErrors come from its storage, too.
    """
    try:
        return Retries(limit_s, tell)(action, lambda error: not is_away(error))
    except Exception as error:
        if not is_away(error):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        message, path = f"the data cannot be read: {one_line(error)}", ""
        if isinstance(error, StorageFailed):
            message, path = error.message, str(error.facts.get("path", ""))
        raise StorageFailed(f"{message}{notes}", path=path) from error


def at_submission(action: Callable[[], T], limit_s: float = Timeouts.storage_s) -> T:
    """As `patiently`, for SUBMIT_S at most; but credentials and permissions are the user's to mend, at once."""
    try:
        return Retries(min(limit_s, SUBMIT_S))(action, lambda error: not is_away(error) or _is_refused(error))
    except Exception as error:
        if is_away(error) and _is_refused(error):
            raise ValueError(f"{error}: check the credentials and the permissions for reading it") from error
        raise


def _is_refused(error: BaseException) -> bool:
    return any(
        isinstance(cause, PermissionError) or any(code in str(cause) for code in _AWS_REFUSED)
        for cause in (error, error.__cause__)
    )


def located(uri: str) -> tuple[Any, str]:
    """(file system, path in it): pyarrow's for local paths and s3://, which may be the store that `AWS_ENDPOINT_URL`
    names. Reads nothing. Raises ValueError for an unknown scheme."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return fs.LocalFileSystem(), str(Path(rest if separator else uri).expanduser().absolute())
    if scheme == "s3":
        variables = environment()
        endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
        options = {}
        if endpoint is not None:
            parts, region = urlsplit(endpoint), variables.get("AWS_REGION", "us-east-1")
            options = {"endpoint_override": parts.netloc, "scheme": parts.scheme, "region": region}
        return fs.S3FileSystem(**options), rest.rstrip("/")
    import fsspec

    try:
        opened, path = fsspec.core.url_to_fs(uri)
    except Exception as error:  # each file system has its own classes of errors
        raise ValueError(shown_url(f"{uri}: cannot be opened: {error}")) from error
    return fs.PyFileSystem(fs.FSSpecHandler(opened)), path


def read_file(filesystem: Any, path: str, name: str, most_bytes: int) -> bytes:
    """All bytes of a small file. Raises ValueError and StorageFailed that say `name`."""

    def read() -> bytes:
        if filesystem.get_file_info(path).type == fs.FileType.Unknown:  # a pipe would be waited for without end
            raise ValueError(f"{name}: is no regular file")
        with filesystem.open_input_stream(path) as stream:
            data: bytes = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ValueError(f"{name}: has more than {most_bytes} bytes")
        return data

    return reading(name, read)
