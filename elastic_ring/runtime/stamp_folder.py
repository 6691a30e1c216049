"""The folder of a run's progress stamps on one host: held by the processes that use it, removed once nobody does.

A hold is a shared lock on a file in the folder. The kernel lets go of it the moment its process dies, however it dies
(a child that was forked and runs no program of its own keeps it, too: the folder then stays longer, never shorter), and
knows it across PID namespaces: containers that share /dev/shm cannot see each other's processes, but do meet at the
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
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elastic_ring-"
KEPT = ("elastic_ring-kernels", "elastic_ring-gpus")
"""Of all runs of a host, and of no run."""
LOCK_NAME = ".held"
RETRY_S = 0.01
GONE = f"{PREFIX}.gone-"
"""Of folders on their way out; no run's name begins with a dot."""


def stamp_folder(run: str, attempt: str) -> Path:
    """Where the workers of this attempt leave their stamps, on every host."""
    return SHARED_MEMORY / f"{PREFIX}{run}-{attempt[:8]}"


def hold(folder: Path, timeout_s: float, *, make: bool = True) -> int:
    """Keep `folder` from being removed for as long as this process lives or the descriptor that is returned is open;
    with `make`, make it if need be.

    Whoever is removing it is waited for, for `timeout_s` at most. Raises TimeoutError; OSError.
    """
    deadline = time.monotonic() + timeout_s
    while (fd := _try_to_hold(folder, make)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{folder} is being removed, and is not gone after {timeout_s} s")
        time.sleep(RETRY_S)
    return fd


def _try_to_hold(folder: Path, make: bool) -> int | None:
    """None where somebody is removing it: the next time there is another folder, or none."""
    if make:
        with suppress(FileExistsError):  # which `exist_ok` raises too, where it is removed at that moment
            folder.mkdir(parents=True)
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        if not make:
            raise
        return None  # it was removed between the two calls
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if _is_at(fd, folder):
            return fd
    os.close(fd)
    return None


def remove(folder: Path) -> None:
    """Out of the way in one rename: who comes then finds no folder, not half of one. Raises OSError."""
    away = folder.with_name(f"{GONE}{secrets.token_hex(8)}")
    folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def remove_stale(parent: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's stamp folders that nobody holds; the names of those that went, in order.

    One without a lock file goes if it is empty: whoever made it died before it held it. What is in any other such
    folder is left alone: an earlier version held nothing, so nobody can tell whose it is.
    """
    removed = []
    for name in sorted(os.listdir(parent)):
        if name in KEPT or not name.startswith(PREFIX):
            continue
        with suppress(OSError):  # gone meanwhile, or not to be touched: the next run tries again
            if not _is_own_folder(parent / name):
                continue
            if name.startswith(GONE):  # somebody died while removing it, or is at it
                shutil.rmtree(parent / name, ignore_errors=True)
            elif _remove_if_free(parent / name):
                removed.append(name)
    if removed:
        log.info("removed what runs that are gone left in %s: %s", parent, ", ".join(removed))
    return removed


def _is_own_folder(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _remove_if_free(folder: Path) -> bool:
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        folder.rmdir()  # refused where anything is in it; who was about to hold it makes it once more
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(fd, folder):
            return False
        remove(folder)
        return True
    finally:
        os.close(fd)


def _is_at(fd: int, folder: Path) -> bool:
    """Whether the open lock file is the one that is in `folder` now."""
    try:
        return os.path.samestat(os.fstat(fd), (folder / LOCK_NAME).lstat())
    except FileNotFoundError:
        return False
