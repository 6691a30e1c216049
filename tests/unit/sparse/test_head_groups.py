"""Head groups of equally many heads run in one kernel call a stage: the same values and bytes, fewer calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.kernels.adapters.flex import LEAST, padded_blocks
from elastic_ring.attention.kernels.adapters.reference import seen_by, seen_by_key
from elastic_ring.attention.kernels.block_tables import tables_apart
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.layouts.rows import OneGroup, SeveralGroups, Span
from elastic_ring.attention.lowering import blocks as lowered
from elastic_ring.attention.lowering.device_blocks import on_device, rows_of
from elastic_ring.attention.merge import Accumulator, GradientSum, accumulate_dtype
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import Hierarchical
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import ThreadRings, in_threads, relative_error
from tests.unit.sparse.block_cases import (
    FAMILIES,
    GROUPED,
    NEAR,
    BlockCase,
    block_case,
    check_bytes,
    grouped_case,
    masked_reference,
)
from tests.unit.sparse.test_flex_masks import compiled_shape

CPU = torch.device("cpu")
LAYOUTS = ("contiguous", "zigzag", "striped", "by residue")
ONE_STAGE, EVERY_HOP = 2**40, 1

REFERENCE = named("reference-sparse")


@dataclass
class Counted:
    """A rank's kernel, which counts its calls on fetched keys and what queries they take, by direction and the last hop
    that was heard of before."""

    writes: bool = True
    hop: tuple[str, int] = ("", 0)
    calls: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, direction: str, call_index: int, hop: int) -> None:
        self.hop = (direction, hop)

    def note(self, q: torch.Tensor, tables: Any) -> None:
        if not tables.all_keys:
            self.calls[self.hop].append(q.numel())

    def kernel(self) -> Kernel:
        def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
            self.note(q, tables)
            return REFERENCE.forward(q, k, v, tables, scale)

        def backward(dout: Any, q: Any, *rest: Any, **places: Any) -> Any:
            if not places["tables"].all_keys:  # where partials are of the inputs' type
                assert ("dk" in places) == (self.writes and q.dtype == accumulate_dtype(q.dtype))
            self.note(q, places["tables"])
            return REFERENCE.backward(dout, q, *rest, **places)

        return replace(REFERENCE, forward=forward, backward=backward, writes_gradients=self.writes)


def run(
    case: BlockCase, rings: ThreadRings, *, writes: bool = True, **options: Any
) -> tuple[list[torch.Tensor], list[HopLedger], list[Counted]]:
    groups = rings.groups(case.layout.cp)

    def work(cp_rank: int) -> tuple[list[torch.Tensor], HopLedger, Counted]:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        counted = Counted(writes)
        ring = RingAttention(
            case.schedule,
            cp_rank,
            groups[cp_rank],
            RingOptions(kernel=counted.kernel(), observer=counted.observe, **options),
        )
        out = ring(*leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], ring.ledger, counted

    results = in_threads(case.layout.cp, work)
    found = [case.layout.gather([tensors[i] for tensors, _, _ in results], 1) for i in range(4)]
    return found, [ledger for _, ledger, _ in results], [counted for _, _, counted in results]


@lru_cache(maxsize=2)
def reference(case: BlockCase) -> list[torch.Tensor]:
    return masked_reference(case)


def check(case: BlockCase, found: list[torch.Tensor], allowed: float = 1e-12) -> None:
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, reference(case), strict=True):
        assert relative_error(got, want) <= allowed, (case, name)


def sizes_fetched(case: BlockCase, cp_rank: int, hops: tuple[int, ...]) -> set[int]:
    """How many K/V heads the groups have of which a rank fetches anything in these hops."""
    schedule = case.schedule
    return {
        len(group.kv_heads)
        for number, group in enumerate(schedule.groups)
        if any(schedule.hops[cp_rank][hop].fetch[number] for hop in hops)
    }


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("stage_bytes", [ONE_STAGE, EVERY_HOP], ids=["one stage", "a stage a hop"])
@pytest.mark.parametrize("name", GROUPED)
def test_a_stage_is_one_call_for_each_size_of_its_head_groups(rings, name, stage_bytes, monkeypatch):
    """And the values are those of the masked fp64 softmax, the bytes those of the plan."""
    number = list(GROUPED).index(name)
    if (number + stage_bytes) % 2:
        monkeypatch.setattr(lowered, "HALVING_S", 0)
    case = grouped_case(name, 4, LAYOUTS[number % 4], batch=1 + (number == 0))
    assert len(case.schedule.groups) > 1
    found, ledgers, counted = run(case, rings, stage_bytes=stage_bytes, keep_keys=False)
    check(case, found)
    check_bytes(case, ledgers, keys_kept=False)
    most = 0
    for cp_rank, kernel in enumerate(counted):
        own = case.batch * case.layout.num_tokens(cp_rank) * case.num_heads * case.head_dim
        stages = [(1, 2, 3)] if stage_bytes == ONE_STAGE else [(1,), (2,), (3,)]
        for direction in ("forward", "backward"):
            for hops in stages:
                taken = kernel.calls[direction, hops[-1]]
                assert len(taken) == len(sizes_fetched(case, cp_rank, hops)), (cp_rank, direction, hops)
                assert sum(taken) <= own
                most = max(most, len(taken))
    sizes = {len(group.kv_heads) for group in case.schedule.groups}
    assert most == len(sizes)
    assert len(sizes) == 1 + ("groups" in name)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("name", ["longnet and a window, 8 heads", "two rules for a key", "groups of 2, 1, 1, 1 and 2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_calls_give_equal_bits_whether_keys_are_kept_and_whoever_writes_gradients(rings, name, dtype):
    case = grouped_case(name, 3, "contiguous", dtype=dtype)
    first, _, _ = run(case, rings, keep_keys=False)
    check(case, first, {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype])
    for options in ({"keep_keys": False}, {"keep_keys": True}, {"keep_keys": True, "writes": False}):
        again, _, _ = run(case, rings, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [2, 8])
def test_rings_of_other_sizes_and_several_documents_agree(rings, cp):
    case = grouped_case("groups of 1, 2, 1 and 2", cp, "zigzag", document_starts=(0, 384))
    for stage_bytes in (ONE_STAGE, EVERY_HOP):
        found, ledgers, _ = run(case, rings, stage_bytes=stage_bytes)
        check(case, found)
        check_bytes(case, ledgers, keys_kept=None if stage_bytes == ONE_STAGE else False)


# ------------------------------------------------------------ plans


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_a_size_are_neighbours_and_all_heads_are_there_once(name):
    case = grouped_case(name, 4, "zigzag")
    for cp_rank in range(4):
        blocks = on_device(case.schedule, cp_rank, CPU)
        plan = blocks.plan
        assert sorted(plan.head_order) == list(range(case.num_heads))
        assert sorted(plan.kv_head_order) == list(range(case.num_kv_heads))
        (stage,) = blocks.stages
        sizes = [region.num_kv_heads for region in stage.plan.regions]
        assert sizes == sorted(sizes)
        for region in stage.plan.regions:
            heads = plan.kv_head_order[slice(*region.kv_heads)]
            assert heads in [group.kv_heads for group in case.schedule.groups]
        ends = [0, *(call.keys.rows[1] for call in stage.calls)]
        assert [call.keys.rows[0] for call in stage.calls] == ends[:-1]
        assert ends[-1] == stage.plan.num_fetched_rows
        assert [call.keys.num_kv_heads for call in stage.calls] == sorted(
            {call.keys.num_kv_heads for call in stage.calls}
        )


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("name", GROUPED)
def test_a_call_sees_what_the_rules_say_and_no_other_group(name):
    """Each query and each key of a call is told by a mark of its own: which token and head it is."""
    case = grouped_case(name, 4, "zigzag")
    mask, sharing = case.mask(), case.num_heads // case.num_kv_heads
    for cp_rank in range(4):
        blocks, own = on_device(case.schedule, cp_rank, CPU), case.layout.positions(cp_rank)
        order = torch.tensor(blocks.plan.head_order)
        marks = own[:, None] * case.num_heads + order  # of queries, in the inner order of heads
        (stage,) = blocks.stages
        met = torch.zeros_like(mask)
        keys = _marks_of_keys(case, cp_rank, blocks)
        for call in stage.calls:
            seen, (of_keys, _) = seen_by(call.tables), call.keys.of(keys)
            assert torch.equal(seen, seen_by_key(call.tables))
            queries = call.queries.take(marks[None])[0]
            assert seen.shape[1:] == (len(queries), of_keys.size(1))
            for head in range(queries.size(1)):
                which = seen[head % len(seen)].nonzero()
                query, key = queries[which[:, 0], head], of_keys[0, which[:, 1], head // sharing, 0]
                of_query, of_key = query % case.num_heads, key % case.num_kv_heads
                assert torch.equal(of_query // sharing, of_key)
                met[of_query, query // case.num_heads, key // case.num_kv_heads] = True
        want = mask.clone()
        want[:, :, own] = False
        others = torch.ones(len(mask[0]), dtype=torch.bool)
        others[own] = False
        want[:, others] = False
        assert torch.equal(met, want)


def _marks_of_keys(case: BlockCase, cp_rank: int, blocks: Any) -> torch.Tensor:
    """A buffer of fetched keys (rows, 1, 2, 1) as the owners fill it: token * K/V heads + head."""
    (stage,) = blocks.stages
    keys = torch.full((stage.plan.num_fetched_rows, 1, 2, 1), -1)
    for leg in stage.plan.fetched:
        there = on_device(case.schedule, leg.peer, CPU)
        served = there.stages[0]
        (sent,) = [each for each in served.plan.served if (each.hop, each.peer) == (leg.hop, cp_rank)]
        for mine, theirs in zip(leg.pieces, sent.pieces, strict=True):
            assert mine.size == theirs.size
            rows = served.served_rows[theirs.source : theirs.source + theirs.size].long()
            local, inner = rows // case.num_kv_heads, rows % case.num_kv_heads
            head = torch.tensor(there.plan.kv_head_order)[inner]
            position = case.layout.positions(leg.peer)[local]
            marks = (position * case.num_kv_heads + head)[:, None, None, None]
            keys[mine.target : mine.target + mine.size] = marks
    assert (keys >= 0).all()
    return keys


def test_one_group_is_a_slice_where_its_readers_lie_together_and_nothing_is_laid_by_rows():
    for layout, kind in (("contiguous", slice), ("zigzag", torch.Tensor)):
        case = replace(block_case("window", 4, layout), rules=(NEAR,))
        blocks = on_device(case.schedule, 1, CPU)
        (call,) = blocks.stages[0].calls
        assert isinstance(call.queries, OneGroup)
        assert isinstance(call.queries.tokens, kind)
        assert not blocks.by_rows
    assert on_device(grouped_case("longnet, 4 heads", 4, "contiguous").schedule, 3, CPU).by_rows


def test_tables_of_groups_are_theirs_wherever_their_keys_lie():
    generator = np.random.default_rng(0)
    kept = [generator.random(shape) < 0.4 for shape in ((2, 3, 5), (1, 4, 2), (2, 1, 6))]
    keys = [np.array([0, 1, 4, 7, 8]), np.array([2, 9]), np.array([3, 5, 6, 10, 11, 12])]
    tables = tables_apart(kept, keys, CPU, all_rows=False)
    assert (tables.num_heads, tables.num_q_blocks, tables.num_k_blocks) == (2, 8, 13)
    want = torch.zeros(2, 8, 13, dtype=torch.bool)
    for rows, columns, part in ((range(3), keys[0], 0), (range(3, 7), keys[1], 1), (range(7, 8), keys[2], 2)):
        for (row, column), found in np.ndenumerate(kept[part][0]):
            want[0, rows[row], columns[column]] = bool(found)
            want[1, rows[row], columns[column]] = bool(kept[part][-1, row, column])
    of_tokens = want.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(seen_by(tables), of_tokens)
    assert torch.equal(seen_by_key(tables), of_tokens)
    assert not tables.own.counts.any()
    for lists in (tables.full, tables.full_by_key):
        for head, row in np.ndindex(2, lists.counts.size(2)):
            listed = lists.indices[0, head, row, : lists.counts[0, head, row]].tolist()
            assert listed == sorted(listed)
    shared = tables_apart([part[:1] for part in kept], keys, CPU)
    assert shared.num_heads == 1
    assert torch.equal(seen_by(shared), seen_by(tables)[:1])
    assert compiled_shape(tables, 2, 1)[:5] == (2, 1, 2, LEAST, LEAST)


def test_groups_whose_queries_are_all_of_a_rank_are_as_many_in_every_call():
    """What other numbers come with every plan is rounded up; the rest is compiled as it is."""
    case = grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag")
    for cp_rank in range(4):
        for call in on_device(case.schedule, cp_rank, CPU).stages[0].calls:
            num_blocks = call.tables.num_q_blocks
            assert call.tables.all_rows == (num_blocks == 2 * 4)
            assert padded_blocks(call.tables)[0] == LEAST
    rules = (*FAMILIES["segments, nothing beyond"], Dense(), Hierarchical(2))
    few = replace(case, rules=rules, num_heads=3, num_kv_heads=3, layout=contiguous(128 * 16, 4))
    (call,) = on_device(few.schedule, 3, CPU).stages[0].calls
    assert call.tables.num_q_blocks == 2 * 4  # all of two groups; the third, which fetches nothing here, may elsewhere
    assert not call.tables.all_rows


# ------------------------------------------------------------ picking out and putting back


@pytest.mark.parametrize("first", [(0, 2, 4), (1, 3, 5)])
def test_what_is_taken_is_each_groups_and_goes_back_where_it_was(first):
    """Heads of groups in pairs, from the first on or behind a single one; also of tensors that do not lie by rows."""
    blocks = [np.array([0, 2]), np.array([1]), np.array([0, 1, 2])]
    heads = [(head, head + 2) for head in first]
    num_heads = 6 + first[0]
    readers = rows_of(blocks, heads, num_heads, CPU)
    assert isinstance(readers, SeveralGroups)
    assert readers.unit == 2 - first[0]
    assert len(set(readers.index.tolist())) == readers.index.numel()
    for more in ((), (3,)):
        x = torch.randn(2, 3 * 128, num_heads, *more, generator=torch.Generator().manual_seed(0))
        pieces = [
            x[:, block * 128 : block * 128 + 128, start:stop]
            for some, (start, stop) in zip(blocks, heads, strict=True)
            for block in some
        ]
        want = torch.cat(pieces, 1)
        taken = readers.take(x)
        assert torch.equal(taken, want)
        assert taken.numel() <= x.numel()
        by_heads = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(readers.take(by_heads), want)
        changed = x.clone()
        readers.put_back(changed, taken * 2)
        assert torch.equal(readers.take(changed), want * 2)
        elsewhere = torch.ones_like(x, dtype=torch.bool)
        readers.put_back(elsewhere, torch.zeros_like(taken, dtype=torch.bool))
        assert torch.equal(changed[elsewhere], x[elsewhere])
        with pytest.raises(RuntimeError):  # not silently to a copy
            readers.put_back(by_heads, taken)


def test_sums_lie_by_rows_where_they_are_told_to():
    q = torch.randn(2, 128, 4, 8)
    by_heads = q.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.randn(2, 4, 128).transpose(1, 2)
    total = Accumulator(q, by_rows=True)
    total.add(Span(0, 128), by_heads, lse)
    empty = Accumulator(q, by_rows=True)
    grown = GradientSum(q, by_rows=True)
    grown.add(Span(0, 128), by_heads)
    for x in (total.out, total.lse, empty.out, empty.lse, grown.total, GradientSum(q, by_rows=True).total):
        assert x.is_contiguous()
    assert torch.equal(total.out, q)
    assert torch.equal(total.lse, lse)
