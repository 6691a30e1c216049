"""Hops by copy engines, on a model of GPUs that reach each other's memory: the bits and bytes of hops through NCCL, and
no more calls than that takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.traffic import ContiguousCopy
from experiments.peer_exchange import PeerRing, most_tokens
from experiments.peer_memory import PeerMemory
from tests.gpu.gpu_rings import run_dense_on
from tests.unit.attention.attention_rings import Case, in_threads
from tests.unit.attention.test_attention_api import FakeRing
from tests.unit.attention.test_attention_bytes import check_bytes
from tests.unit.experiments.peer_model import ModelledHost

DOCUMENTS = (0, 1, 18, 35)
CASES = [
    Case(cp, 20 * cp + 3, causal, layout, documents)
    for cp, causal, layout, documents in itertools.product(
        (2, 3, 5), (True, False), ("contiguous", "zigzag"), ((0,), DOCUMENTS)
    )
]


class NamedGroup(FakeRing):
    """What a ring, and memory that connects, ask a group for where no message may pass through it."""

    group_name = "ring"


def run_by_copies(host: ModelledHost, cases: list[Case], **options: Any) -> list[tuple[list[torch.Tensor], Any]]:
    """out, dq, dk, dv and the ledgers of each case, one after another over the same memory."""

    @torch.no_grad()
    def work(cp_rank: int) -> list[tuple[list[torch.Tensor], HopLedger]]:
        host.begin(cp_rank)
        group: Any = NamedGroup(cp_rank, host.cp)
        memory = PeerMemory(cp_rank, host.cp, torch.device("cpu"))
        memory.connect(group)
        results = []
        for case in cases:
            q, k, v, dout = (case.layout.scatter(x, cp_rank, 1).contiguous() for x in case.tensors())
            ring = PeerRing(case.schedule, cp_rank, group, RingOptions(**options), memory)
            out, lse, call, _ = ring.run_forward(q, k, v, case.head_dim**-0.5)
            grads = ring.run_backward(dout, (q, k, v, out, lse), case.head_dim**-0.5, call)
            results.append(([out, *grads], ring.ledger))
        return results

    with host.installed():
        by_rank = in_threads(host.cp, work)
    return [
        ([case.layout.gather([own[i] for own, _ in of_ranks], 1) for i in range(4)], [ledger for _, ledger in of_ranks])
        for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


@pytest.mark.thinned
@pytest.mark.parametrize("hops_per_stage", [1, 2, 4])
@pytest.mark.parametrize("cp", [2, 3, 5])
def test_the_bits_and_the_bytes_are_those_of_hops_through_a_group(cp: int, hops_per_stage: int) -> None:
    """Calls of several shapes share memory, which grows between them."""
    cases = [case for case in CASES if case.cp == cp]
    cases += [Case(cp, 40 * cp, batch=3), Case(cp, 8 * cp, batch=1, num_kv_heads=4)]
    for case, (tensors, ledgers) in zip(
        cases, run_by_copies(ModelledHost(cp), cases, hops_per_stage=hops_per_stage), strict=True
    ):
        want = run_dense_on("cpu", case, hops_per_stage=hops_per_stage)
        assert all(map(torch.equal, tensors, want.tensors)), case
        check_bytes(case, ledgers)


def test_a_pass_makes_the_calls_that_its_messages_take_and_asks_once_for_its_stream() -> None:
    case, host = Case(2, 64, batch=1), ModelledHost(2)
    run_by_copies(host, [case])
    for calls in host.calls:
        # Keys in forward; keys and partials in backward: for each, a flag before and one after, on both sides.
        assert calls["raise"] == calls["wait"] == 6
        # K and V lie apart; dK and dV of a stage of one hop do not.
        assert calls["copy"] == 5
        assert calls["current_stream"] == 2


def test_copies_beyond_a_buffer_are_refused() -> None:
    host = ModelledHost(1)

    def work(cp_rank: int) -> None:
        host.begin(cp_rank)
        memory: Any = PeerMemory(0, 1, torch.device("cpu"))
        memory.connect(NamedGroup(0, 1))
        memory.reserve("keys", 0, 8, torch.float32)
        source, stream = torch.arange(6.0), memory.streams[0]
        assert memory.copy("keys", 0, 0, [ContiguousCopy(0, 1, 3, 5)], [source], stream) == 20
        for piece, wrong in (
            (ContiguousCopy(0, 0, 3, 6), source),
            (ContiguousCopy(0, 1, 0, 6), source),
            (ContiguousCopy(0, 0, 0, 3), source[::2]),
            (ContiguousCopy(0, 0, 0, 6), source.double()),
        ):
            with pytest.raises(AssertionError):
                memory.copy("keys", 0, 0, [piece], [wrong], stream)
        stream.record_event().wait()
        assert memory.own("keys", 0, (8,)).tolist() == [77, 77, 77, 1, 2, 3, 4, 5]

    with host.installed():
        in_threads(1, work)


def test_all_ranks_size_their_memory_by_the_largest_stage_of_any() -> None:
    # Chunks of 8 tokens; rank 0 fetches a whole slice of 16 in every hop.
    assert most_tokens(Case(cp=4, seq_len=64).schedule, 3) == (48, 48)
