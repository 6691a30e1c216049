"""A killed process that holds a GPU's memory: its death is seen before the kernel has freed the memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch

from elastic_ring.monitor.exits import ExitWatch

HOLDER = """
import torch
free_bytes, _ = torch.cuda.mem_get_info()
held = torch.ones(free_bytes // 2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
input()
"""
NUM_KILLS, LIMIT_S = 3, 60.0


def killed() -> tuple[float, float]:
    """Seconds from SIGKILL until the death is seen, and until the process has ended."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, ExitWatch() as watch:
        assert process.stdout.readline() == b"held\n"
        watch.watch(process.pid, "holder")
        assert watch.ending() == []
        os.kill(process.pid, signal.SIGKILL)
        begun = time.monotonic()
        while not (seen := watch.ending()):
            assert time.monotonic() < begun + LIMIT_S
        seen_s = time.monotonic() - begun
        assert seen == ["holder"]
        (notice,) = watch.wait(LIMIT_S)
        assert notice.signal == signal.SIGKILL
        return seen_s, notice.monotonic_s - begun


def test_a_death_is_seen_before_the_gpus_memory_is_free() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    found = [killed() for _ in range(NUM_KILLS)]
    print("seen after, ended after (s):", found)
    assert all(seen_s < ended_s for seen_s, ended_s in found)
    assert min(seen_s for seen_s, _ in found) < 0.1
    assert torch.cuda.mem_get_info()[0] > 0.9 * free_bytes
