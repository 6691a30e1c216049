"""What moves is what the schedule says, hop by hop, and a ring that sends more is caught."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import HopMessages
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import Case, ThreadRings, in_threads, run_ring

CASES = [
    Case(cp=2, seq_len=32),
    Case(cp=3, seq_len=47, document_starts=(0, 5, 30)),
    Case(cp=4, seq_len=61, layout_name="contiguous", document_starts=(0, 20, 21, 50), dtype=torch.float32),
    Case(cp=5, seq_len=64, causal=False, num_kv_heads=1, dtype=torch.bfloat16),
    Case(cp=8, seq_len=100, causal=True, document_starts=(0, 50), num_kv_heads=4, dtype=torch.bfloat16),
    Case(cp=4, seq_len=64, layout_name="contiguous", document_starts=(0, 16, 32, 48)),
]


class WireTap:
    """Passes everything to a real group and adds up what went through it, by tag."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent_bytes = 0
        self.num_sends = 0
        self.tags: set[tuple[int, int]] = set()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        self.num_sends += 1
        assert (dst, tag) not in self.tags, "two messages of one call under the same tag"
        self.tags.add((dst, tag))
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._group.recv(tensors, src, tag)

    def rank(self) -> int:
        rank: int = self._group.rank()
        return rank

    def size(self) -> int:
        size: int = self._group.size()
        return size


def check_bytes(case: Case, ledgers: list[HopLedger], num_calls: int = 1, **options: Any) -> None:
    """Every ledger equals the schedule's formula; `options`: more of that."""
    for cp_rank, ledger in enumerate(ledgers):
        check_ledger(case, cp_rank, ledger, num_calls, **options)


def check_ledger(case: Case, cp_rank: int, ledger: HopLedger, num_calls: int = 1, **options: Any) -> None:
    """For every direction, hop and side."""
    options |= {"kv_heads": case.num_kv_heads, "batch": case.batch}
    sizes = case.head_dim, case.dtype.itemsize
    for side, counted in (("received", ledger.received_bytes), ("sent", ledger.sent_bytes)):
        planned = {
            (direction, hop): num_calls * case.schedule.hop_bytes(cp_rank, hop, *sizes, direction, side=side, **options)
            for direction, hop in itertools.product(("forward", "backward"), range(case.cp))
        }
        assert dict(counted) == {key: num for key, num in planned.items() if num}, (cp_rank, side)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"cp{case.cp}-{case.layout_name}")
def test_moved_bytes_equal_the_schedules_hop_by_hop(rings: ThreadRings, case: Case) -> None:
    taps = [WireTap(group) for group in rings.groups(case.cp)]
    outcome = run_ring(case, taps)
    check_bytes(case, outcome.ledgers)
    for tap, ledger in zip(taps, outcome.ledgers, strict=True):
        assert tap.sent_bytes == sum(ledger.sent_bytes.values())


def test_k_and_v_travel_in_one_message_and_empty_hops_in_none(rings: ThreadRings) -> None:
    for case in CASES:
        taps = [WireTap(group) for group in rings.groups(case.cp)]
        run_ring(case, taps)
        for cp_rank, tap in enumerate(taps):
            read = sum(any(hop.fetch) for hop in case.schedule.hops[cp_rank])
            served = sum(any(case.schedule.requested(cp_rank, hop)) for hop in range(case.cp))
            # Keys in forward, keys again and the partials of what was read in backward.
            assert tap.num_sends == 2 * served + read


def test_a_ledger_adds_up_over_calls_and_clears(rings: ThreadRings) -> None:
    case = CASES[1]
    shared = [HopLedger() for _ in range(case.cp)]
    for _ in range(2):
        _run_with_ledgers(rings, case, shared)
    check_bytes(case, shared, num_calls=2)
    for ledger in shared:
        ledger.clear()
        assert (ledger.sent_bytes, ledger.received_bytes, ledger.wait_s) == ({}, {}, {})


def _run_with_ledgers(rings: ThreadRings, case: Case, ledgers: list[HopLedger]) -> None:
    groups, tensors = rings.groups(case.cp), case.tensors()

    def work(cp_rank: int) -> None:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
        ring = RingAttention(case.schedule, cp_rank, groups[cp_rank], RingOptions(ledger=ledgers[cp_rank]))
        ring(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()).backward(dout)

    in_threads(case.cp, work)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_hop_sent_twice_is_caught_though_the_result_is_right(
    rings: ThreadRings, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """The planted bug: the keys of hop 1 cross the wire twice, and the second copy is used."""
    case = CASES[1]
    clean = run_ring(case, rings.groups(case.cp))
    check_bytes(case, clean.ledgers)
    send, receive = HopMessages._send, HopMessages._receive
    first_copies = []

    def planted(self: HopMessages, hop: int, kind: int) -> bool:
        return hop == 1 and kind == 0 and self._direction == direction

    def send_twice(self: HopMessages, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> Any:
        if planted(self, hop, kind):
            first_copies.append(send(self, hop, kind, peer, buffer))
        return send(self, hop, kind, peer, buffer)

    def receive_twice(self: HopMessages, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> Any:
        if planted(self, hop, kind):
            first_copies.append(receive(self, hop, kind, peer, torch.empty_like(buffer)))
        return receive(self, hop, kind, peer, buffer)

    monkeypatch.setattr(HopMessages, "_send", send_twice)
    monkeypatch.setattr(HopMessages, "_receive", receive_twice)
    twice = run_ring(case, rings.groups(case.cp, fresh=True))
    assert first_copies
    assert all(torch.equal(a, b) for a, b in zip(clean.tensors, twice.tensors, strict=True))
    with pytest.raises(AssertionError):
        check_bytes(case, twice.ledgers)


def test_a_plan_of_one_element_more_than_was_moved_is_caught(
    rings: ThreadRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger counts tensors, so a wrong formula cannot agree with itself."""
    case = CASES[0]
    outcome = run_ring(case, rings.groups(case.cp))
    formula = Schedule.hop_bytes
    monkeypatch.setattr(Schedule, "hop_bytes", lambda *args, **kwargs: formula(*args, **kwargs) + 8)
    with pytest.raises(AssertionError):
        check_bytes(case, outcome.ledgers)
