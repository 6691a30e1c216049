"""A worker that warms up tells its coordinator how much CPU it uses, and stops telling once it is warm."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace
from typing import Any

from elastic_ring.control.messages import WorkerStarting, from_json
from elastic_ring.runtime.worker.coordinator_client import CoordinatorClient
from elastic_ring.runtime.worker.start_reports import start_reports


def test_a_worker_that_warms_up_reports_its_growing_cpu_time_until_it_is_warm() -> None:
    received: queue.Queue[dict[str, Any]] = queue.Queue()
    spec: Any = SimpleNamespace(worker="w0.t1")
    client = CoordinatorClient(spec, lambda: 1)
    client.coordinator = SimpleNamespace(notify=SimpleNamespace(remote=lambda event, extra: received.put(event)))
    with start_reports(client, "w0.t1", start_s=0.1):
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
