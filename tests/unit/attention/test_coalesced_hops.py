"""The dense ring's messages as NCCL gets them, on CPUs: what is posted together is one operation, keys leave from where
they lie, several hops share a stage. The same results, bytes and bits as through gloo."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch

from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import GroupAborted
from tests.gpu.gpu_rings import ProcessGroups, run_dense_on
from tests.unit.attention.attention_rings import (
    Case,
    ThreadRings,
    relative_error,
    run_ring,
    whole_attention,
)
from tests.unit.attention.test_attention_api import FakeRing
from tests.unit.attention.test_attention_bytes import check_bytes

DOCUMENTS = (0, 1, 18, 35)
CASES = [
    Case(cp, 20 * cp + 3, causal, layout, documents)
    for cp, causal, layout, documents in itertools.product(
        (2, 3, 4, 5), (True, False), ("contiguous", "zigzag"), ((0,), DOCUMENTS)
    )
]


@pytest.mark.parametrize("hops_per_stage", [1, 2, 4])
def test_fp64_agrees_with_one_process_and_moves_the_planned_bytes(rings: ThreadRings, hops_per_stage: int) -> None:
    for case in CASES:
        found = run_dense_on("cpu", case, hops_per_stage=hops_per_stage)
        for name, got, want in zip(("out", "dq", "dk", "dv"), found.tensors, whole_attention(case), strict=True):
            assert relative_error(got, want) <= 1e-12, (case, name)
        check_bytes(case, found.ledgers)


def test_the_bits_are_those_of_a_ring_over_gloo(rings: ThreadRings) -> None:
    for case in CASES:
        through_gloo = run_ring(case, rings.groups(case.cp), hops_per_stage=1)
        coalesced = run_dense_on("cpu", case, hops_per_stage=1)
        assert all(map(torch.equal, coalesced.tensors, through_gloo.tensors)), case
        for ours, theirs in zip(coalesced.ledgers, through_gloo.ledgers, strict=True):
            assert (ours.sent_bytes, ours.received_bytes) == (theirs.sent_bytes, theirs.received_bytes), case


def test_a_stage_is_one_operation_a_direction() -> None:
    case, links = Case(4, 64), ProcessGroups(4)
    groups = links.groups()
    links.groups = lambda: groups  # type: ignore[method-assign]
    run_dense_on("cpu", case, links, hops_per_stage=3)
    # Keys in forward, keys again and partials in backward.
    assert [group.num_operations for group in groups] == [3] * 4


class LostWork:
    """Like one of NCCL's its `wait` has no frame that a traceback would keep it by."""

    def __init__(self, group: LostGroup) -> None:
        self.wait = group.wait


class LostGroup(FakeRing):
    """Rank 0's side of a ring that is aborted: operations are posted, and after `good_waits` the next wait raises."""

    def __init__(self, cp: int, good_waits: int) -> None:
        super().__init__(0, cp)
        self.good_waits = good_waits
        self.works: list[weakref.ref[LostWork]] = []
        self.received: list[int] = []

    def wait(self) -> None:
        if not self.good_waits:
            raise GroupAborted("the ring is closed")
        self.good_waits -= 1

    def _start_coalescing(self) -> None:
        self.received = []

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        pass

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        self.received.append(tensors[0].data_ptr())

    def _end_coalescing(self) -> LostWork:
        work = LostWork(self)
        self.works.append(weakref.ref(work))
        return work


@pytest.mark.parametrize("good_waits", range(3))
def test_a_lost_operation_keeps_what_it_fills_and_lets_go_of_its_works(good_waits: int) -> None:
    """All messages of an operation share one end: it is let go for all of them, while the error's traceback lives."""
    case, group = Case(3, 36), LostGroup(3, good_waits)
    lost: Any = group
    ring = RingAttention(case.schedule, 0, lost, RingOptions(hops_per_stage=2, coalesced=True))
    q, k, v, dout = (case.layout.scatter(x, 0, 1).contiguous() for x in case.tensors())

    @torch.no_grad()
    def both_passes() -> None:
        out, lse, call, _ = ring.run_forward(q, k, v, 1.0)
        assert good_waits > 0, "forward waits for keys"
        ring.run_backward(dout, (q, k, v, out, lse), 1.0, call)

    with pytest.raises(GroupAborted) as caught:
        both_passes()
    assert caught.value.__traceback__ is not None
    # One operation in forward, keys and partials in backward.
    assert len(group.works) == good_waits + 1
    assert [work() for work in group.works] == [None] * len(group.works)
    held = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in ring.options.abandoned]
    assert group.received
    assert all(any(start <= at < stop for start, stop in held) for at in group.received)
