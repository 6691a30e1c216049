"""Keys that several ranks of a host read cross to it once: the same bits and bytes at every rank, and fewer between
hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense, Sinks, Window
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.traffic import Hosts, is_forwarded
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import Case, ThreadRings, run_ring
from tests.unit.sparse.block_cases import BlockCase
from tests.unit.sparse.pattern_cases import SparseCase

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
def test_a_dense_ring_over_hosts_has_the_same_bits_and_sends_less_between_them(
    rings: ThreadRings, layout: str, hosts: Hosts, documents: tuple[int, ...], causal: bool
) -> None:
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
    ("kind", "case"),
    [
        ("dense", DENSE_RULES),
        ("sparse", SPARSE),
        ("sparse", DENSE_RULES),
        ("blocks", BLOCKS),
    ],
)
def test_so_do_patterns_and_keys_in_8_bits(rings: ThreadRings, kind: str, case: SparseCase, wire: str) -> None:
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


def test_hosts_are_one_for_each_rank() -> None:
    with pytest.raises(ValueError, match="one for each of the 1 ranks"):
        RingAttention(Case(1, 16).schedule, 0, None, RingOptions(hosts=("a", "b")))
