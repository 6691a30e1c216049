"""What stands round NCCL's groups and needs no GPU: builds side by side, and aborts that meet them half way."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.runtime.groups.groups import Connector, Rendezvous
from elastic_ring.runtime.groups.nccl import connect_now, in_parallel, link_error

WAIT_S = 60.0


def nothing() -> None:
    return None


def test_builds_run_side_by_side_and_their_results_keep_their_order() -> None:
    both = threading.Barrier(2)

    def build(name: str) -> str:
        both.wait(WAIT_S)  # neither can end before the other has begun
        return name

    assert in_parallel([lambda: build("shard"), lambda: build("ring")], nothing) == ["shard", "ring"]
    assert in_parallel([], nothing) == []


def test_a_build_that_fails_does_not_wait_for_one_that_never_ends() -> None:
    never = threading.Event()

    def fails() -> None:
        raise PeerFailed("the peer is gone")

    with pytest.raises(PeerFailed):
        in_parallel([lambda: never.wait(WAIT_S * 10), fails], nothing)
    never.set()


def test_builds_that_never_end_are_left_behind_once_the_generation_is_given_up() -> None:
    never, begun = threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        never.wait(WAIT_S * 10)

    def check() -> None:
        if begun.is_set():
            raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        in_parallel([hangs, hangs], check)
    never.set()


class Backend:
    """A communicator is there to be aborted only once it is connected, as in torch's."""

    def __init__(self) -> None:
        self.connecting, self.peers_have_come, self.touched = threading.Event(), threading.Event(), threading.Event()
        self.connected = False
        self.num_communicators = 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connecting.set()
        assert self.peers_have_come.wait(WAIT_S)
        self.connected, self.num_communicators = True, 1

    def abort(self) -> None:
        self.num_communicators = 0
        self.touched.set()


@pytest.mark.parametrize("aborted", ["meanwhile", "afterwards", "never"])
def test_an_abort_ends_a_communicator_whenever_it_comes(aborted: str) -> None:
    connector, backend = Connector(Rendezvous("127.0.0.1", 1, "1/0", "127.0.0.1", WAIT_S, WAIT_S)), Backend()
    connector._nccl.append(backend)
    thread = threading.Thread(target=connect_now, args=(backend, torch.device("cpu"), lambda: connector.aborted))
    thread.start()
    assert backend.connecting.wait(WAIT_S)
    if aborted == "meanwhile":
        connector.abort()
        assert backend.touched.wait(WAIT_S), "it is asked at once, and has nothing to end yet"
    backend.peers_have_come.set()
    thread.join()
    if aborted == "afterwards":
        connector.abort()
        assert backend.touched.wait(WAIT_S)
    assert backend.connected
    assert backend.num_communicators == (1 if aborted == "never" else 0)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("SUCCESS", ""),
        ("TIMEOUT", ""),
        ("COMM_ERROR", "NCCL reports COMM_ERROR"),
        ("REMOTE_ERROR", "NCCL reports REMOTE_ERROR"),
    ],
)
def test_a_broken_link_is_told_and_a_timeout_of_what_is_only_queued_is_not(found: str, told: str) -> None:
    backend = SimpleNamespace(get_error=lambda: getattr(ErrorType, found))
    assert link_error(backend) == told


def test_a_build_of_torch_that_tells_of_no_errors_tells_of_none() -> None:
    assert link_error(SimpleNamespace()) == ""


def test_what_an_aborted_generation_says_of_its_links_is_not_asked() -> None:
    connector = Connector(Rendezvous("127.0.0.1", 1, "1/0", "127.0.0.1", WAIT_S, WAIT_S))
    backend = SimpleNamespace(get_error=lambda: ErrorType.COMM_ERROR, abort=lambda: None)
    connector._nccl.append(backend)
    assert connector.exchange_error() == "NCCL reports COMM_ERROR"
    connector.abort()
    assert connector.exchange_error() == ""
