"""Leases on the GPUs of a node, as files shared by all its processes: each GPU's owner, its rank, and its failures.

Locks are for all users of the host, so that two of them do not take one GPU. Failures count if root or this user has
recorded them, each in a file of its own; other files in the folder are ignored.

A lease is a lock on a small file. The kernel releases it when its process dies, however it dies, so a spare takes over
the GPU of a dead process at once. Files are named by the GPU's UUID, so that processes which see different GPUs, or
number them differently, mean the same one. No torch and no CUDA may enter: the node's agent reads these files too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from elastic_ring.errors import PeerFailed
from elastic_ring.files import plain_json

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm/elastic_ring-gpus")
"""One for all runs and users of a host."""
LOOK_S = 0.005
PATIENCE_S = 1.0
"""A newcomer waits so long for the GPU of its place before it takes another place's."""
QUIET_S = 0.1
MAX_RECORD_BYTES = 1 << 16
MAX_FAILURES, FAILURE_WINDOW_S = 2, 3600.0
"""A GPU is bad while this many processes have failed on it within the window."""


@dataclass(frozen=True)
class Gpu:
    """`index`: among the GPUs that this process sees. `name`: the same in every process of the host."""

    index: int
    name: str


@dataclass(frozen=True)
class Owner:
    """The present or last owner of a GPU: a process (pid 0: it gave the GPU back) and its global rank in `run`.
    `started` is in kernel ticks since boot, because PIDs are reused."""

    pid: int = 0
    started: int = 0
    run: str = ""
    place: int = -1


@dataclass(frozen=True)
class GpuFailure:
    """One process's failure on a GPU. `is_proven`: its peers showed that it gave a wrong result."""

    pid: int
    started: int
    unix_s: float
    why: str
    is_proven: bool = False


_FAILURE = TypeAdapter(GpuFailure)


# ------------------------------------------------------------ decisions


def verdict(failures: Iterable[GpuFailure], now_unix_s: float) -> str:
    """`good`, `doubtful` (the process may have been to blame) or `bad` (several processes failed there, or a wrong
    result was proven, which does not lapse)."""
    failures = list(failures)
    recent = [failure for failure in failures if abs(now_unix_s - failure.unix_s) < FAILURE_WINDOW_S]
    failed = {(failure.pid, failure.started) for failure in recent}
    if len(failed) >= MAX_FAILURES or any(failure.is_proven for failure in failures):
        return "bad"
    return "doubtful" if failed else "good"


def order_of(
    gpus: Sequence[Gpu],
    owners: Mapping[str, Owner],
    verdicts: Mapping[str, str],
    run: str,
    place: int,
    waited_s: float,
) -> list[Gpu]:
    """The GPUs that a newcomer to global rank `place` tries now, in this order.

    The rank's last GPU comes first, and alone for PATIENCE_S: so ranks keep their GPUs when two members of a node die
    at once, and sums over three or more ranks keep NCCL's order of GPUs. A doubtful GPU comes last, a bad one never.
    """

    def distance(gpu: Gpu) -> int:
        """0: of this rank, 1: of no rank of this run, 2: of another rank."""
        record = owners.get(gpu.name, Owner())
        return 1 if record.run != run or record.place == -1 else 0 if record.place == place else 2

    good = sorted((gpu for gpu in gpus if verdicts.get(gpu.name, "good") == "good"), key=distance)
    doubtful = [gpu for gpu in gpus if verdicts.get(gpu.name, "good") == "doubtful"]
    if waited_s >= PATIENCE_S:
        return good + doubtful
    own = [gpu for gpu in good if distance(gpu) == 0]
    return own or [gpu for gpu in good if distance(gpu) == 1] + [gpu for gpu in doubtful if distance(gpu) == 0]


def wait_for_memory(
    free_bytes: Callable[[], int],
    need_bytes: int,
    is_there: Callable[[], bool],
    check: Callable[[], None],
    timeout_s: float,
) -> int:
    """Wait until `need_bytes` are free, or the previous owner has ended and no more gets free; returns the free bytes.

    `is_there()`: whether the previous owner still exists; the kernel releases its lock long before its memory. `check`
    is called in each poll, and raises to end the wait.
    """
    begun = changed = time.monotonic()
    free = most = free_bytes()
    ended = False
    while free < need_bytes and time.monotonic() - begun < timeout_s:
        if not ended and not is_there():
            ended, changed = True, time.monotonic()
        if ended and time.monotonic() - changed > QUIET_S:
            break
        check()
        time.sleep(LOOK_S)
        free = free_bytes()
        if free > most:
            most, changed = free, time.monotonic()
    return free


