"""Fetched keys by stages: bounded buffers, what is posted and computed in which order, in how few messages."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.attention.footprint import footprint
from elastic_ring.attention import merge
from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.kernels.adapters.flex import flex_mask
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.lowering import blocks as lowered
from elastic_ring.attention.lowering import call_plan, device_blocks
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.lowering.device_blocks import on_device
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.sparse_blocks import group_hops, plan_blocks
from elastic_ring.attention.ring import RingAttention
from tests.gpu.gpu_rings import CopyWork, ProcessGroups, ThreadGroup, run_sparse_on
from tests.unit.attention.attention_rings import in_threads
from tests.unit.sparse.block_cases import BlockCase, block_case, check_bytes, check_exact, fetches_little, grouped_case
from tests.unit.sparse.pattern_cases import run_sparse

REFERENCE = named("reference-sparse")
KERNEL = REFERENCE.name
FAMILIES = ("bigbird", "longnet with rows that see nothing", "heads in turn")


def row_bytes(case: BlockCase) -> int:
    return 2 * case.batch * case.head_dim * case.dtype.itemsize


def most_of_a_hop(case: BlockCase) -> int:
    """The most rows that any rank fetches in any hop."""
    ranks = range(case.layout.cp)
    return max(case.schedule.num_head_tokens(rank, hop) for rank in ranks for hop in ranks)


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    ("family", "layout", "halved"),
    [
        (FAMILIES[0], "zigzag", True),
        (FAMILIES[1], "contiguous", True),
        (FAMILIES[1], "zigzag", False),
        (FAMILIES[2], "by residue", True),
        (FAMILIES[2], "zigzag", False),
    ],
)
def test_any_stages_agree_with_the_masked_reference_and_move_the_planned_bytes(
    rings, family, layout, halved, monkeypatch
):
    """Over gloo: each hop for itself, two or so at a time, all at once."""
    if halved:
        monkeypatch.setattr(lowered, "HALVING_S", 0)
    case = block_case(family, 4, layout, batch=1 + halved)
    seen = set()
    for limit_rows in (1, 2 * most_of_a_hop(case), 2**40):
        seen.add(len(group_hops(case.schedule, limit_rows)))
        found, ledgers = run_sparse(
            case, rings.groups(4), kernel=KERNEL, stage_bytes=limit_rows * row_bytes(case), keep_keys=False
        )
        check_exact(case, found)
        check_bytes(case, ledgers, keys_kept=False)
    assert {1, 3} <= seen


@pytest.mark.slow
def test_stages_of_a_longer_ring_and_several_documents_agree(rings):
    case = block_case("heads in turn", 8, "zigzag", documents=(0, 5), num_kv_heads=4)
    found, ledgers = run_sparse(case, rings.groups(8), kernel=KERNEL, stage_bytes=300 * row_bytes(case))
    check_exact(case, found)
    check_bytes(case, ledgers)


def test_what_up_to_three_stages_find_is_merged_in_one_pass_over_memory(rings, monkeypatch):
    """Each row once, with all that its stages found, where those that read fetched keys are neighbours."""
    merged: dict[str, list[tuple[int, int]]] = defaultdict(list)
    plain, at_once = merge.eager_merge_all_, {}

    def watched(out: torch.Tensor, lse: torch.Tensor, parts: Any) -> None:
        merged[threading.current_thread().name].append((out.size(1), len(parts)))
        plain(out, lse, parts)

    monkeypatch.setattr(merge, "eager_merge_all_", watched)
    case = block_case("bigbird", 4, "zigzag")

    def work(cp_rank: int) -> None:
        threading.current_thread().name = f"rank {cp_rank}"
        q, k, v, _ = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        ring = RingAttention(
            case.schedule, cp_rank, rings.groups(4)[cp_rank], RingOptions(kernel=KERNEL, stage_bytes=1, keep_keys=False)
        )
        assert footprint(ring, q, k).num_stages == 3
        at_once[f"rank {cp_rank}"] = ring.call_plan(q, k).sums.at_once
        ring.run_forward(q, k, v, 1.0)

    rings.groups(4)
    in_threads(4, work)  # the kernel is tested at its first call, with merges of its own
    merged.clear()
    in_threads(4, work)
    num_rows = case.layout.num_tokens(0)
    assert set(at_once.values()) == {True, False}
    assert max(parts for rank, found in merged.items() if at_once[rank] for _, parts in found) == 3
    for rank, found in merged.items():
        if at_once[rank]:
            assert sum(rows for rows, _ in found) <= num_rows
        else:
            assert all(parts == 1 for _, parts in found)


def test_stages_are_the_same_on_all_ranks_and_hold_what_fits():
    for family in FAMILIES:
        schedule = block_case(family, 8, "zigzag").schedule
        for limit_rows in (0, 300, 600, 2000, 2**40):
            stages = group_hops(schedule, limit_rows)
            assert [hop for stage in stages for hop in stage] == list(range(1, 8))
            for stage in stages:
                fetched = [sum(schedule.num_head_tokens(rank, hop) for hop in stage) for rank in range(8)]
                served = [
                    sum(schedule.num_head_tokens(schedule.reader(rank, hop), hop) for hop in stage) for rank in range(8)
                ]
                assert len(stage) == 1 or max(fetched + served) <= limit_rows
        assert len(group_hops(schedule, 0)) == 7
        assert len(group_hops(schedule, 2**40)) == 1


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_bounded_by_the_limit_and_the_largest_hop(rings, family):
    case = block_case(family, 8, "zigzag")
    hop = most_of_a_hop(case)
    held = {}
    for limit_rows in (1, 2 * hop, 2**40):

        def work(cp_rank: int, limit_rows: int = limit_rows) -> tuple[int, int]:
            buffers = HopBuffers()
            q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
            ring = RingAttention(
                case.schedule,
                cp_rank,
                rings.groups(8)[cp_rank],
                RingOptions(kernel=KERNEL, buffers=buffers, stage_bytes=limit_rows * row_bytes(case), keep_keys=False),
            )
            for _ in range(2):
                ring(q.requires_grad_(), k, v).backward(dout)
            found = footprint(ring, q, k)
            assert found.kept_bytes == 0
            assert found.buffer_bytes == buffers.num_bytes
            return found.num_stages, buffers.num_bytes

        rings.groups(8)
        found = in_threads(8, work)
        assert len({num_stages for num_stages, _ in found}) == 1
        num_buffers = 4 if found[0][0] == 1 else 9
        held[limit_rows] = max(num_bytes for _, num_bytes in found)
        assert held[limit_rows] <= num_buffers * max(limit_rows, hop) * row_bytes(case)
    assert held[1] < 0.6 * held[2**40]  # nine buffers of a hop, and four of all seven


# ------------------------------------------------------------ kept keys


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_the_same_whether_keys_are_kept_or_fetched_again(rings, family, dtype):
    case = block_case(family, 4, "zigzag", dtype=dtype)
    kept, ledgers = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=True)
    again, others = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    check_bytes(case, ledgers, keys_kept=True)
    check_bytes(case, others, keys_kept=False)


def test_small_fetches_are_kept_and_freed_after_backward(rings):
    case = block_case("window", 4, "contiguous")
    alive: list[Any] = [None] * 4

    def work(cp_rank: int) -> None:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        buffers = HopBuffers()
        ring = RingAttention(
            case.schedule,
            cp_rank,
            rings.groups(4)[cp_rank],
            RingOptions(kernel=KERNEL, buffers=buffers, keep_keys=True),
        )
        run = ring.run_forward

        def watched(*arguments: Any) -> Any:
            result = run(*arguments)
            alive[cp_rank] = weakref.ref(result.keys)
            assert result.keys is not None
            assert result.keys.nbytes == footprint(ring, q, k).kept_bytes
            return result

        ring.run_forward = watched  # type: ignore[method-assign]
        out = ring(q.requires_grad_(), k, v)
        out.backward(dout)
        assert buffers.num_bytes == footprint(ring, q, k).buffer_bytes
        del out

    rings.groups(4)
    in_threads(4, work)
    assert [keys() for keys in alive] == [None] * 4


def test_keys_are_kept_where_no_rank_fetches_more_than_a_quarter_and_in_one_stage(rings):
    """The window reaches over two blocks: two of the four of a rank's slice, or two of eight."""
    far = block_case("bigbird", 4, "zigzag")
    some, few = (replace(block_case("window", 4, "contiguous"), layout=contiguous(128 * n, 4)) for n in (16, 32))
    for case, small in ((far, False), (some, False), (few, True)):
        assert {plan_blocks(case.schedule, rank)[0].small for rank in range(4)} == {small}
        assert fetches_little(case) == small
    x = torch.zeros(1, 512, 4, 8, dtype=torch.float64)
    ring = RingAttention(far.schedule, 0, rings.groups(4)[0], RingOptions(kernel=KERNEL, keep_keys=True, stage_bytes=1))
    with pytest.raises(ValueError, match="keep_keys=True, but what is fetched is 3 stages of at most stage_bytes=1"):
        ring(x, x[:, :, :2], x[:, :, :2])


