"""The thread that trains: an order's end counts for that order alone, and only a wait that nothing ends is given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.runtime.worker.training_thread import TrainingThread
from elastic_ring.state.transfer import Link, receive_shard

LIMIT_S = 30.0


@pytest.fixture
def thread() -> TrainingThread:
    made = TrainingThread("under test")
    made.start()
    return made


def never(paused: threading.Event, for_s: float) -> bool:
    """An abort that reaches nobody."""
    return paused.wait(for_s)


def test_the_late_return_of_an_order_that_paused_early_does_not_pause_the_next(thread: TrainingThread) -> None:
    paused, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        thread.pause()
        paused.set()
        assert go_on.wait(LIMIT_S)  # telling of its end takes long

    thread.give(first)
    assert paused.wait(LIMIT_S)
    assert thread.paused.is_set()
    running = threading.Event()

    def next_order() -> None:
        running.set()
        assert second.wait(LIMIT_S)

    thread.give(next_order)
    go_on.set()
    assert running.wait(LIMIT_S)
    assert not thread.paused.is_set(), "the first order has returned, the second has not"
    second.set()
    assert thread.paused.wait(LIMIT_S)


def test_a_thread_that_sleeps_in_an_exchange_which_nobody_ends_is_stuck_unless_its_state_is_not_whole(
    thread: TrainingThread,
) -> None:
    lock = threading.Lock()
    lock.acquire()
    waiting = threading.Event()

    def recv(tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        waiting.set()
        return SimpleNamespace(wait=lock.acquire)  # native, as a backend's wait is

    host: Any = SimpleNamespace(recv=recv, size=lambda: 2)
    shard: Any = None
    thread.give(lambda: receive_shard(shard, Link(host)) and None)
    assert waiting.wait(LIMIT_S)
    assert thread.release(never, lambda: False, 1.0) == "busy"
    assert thread.release(never, lambda: True, LIMIT_S) == "stuck"
    thread.leave()
    lock.release()


def test_a_thread_that_computes_is_busy_however_long_it_takes(thread: TrainingThread) -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread.give(compute)
    assert thread.release(never, lambda: True, 1.5) == "busy"
    over.set()
    assert thread.paused.wait(LIMIT_S)
    assert thread.release(never, lambda: True, 1.0) == "paused"
