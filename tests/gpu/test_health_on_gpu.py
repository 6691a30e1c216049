"""What NVML answers of a real GPU, as the node agent asks it, and that training shows in it."""

from __future__ import annotations

import time

import pytest
import torch

from elastic_ring.runtime.agent.health import GPU_KEYS, HealthThread, Nvml

pytest.importorskip("pynvml", reason="needs nvidia-ml-py (the extra cuda)")


@pytest.fixture
def nvml() -> Nvml:
    made = Nvml()
    assert made.open()
    return made


def test_every_gpu_tells_its_health(nvml):
    found = nvml.read()
    assert len(found) >= torch.cuda.device_count()
    for index, reading in found.items():
        assert set(reading) <= set(GPU_KEYS), index
        missing = set(GPU_KEYS) - set(reading)
        print(f"GPU {index}: {reading}; not told: {sorted(missing) or 'nothing'}")
        assert {"utilisation", "power_watts", "temperature_celsius"} <= set(reading)
        assert 0 <= reading["utilisation"] <= 1
        assert 15 <= reading["temperature_celsius"] < 100
        assert 5 < reading["power_watts"] < 2000
        assert reading.get("xid_errors", 0.0) == 0.0


def test_work_shows_in_utilisation_and_power(nvml):
    before = nvml.read()["0"]
    a = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        for _ in range(20):
            a = torch.nn.functional.normalize(a @ a)
        torch.cuda.synchronize()
    during = nvml.read()
    busy = max(during.values(), key=lambda reading: reading["utilisation"])
    assert busy["utilisation"] > 0.5, (before, during)


def test_a_look_takes_milliseconds_and_a_wait_for_xid_errors_ends(nvml):
    begun = time.monotonic()
    for _ in range(10):
        nvml.read()
    read_s = (time.monotonic() - begun) / 10
    print(f"a reading takes {1e3 * read_s:.1f} ms")
    assert read_s < 0.5
    begun = time.monotonic()
    waited = nvml.wait(0.3)
    print("Xid errors are told" if waited else "NVML tells no Xid errors here")
    assert time.monotonic() - begun < 3.0


def test_the_agents_thread_reads_it():
    told: list[str] = []
    health = HealthThread(told.append)
    health.open()
    deadline = time.monotonic() + 20.0
    while (found := health.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found["gpus"]
    assert found["network"]["errors"] >= 0
    assert not told or all("from before" in text for text in told)