# ------------------------------------------------------------ the files


def shared_folder(path: Path) -> Path:
    """A folder in which every user of the host may make files and nobody removes another's, as in /tmp. Raises
    NotADirectoryError if `path` is something else, or a link."""
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(f"{path}: is no folder; somebody has put it there: remove it")
    writes_alone = not about.st_mode & 0o022 or about.st_mode & stat.S_ISVTX
    if about.st_uid not in (0, os.getuid()) and not writes_alone:
        raise NotADirectoryError(
            f"{path}: belongs to user {about.st_uid}, and everybody may remove files in it: remove it, or chmod +t it"
        )
    if about.st_uid == os.getuid() and about.st_mode & 0o7777 != 0o1777:
        path.chmod(0o1777)  # mkdir's own mode is cut by the umask
    return path


def open_shared(path: Path) -> int:
    """The descriptor of a file that every user may lock and write, made if need be.

    An existing file is opened without O_CREAT: in a folder such as /tmp the kernel refuses that for another user's file
    (fs.protected_regular). Raises PermissionError if its owner has closed it to other users.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o666)
        return fd


def lock_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def failure_record_path(folder: Path, name: str, uid: int | None = None) -> Path:
    """The failures on a GPU that a user (by default this one) has recorded, one per line; an operator may delete it."""
    return folder / f"{name}.{os.geteuid() if uid is None else uid}.bad"


def _read(path: Path, owner: int | None = None) -> str:
    """The end of a regular file that, if `owner` is given, only this user may write. Raises OSError. Never waits, as
    for the writer of a FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or (owner is not None and not _is_of(about, owner)):
            raise PermissionError(f"{path}: is not a file of the user that it is named after")
        return os.pread(fd, MAX_RECORD_BYTES, max(0, about.st_size - MAX_RECORD_BYTES)).decode(errors="replace")
    finally:
        os.close(fd)


def _is_of(about: os.stat_result, uid: int) -> bool:
    return stat.S_ISREG(about.st_mode) and about.st_uid == uid and not about.st_mode & 0o022


