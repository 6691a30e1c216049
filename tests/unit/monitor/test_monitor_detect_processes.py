"""Who hangs and who only waits: real processes, stopped, stuck and starved."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_ring.monitor.hang_detection import Hang, HangDetector, HangSettings, Observation, ProcReader
from elastic_ring.monitor.stamps import StampReader

# Stamps every few milliseconds, a step every ten stamps; does what it is told by a line on stdin.
CHILD = """
import ctypes, os, sys, threading, time
from elastic_ring.monitor.stamps import Phase, StampWriter
writer = StampWriter(sys.argv[1]).open()
def obey():
    for line in sys.stdin:
        if line == "gil\\n":
            ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL during the call
        if line.startswith("compute "):  # one call that computes and keeps the GIL, as compilers do
            sum(range(int(line.split()[1])))
            print("computed", flush=True)
        if line == "stuck\\n":
            global stuck
            stuck = True
stuck = False
threading.Thread(target=obey, daemon=True).start()
busy_s = 0.0
if len(sys.argv) > 2:
    os.nice(19)
    busy_s = float(sys.argv[2])
print("up", flush=True)
for n in range(10**9):
    writer.stamp(n // 10, Phase.BACKWARD)
    done = time.thread_time() + busy_s
    while time.thread_time() < done:
        pass
    time.sleep(0.004)
    while stuck:
        time.sleep(0.01)  # alive, with the GIL free, and without progress
"""
QUICK = HangSettings(
    period_s=0.02, floor_s=0.4, cap_s=2.0, stopped_limit_s=0.2, computing_floor_s=8.0, computing_cap_s=8.0
)
PROBED_RANGE, CALL_S = 1 << 22, 0.8
FOR_EVER = 1 << 50


def range_of_one_call() -> int:
    """Whose sum takes this machine about CALL_S of CPU time in one call, which holds the GIL."""
    begun_s = time.process_time()
    sum(range(PROBED_RANGE))
    return int(PROBED_RANGE * CALL_S / (time.process_time() - begun_s))


class Agent:
    """What a node agent does with the detector: look, judge, sleep a period."""

    def __init__(self) -> None:
        self.detector = HangDetector(QUICK)
        self.watched: dict[str, tuple[int, StampReader]] = {}
        self.proc = ProcReader()

    def look(self) -> list[Hang]:
        seen = []
        for name, (pid, reader) in self.watched.items():
            stamp = reader.read()
            seen.append(Observation(name, pid, stamp, self.proc.read(pid, stamp.tid if stamp else None)))
        return self.detector.tick(time.monotonic(), seen)

    def ticks(self, number: int) -> list[Hang]:
        hangs = []
        for _ in range(number):
            hangs += self.look()
            time.sleep(QUICK.period_s)
        return hangs

    def until_warm(self) -> None:
        """Until every worker has gone on from one step to the next three times under the detector's eyes."""
        marks = {name: self._step(name) for name in self.watched}
        for _ in range(3):
            while any(self._step(name) <= mark for name, mark in marks.items()):
                assert self.ticks(1) == []
            marks = {name: self._step(name) for name in self.watched}
            assert self.ticks(1) == []

    def until_hang(self) -> list[Hang]:
        for _ in range(2000):
            if hangs := self.ticks(1):
                return hangs
        return []

    def _step(self, name: str) -> int:
        stamp = self.watched[name][1].read()
        return -1 if stamp is None else stamp.step


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def start(tmp_path: Path, agent: Agent) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start_child(name: str, *arguments: str) -> subprocess.Popen[str]:
        path = tmp_path / name
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        agent.watched[name] = (child.pid, StampReader(path))
        return child

    yield start_child
    for process in processes:
        process.kill()
        process.communicate()


def tell(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    child.stdin.write(word + "\n")
    child.stdin.flush()


def test_a_process_that_is_stopped_for_real_is_hung(agent: Agent, start: Callable[..., subprocess.Popen[str]]) -> None:
    start("w-0")
    victim = start("w-1")
    agent.until_warm()
    os.kill(victim.pid, signal.SIGSTOP)
    (hang,) = agent.until_hang()
    assert (hang.worker, hang.pid, hang.kind) == ("w-1", victim.pid, "stopped")
    os.kill(victim.pid, signal.SIGCONT)
    assert [hang.worker for hang in agent.ticks(30)] == []


@pytest.mark.parametrize("how", ["gil", "stuck"])
def test_a_thread_that_holds_the_gil_and_a_loop_without_progress_are_hung(
    agent: Agent, start: Callable[..., subprocess.Popen[str]], how: str
) -> None:
    start("w-0")
    victim = start("w-1")
    agent.until_warm()
    tell(victim, how)
    (hang,) = agent.until_hang()
    assert (hang.worker, hang.pid, hang.kind, hang.phase) == ("w-1", victim.pid, "stalled", "backward")


def test_a_process_that_holds_the_gil_by_computing_is_not_hung_before_the_computing_limit(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """It is silent for longer than the limit of idle processes, lives, and goes on. An endless call is found."""
    start("w-0")
    child = start("w-1")
    assert child.stdout is not None
    agent.until_warm()
    tell(child, f"compute {range_of_one_call()}")
    longest_s = 0.0
    while not select.select([child.stdout], [], [], 0)[0]:
        assert agent.ticks(1) == []
        longest_s = max(longest_s, agent.detector._tracks["w-1"].silent_s)
    assert longest_s > QUICK.floor_s, "the call was too short: this proves nothing"
    agent.until_warm()
    tell(child, f"compute {FOR_EVER}")
    (hang,) = agent.until_hang()
    assert (hang.worker, hang.kind) == ("w-1", "computing")


def test_a_healthy_process_starved_by_busy_loops_is_not_hung(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """All on one CPU, the healthy one at the lowest priority: it gets about one percent of it, so the 10 ms
    of work between two of its stamps take far longer than the limit."""
    child = start("w-0", "0.01")
    cpu = {min(os.sched_getaffinity(0))}
    agent.until_warm()
    os.sched_setaffinity(child.pid, cpu)
    before = agent.proc.read(child.pid)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for hog in hogs:
            os.sched_setaffinity(hog.pid, cpu)
        assert agent.ticks(120) == []
        after = agent.proc.read(child.pid)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert before is not None
    assert after is not None
    assert after.wait_ns - before.wait_ns > QUICK.floor_s * 1e9, "it hardly waited: this proves nothing"


def test_proc_tells_states_and_when_a_process_is_gone(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("w (0) x")
    reader = ProcReader()
    reading = reader.read(child.pid)
    assert reading is not None
    assert reading.state in "RS"
    assert reading.run_ns > 0
    assert reading.cpu_ns > 0
    stranger = reader.read(child.pid, tid=os.getpid())
    assert stranger is not None
    assert (stranger.thread_state, stranger.run_ns, stranger.wait_ns) == ("X", 0, 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = reader.read(child.pid)
    assert zombie is not None
    assert zombie.state == "Z"
    child.wait()
    assert reader.read(child.pid) is None
