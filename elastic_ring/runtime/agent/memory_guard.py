"""Which worker a node agent kills before the node runs out of memory, and which one the kernel, or Ray, has killed.

Ray's memory monitor takes first whom Ray can start again: the coordinator, not the worker that grew. The guard acts
before it. Pure but for its readings; the agent kills.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ring.monitor.host_memory import HostMemory, MemoryReading, Pressure, kills

MARGIN = 0.02
"""How far below Ray's threshold the guard acts: Ray looks every 250 ms, the guard every PERIOD_S."""
PERIOD_S = 0.2
WINDOW_S = 60.0
"""Growth counts from the least that a worker held within this time."""
NOTABLE_GROWTH = 0.02
"""Growth as a share of all memory. If no worker grew by more, the largest one goes."""
REST_S = 3.0
"""For a killed worker's memory to be free."""
KERNEL_S = 3.0
"""A worker that died by SIGKILL within this time of the kernel's OOM kill counts as its victim."""
RAY_THRESHOLD, RAY_THRESHOLD_VARIABLE = 0.95, "RAY_memory_usage_threshold"
RAY_REFRESH_VARIABLE = "RAY_memory_monitor_refresh_ms"
GIB = 2**30


@dataclass
class _Known:
    pid: int
    counter: Path | None
    sizes: deque[tuple[float, int]] = field(default_factory=deque)
    counts: deque[tuple[float, int]] = field(default_factory=deque)


@dataclass(frozen=True)
class Verdict:
    """`worker`: whom to kill; empty where the run's workers are not what fills the memory."""

    worker: str
    text: str


class MemoryGuard:
    """The guard of one node. `limit`: the share of memory at which it acts; 0 for never."""

    def __init__(self, limit: float, memory: HostMemory | None = None) -> None:
        self.limit, self._memory = limit, memory or HostMemory()
        self._known: dict[str, _Known] = {}
        self._looked_at = self._acted_at = -WINDOW_S

    def look(self, now: float, pids: Mapping[str, int]) -> Verdict | None:
        """`pids` of the workers here. A verdict once the limit is passed, and again after REST_S."""
        if now - self._looked_at < PERIOD_S:
            return None
        self._looked_at = now
        self._measure(now, pids)
        if not self.limit or now - self._acted_at < REST_S:
            return None
        reading = self._memory.read()
        if reading.share < self.limit:
            return None
        self._acted_at = now
        return self._choose(reading)

    def kernel_killed(self, worker: str) -> str:
        """What the kernel's counter says of a worker that has just died by SIGKILL; empty if nothing."""
        known = self._known.get(worker)
        if known is None or not known.counts:
            return ""
        before, after = known.counts[0][1], kills(known.counter)
        if after <= before:
            return ""
        return f"killed by the kernel's OOM killer ({known.counter}: oom_kill {before} -> {after})"

    def _measure(self, now: float, pids: Mapping[str, int]) -> None:
        self._known = {
            worker: known
            if (known := self._known.get(worker)) is not None and known.pid == pid
            else _Known(pid, self._memory.kill_counter(pid))
            for worker, pid in pids.items()
        }
        for known in self._known.values():
            _add(known.sizes, now, self._memory.rss_bytes(known.pid), WINDOW_S)
            _add(known.counts, now, kills(known.counter), KERNEL_S)

    def _choose(self, reading: MemoryReading) -> Verdict:
        full = (
            f"{100 * reading.share:.1f} % of {reading.total_bytes / GIB:.2f} GiB in use, limit {100 * self.limit:g} %"
            f"{_waits(self._memory.pressure())}"
        )
        sizes = {worker: known.sizes[-1][1] for worker, known in self._known.items()}
        growth = {w: sizes[w] - min(size for _, size in known.sizes) for w, known in self._known.items()}
        notable = max(growth.values(), default=0) > NOTABLE_GROWTH * reading.total_bytes
        ranked = growth if notable else sizes
        worker = max(ranked, key=lambda name: (ranked[name], sizes[name]), default="")
        excess = reading.used_bytes - self.limit * reading.total_bytes
        if not worker or sizes[worker] < max(excess, NOTABLE_GROWTH * reading.total_bytes):
            return Verdict(
                "", f"{full}, and no worker of the run holds enough to change that: other processes fill the node"
            )
        grew = f"it grew by {growth[worker] / GIB:.2f} GiB to {sizes[worker] / GIB:.2f} GiB"
        return Verdict(worker, f"{full}; {grew} within {WINDOW_S:.0f} s")


def _waits(pressure: Pressure | None) -> str:
    """How much the node's tasks have waited for memory, for a log line; empty where the kernel does not tell."""
    if pressure is None:
        return ""
    return f", for {100 * pressure.some:.0f} % of the last 10 s some task waited for memory"


def _add(values: deque[tuple[float, int]], now: float, value: int, window_s: float) -> None:
    values.append((now, value))
    while values[0][0] < now - window_s:
        values.popleft()


def ray_threshold(raylet: int, proc: str | os.PathLike[str] = "/proc") -> float | None:
    """The share of memory at which Ray's monitor acts on this node, from the environment of its raylet; None if it is
    off. What the head was given in another way is not seen."""
    try:
        pairs = Path(proc, str(raylet), "environ").read_bytes().split(b"\0")
    except OSError:
        return RAY_THRESHOLD
    found = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)
    try:
        if float(found.get(RAY_REFRESH_VARIABLE, "250")) <= 0:
            return None
        return float(found.get(RAY_THRESHOLD_VARIABLE, RAY_THRESHOLD))
    except ValueError:
        return RAY_THRESHOLD


def guard_limit(wanted: float, threshold: float | None) -> float:
    """The share at which the guard acts: `wanted`, but before Ray's monitor."""
    return wanted if threshold is None or not wanted else min(wanted, threshold - MARGIN)


def warning(node: str, wanted: float, threshold: float | None) -> str:
    """A warning for the driver if Ray's monitor would act first; empty if not."""
    if threshold is None or (wanted and wanted <= threshold - MARGIN + 1e-9):
        return ""
    first = f"node {node}: Ray's memory monitor acts at {100 * threshold:g} % and takes the coordinator before a worker"
    acts = f"the run's guard acts at {100 * guard_limit(wanted, threshold):g} %" if wanted else "the run's guard is off"
    return (
        f"{first}; {acts} (memory_limit={wanted}). Start Ray there with {RAY_THRESHOLD_VARIABLE}=0.98 or "
        f"{RAY_REFRESH_VARIABLE}=0"
    )


NAME = "raylet.out"
TAIL_BYTES = 256 << 10
_CHOSEN = re.compile(r"\bto kill\b|\bkill details\b|\bkilled due to the node running low on memory\b")
_VICTIM = re.compile(r"\bpid=(\d+), actual memory used=([0-9.]+)GB")


def ray_killed(log_path: str, pid: int) -> str:
    """What the raylet says of a worker that has just died by a signal; empty if nothing. `log_path`: the worker's own
    log, which lies beside the raylet's."""
    if not log_path:
        return ""
    try:
        with (Path(log_path).parent / NAME).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if _CHOSEN.search(line):
            held = dict(_VICTIM.findall(line))
            if str(pid) in held:
                return f"Ray's memory monitor killed it ({NAME}: pid={pid}, {held[str(pid)]} GB)"
    return ""
