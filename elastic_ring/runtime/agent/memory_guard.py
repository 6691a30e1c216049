"""Chooses the worker that a node agent kills before the node runs out of memory, and recognises kernel and Ray kills.

Ray's memory monitor first kills actors that Ray can restart: the coordinator, not the worker that grew. The guard acts
before it. Pure but for its readings; the agent kills.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ring.monitor.host_memory import HostMemory, MemoryReading, kills

MARGIN = 0.02
"""The guard acts so far below Ray's threshold: Ray looks every 250 ms, the guard every PERIOD_S."""
PERIOD_S = 0.2
WINDOW_S = 60.0
"""Growth counts from a worker's smallest size within this time."""
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
class _History:
    pid: int
    counter: Path | None
    sizes: deque[tuple[float, int]] = field(default_factory=deque)
    counts: deque[tuple[float, int]] = field(default_factory=deque)


@dataclass(frozen=True)
class Verdict:
    """`worker`: the worker to kill; empty if other processes fill the memory."""

    worker: str
    text: str


class MemoryGuard:
    """The guard of one node. `limit`: the share of memory at which it acts; 0 for never."""

    def __init__(self, limit: float, memory: HostMemory | None = None) -> None:
        self.limit, self._memory = limit, memory or HostMemory()
        self._histories: dict[str, _History] = {}
        self._looked_at = self._acted_at = -WINDOW_S

    def look(self, now: float, pids: Mapping[str, int]) -> Verdict | None:
        """`pids` of the workers here. A verdict once the limit is passed, and again after REST_S."""
        if now - self._looked_at < PERIOD_S:
            return None
        self._looked_at = now
        histories = self._histories
        self._histories = {}
        for worker, pid in pids.items():
            history = histories.get(worker)
            if history is None or history.pid != pid:
                history = _History(pid, self._memory.kill_counter(pid))
            _add(history.sizes, now, self._memory.rss_bytes(pid), WINDOW_S)
            _add(history.counts, now, kills(history.counter), KERNEL_S)
            self._histories[worker] = history
        if not self.limit or now - self._acted_at < REST_S:
            return None
        reading = self._memory.read()
        if reading.share < self.limit:
            return None
        self._acted_at = now
        return self._choose(reading)

    def kernel_killed(self, worker: str) -> str:
        """A sentence if the kernel's counter shows an OOM kill of a worker that has just died by SIGKILL; else
        empty."""
        history = self._histories.get(worker)
        if history is None or not history.counts:
            return ""
        before, after = history.counts[0][1], kills(history.counter)
        if after <= before:
            return ""
        return f"killed by the kernel's OOM killer ({history.counter}: oom_kill {before} -> {after})"

    def _choose(self, reading: MemoryReading) -> Verdict:
        full = (
            f"{100 * reading.share:.1f} % of {reading.total_bytes / GIB:.2f} GiB in use, limit {100 * self.limit:g} %"
        )
        if (pressure := self._memory.pressure()) is not None:
            full += f", for {100 * pressure.some:.0f} % of the last 10 s some task waited for memory"
        sizes = {worker: history.sizes[-1][1] for worker, history in self._histories.items()}
        least = {worker: min(size for _, size in history.sizes) for worker, history in self._histories.items()}
        growth = {worker: sizes[worker] - least[worker] for worker in sizes}
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


def _add(values: deque[tuple[float, int]], now: float, value: int, window_s: float) -> None:
    values.append((now, value))
    while values[0][0] < now - window_s:
        values.popleft()


def ray_threshold(raylet: int, proc: str | os.PathLike[str] = "/proc") -> float | None:
    """The share of memory at which Ray's monitor acts on this node, from the environment of its raylet; None if it is
    off. Settings that the head got in another way are not seen."""
    try:
        pairs = Path(proc, str(raylet), "environ").read_bytes().split(b"\0")
    except OSError:
        return RAY_THRESHOLD
    variables = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)
    try:
        if float(variables.get(RAY_REFRESH_VARIABLE, "250")) <= 0:
            return None
        return float(variables.get(RAY_THRESHOLD_VARIABLE, RAY_THRESHOLD))
    except ValueError:
        return RAY_THRESHOLD


def guard_limit(memory_limit: float, threshold: float | None) -> float:
    """The share at which the guard acts: `memory_limit`, but before Ray's monitor."""
    return memory_limit if threshold is None or not memory_limit else min(memory_limit, threshold - MARGIN)


def warning(node: str, memory_limit: float, threshold: float | None) -> str:
    """A warning for the driver if Ray's monitor would act first; empty if not."""
    if threshold is None or (memory_limit and memory_limit <= threshold - MARGIN + 1e-9):
        return ""
    first = f"node {node}: Ray's memory monitor acts at {100 * threshold:g} % and takes the coordinator before a worker"
    limit = 100 * guard_limit(memory_limit, threshold)
    acts = f"the run's guard acts at {limit:g} %" if memory_limit else "the run's guard is off"
    return (
        f"{first}; {acts} (memory_limit={memory_limit}). Start Ray there with {RAY_THRESHOLD_VARIABLE}=0.98 or "
        f"{RAY_REFRESH_VARIABLE}=0"
    )


NAME = "raylet.out"
TAIL_BYTES = 256 << 10
_CHOSEN = re.compile(r"\bto kill\b|\bkill details\b|\bkilled due to the node running low on memory\b")
_VICTIM = re.compile(r"\bpid=(\d+), actual memory used=([0-9.]+)GB")


def ray_killed(log_path: str, pid: int) -> str:
    """A sentence if the raylet's log shows that it killed a worker that has just died by a signal; else empty.
    `log_path`: the worker's own log, beside the raylet's."""
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
            sizes = dict(_VICTIM.findall(line))
            if str(pid) in sizes:
                return f"Ray's memory monitor killed it ({NAME}: pid={pid}, {sizes[str(pid)]} GB)"
    return ""
