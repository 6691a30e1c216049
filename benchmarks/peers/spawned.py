"""Runs a peer's ranks, each in a fresh process that ends with the measurement."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Run = TypeVar("Run")
Measure = Callable[[Run, int, int], dict[str, Any]]


def measured(measure: Measure[Run], run: Run, num_ranks: int, limit_s: float) -> list[dict[str, Any]]:
    """`measure(run, rank, port)` of each rank, or its `error`. `port`: free on this host, for the rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        processes.append(context.Process(target=_rank, args=(measure, run, rank, port, there), daemon=True))
        processes[-1].start()
        ends.append(here)
    try:
        return [end.recv() if end.poll(limit_s) else {"error": "no answer"} for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(measure: Measure[Run], run: Run, rank: int, port: int, end: Any) -> None:
    try:
        end.send(measure(run, rank, port))
    except BaseException:
        end.send({"error": traceback.format_exc()[-1500:]})
