"""How much memory a node, or the container in it, has left, how much its processes wait for it, and how often the
kernel's OOM killer has killed.

Reads /proc and the cgroup's files (versions 1 and 2), in some hundred microseconds. No decisions here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemoryReading:
    """`total_bytes`: what the node, or a cgroup around this process, may use. Page cache that can be dropped does not
    count as used."""

    total_bytes: int
    used_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes


@dataclass(frozen=True)
class Pressure:
    """The kernel's pressure stall information (PSI): the share of the last ten seconds in which some task, or all of
    them (`full`), stood still because memory had to be found first."""

    some: float
    full: float


@dataclass(frozen=True)
class ProcessMemory:
    """One process's memory: resident now, its peak, and the resident part that is shared memory (`/dev/shm`, mapped
    anonymously)."""

    rss_bytes: int
    peak_rss_bytes: int
    shared_bytes: int


class HostMemory:
    """Readings of this machine. `root`: where /proc and /sys are."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._root = Path(root)

    def read(self) -> MemoryReading:
        """The node or the tightest limit of a cgroup, whichever is fuller."""
        fields = _fields(self._root / "proc/meminfo")
        total = fields["MemTotal:"] << 10
        node = MemoryReading(total, total - (fields["MemAvailable:"] << 10))
        limits = (_limited(folder, total) for folder in self._with_parents("self"))
        return max([node, *filter(None, limits)], key=lambda reading: reading.share)

    def rss_bytes(self, pid: int) -> int:
        """Resident memory of a process; 0 once it is gone."""
        try:
            return int((self._root / f"proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return 0

    def process(self, pid: int) -> ProcessMemory | None:
        """None for a process that is gone."""
        fields = _kib(self._root / f"proc/{pid}/status")
        if "VmRSS:" not in fields:
            return None
        return ProcessMemory(fields["VmRSS:"], fields["VmHWM:"], fields.get("RssShmem:", 0))

    def pressure(self) -> Pressure | None:
        """Pressure on the node or a cgroup around this process, whichever is more; None without kernel support."""
        files = [self._root / "proc/pressure/memory"]
        files += [folder / "memory.pressure" for folder in self._with_parents("self")]
        pressures = filter(None, map(_pressure, files))
        return max(pressures, key=lambda pressure: (pressure.full, pressure.some), default=None)

    def kill_counter(self, pid: int) -> Path | None:
        """The file in which the kernel counts what its OOM killer took in the cgroup of a process; the node's, if that
        has none; None if nobody counts."""
        for folder in self._with_parents(str(pid)):
            for name in ("memory.events", "memory.oom_control"):
                if "oom_kill" in _fields(folder / name):
                    return folder / name
        vmstat = self._root / "proc/vmstat"
        return vmstat if "oom_kill" in _fields(vmstat) else None

    def _with_parents(self, pid: str) -> Iterator[Path]:
        """The memory cgroup of a process, and those around it. In a container the path may be the host's: then its own
        root stands for it."""
        try:
            lines = (self._root / f"proc/{pid}/cgroup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            mount = self._root / "sys/fs/cgroup" / controllers
            folder = mount / path.lstrip("/")
            folder = folder if folder.is_dir() else mount
            while True:
                yield folder
                if folder == mount:
                    break
                folder = folder.parent


def kills(counter: Path | None) -> int:
    """What `HostMemory.kill_counter` counts now; 0 where nobody counts."""
    return 0 if counter is None else _fields(counter).get("oom_kill", 0)


def _limited(folder: Path, node_bytes: int) -> MemoryReading | None:
    """The limit of one cgroup, version 2 or 1; None if it has none below the node's."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and 0 < limit < node_bytes:
            return MemoryReading(limit, max(0, usage - _fields(folder / "memory.stat").get(cache_name, 0)))
    return None


def _pressure(path: Path) -> Pressure | None:
    """The lines `some avg10=1.23 ...` and `full avg10=...`, in percent; None without such a file, or with PSI off."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    shares = {words[0]: float(words[1].partition("=")[2]) / 100 for line in lines if len(words := line.split()) > 1}
    return Pressure(shares.get("some", 0.0), shares.get("full", 0.0)) if shares else None


def _kib(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file, in bytes; {} if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    split = [line.split() for line in lines if line.endswith(" kB")]
    return {words[0]: int(words[1]) << 10 for words in split}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """The lines `name number` of a file; {} if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split()[:2] for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