def test_a_checkpointed_layer_whose_keys_are_kept_exchanges_them_once(rings):
    case = block_case("window", 4, "zigzag")

    def work(cp_rank: int, offload: bool) -> tuple[list[torch.Tensor], Any]:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        ring = RingAttention(
            case.schedule, cp_rank, rings.groups(4)[cp_rank], RingOptions(kernel=KERNEL, keep_keys=True)
        )
        out = checkpoint(ring, *leaves, use_reentrant=False, context_fn=lambda: ring.recomputation(offload=offload))
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves)], ring.ledger  # type: ignore[misc]

    want, _ = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=False)
    for offload in (False, True):
        results = in_threads(4, lambda cp_rank, offload=offload: work(cp_rank, offload))
        found = [case.layout.gather([part[i] for part, _ in results], 1) for i in range(4)]
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        check_bytes(case, [ledger for _, ledger in results], keys_kept=True)


# ------------------------------------------------------------ gradients in place, and plans


@pytest.mark.slow
def test_kernels_that_can_write_gradients_where_they_are_sent_from():
    case = block_case("heads in turn", 4, "zigzag", num_kv_heads=4, batch=2)
    written: list[bool] = []

    def backward(*arguments: Any, **places: Any) -> Any:
        written.append({"dk", "dv"} <= set(places))
        return REFERENCE.backward(*arguments, **places)

    results = []
    for writes in (True, False):
        kernel = replace(REFERENCE, backward=backward, writes_gradients=writes)
        written.clear()
        found, _ = run_sparse_on("cpu", case, kernel=kernel)
        assert set(written) == {writes}
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_run_of_equal_sequences_plans_once_and_one_of_packed_documents_does_not_fill_memory(monkeypatch):
    planned: list[Any] = []

    def plan(*arguments: Any) -> Any:
        planned.append(arguments)
        return plan_blocks(*arguments)

    monkeypatch.setattr(device_blocks, "plan_blocks", plan)
    monkeypatch.setattr(call_plan, "MOST_PLANS", 5)
    case, owner = block_case("bigbird", 1, "contiguous"), PlanCache()
    x = case.tensors()

    def call(owner: PlanCache, of: BlockCase) -> None:
        plans = owner.of(of.document_starts, lambda: of.schedule)
        RingAttention(plans.schedule, 0, None, RingOptions(kernel=KERNEL), plans=plans)(*x[:3])

    for _ in range(3):
        call(owner, case)
    assert len(planned) == 1
    for name, value in (("NUM_PLANS", 2), ("KEPT_BYTES", 3 * owner.num_bytes)):
        monkeypatch.setattr(call_plan, name, value)
    for start in range(1, 6):
        call(owner, block_case("bigbird", 1, "contiguous", documents=(0, start)))
        call(owner, case)  # what comes back stays
        assert len(owner) <= 4
    assert len(planned) == 6
    for limit, starts, num_kept in ((0, (1,), 2), (2**40, (2, 3, 4, 5), 5)):
        monkeypatch.setattr(call_plan, "KEPT_BYTES", limit)
        for start in starts:
            call(owner, block_case("bigbird", 1, "contiguous", documents=(0, start)))
        assert len(owner) == num_kept
    plans = owner.of((0, 5 * 128), lambda: case.schedule)
    kept = [weakref.ref(each) for each in (plans, *plans.tables.values())]
    assert len(kept) == 2
    del owner, plans
    gc.collect()
    assert not any(each() is not None for each in kept)  # all of it is the owner's


