"""The folder of a run's progress stamps on one host: locked by the processes that use it, removed once none does.

It also has the values of variables that a run gives its workers, in a file for this user alone.

Each process keeps a shared lock on a file in the folder. The kernel releases it when the process dies, however it dies
(a forked child that has not called exec keeps it too, so the folder may stay longer, never shorter). Locks work across
PID namespaces, so containers that share /dev/shm see each other's. No living process uses a folder whose lock can be
taken exclusively. `monitor.stamps` defines the stamps. No torch and no Ray may enter: the node's agent cleans up here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elastic_ring.files import private_folder

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elastic_ring-"
KEPT = (f"{PREFIX}{os.geteuid()}", "elastic_ring-gpus")
"""Folders of all runs of this user (`files.user_folder`), and of all users; never removed."""
LOCK_NAME, VARIABLES = ".held", "variables.json"
RETRY_S = 0.01
GONE = f"{PREFIX}.gone-"
"""Prefix of folders that are being removed; no run's name begins with a dot."""


def stamp_folder(run: str, attempt: str) -> Path:
    """The stamp folder of this attempt, the same path on every host."""
    return SHARED_MEMORY / f"{PREFIX}{run}-{attempt[:8]}"


def hold(folder: Path, timeout_s: float, *, make: bool = True) -> int:
    """Lock `folder` against removal until this process dies or closes the returned descriptor; `make` creates it.

    Waits at most `timeout_s` for a removal under way. Raises TimeoutError; OSError.
    """
    deadline = time.monotonic() + timeout_s
    while (fd := _try_to_hold(folder, make)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{folder} is being removed, and is not gone after {timeout_s} s")
        time.sleep(RETRY_S)
    return fd


def _try_to_hold(folder: Path, make: bool) -> int | None:
    """The locked descriptor, or None while another process is removing the folder."""
    if make:
        with suppress(FileNotFoundError):  # it is removed at that moment
            private_folder(folder)
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


def keep_variables(folder: Path, values: Mapping[str, str]) -> Path:
    """Write the variables of a run's workers into its folder, which this process has locked."""
    path = folder / VARIABLES
    scratch = folder / f".{VARIABLES}-{secrets.token_hex(8)}"
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(dict(values), file)
    scratch.rename(path)  # workers of the run read it meanwhile
    return path


def remove(folder: Path) -> None:
    """Rename, then delete: no other process ever finds a half-deleted folder. Raises OSError."""
    away = folder.with_name(f"{GONE}{secrets.token_hex(8)}")
    folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def remove_stale(parent: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's stamp folders that no process has locked; returns their names in order.

    A folder without a lock file is removed only if it is empty: its creator died before locking it. Otherwise it may
    belong to an earlier version, which took no locks.
    """
    removed = []
    for name in sorted(os.listdir(parent)):
        if name in KEPT or not name.startswith(PREFIX):
            continue
        with suppress(OSError):  # gone meanwhile, or no permission: the next run tries again
            about = (parent / name).lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            if name.startswith(GONE):  # its removal was interrupted, or is under way
                shutil.rmtree(parent / name, ignore_errors=True)
            elif _remove_if_free(parent / name):
                removed.append(name)
    if removed:
        log.info("removed stale folders in %s: %s", parent, ", ".join(removed))
    return removed


def _remove_if_free(folder: Path) -> bool:
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        folder.rmdir()  # fails unless it is empty; a process that is about to lock it creates it again
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
    """Whether the open file is still the lock file of `folder`."""
    try:
        return os.path.samestat(os.fstat(fd), (folder / LOCK_NAME).lstat())
    except FileNotFoundError:
        return False
