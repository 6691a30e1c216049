"""Tells the coordinator, while a worker warms up, how much CPU its process has used: progress earns it time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ring.control.messages import WorkerStarting
from elastic_ring.runtime.worker.coordinator_client import CoordinatorClient

REPORTS_A_LIMIT = 10


@contextmanager
def start_reports(client: CoordinatorClient, worker: str, start_s: float) -> Iterator[None]:
    """Report from a thread of its own, several times within `start_s`, for as long as this lasts."""
    over = threading.Event()

    def report() -> None:
        while True:
            client.answer(WorkerStarting(client.cause(), worker, time.process_time()))
            if over.wait(start_s / REPORTS_A_LIMIT):
                return

    thread = threading.Thread(target=report, name="start-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
