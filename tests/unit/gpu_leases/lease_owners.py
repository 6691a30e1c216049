"""GPUs by name and processes of their own that hold them, for tests; there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ring.runtime.gpu.leases import Gpu
from tests.lock_process import lock_process

FOUR = tuple(Gpu(index, f"GPU-{letter}") for index, letter in enumerate("abcd"))

HOLD = """
import sys, time
from pathlib import Path
from elastic_ring.runtime.gpu.leases import Gpu, GpuLease, record_failure
lease = GpuLease("run", Path(sys.argv[1]))
gpu = lease.acquire([Gpu(0, sys.argv[2])], int(sys.argv[3]), 10.0, lambda: None)
if sys.argv[4:]:
    record_failure(lease.folder, gpu, sys.argv[4])
print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def owner_process(folder: Path, gpu: Gpu, place: int, *failure: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds a GPU for a place."""
    command = [sys.executable, "-c", HOLD, str(folder), gpu.name, str(place), *failure]
    with lock_process(command) as process:
        yield process


def fail_elsewhere(folder: Path, gpu: Gpu, why: str) -> None:
    """A failure of another process, which ends."""
    with owner_process(folder, gpu, 0, why):
        pass


def go_on() -> None:
    pass