def last_owner(folder: Path, name: str) -> Owner:
    """The owner recorded in the lock file; an empty record if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, LookupError, OverflowError):  # not there, torn, or not ours
        record = plain_json(_read(lock_path(folder, name)))
        return Owner(int(record["pid"]), int(record["started"]), str(record["run"]), int(record["place"]))
    return Owner()


def failures_of(folder: Path, name: str) -> list[GpuFailure]:
    """The readable lines of this user's and of root's records, in the order of their times."""
    failures = []
    for uid in sorted({0, os.geteuid()}):
        with suppress(OSError):
            for line in _read(failure_record_path(folder, name, uid), uid).splitlines():
                with suppress(ValueError):
                    failures.append(_FAILURE.validate_json(line))
    return sorted(failures, key=lambda failure: failure.unix_s)


def verdicts_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    now = time.time()
    return {name: verdict(failures_of(folder, name), now) for name in names}


def bad_ones(folder: Path, names: Iterable[str]) -> list[str]:
    return sorted(name for name, state in verdicts_of(folder, names).items() if state == "bad")


def process_started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when it is gone. It counts as alive while a thread of it may
    still have files, and so a GPU's memory, open."""

    def fields(path: Path) -> list[str]:
        """From the process's state on; its name before it may contain anything."""
        return path.read_text(errors="replace").rpartition(")")[2].split()

    folder = Path(f"/proc/{pid}")
    try:
        own = fields(folder / "stat")
        threads = (path for path in (folder / "task").iterdir() if path.name != str(pid))
        if own[0] in "ZX" and all(fields(path / "stat")[0] in "ZX" for path in threads):
            return None
        return int(own[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def lock_owner(path: Path, locks: str) -> int | None:
    """The PID that holds the lock on `path`, by the text of /proc/locks; None if this process can see none."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    file = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    for line in locks.splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == file and int(words[4]) > 0:
            return int(words[4])
    return None


def describe(folder: Path, gpus: Sequence[Gpu]) -> str:
    """Why each of these GPUs is not available."""
    locks, bad, reasons = Path("/proc/locks").read_text(), bad_ones(folder, [gpu.name for gpu in gpus]), []
    for gpu in gpus:
        path, record = lock_path(folder, gpu.name), last_owner(folder, gpu.name)
        pid = lock_owner(path, locks)
        if gpu.name in bad:
            why = f"failed ({failures_of(folder, gpu.name)[-1].why}; {folder}/{gpu.name}.*.bad)"
        elif os.path.lexists(path) and not (
            path.is_file() and not path.is_symlink() and os.access(path, os.R_OK | os.W_OK)
        ):
            why = f"cannot be locked: {path} is no file that this user may write; remove it"
        elif pid is None:
            why = f"is owned by nobody that can be seen from here ({path})"
        else:
            is_recorded = record.pid == pid and record.run and record.run.isprintable()
            rank = f", rank {record.place} of run {record.run}" if is_recorded else ""
            why = f"is owned by pid {pid}{rank} ({path})"
        reasons.append(f"GPU {gpu.index} {why}")
    return "; ".join(reasons)


class GpuLease:
    """One process's lock on one GPU. The GPU itself is not used here."""

    def __init__(self, run: str, folder: Path = FOLDER) -> None:
        self._run, self.folder = run, folder
        self._fd: int | None = None
        self.gpu: Gpu | None = None
        self.previous_owner = Owner()

    def acquire(self, gpus: Sequence[Gpu], place: int, timeout_s: float, check: Callable[[], None]) -> Gpu:
        """The GPU owned already, or the first of `order_of` that is free. Raises PeerFailed, which names the owners, if
        none gets free in time. `check` is called in each poll, and raises to end the wait."""
        begun, names = time.monotonic(), [gpu.name for gpu in gpus]
        while self.gpu is None:
            waited_s = time.monotonic() - begun
            owners = {name: last_owner(self.folder, name) for name in names}
            for gpu in order_of(gpus, owners, verdicts_of(self.folder, names), self._run, place, waited_s):
                if self.lock(gpu):
                    break
            else:
                if waited_s > timeout_s:
                    reasons = describe(self.folder, gpus)
                    raise PeerFailed(f"none of {len(gpus)} GPUs got free within {timeout_s:.0f} s: {reasons}")
                check()
                time.sleep(LOOK_S)
        self._record(Owner(os.getpid(), process_started(os.getpid()) or 0, self._run, place))
        return self.gpu

    def lock(self, gpu: Gpu) -> bool:
        """Take a GPU if it is free. Without a lock that can be opened it is not: `describe` says so."""
        path = lock_path(shared_folder(self.folder), gpu.name)
        try:
            fd = open_shared(path)
        except OSError:
            return False
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(fd)
            # If this file was removed, other processes lock a new one.
            if stat.S_ISREG(about.st_mode) and os.path.samestat(about, path.lstat()):
                self._fd, self.gpu, self.previous_owner = fd, gpu, last_owner(self.folder, gpu.name)
                return True
        os.close(fd)
        return False

    def give_back(self) -> None:
        """Release the GPU and record the rank that used it."""
        if self.gpu is not None:
            record = last_owner(self.folder, self.gpu.name)
            self._record(Owner(run=record.run, place=record.place))
        self.release()

    def release(self) -> None:
        """Release the GPU and leave the record as it is."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self.gpu = None, None

    def previous_owner_is_alive(self) -> bool:
        return self.previous_owner.pid > 0 and process_started(self.previous_owner.pid) == self.previous_owner.started

    def _record(self, owner: Owner) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(owner)).encode(), 0)


def record_failure(folder: Path, gpu: Gpu, why: str, is_proven: bool = False) -> str:
    """Record that this process failed on `gpu`, which it owns; returns the new verdict."""
    pid, first_line = os.getpid(), (why.splitlines() or [""])[0][:300]
    entry = asdict(GpuFailure(pid, process_started(pid) or 0, time.time(), first_line, is_proven))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path = failure_record_path(shared_folder(folder), gpu.name)
        with open(os.open(path, flags, 0o644), "ab", buffering=0) as file:
            if not _is_of(os.fstat(file.fileno()), os.geteuid()):
                raise PermissionError(f"{path}: is not this user's own file")
            os.fchmod(file.fileno(), 0o644)  # read by other users, whatever the umask
            file.write(f"{json.dumps(entry)}\n".encode())
    except OSError as error:  # another user has taken the name: this process is replaced all the same
        log.error("could not record that GPU %d (%s) failed: %s", gpu.index, gpu.name, error)
    state = verdicts_of(folder, [gpu.name])[gpu.name]
    log.error("GPU %d (%s) is %s now: %s", gpu.index, gpu.name, state, why)
    return state


def record_failure_if_free(folder: Path, gpu: Gpu, why: str) -> bool:
    """Record a failure on a GPU that this process does not own; False if another process does. Then a failure proves
    nothing: the GPU may be in compute mode EXCLUSIVE_PROCESS."""
    lease = GpuLease("", folder)
    if was_free := lease.lock(gpu):
        record_failure(folder, gpu, why)
    lease.release()
    return was_free
