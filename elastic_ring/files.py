"""What files need beyond the standard library, in every room."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Make a new or renamed name in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def absolute(uri: str) -> str:
    """The same place for every process: other ones have other working directories. URIs stay as they are."""
    return uri if not uri or "://" in uri else str(Path(uri).expanduser().absolute())
