"""Reports to the coordinator what a starting worker does and how much CPU it has used: progress earns it time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from elastic_ring.control.messages import WorkerStarting
from elastic_ring.runtime.stages import Stages
from elastic_ring.runtime.worker.coordinator_client import CoordinatorClient

REPORTS_A_LIMIT = 10
CHANGES_S = 2.0
"""The shortest time between two extra reports of what a worker does."""


class StartWork:
    """What a starting worker does right now: the warm-up thread writes it, the reports' thread reads it."""

    def __init__(self) -> None:
        self.stages = Stages("its process and imports")
        self.compiling = ""
        self.begin("first calls")

    def begin(self, what: str) -> None:
        """With an empty text it is warm."""
        self.what = what
        self.stages.begin(what)

    @property
    def told(self) -> str:
        return f"compiles {self.compiling}" if self.compiling else self.what


@contextmanager
def start_reports(client: CoordinatorClient, worker: str, start_s: float, work: StartWork) -> Iterator[None]:
    """Report from a thread of its own, several times within `start_s` and when the work changes, for as long as this
    lasts."""
    over = threading.Event()

    def report() -> None:
        while True:
            begun, told, compiles = time.monotonic(), work.told, bool(work.compiling)
            client.answer(WorkerStarting(client.cause(), worker, cpu_used_s(), told, compiles))
            period_s = start_s / REPORTS_A_LIMIT
            while (left_s := begun + period_s - time.monotonic()) > 0 and (
                work.told == told or time.monotonic() < begun + CHANGES_S
            ):
                if over.wait(min(CHANGES_S, left_s)):
                    return
            if over.is_set():
                return

    thread = threading.Thread(target=report, name="start-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cpu_used_s() -> float:
    """CPU seconds of this process and of those that it has started: compilers are processes of their own."""
    ended = os.times()
    total_s = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total_s += times.user + times.system
    return total_s