def test_what_a_plan_weighs_counts_shared_memory_once_and_what_kernels_make_of_it():
    blocks = on_device(block_case("bigbird", 4, "zigzag").schedule, 0, torch.device("cpu"))
    before = blocks.num_bytes
    flex_mask(blocks.own_parts[0])
    made = blocks.num_bytes
    assert made > before
    flex_mask(blocks.own_parts[1])
    assert blocks.num_bytes == made
    assert not any(isinstance(value, np.ndarray) for value in vars(blocks.plan).values())


# --------------------------------------------------------------------------------------------------------- their order


@dataclass
class ToldGroup(ThreadGroup):
    """Notes in its thread's story what is posted together, of which kind, and breaks where it is told to."""

    stories: dict[int, list[str]] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    thread: int = 0
    num_open: int = 0
    breaks: bool = False

    def _start_coalescing(self) -> None:
        super()._start_coalescing()
        self.thread, self.kinds, self.num_open = threading.get_ident(), [], self.num_open + 1

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        if self.breaks:
            raise RuntimeError("a peer is gone")
        super().send(tensors, dst, tag)
        self.kinds.append(tag % 2)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        super().recv(tensors, src, tag)
        self.kinds.append(tag % 2)

    def _end_coalescing(self) -> CopyWork:
        self.num_open -= 1
        (kind,) = set(self.kinds)
        self.stories.setdefault(self.thread, []).append("post partials" if kind else "post keys")
        return super()._end_coalescing()


