"""What files need beyond the standard library, in every room."""

from __future__ import annotations

import os


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Make a new or renamed name in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
