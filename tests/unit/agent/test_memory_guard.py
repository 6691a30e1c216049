"""The guard of a node: whom it kills, what it reads, and what it says of the kernel's and of Ray's killers."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ring.config import Timeouts
from elastic_ring.monitor.host_memory import HostMemory, MemoryReading, Pressure, kills
from elastic_ring.runtime.agent.agent import AgentSpec, NodeAgent
from elastic_ring.runtime.agent.memory_guard import (
    NAME,
    PERIOD_S,
    REST_S,
    TAIL_BYTES,
    MemoryGuard,
    guard_limit,
    ray_killed,
    ray_threshold,
    warning,
)
from elastic_ring.runtime.agent.messages import Death, Watch
from tests.unit.agent.test_agent import JsonConnection, linked

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


class FakeMemory(HostMemory):
    """A node of 100 GiB with the processes that it is told."""

    def __init__(self, others: int = 0) -> None:
        super().__init__()
        self.others, self.sizes = others, dict[int, int]()

    def read(self) -> MemoryReading:
        return MemoryReading(100 * GIB, (self.others + sum(self.sizes.values())) * GIB)

    def rss_bytes(self, pid: int) -> int:
        return self.sizes.get(pid, 0) * GIB

    def kill_counter(self, pid: int) -> None:
        return None

    def pressure(self) -> Pressure:
        return Pressure(0.25, 0.125)


def guard_over(sizes: dict[int, int], others: int = 0) -> tuple[MemoryGuard, FakeMemory]:
    memory = FakeMemory(others)
    memory.sizes = sizes
    return MemoryGuard(0.9, memory), memory


PIDS = {"a": 1, "b": 2, "c": 3}


def test_the_worker_that_grew_goes_though_another_is_larger_and_nobody_before_the_limit() -> None:
    guard, memory = guard_over({1: 50, 2: 10, 3: 10})
    assert guard.look(0.0, PIDS) is None
    memory.sizes[2] = 29
    assert guard.look(1.0, PIDS) is None  # 89 %
    memory.sizes[2] = 31
    assert guard.look(1.0 + PERIOD_S / 2, PIDS) is None  # too soon for a look
    verdict = guard.look(2.0, PIDS)
    assert verdict is not None
    assert verdict.worker == "b"
    assert verdict.text == (
        "91.0 % of 100.00 GiB in use, limit 90 %, for 25 % of the last 10 s some task waited for memory; it grew by "
        "21.00 GiB to 31.00 GiB within 60 s"
    )
    assert guard.look(2.0 + REST_S / 2, PIDS) is None  # its memory is not free at once
    memory.sizes[3] = 30
    assert (guard.look(2.1 + REST_S, PIDS) or verdict).worker == "b"  # still there, and it grew most


def test_growth_of_long_ago_counts_no_more_and_then_the_largest_goes() -> None:
    guard, memory = guard_over({1: 60, 2: 10, 3: 10})
    guard.look(0.0, PIDS)
    memory.sizes[3] = 19
    for second in range(1, 130):
        assert guard.look(float(second), PIDS) is None
    memory.others = 2
    verdict = guard.look(131.0, PIDS)
    assert verdict is not None
    assert verdict.worker == "a"


def test_where_somebody_else_fills_the_node_nobody_of_the_run_is_killed() -> None:
    guard, memory = guard_over({1: 1, 2: 1, 3: 1}, others=80)
    guard.look(0.0, PIDS)
    memory.others = 96
    verdict = guard.look(1.0, PIDS)
    assert verdict is not None
    assert verdict.worker == ""
    assert "other processes fill the node" in verdict.text


def test_a_limit_of_0_never_kills() -> None:
    _, memory = guard_over({1: 99})
    guard = MemoryGuard(0.0, memory)
    assert guard.look(0.0, {"a": 1}) is None


def written(root: Path, files: dict[str, str]) -> HostMemory:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory(root)


def test_without_a_cgroup_the_node_counts(tmp_path: Path) -> None:
    memory = written(tmp_path, {"proc/vmstat": "nr_free_pages 5\noom_kill 7\n"})
    assert memory.read() == MemoryReading(16 * GIB, 8 * GIB)
    assert kills(memory.kill_counter(1)) == 7


@pytest.mark.parametrize("inside", [True, False], ids=["the host's path", "the container's own root"])
def test_the_limit_of_a_container_counts_without_its_page_cache(tmp_path: Path, inside: bool) -> None:
    folder = "sys/fs/cgroup/kubepods/pod" if inside else "sys/fs/cgroup"
    memory = written(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod\n",
            "proc/9/cgroup": "0::/kubepods/pod\n",
            f"{folder}/memory.max": f"{4 * GIB}\n",
            f"{folder}/memory.current": f"{3 * GIB}\n",
            f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            f"{folder}/memory.events": "low 0\noom 3\noom_kill 2\n",
        },
    )
    assert memory.read() == MemoryReading(4 * GIB, 5 * GIB // 2)
    assert kills(memory.kill_counter(9)) == 2


def test_of_nested_cgroups_of_version_1_the_fullest_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    memory = written(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory:/outer/inner\n",
            "proc/9/cgroup": "4:memory:/outer/inner\n",
            f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{base}/memory.usage_in_bytes": "1\n",
            f"{base}/outer/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{base}/outer/memory.usage_in_bytes": f"{7 * GIB // 4}",
            f"{base}/outer/inner/memory.limit_in_bytes": f"{8 * GIB}",
            f"{base}/outer/inner/memory.usage_in_bytes": "5",
            f"{base}/outer/inner/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        },
    )
    assert memory.read() == MemoryReading(2 * GIB, 7 * GIB // 4)
    assert kills(memory.kill_counter(9)) == 4


def test_this_machine_can_be_read() -> None:
    memory = HostMemory()
    reading = memory.read()
    assert 0 < reading.used_bytes < reading.total_bytes
    assert memory.rss_bytes(os.getpid()) > 10 << 20
    assert memory.rss_bytes(2**22 + 1) == 0


def test_of_the_node_and_its_container_the_one_that_waits_more_counts(tmp_path: Path) -> None:
    told = "some avg10={} avg60=0.00 avg300=0.00 total=7\nfull avg10={} avg60=0.00 avg300=0.00 total=6\n"
    files = {"proc/pressure/memory": told.format("12.50", "1.00"), "proc/self/cgroup": "0::/pod\n"}
    assert written(tmp_path, files).pressure() == Pressure(0.125, 0.01)
    inside = written(tmp_path, {"sys/fs/cgroup/pod/memory.pressure": told.format("8.00", "2.00")})
    assert inside.pressure() == Pressure(0.08, 0.02)
    assert HostMemory(tmp_path / "elsewhere").pressure() is None


def test_the_memory_of_a_process_is_told_by_kind() -> None:
    """A child that takes 32 MiB, gives them back, and keeps 16 MiB of shared memory."""
    code = (
        "import mmap; a = bytearray(b'x') * (32 << 20); del a; m = mmap.mmap(-1, 16 << 20); "
        "m.write(b'y' * (16 << 20)); print(flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = HostMemory().process(child.pid)
    child.communicate(b"\n")
    assert found is not None
    assert 16 << 20 <= found.shared_bytes < 18 << 20
    assert found.rss_bytes > found.shared_bytes
    assert found.peak_rss_bytes > found.rss_bytes + (8 << 20)
    assert HostMemory().process(child.pid) is None


def test_the_guard_acts_before_rays_monitor_and_says_so_where_that_is_earlier_than_asked(tmp_path: Path) -> None:
    def threshold(environ: str) -> float | None:
        (tmp_path / "5").mkdir(exist_ok=True)
        (tmp_path / "5/environ").write_bytes(environ.encode().replace(b" ", b"\0"))
        return ray_threshold(5, tmp_path)

    assert threshold("HOME=/root") == ray_threshold(6, tmp_path) == 0.95
    assert threshold("RAY_memory_usage_threshold=0.98 HOME=/root") == 0.98
    assert threshold("RAY_memory_monitor_refresh_ms=0") is None
    assert guard_limit(0.93, 0.95) == pytest.approx(0.93)
    assert guard_limit(0.97, 0.95) == pytest.approx(0.93)
    assert guard_limit(0.97, None) == 0.97
    assert guard_limit(0.0, 0.95) == 0.0
    assert warning("n", 0.93, 0.95) == warning("n", 0.0, None) == ""
    assert "the run's guard acts at 88 % (memory_limit=0.93)" in warning("n", 0.93, 0.9)
    assert "guard is off" in warning("n", 0.0, 0.95)


@pytest.mark.parametrize("oom_kills", [True, False])
def test_a_kill_by_the_kernel_is_told_apart_from_another(tmp_path: Path, oom_kills: bool) -> None:
    connection = JsonConnection()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        cgroup, events = f"proc/{process.pid}/cgroup", "sys/fs/cgroup/memory.events"
        memory = written(tmp_path, {cgroup: "0::/\n", events: "oom 0\noom_kill 2\n"})
        agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
        agent._exits.open()
        agent._guard, agent._link = MemoryGuard(0.0, memory), linked(connection)
        agent._watch_worker(Watch("w", process.pid, str(tmp_path / "no"), ""))
        agent._look()
        if oom_kills:
            (tmp_path / events).write_text("oom 1\noom_kill 3\n")
        os.kill(process.pid, signal.SIGKILL)
        while not connection.deaths():
            agent._look()
    (death,) = [message for message in connection.said if isinstance(message, Death)]
    assert death.reason == ("out of memory" if oom_kills else "died")
    assert ("oom_kill 2 -> 3); killed by SIGKILL" in death.how) == oom_kills
    connection.close()


def test_the_agent_kills_the_worker_that_grew_and_names_the_cause(tmp_path: Path) -> None:
    connection = JsonConnection()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        guard, memory = guard_over({process.pid: 10})
        agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
        agent._exits.open()
        agent._guard, agent._link = guard, linked(connection)
        agent._watch_worker(Watch("w", process.pid, str(tmp_path / "no"), ""))
        agent._look()
        memory.sizes[process.pid] = 95
        while not connection.deaths():
            agent._look()
        assert process.wait(timeout=10) == -signal.SIGKILL
    (death,) = [message for message in connection.said if isinstance(message, Death)]
    assert death.reason == "out of memory"
    assert "it grew by 85.00 GiB to 95.00 GiB" in death.how
    connection.close()


# ------------------------------------------------------------ the raylet's log


CHOSEN = (
    "[2026-11-24 23:40:12,345 I 811 811] (raylet) node_manager.cc:3011: Currently used memory: 22548578304 bytes, "
    "threshold: 21474836480 bytes, kill buffer: 0 bytes. Needed to free 1073741824 bytes. Selected 2 workers to kill: "
    "(actor name=Coordinator, pid=812, actual memory used=0.41GB, worker ID=ab), "
    "(actor name=Worker, pid=4711, actual memory used=5.20GB, worker ID=cd).\n"
)
OTHERS = "[2026-11-24 23:40:13,000 I 811 811] (raylet) idle: (pid=4712, actual memory used=0.10GB, worker ID=ef)\n"


def log_beside(folder: Path, text: str) -> str:
    (folder / NAME).write_text(text)
    return str(folder / "worker-1.err")


def test_a_worker_that_the_monitor_chose_is_told_with_what_it_held_and_no_other(tmp_path: Path) -> None:
    worker_log = log_beside(tmp_path, "x" * (TAIL_BYTES + 5) + "\n" + CHOSEN + OTHERS)
    assert ray_killed(worker_log, 4711) == "Ray's memory monitor killed it (raylet.out: pid=4711, 5.20 GB)"
    assert ray_killed(worker_log, 812) == "Ray's memory monitor killed it (raylet.out: pid=812, 0.41 GB)"
    for pid in (4712, 471, 811):
        assert ray_killed(worker_log, pid) == ""


def test_without_a_log_nothing_is_known(tmp_path: Path) -> None:
    assert ray_killed("", 1) == ray_killed(str(tmp_path / "worker.err"), 1) == ""
    assert ray_killed(log_beside(tmp_path, CHOSEN + "x" * TAIL_BYTES), 4711) == "", "too long ago"


@pytest.mark.parametrize("text", [b"pid=%d, actual memory used=%sGB", b"workers to kill: %s"])
def test_the_raylet_of_this_ray_writes_so(text: bytes) -> None:
    binary = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(text) >= 0
