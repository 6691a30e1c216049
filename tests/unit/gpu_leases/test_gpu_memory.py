"""A newcomer waits for the memory of the process that held its GPU before, and no longer than that helps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ring.errors import GroupAborted
from elastic_ring.runtime.gpu.leases import GpuLease, Owner, process_started, wait_for_memory
from tests.unit.gpu_leases.lease_owners import FOUR, go_on, owner_process

A = FOUR[0]


class Memory:
    """Readings of free memory, one after another, the last for ever; `then` happens with the reading before it."""

    def __init__(self, *readings: int, then: Callable[[], None] = go_on) -> None:
        self.readings, self.then, self.num_read = list(readings), then, 0

    def __call__(self) -> int:
        self.num_read += 1
        if len(self.readings) == 1:
            return self.readings[0]
        if len(self.readings) == 2:
            self.then()
        return self.readings.pop(0)


def test_where_enough_is_free_nobody_is_waited_for() -> None:
    memory = Memory(8)
    assert wait_for_memory(memory, 8, lambda: True, go_on, 60.0) == 8
    assert memory.num_read == 1


def test_memory_is_waited_for_while_the_process_before_is_there() -> None:
    assert wait_for_memory(Memory(1, 1, 3, 9), 8, lambda: True, go_on, 60.0) == 9


def test_once_the_process_before_has_ended_and_no_more_gets_free_it_goes_on() -> None:
    there = [True]
    memory = Memory(1, 2, 3, then=there.clear)
    assert wait_for_memory(memory, 8, lambda: bool(there), go_on, 60.0) == 3
    assert memory.num_read > 3


def test_the_wait_for_memory_is_bounded_and_an_abort_ends_it() -> None:
    assert wait_for_memory(Memory(1), 8, lambda: True, go_on, 0.05) == 1

    def aborted() -> None:
        raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        wait_for_memory(Memory(1), 8, lambda: True, aborted, 60.0)


def test_a_previous_owner_is_there_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    with owner_process(tmp_path, A, 0) as process:
        lease = GpuLease("run", tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        while not lease.lock(A):
            pass
        while lease.previous_owner_is_alive():  # its lock is released first; nobody has waited for the process yet
            pass
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert process_started(os.getpid()) is not None
    lease.previous_owner = Owner(os.getpid(), (process_started(os.getpid()) or 0) - 1)
    assert not lease.previous_owner_is_alive(), "another process with the same number"
    lease.previous_owner = Owner(os.getpid(), process_started(os.getpid()) or 0)
    assert lease.previous_owner_is_alive()


LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone, on x86-64
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_a_process_whose_first_thread_has_ended_before_the_others_is_there() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert process_started(process.pid) is not None
        process.kill()
        while process_started(process.pid) is not None:
            pass
