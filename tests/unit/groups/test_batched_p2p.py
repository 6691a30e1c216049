"""Sends and receives of a GPU's group go out together or not at all, and an abort never meets them half way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.exchange import one_operation
from elastic_ring.errors import GroupAborted
from elastic_ring.runtime.groups.nccl import BatchedGroup, LaunchGate


class Backend:
    """Notes what is asked of it, as NCCL would see it; `breaks` raises at the second send."""

    def __init__(self, breaks: bool = False) -> None:
        self.seen: list[str] = []
        self.open = 0
        self._breaks = breaks

    def _start_coalescing(self) -> None:
        self.open += 1
        self.seen.append("start")

    def _end_coalescing(self) -> str:
        self.open -= 1
        self.seen.append("end")
        return "work"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        if self._breaks and "send 1" in self.seen:
            raise RuntimeError("NCCL communicator was aborted")
        self.seen.append(f"send {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.seen.append(f"recv {peer}")


def post(group: BatchedGroup) -> Any:
    tensors = [torch.zeros(1)]
    group._start_coalescing()
    group.recv(tensors, 2, 0)
    group.send(tensors, 1, 0)
    group.send(tensors, 3, 0)
    return group._end_coalescing()


def test_nothing_is_launched_before_all_is_posted_and_then_in_the_order_posted() -> None:
    backend = Backend()
    group = BatchedGroup(backend, LaunchGate(lambda: None).launching)
    group._start_coalescing()
    group.send([torch.zeros(1)], 1, 0)
    assert backend.seen == []
    assert post(group) == "work"
    assert backend.seen == ["start", "recv 2", "send 1", "send 3", "end"]


def test_a_group_that_was_given_up_is_not_touched() -> None:
    def gone() -> None:
        raise GroupAborted("given up")

    backend = Backend()
    with pytest.raises(GroupAborted):
        post(BatchedGroup(backend, LaunchGate(gone).launching))
    assert backend.seen == []


def test_an_operation_that_breaks_leaves_no_thread_collecting() -> None:
    backend = Backend(breaks=True)
    with pytest.raises(RuntimeError, match="aborted"):
        post(BatchedGroup(backend, LaunchGate(lambda: None).launching))
    assert backend.open == 0


def send_all(group: Any, *peers: int | None) -> None:
    with one_operation(group):
        for peer in peers:
            assert peer is not None, "not a peer"
            group.send([torch.zeros(1)], peer, 0)


def test_a_hop_goes_out_as_one_operation_of_a_plain_group() -> None:
    backend = Backend()
    with one_operation(backend) as works:
        backend.recv([torch.zeros(1)], 2, 0)
        backend.send([torch.zeros(1)], 1, 0)
        assert works == []
    assert (backend.seen, works) == (["start", "recv 2", "send 1", "end"], ["work"])


def test_an_error_between_a_hops_sends_leaves_no_thread_collecting_in_a_plain_group() -> None:
    backend = Backend(breaks=True)
    with pytest.raises(RuntimeError, match="aborted"):
        send_all(backend, 1, 3)
    assert backend.open == 0


def test_an_error_between_a_hops_sends_launches_nothing_of_a_group_that_posts() -> None:
    backend = Backend()
    group = BatchedGroup(backend, LaunchGate(lambda: None).launching)
    with pytest.raises(AssertionError, match="not a peer"):
        send_all(group, 1, None)
    assert backend.seen == []
    assert post(group) == "work"
    assert backend.seen == ["start", "recv 2", "send 1", "send 3", "end"]


def test_an_abort_waits_for_the_launch_under_way() -> None:
    gate, order = LaunchGate(lambda: None), list[str]()
    inside, go_on = threading.Event(), threading.Event()

    def launch() -> None:
        with gate.launching():
            inside.set()
            assert go_on.wait(60)
            order.append("launched")

    def abort() -> None:
        assert inside.wait(60)
        threading.Timer(0.01, go_on.set).start()
        with gate.shut():
            order.append("aborted")

    threads = [threading.Thread(target=work) for work in (launch, abort)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["launched", "aborted"]


def test_an_abort_does_not_wait_for_ever_for_a_launch_that_waits_for_the_dead() -> None:
    gate, inside, go_on = LaunchGate(lambda: None), threading.Event(), threading.Event()

    def launch() -> None:
        with gate.launching():
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=launch)
    thread.start()
    assert inside.wait(60)
    with gate.shut():
        assert thread.is_alive()
    go_on.set()
    thread.join()
