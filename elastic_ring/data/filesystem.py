"""File systems by URI, for reading: local paths and s3:// through pyarrow.fs, every other scheme through fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from elastic_ring.config import environment


def located(uri: str) -> tuple[Any, str]:
    """(file system, path in it). Reads nothing. Raises ValueError for a scheme that nobody knows."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return fs.LocalFileSystem(), str(Path(rest if separator else uri).expanduser().absolute())
    if scheme == "s3":
        return _s3_filesystem(), rest.rstrip("/")
    import fsspec

    try:
        opened, path = fsspec.core.url_to_fs(uri)
    except Exception as error:  # each file system has its own classes of errors
        raise ValueError(f"{uri}: cannot be opened: {error}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(opened)), path


def read_file(filesystem: Any, path: str, name: str) -> bytes:
    """All bytes of a small file. Raises ValueError that says `name`."""
    try:
        with filesystem.open_input_stream(path) as stream:
            data: bytes = stream.read()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error
    return data


def _s3_filesystem() -> Any:
    """pyarrow's, of Amazon or of the store that `AWS_ENDPOINT_URL` names."""
    found = environment()
    endpoint = found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")
    if endpoint is None:
        return fs.S3FileSystem()
    parts = urlsplit(endpoint)
    return fs.S3FileSystem(
        endpoint_override=parts.netloc, scheme=parts.scheme, region=found.get("AWS_REGION", "us-east-1")
    )
