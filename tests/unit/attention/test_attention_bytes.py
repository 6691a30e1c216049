"""What moves is what the schedule says, hop by hop, over gloo and as NCCL gets it; a ring that sends more is caught."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import HopMessages
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense, Sinks, Window
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.plan.traffic import Hosts, is_forwarded
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import GroupAborted
from tests.gpu.gpu_rings import ProcessGroups, run_dense_on
from tests.unit.attention.attention_rings import (
    Case,
    ThreadRings,
    in_threads,
    relative_error,
    run_ring,
    whole_attention,
)
from tests.unit.attention.test_attention_api import FakeRing
from tests.unit.sparse.block_cases import BlockCase
from tests.unit.sparse.pattern_cases import SparseCase

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
def test_moved_bytes_equal_the_schedules_hop_by_hop(rings, case):
    taps = [WireTap(group) for group in rings.groups(case.cp)]
    outcome = run_ring(case, taps)
    check_bytes(case, outcome.ledgers)
    for tap, ledger in zip(taps, outcome.ledgers, strict=True):
        assert tap.sent_bytes == sum(ledger.sent_bytes.values())


def test_k_and_v_travel_in_one_message_and_empty_hops_in_none(rings):
    for case in CASES:
        taps = [WireTap(group) for group in rings.groups(case.cp)]
        run_ring(case, taps)
        for cp_rank, tap in enumerate(taps):
            read = sum(any(hop.fetch) for hop in case.schedule.hops[cp_rank])
            served = sum(any(case.schedule.requested(cp_rank, hop)) for hop in range(case.cp))
            # Keys in forward, keys again and the partials of what was read in backward.
            assert tap.num_sends == 2 * served + read


def test_a_ledger_adds_up_over_calls_and_clears(rings):
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
def test_a_hop_sent_twice_is_caught_though_the_result_is_right(rings, monkeypatch, direction):
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


def test_a_plan_of_one_element_more_than_was_moved_is_caught(rings, monkeypatch):
    """The ledger counts tensors, so a wrong formula cannot agree with itself."""
    case = CASES[0]
    outcome = run_ring(case, rings.groups(case.cp))
    formula = Schedule.hop_bytes
    monkeypatch.setattr(Schedule, "hop_bytes", lambda *args, **kwargs: formula(*args, **kwargs) + 8)
    with pytest.raises(AssertionError):
        check_bytes(case, outcome.ledgers)


# -------------------------------------------------------------------------------------- the messages as NCCL gets them


DOCUMENTS = (0, 1, 18, 35)
COALESCED = [
    Case(cp, 20 * cp + 3, causal, layout, documents)
    for cp, causal, layout, documents in itertools.product(
        (2, 3, 4, 5), (True, False), ("contiguous", "zigzag"), ((0,), DOCUMENTS)
    )
]


@pytest.mark.parametrize("hops_per_stage", [1, 2, 4])
def test_fp64_agrees_with_one_process_and_moves_the_planned_bytes(rings, hops_per_stage):
    for case in COALESCED:
        found = run_dense_on("cpu", case, hops_per_stage=hops_per_stage)
        for name, got, want in zip(("out", "dq", "dk", "dv"), found.tensors, whole_attention(case), strict=True):
            assert relative_error(got, want) <= 1e-12, (case, name)
        check_bytes(case, found.ledgers)


def test_the_bits_are_those_of_a_ring_over_gloo(rings):
    for case in COALESCED:
        through_gloo = run_ring(case, rings.groups(case.cp), hops_per_stage=1)
        coalesced = run_dense_on("cpu", case, hops_per_stage=1)
        assert all(map(torch.equal, coalesced.tensors, through_gloo.tensors)), case
        for ours, theirs in zip(coalesced.ledgers, through_gloo.ledgers, strict=True):
            assert (ours.sent_bytes, ours.received_bytes) == (theirs.sent_bytes, theirs.received_bytes), case


def test_a_stage_is_one_operation_a_direction():
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
def test_a_lost_operation_keeps_what_it_fills_and_lets_go_of_its_works(good_waits):
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


# ------------------------------------------------------------------------------ keys that several ranks of a host read


TWO, PAIRS, MIXED = ("a",) * 4 + ("b",) * 4, ("a", "a", "b", "b", "c", "c"), ("a", "b", "a", "a", "b")


def far_bytes(ledgers: list[HopLedger], direction: str) -> int:
    return sum(size for ledger in ledgers for (way, _), size in ledger.far_sent_bytes.items() if way == direction)


def read_from_afar(case: Case, hosts: Hosts) -> int:
    """Bytes of K and V that ranks read from other hosts in a pass."""
    ranks = range(case.cp)
    far = [(r, (r - s) % case.cp) for r in ranks for s in ranks if hosts[r] != hosts[s]]
    return sum(
        case.schedule.hop_bytes(rank, hop, case.head_dim, 8, "forward", batch=case.batch, kv_heads=case.num_kv_heads)
        for rank, hop in far
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("hosts", "documents", "causal"),
    [
        (TWO, (0,), False),
        (TWO, (0,), True),
        (PAIRS, (0, 37, 50), True),
        (PAIRS, (0, 37, 50), False),
        (MIXED, (0,), True),
    ],
)
def test_a_dense_ring_over_hosts_has_the_same_bits_and_sends_less_between_them(rings, layout, hosts, documents, causal):
    case = Case(len(hosts), 16 * len(hosts), causal, layout, documents)
    groups = rings.groups(case.cp)
    direct = run_ring(case, groups)
    found = run_ring(case, groups, hosts=hosts)
    for one, other in zip(direct.tensors, found.tensors, strict=True):
        assert torch.equal(one, other)
    assert [ledger.received_bytes for ledger in direct.ledgers] == [ledger.received_bytes for ledger in found.ledgers]
    assert far_bytes(direct.ledgers, "forward") == 0, "without hosts nothing is known to be far"
    sent, all_read = far_bytes(found.ledgers, "forward"), read_from_afar(case, hosts)
    forwarded = sum(
        case.schedule.hop_bytes(rank, hop, case.head_dim, 8, "forward", batch=case.batch, kv_heads=case.num_kv_heads)
        for rank in range(case.cp)
        for hop in range(1, case.cp)
        if is_forwarded(case.schedule, rank, hop, hosts)
    )
    assert sent == all_read - forwarded
    if documents == (0,) and hosts != MIXED and not causal:
        ranks_per_host = hosts.count("a")
        assert sent * ranks_per_host == all_read, "each host fetches each key once"
    if not causal or layout != "contiguous":
        assert forwarded
    # dK and dV go back directly, in fp64 as wide as keys here.
    assert far_bytes(found.ledgers, "backward") == sent + all_read


SPARSE = SparseCase((Sinks(5) | Window(70),), (), zigzag(20 * 6, 6), (0,))
DENSE_RULES = SparseCase((Dense(),), (), zigzag(20 * 6, 6), (0, 50))
BLOCKS = BlockCase((BigBird(1, 1, 1),), (), zigzag(128 * 12, 6), block=128)


@pytest.mark.parametrize("wire", ["native", "fp8"])
@pytest.mark.parametrize(
    ("kind", "case"), [("dense", DENSE_RULES), ("sparse", SPARSE), ("sparse", DENSE_RULES), ("blocks", BLOCKS)]
)
def test_so_do_patterns_and_keys_in_8_bits(rings, kind, case, wire):
    """`blocks` without coalesced messages, as `stage_bytes` has one hop in a stage."""
    options: dict[str, Any] = {"kv_wire": wire}
    if kind == "blocks":
        options |= {"kernel": "reference-sparse", "stage_bytes": 1}
    schedule = plan(Pattern(True, case.document_starts), case.layout) if kind == "dense" else None
    direct, found = (
        run_ring(case, rings.groups(6), schedule=schedule, hosts=hosts, **options) for hosts in (None, PAIRS)
    )
    assert all(map(torch.equal, direct.tensors, found.tensors))
    assert [each.received_bytes for each in direct.ledgers] == [each.received_bytes for each in found.ledgers]
    far = {"direct": 0, "now": 0}
    for rank, (before, now) in enumerate(zip(direct.ledgers, found.ledgers, strict=True)):
        for hop in range(1, 6):
            if PAIRS[rank] != PAIRS[(rank + hop) % 6]:
                far["direct"] += before.sent_bytes.get(("forward", hop), 0)
        far["now"] += sum(size for (way, _), size in now.far_sent_bytes.items() if way == "forward")
    assert 0 < far["now"] < far["direct"]


def test_hosts_are_one_for_each_rank():
    with pytest.raises(ValueError, match="one for each of the 1 ranks"):
        RingAttention(Case(1, 16).schedule, 0, None, RingOptions(hosts=("a", "b")))