def told(
    monkeypatch: pytest.MonkeyPatch, case: BlockCase, stories: dict[int, list[str]] | None = None, **options: Any
) -> tuple[list[str], list[ToldGroup]]:
    """What each rank's kernels and exchange did, in order, and the groups."""
    links, stories = ProcessGroups(case.layout.cp), {} if stories is None else stories
    groups = [ToldGroup(links, rank, stories=stories) for rank in range(case.layout.cp)]
    links.groups = lambda: groups  # type: ignore[method-assign, assignment, return-value]

    def note(what: str, tables: Any) -> None:
        which = "own" if tables.all_keys else "fetched"
        stories.setdefault(threading.get_ident(), []).append(f"{what} {which}")

    def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
        note("forward", tables)
        return REFERENCE.forward(q, k, v, tables, scale)

    def backward(*arguments: Any, **places: Any) -> Any:
        note("backward", places["tables"])
        return REFERENCE.backward(*arguments, **places)

    kernel = replace(REFERENCE, forward=forward, backward=backward)
    found, _ = run_sparse_on("cpu", case, links, kernel=kernel, **options)
    check_exact(case, found)
    return [", ".join(stories[group.thread]) for group in groups], groups


FORWARD = "post keys, post keys, forward own, forward fetched, post keys, forward fetched, forward fetched"
BACKWARD = (
    "post keys, post keys, backward own, backward fetched, post keys, post partials, backward fetched, post partials, "
    "backward fetched, post partials"
)


def test_two_stages_are_posted_before_any_kernel_and_the_next_in_place_of_what_was_read(monkeypatch):
    (story, *_), _ = told(monkeypatch, block_case("bigbird", 4, "zigzag"), stage_bytes=1)
    assert story == f"{FORWARD}, {BACKWARD}"  # of a rank that fetches in every hop


def test_what_came_back_is_added_last_and_own_heads_are_left_to_hide_its_way(monkeypatch):
    """All of it in one pass over memory. Keys that others wait for have been posted before any partials are."""
    stories = halved(monkeypatch, block_case("bigbird", 4, "contiguous"))
    assert stories[0] == (  # fetches nothing
        "post keys, post keys, forward own, post keys, post keys, post keys, backward own, post keys, post partials, "
        "post partials, post partials, backward own, add 3"
    )
    assert stories[3] == f"{FORWARD}, {BACKWARD}, backward own"  # serves nobody


def test_with_many_stages_who_fetches_nothing_more_computes_what_is_left_before_it_waits(monkeypatch):
    stories = halved(monkeypatch, block_case("bigbird", 8, "contiguous"))
    backward = "post keys, post keys, backward own" + 3 * ", post keys, post partials" + ", backward own"
    added = 2 * ", add 1, post keys, post partials" + 2 * ", add 1, post partials" + ", add 3"
    assert stories[0].endswith(backward + added)


