"""How a process that is not our child ended: pidfds say when, the kernel says why.

A node agent watches workers whose parent is the raylet, so it cannot `wait` for them. Deciding what a
death means must not enter this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

# linux/pidfd.h: PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info), here with the struct's first published
# size of 64 bytes, which every later kernel accepts. PIDFD_INFO_EXIT came with Linux 6.15.
_INFO_STRUCT = struct.Struct("@QQ11Ii")  # mask, cgroupid, pid ... fsgid, exit_code
_GET_INFO = (3 << 30) | (_INFO_STRUCT.size << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3
_PF_EXITING = 0x4  # linux/sched.h
_FLAGS_FIELD = 6  # of /proc/PID/stat, counted from behind the command's name


@dataclass(frozen=True)
class ExitNotice:
    """A watched process has ended. At most one of `exit_code` and `signal` is set; neither when unknown.

    `source`: `pidfd` (the kernel's own record), `proc` (read from the zombie), `unknown`.
    """

    pid: int
    key: str
    monotonic_s: float
    exit_code: int | None
    signal: int | None
    source: str


class ExitWatch:
    """Holds one pidfd per watched process. `watch` and `unwatch` may be called while another thread waits."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector | None = None
        self._watched: dict[str, tuple[int, int]] = {}  # key -> (pid, pidfd)
        self._gone: list[ExitNotice] = []
        self._ending: set[str] = set()

    def open(self) -> ExitWatch:
        self._selector = selectors.EpollSelector()
        return self

    def fileno(self) -> int:
        """For select or an event loop: readable when a watched process has ended. A process that was gone when `watch`
        was called does not make it readable, but is in the next `wait(0)`."""
        assert isinstance(self._selector, selectors.EpollSelector), "ExitWatch used before open"
        return self._selector.fileno()

    def watch(self, pid: int, key: str) -> None:
        """Report the end of `pid` under `key`. A process that is already gone is in the next `wait`.

        Call it as soon as the pid is known: the kernel reuses the pid of a reaped process.
        """
        assert self._selector is not None, "ExitWatch.watch before open"
        assert key not in self._watched, f"{key} is watched already"
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.append(ExitNotice(pid, key, time.monotonic(), None, None, "unknown"))
            return
        self._watched[key] = (pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, key)

    def unwatch(self, key: str) -> None:
        """Stop watching `key`; does nothing for an unknown key."""
        _, pidfd = self._watched.pop(key, (0, -1))
        self._ending.discard(key)
        if pidfd >= 0:
            assert self._selector is not None
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def kill(self, key: str, signal_number: int = signal.SIGKILL) -> bool:
        """Signal the watched process through its pidfd, never another process that got its pid.

        Returns False when it has ended or is not watched.
        """
        _, pidfd = self._watched.get(key, (0, -1))
        if pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(pidfd, signal_number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout_s: float | None) -> list[ExitNotice]:
        """The processes that have ended, each once; empty after `timeout_s` (None: no limit, 0: no wait)."""
        assert self._selector is not None, "ExitWatch.wait before open"
        notices, self._gone = self._gone, []
        for ready, _ in self._selector.select(0 if notices else timeout_s):
            watched = self._watched.get(ready.data)
            if watched is None:  # unwatched by another thread since select returned
                continue
            pid, pidfd = watched
            exit_code, number, source = _cause(pid, pidfd)
            notices.append(ExitNotice(pid, ready.data, time.monotonic(), exit_code, number, source))
            self.unwatch(ready.data)
        return notices

    def ending(self) -> list[str]:
        """Keys of processes that have begun to exit, each once; `wait` reports them later, with the cause.

        The kernel needs tenths of a second to free the GPU memory of a process that runs no code any more.
        """
        new = [key for key, (pid, _) in list(self._watched.items()) if key not in self._ending and _is_ending(pid)]
        self._ending.update(new)
        return new

    def close(self) -> None:
        for key in list(self._watched):
            self.unwatch(key)
        if self._selector is not None:
            self._selector.close()
            self._selector = None

    def __enter__(self) -> ExitWatch:
        return self if self._selector is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def describe_exit(notice: ExitNotice) -> str:
    """`killed by SIGKILL`, `exit code 3`, or `ended, cause unknown`."""
    if notice.signal is not None:
        return f"killed by {signal_name(notice.signal)}"
    if notice.exit_code is not None:
        return f"exit code {notice.exit_code}"
    return "ended, cause unknown"


def tail(path: str | os.PathLike[str], num_lines: int, *, max_bytes: int = 65536) -> list[str]:
    """The last lines of a log, from at most its last `max_bytes`; empty if there is no such file."""
    if num_lines < 1:
        return []
    try:
        with Path(path).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            start = max(0, size_bytes - max_bytes)
            file.seek(start)
            lines = file.read(max_bytes).splitlines()
    except FileNotFoundError:
        return []
    if start > 0 and len(lines) > 1:
        lines = lines[1:]  # the first one is not whole
    return [line.decode(errors="replace") for line in lines[-num_lines:]]


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)


def _cause(pid: int, pidfd: int) -> tuple[int | None, int | None, str]:
    """(exit code, signal, source). /proc has the status until the parent reaps the process, the pidfd from then on.
    The parent may reap between the first two reads, hence the third."""
    for look in (_status_from_pidfd, _status_from_proc, _status_from_pidfd):
        status = look(pid, pidfd)
        if status is not None:
            source = "proc" if look is _status_from_proc else "pidfd"
            return (None, status & 0x7F, source) if status & 0x7F else (status >> 8 & 0xFF, None, source)
    return None, None, "unknown"


def _status_from_pidfd(_: int, pidfd: int) -> int | None:
    answer = bytearray(_INFO_STRUCT.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, answer, True)
    except OSError as error:
        # ESRCH: the process was reaped and this kernel keeps no record. The others: a kernel without this call.
        if error.errno in (errno.ESRCH, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    values = _INFO_STRUCT.unpack(answer)
    return int(values[-1]) if values[0] & _INFO_EXIT else None


def _status_from_proc(pid: int, _: int) -> int | None:
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Other users read 0 here, which would look like a clean exit.
    if fields[0] not in "ZX" or os.geteuid() not in (0, owner):
        return None
    return int(fields[-1])


def signal_name(number: int | None) -> str:
    """ "SIGKILL" for 9; empty for None."""
    if number is None:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
