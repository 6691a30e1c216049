"""The dense ring's messages as NCCL gets them, on CPUs: what is posted together is one operation, keys leave from where
they lie, several hops share a stage. The same results, bytes and bits as through gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.gpu_rings import Wires, run_dense_on
from tests.unit.attention_rings import Case, ThreadRings, one_thread, relative_error, run_ring, whole_attention
from tests.unit.test_attention_bytes import check_bytes

DOCUMENTS = (0, 1, 18, 35)
CASES = [
    Case(cp, 20 * cp + 3, causal, layout, documents)
    for cp, causal, layout, documents in itertools.product(
        (2, 3, 4, 5), (True, False), ("contiguous", "zigzag"), ((0,), DOCUMENTS)
    )
]


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


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
    case, wires = Case(4, 64), Wires(4)
    groups = wires.groups()
    wires.groups = lambda: groups  # type: ignore[method-assign]
    run_dense_on("cpu", case, wires, hops_per_stage=3)
    # Keys in forward, keys again and partials in backward.
    assert [group.num_operations for group in groups] == [3] * 4
