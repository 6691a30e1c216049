"""The folder of a run's progress stamps on one host: held by the processes that use it, removed once nobody does.

A hold is a shared lock on a file in the folder. The kernel lets go of it the moment its process dies, however it dies,
and knows it across PID namespaces: containers that share /dev/shm cannot see each other's processes, but do meet at the
lock. So a folder whose lock can be had alone belongs to nobody who lives. What the stamps say is `monitor.stamps`'
work. No torch and no Ray may enter: the node's agent cleans up with this.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elastic_ring-"
KEPT = ("elastic_ring-kernels", "elastic_ring-gpus")
"""Of all runs of a host, and of no run."""
LOCK_NAME = ".held"
GONE = f"{PREFIX}.gone-"
"""Of folders on their way out; no run's name begins with a dot."""


def stamp_folder(run: str, attempt: str) -> Path:
    """Where the workers of this attempt leave their stamps, on every host."""
    return SHARED_MEMORY / f"{PREFIX}{run}-{attempt[:8]}"


def hold(folder: Path) -> int:
    """Make `folder` if need be, and keep it from being removed for as long as this process lives or the descriptor
    that is returned is open."""
    while True:
        with suppress(FileExistsError):  # which `exist_ok` raises too, where it is removed at that moment
            folder.mkdir(parents=True)
        try:
            fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # it was removed between the two calls
            continue
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_at(fd, folder):
            return fd
        os.close(fd)  # whoever removed it had the lock before; there is another folder now, or none


def remove_stale(parent: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's stamp folders that nobody holds; the names of those that went, in order.

    One without a lock file is left alone: an earlier version held nothing, so nobody can tell whose it is.
    """
    removed = []
    for name in sorted(os.listdir(parent)):
        if name.startswith(GONE):  # somebody died while removing it, or is at it
            shutil.rmtree(parent / name, ignore_errors=True)
        elif name.startswith(PREFIX) and name not in KEPT:
            with suppress(OSError):  # gone meanwhile, or not to be touched: the next run tries again
                if _remove_if_free(parent / name):
                    removed.append(name)
    if removed:
        log.info("removed what runs that are gone left in %s: %s", parent, ", ".join(removed))
    return removed


def _remove_if_free(folder: Path) -> bool:
    """Out of the way in one rename, under the lock: who comes then finds no folder, not half of one."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return False
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(fd, folder):
            return False
        away = folder.with_name(f"{GONE}{secrets.token_hex(8)}")
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        return True
    finally:
        os.close(fd)


def _is_at(fd: int, folder: Path) -> bool:
    """Whether the open lock file is the one that is in `folder` now."""
    try:
        return os.path.samestat(os.fstat(fd), (folder / LOCK_NAME).lstat())
    except FileNotFoundError:
        return False
