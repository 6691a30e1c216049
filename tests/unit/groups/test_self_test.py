"""The first exchange of a generation goes between all that a step's hops go between, and notices a wrong wire."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.groups import self_test, shift
from elastic_ring.runtime.groups.nccl import BatchedGroup, LaunchGate
from tests.unit.groups.processes import Membership, connect, membership

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
