"""Groups on a device, without a GPU: builds side by side, aborts half way, posted operations, and the self-test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from elastic_ring.attention.comm.messages import one_operation
from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.groups import Connector, Rendezvous, self_test, shift
from elastic_ring.runtime.groups.nccl import BatchedGroup, Builds, LaunchGate, connect_now, link_error
from tests.unit.groups.processes import Membership, connect, membership

WAIT_S = 60.0


def nothing() -> None:
    return None


def test_builds_run_side_by_side_and_their_results_keep_their_order() -> None:
    both = threading.Barrier(2)

    def build(name: str) -> str:
        both.wait(WAIT_S)  # neither can end before the other has begun
        return name

    assert Builds([lambda: build("shard"), lambda: build("ring")]).results(nothing) == ["shard", "ring"]
    assert Builds([]).results(nothing) == []


def test_a_build_that_fails_does_not_wait_for_one_that_never_ends() -> None:
    never = threading.Event()

    def fails() -> None:
        raise PeerFailed("the peer is gone")

    with pytest.raises(PeerFailed):
        Builds([lambda: never.wait(WAIT_S * 10), fails]).results(nothing)
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
        Builds([hangs, hangs]).results(check)
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


# ------------------------------------------------------------ sends and receives posted together


class Poster:
    """Notes what is asked of it, as NCCL would see it; `breaks` raises at the second send."""

    def __init__(self, breaks: bool = False) -> None:
        self.seen: list[str] = []
        self.num_open = 0
        self._breaks = breaks

    def _start_coalescing(self) -> None:
        self.num_open += 1
        self.seen.append("start")

    def _end_coalescing(self) -> str:
        self.num_open -= 1
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
    backend = Poster()
    group = BatchedGroup(backend, LaunchGate(lambda: None).launching)
    group._start_coalescing()
    group.send([torch.zeros(1)], 1, 0)
    assert backend.seen == []
    assert post(group) == "work"
    assert backend.seen == ["start", "recv 2", "send 1", "send 3", "end"]


def test_a_group_that_was_given_up_is_not_touched() -> None:
    def gone() -> None:
        raise GroupAborted("given up")

    backend = Poster()
    with pytest.raises(GroupAborted):
        post(BatchedGroup(backend, LaunchGate(gone).launching))
    assert backend.seen == []


def test_an_operation_that_breaks_leaves_no_thread_collecting() -> None:
    backend = Poster(breaks=True)
    with pytest.raises(RuntimeError, match="aborted"):
        post(BatchedGroup(backend, LaunchGate(lambda: None).launching))
    assert backend.num_open == 0


def send_all(group: Any, *peers: int | None) -> None:
    with one_operation(group):
        for peer in peers:
            assert peer is not None, "not a peer"
            group.send([torch.zeros(1)], peer, 0)


def test_a_hop_goes_out_as_one_operation_of_a_plain_group() -> None:
    backend = Poster()
    with one_operation(backend) as works:
        backend.recv([torch.zeros(1)], 2, 0)
        backend.send([torch.zeros(1)], 1, 0)
        assert works == []
    assert (backend.seen, works) == (["start", "recv 2", "send 1", "end"], ["work"])


def test_an_error_between_a_hops_sends_leaves_no_thread_collecting_in_a_plain_group() -> None:
    backend = Poster(breaks=True)
    with pytest.raises(RuntimeError, match="aborted"):
        send_all(backend, 1, 3)
    assert backend.num_open == 0


def test_an_error_between_a_hops_sends_launches_nothing_of_a_group_that_posts() -> None:
    backend = Poster()
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


# ------------------------------------------------------------ the self-test


CPU = torch.device("cpu")


class Joining:
    """A real gloo group that joins operations as NCCL's backends do, and notes who was spoken to."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.works: list[Any] = []
        self.to: list[int] = []
        self.num_operations = 0

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def _start_coalescing(self) -> None:
        self.works = []

    def _end_coalescing(self) -> Any:
        self.num_operations += 1
        return SimpleNamespace(wait=lambda: [work.wait() for work in self.works])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.to.append(peer)
        self.works.append(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.works.append(self._group.recv(tensors, peer, tag))


def shift_joined(me: Any) -> tuple[list[float], list[int], int]:
    backend = Joining(me.groups.ring)
    return shift(BatchedGroup(backend, LaunchGate(lambda: None).launching), CPU), backend.to, backend.num_operations


def shift_plainly(me: Any) -> list[float]:
    return shift(me.groups.ring, CPU)


@pytest.fixture(scope="module")
def three() -> Iterator[Membership]:
    with membership(3) as made:
        made.all(connect, made.meeting(), Mesh(1, 3))
        yield made


def test_every_rank_of_a_ring_hears_every_other(three: Membership) -> None:
    assert three.all(shift_plainly) == [[0.0, 1.0, 2.0]] * 3


def test_where_operations_are_joined_all_pairs_are_one_operation(three: Membership) -> None:
    heard = three.all(shift_joined)
    assert [answer[0] for answer in heard] == [[0.0, 1.0, 2.0]] * 3
    assert [answer[1] for answer in heard] == [[1, 2], [2, 0], [0, 1]], "in the order of the hops"
    assert [answer[2] for answer in heard] == [1, 1, 1]


class Wire:
    """A group of two whose sums are right and whose hops bring `brings`."""

    def __init__(self, brings: float) -> None:
        self._brings = brings

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        tensors[0].copy_(torch.tensor([2.0, 1.0]))
        return SimpleNamespace(wait=lambda: None)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: tensors[0].fill_(self._brings))


def groups_over(wire: Wire, check: Any = lambda: None) -> Any:
    connector = SimpleNamespace(device=CPU)
    gate = LaunchGate(lambda: None)
    return SimpleNamespace(
        world=wire, shard=wire, ring=wire, replica=wire, connector=connector, check=check, launching=gate.launching
    )


def test_hops_that_bring_another_ranks_number_are_a_failed_peer() -> None:
    self_test(groups_over(Wire(1.0)))
    with pytest.raises(PeerFailed, match="hops of the ring"):
        self_test(groups_over(Wire(0.0)))


def test_nonsense_of_an_aborted_group_is_the_aborts() -> None:
    """On a device an abort ends an exchange without an error."""

    def gone() -> None:
        raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        self_test(groups_over(Wire(0.0), gone))
