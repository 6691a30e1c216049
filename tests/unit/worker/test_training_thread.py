"""The thread that trains: an order's end counts for that order alone, and only a wait that nothing ends is given up.
And whose error an exception is: the ring's, the user's, or that of this worker's own device."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ring.errors import DigestMismatch, GroupAborted, PeerFailed, TooManySkipped
from elastic_ring.runtime.groups.nccl import has_failed
from elastic_ring.runtime.worker.training_thread import TrainingThread, error_kind, error_text
from elastic_ring.state.transfer import Link, receive_shard
from elastic_ring.train.memory import drop_frames
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.startup.kernels import KernelMismatch
from elastic_ring.train.vote import ReplicasDiverged

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
    thread.abandon()
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


# ------------------------------------------------------------ whose error

CUDA_ERROR = "CUDA error: an illegal memory access was encountered\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The exception as whoever catches it finds it."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def failed() -> bool:
    return True


def untouched() -> bool:
    raise AssertionError("asked of the device although the error says what it is")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TooManySkipped("x"), "skipped"),
        (DigestMismatch("x"), "peer"),
        (ModelRefused("x"), "check"),
        (ReplicasDiverged("x"), "check"),
        (GroupAborted("x"), "peer"),
        (PeerFailed("x"), "peer"),
        (dist.DistNetworkError("x"), "peer"),
        (dist.DistStoreError("x"), "peer"),
        (dist.DistBackendError("x"), "peer"),
        (ValueError("in the user's loss, from a failed exchange"), "peer"),
    ],
)
def test_what_the_ring_says_of_itself_asks_no_device(error: BaseException, kind: str) -> None:
    cause = dist.DistBackendError("x") if isinstance(error, ValueError) else None
    assert error_kind(raised(error, cause), untouched) == kind


def test_an_error_of_the_device_is_not_the_users_wherever_it_is_wrapped() -> None:
    error = torch.AcceleratorError(CUDA_ERROR)
    assert error_kind(raised(error)) == "device"
    assert error_kind(raised(ValueError("in the model"), error)) == "device"
    assert error_kind(raised(RuntimeError("whatever"), None), failed) == "device"


def test_no_room_for_a_newcomer_is_a_device_error_and_no_room_for_a_step_is_not() -> None:
    error = raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB."))
    assert error_kind(error, healing=True) == "device"
    assert error_kind(error, failed) == "device"  # a poisoned device says so, too
    assert error_kind(error) == "memory"
    assert "Tried to allocate 4.00 GiB" in error_text(error, "memory")


def test_a_host_without_memory_is_told_by_what_its_allocators_raise_and_by_nothing_else() -> None:
    def too_much() -> None:
        torch.empty(1 << 50)

    with pytest.raises(RuntimeError) as of_torch:
        too_much()
    with pytest.raises(MemoryError) as of_python:
        bytearray(1 << 60)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 50, dtype=np.float64)
    for caught in (of_torch, of_python, of_numpy):
        assert error_kind(caught.value, untouched) == error_kind(caught.value, untouched, healing=True) == "memory"
        assert error_kind(raised(ValueError("in the model"), caught.value), untouched) == "memory"
    text = error_text(raised(ValueError("in the model"), of_torch.value), "memory")
    assert "you tried to allocate 4503599627370496 bytes" in text
    assert "in too_much" in text
    assert text.count("\n") == 0
    words = "can't allocate memory: you tried to allocate 5 bytes"
    assert error_kind(raised(RuntimeError(words))) == "user"  # words of somebody else
    assert error_kind(raised(ValueError(f"DefaultCPUAllocator: {words}"))) == "user"


def test_the_frames_of_a_step_that_ran_out_of_memory_hold_nothing_any_more() -> None:
    class Activation:
        pass

    seen: list[weakref.ref[Activation]] = []

    def step() -> None:
        held = Activation()
        seen.append(weakref.ref(held))
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        step()
    assert seen[0]() is not None
    drop_frames(caught.value)
    assert seen[0]() is None
    assert "in step (" in error_text(caught.value, "memory")  # the place is known all the same


def test_a_kernel_that_the_others_run_and_this_device_does_not_costs_a_newcomer_or_refuses_a_start() -> None:
    error = raised(KernelMismatch("cannot follow"))
    assert error_kind(error, untouched, healing=True) == "device"
    assert error_kind(error, untouched) == "check"


def test_everything_else_is_the_users_while_the_device_is_well() -> None:
    assert error_kind(raised(ValueError("a shape"))) == "user"
    assert error_kind(raised(RuntimeError("[gloo/transport/tcp] NCCL"))) == "user"  # words prove nothing
    assert error_kind(raised(SystemExit(3))) == "user"
    assert not has_failed(torch.device("cpu"))


def test_a_device_says_one_line_and_the_user_gets_the_whole_traceback() -> None:
    assert error_text(torch.AcceleratorError(CUDA_ERROR), "device") == (
        "AcceleratorError: CUDA error: an illegal memory access was encountered"
    )
    assert error_text(torch.OutOfMemoryError(), "device") == "OutOfMemoryError: "
    told = error_text(raised(ValueError("a shape")))
    assert told.startswith("Traceback")
    assert told.rstrip().endswith("ValueError: a shape")
