"""A GPU has one holder; a holder that dies, however it dies, lets it go. The locks need no GPU to be tested."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_ring.runtime import devices
from elastic_ring.runtime.devices import DeviceClaim

HOLD = """
import sys, time
from pathlib import Path
from elastic_ring.runtime import devices
devices.FOLDER = Path(sys.argv[1])
assert devices.DeviceClaim("cuda")._lock(0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    return tmp_path


def test_a_gpu_has_one_holder_and_gets_free_when_it_is_given_back() -> None:
    first, second = DeviceClaim("cuda"), DeviceClaim("cuda")
    assert first._lock(0)
    assert not second._lock(0)
    assert second._lock(1)
    first.give_back()
    assert DeviceClaim("cuda")._lock(0)


def test_the_gpu_of_a_killed_process_is_free_at_once(folder: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        claim = DeviceClaim("cuda")
        assert not claim._lock(0)
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        assert claim._lock(0)


def test_on_a_cpu_there_is_nothing_to_claim() -> None:
    assert DeviceClaim("cpu").take(0.0, lambda: None) == torch.device("cpu")