def halved(monkeypatch: pytest.MonkeyPatch, case: BlockCase) -> list[str]:
    """As `told`, a hop a stage, where running own keys in two halves pays; and of how many hops what came is added."""
    monkeypatch.setattr(lowered, "LINK_BYTES_PER_S", 1.0)
    monkeypatch.setattr(lowered, "SPARSE_BACKWARD_FLOPS", 1.0)
    add, notes = lowered.add_placed_, dict[int, int]()

    def note(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
        thread = threading.get_ident()
        notes[thread] = notes.get(thread, 0) + 1
        if notes[thread] % 2:  # dK, then dV
            stories.setdefault(thread, []).append(f"add {len(places)}")
        add(total, inbox, places)

    stories: dict[int, list[str]] = {}
    monkeypatch.setattr(lowered, "add_placed_", note)
    return told(monkeypatch, case, stories, stage_bytes=1)[0]


@pytest.mark.slow
def test_half_of_the_own_heads_run_behind_the_last_partials_where_that_pays(monkeypatch):
    case = block_case("bigbird", 4, "zigzag")
    story = "post keys, forward own, forward fetched, post keys, backward own, backward fetched, post partials"
    assert told(monkeypatch, case)[0] == [story] * 4
    monkeypatch.setattr(lowered, "LINK_BYTES_PER_S", 1.0)  # but there is little to compute meanwhile
    assert told(monkeypatch, case)[0] == [story] * 4
    monkeypatch.setattr(lowered, "SPARSE_BACKWARD_FLOPS", 1.0)
    assert told(monkeypatch, case)[0] == [f"{story}, backward own"] * 4


@pytest.mark.slow
def test_kept_keys_are_run_first_and_own_ones_in_one_call_behind_the_partials(monkeypatch):
    monkeypatch.setattr(lowered, "HALVING_S", 0)
    case = block_case("window", 4, "zigzag")
    want = "post keys, forward own, forward fetched, backward fetched, post partials, backward own"
    assert told(monkeypatch, case, keep_keys=True)[0] == [want] * 4


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    "case",
    [
        block_case("heads in turn", 4, "zigzag", num_kv_heads=4, batch=2),
        grouped_case("longnet and a window, 8 heads", 4, "zigzag", batch=2),
        grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag", batch=2),
    ],
    ids=["two groups", "eight groups", "groups of two sizes"],
)
def test_a_hop_is_one_message_a_direction_whatever_its_heads_and_sequences(case, monkeypatch):
    all_sizes = {len(group.kv_heads) for group in case.schedule.groups}
    assert len(case.schedule.groups) > len(all_sizes)
    for stage_bytes, by_size in ((1, False), (2**40, True)):  # where hops lie together, one for each size of groups
        _, groups = told(monkeypatch, case, stage_bytes=stage_bytes)
        num_sent, num_messages = 0, 0
        for rank, group in enumerate(groups):
            num_sent += sum(what == "send" for what, _, _ in group.log)
            assert all(size % (2 * 2 * case.head_dim) == 0 for _, _, (size,) in group.log), "whole rows"
            for hop in case.schedule.hops[rank][1:]:
                pairs = zip(case.schedule.groups, hop.fetch, strict=True)
                sizes = {len(group.kv_heads) for group, ranges in pairs if ranges}
                num_messages += len(sizes) if by_size else bool(sizes)
        assert num_sent == 3 * num_messages  # keys twice, and partials
        assert 0 < num_messages <= 12 * (len(all_sizes) if by_size else 1)


def test_what_was_begun_together_is_ended_even_if_posting_fails():
    case = block_case("bigbird", 2, "zigzag")
    group = ToldGroup(ProcessGroups(2), 0, breaks=True)
    ring = RingAttention(case.schedule, 0, group, RingOptions(kernel=REFERENCE.name, coalesced=True))
    q, k, v, _ = (case.layout.scatter(tensor, 0, 1) for tensor in case.tensors())
    with group.links.baton, pytest.raises(RuntimeError, match="a peer is gone"):
        ring(q, k, v)
    assert group.num_open == 0
    assert ring.options.abandoned
