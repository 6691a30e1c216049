"""A worker that warms up reports its work and its CPU time to the coordinator, until it is warm."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.control.messages import WorkerStarting, from_json
from elastic_ring.runtime.worker import coordinator_client
from elastic_ring.runtime.worker.coordinator_client import CoordinatorClient, StartWork, cpu_used_s, start_reports


def client_of(events: queue.Queue[dict[str, Any]]) -> CoordinatorClient:
    spec: Any = SimpleNamespace(worker="w0.t1")
    client = CoordinatorClient(spec, lambda: 1)
    client.coordinator = SimpleNamespace(notify=SimpleNamespace(remote=lambda event, extra: events.put(event)))
    return client


def test_a_worker_that_warms_up_reports_its_growing_cpu_time_until_it_is_warm() -> None:
    received: queue.Queue[dict[str, Any]] = queue.Queue()
    with start_reports(client_of(received), "w0.t1", start_s=0.1, work=StartWork()):
        first = from_json(received.get(timeout=10.0))
        began = time.process_time()
        while time.process_time() < began + 0.1:
            pass
        last = first
        while isinstance(last, WorkerStarting) and isinstance(first, WorkerStarting) and last.cpu_s < first.cpu_s + 0.1:
            last = from_json(received.get(timeout=10.0))
    assert isinstance(last, WorkerStarting)
    assert last.worker == "w0.t1"
    while not received.empty():
        received.get()
    time.sleep(0.05)
    assert received.empty()


def test_a_change_of_work_is_reported_before_the_next_report_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "CHANGES_S", 0.02)
    received: queue.Queue[dict[str, Any]] = queue.Queue()
    work, reported = StartWork(), []
    with start_reports(client_of(received), "w0.t1", 3600.0, work):
        for stage, compiling in (("opens the data", ""), ("opens the data", "FlexAttention"), ("first runs", "")):
            work.stage, work.compiling = stage, compiling
            while not reported or reported[-1] != str(work):
                report = received.get(timeout=10.0)
                reported.append(report["doing"])
                assert report["compiles"] == report["doing"].startswith("compiles ")
    assert reported[-3:] == ["opens the data", "compiles FlexAttention", "first runs"]


def test_the_cpu_time_of_a_compiler_in_a_process_of_its_own_counts() -> None:
    before_s = cpu_used_s()
    code = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_used_s() > before_s + 0.3, "while it runs"
        child.communicate(b"\n")
    assert cpu_used_s() > before_s + 0.3, "once it has ended"
