"""Hops that share a round of kernels: the same pairs, the same messages in the same order, the same result."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.merge import eager_add_
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.rank_plan import choose_hops_per_stage, num_row_visits, rank_plan, stages
from elastic_ring.attention.plan.schedule import plan
from tests.unit.attention.attention_rings import Case, check_close, run_ring, whole_attention
from tests.unit.attention.test_attention_bytes import check_bytes

CASES = [
    Case(cp=2, seq_len=32),
    Case(cp=4, seq_len=61),
    Case(cp=5, seq_len=100, num_kv_heads=1, document_starts=(0, 7, 50)),
    Case(cp=4, seq_len=64, layout_name="contiguous", batch=1),
    Case(cp=3, seq_len=45, causal=False),
    Case(cp=8, seq_len=90, document_starts=(0, 1, 31, 64)),
]
NAMES = [f"cp{case.cp}-{case.layout_name}-{case.causal}" for case in CASES]


def pairs_of_hops(case: Case, cp_rank: int, hops: tuple[int, ...]) -> Counter[Any]:
    """How often each (query row, place in the stage's buffer) occurs in the tiles of the hops themselves."""
    seen: Counter[Any] = Counter()
    offset = 0
    for hop in (case.schedule.hops[cp_rank][index] for index in hops):
        for tile in hop.tiles:
            start, stop = hop.in_buffer(tile.k)
            seen.update(itertools.product(range(*tile.q), range(offset + start, offset + stop)))
        offset += hop.num_fetched_tokens()
    return seen


@pytest.mark.parametrize("hops_per_stage", [1, 2, 10])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_stage_computes_exactly_the_pairs_of_its_hops(case, hops_per_stage):
    for cp_rank in range(case.cp):
        own, *others = stages(case.schedule, cp_rank, hops_per_stage)
        assert own.by_rows == own.by_keys == case.schedule.hops[cp_rank][0].tiles
        assert [hop for stage in others for hop in stage.hops] == list(range(1, case.cp))
        for stage in others:
            want = pairs_of_hops(case, cp_rank, stage.hops)
            for tiles in (stage.by_rows, stage.by_keys):
                found: Counter[Any] = Counter()
                for tile in tiles:
                    assert not tile.causal
                    found.update(itertools.product(range(*tile.q), range(*tile.k)))
                assert found == want


def test_schedules_of_packed_documents_are_let_go():
    """Each sequence of a run brings another; what was worked out of one that is long gone must not stay."""
    layout, firsts = make_layout("zigzag", 4096, 2), []
    for number in range(400):
        schedule = plan(Pattern(True, (0, 10 + number, 2000 + number)), layout)
        found = rank_plan(schedule, 0, choose_hops_per_stage(schedule, 64, 1 << 20))
        assert found.row_visits[0] >= 1
        if number < 8:
            firsts.append(weakref.ref(schedule))
        del schedule, found
    gc.collect()
    assert [first() for first in firsts] == [None] * 8


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_in_a_gathered_zigzag_each_row_and_each_key_lies_in_one_tile(cp):
    case = Case(cp=cp, seq_len=32 * cp)
    for cp_rank in range(cp):
        own, gathered = stages(case.schedule, cp_rank, cp)
        assert own.keys_once
        assert gathered.keys_once
        assert len(gathered.by_rows) == len(gathered.by_keys) == (1 if cp_rank in (0, cp - 1) else 2)
        assert num_row_visits((own, gathered), backward=False) == 2
        assert num_row_visits((own, gathered), backward=True) == (2 if cp_rank in (0, cp - 1) else 3)


def test_as_many_hops_are_gathered_as_fit_on_every_rank():
    schedule = Case(cp=4, seq_len=64).schedule
    # Chunks of 8 tokens; rank 0 fetches a whole slice of 16 in every hop.
    assert [choose_hops_per_stage(schedule, 2, limit) for limit in (96, 95, 64, 63, 0)] == [3, 2, 2, 1, 1]
    assert choose_hops_per_stage(Case(cp=1, seq_len=8).schedule, 2, 0) == 1


class Recorder:
    """A real group that notes its messages in the order in which they were posted."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.sent: dict[int, list[Any]] = defaultdict(list)
        self.received: dict[int, list[Any]] = defaultdict(list)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.sent[dst].append((tag, tuple(tensors[0].shape)))
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        self.received[src].append((tag, tuple(tensors[0].shape)))
        return self._group.recv(tensors, src, tag)


@pytest.mark.parametrize("hops_per_stage", [1, 2, 10])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_gathering_changes_neither_the_result_nor_what_moves_nor_its_order(rings, case, hops_per_stage):
    """NCCL matches messages by their order alone: what a rank sends is what its peer expects, one by one."""
    groups = [Recorder(group) for group in rings.groups(case.cp)]
    outcome = run_ring(case, groups, hops_per_stage=hops_per_stage)
    check_close(outcome.tensors, whole_attention(case))
    for a, b in itertools.permutations(range(case.cp), 2):
        assert groups[a].sent[b] == groups[b].received[a]
    check_bytes(case, outcome.ledgers)


def test_a_stage_is_the_same_whoever_plans_it():
    case = CASES[1]
    again = plan(Pattern(case.causal, case.document_starts), case.layout)
    assert stages(again, 2, 2) == stages(case.schedule, 2, 2)


def test_a_short_running_sum_is_rounded_once_for_all_its_parts():
    torch.manual_seed(0)
    total, *parts = (torch.randn(1, 50, 2, 8).bfloat16() for _ in range(4))
    want = sum((part.double() for part in parts), total.double()).float().bfloat16()
    eager_add_(total, parts)
    assert torch.equal(total, want)


def test_importing_attention_loads_no_kernel_library():
    code = (
        "import sys, elastic_ring.attention.ring, elastic_ring.attention.kernels.registry\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'triton', 'flash_attn', 'cutlass', 'cuda'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
