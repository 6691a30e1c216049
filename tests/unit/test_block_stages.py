"""Fetched keys by stages: bounded buffers, the next stage behind the kernels of the one before, few messages."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elastic_ring.attention import block_pass, device_blocks, sparse_ring
from elastic_ring.attention.block_kernels import REFERENCE
from elastic_ring.attention.device_blocks import on_device
from elastic_ring.attention.exchange import HopBuffers
from elastic_ring.attention.kernels.block_sparse import flex_mask
from elastic_ring.attention.layout import contiguous
from elastic_ring.attention.sparse_blocks import group_hops, plan_blocks
from elastic_ring.attention.sparse_ring import SparseRingAttention
from tests.gpu.gpu_rings import CopyWork, ThreadGroup, Wires, run_sparse_on
from tests.unit.attention_rings import ThreadRings, in_threads, one_thread, relative_error
from tests.unit.block_cases import BlockCase, block_case, check_bytes, fetches_little, grouped_case, masked_reference
from tests.unit.pattern_cases import run_sparse

KERNEL = REFERENCE.name
FAMILIES = ("bigbird", "longnet with rows that see nothing", "heads in turn")


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


def row_bytes(case: BlockCase) -> int:
    return 2 * case.batch * case.head_dim * case.dtype.itemsize


def most_of_a_hop(case: BlockCase) -> int:
    """The most rows that any rank fetches in any hop."""
    ranks = range(case.layout.cp)
    return max(case.schedule.num_head_tokens(rank, hop) for rank in ranks for hop in ranks)


@lru_cache(maxsize=8)
def reference(case: BlockCase) -> list[torch.Tensor]:
    return masked_reference(case)


def check(case: BlockCase, found: list[torch.Tensor]) -> None:
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, reference(case), strict=True):
        assert relative_error(got, want) <= 1e-12, (case, name)


@pytest.mark.parametrize(
    ("family", "layout", "halved"),
    [
        (FAMILIES[0], "zigzag", True), (FAMILIES[1], "contiguous", True), (FAMILIES[1], "zigzag", False),
        (FAMILIES[2], "by residue", True), (FAMILIES[2], "zigzag", False),
    ],
)  # fmt: skip
def test_any_stages_agree_with_the_masked_reference_and_move_the_planned_bytes(
    rings: ThreadRings, family: str, layout: str, halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo: each hop for itself, two or so at a time, all at once."""
    if halved:
        monkeypatch.setattr(block_pass, "HALVING_S", 0)
    case = block_case(family, 4, layout, batch=1 + halved)
    seen = set()
    for limit_rows in (1, 2 * most_of_a_hop(case), 2**40):
        seen.add(len(group_hops(case.schedule, limit_rows)))
        found, ledgers = run_sparse(
            case, rings.groups(4), kernel=KERNEL, stage_bytes=limit_rows * row_bytes(case), keep_keys=False
        )
        check(case, found)
        check_bytes(case, ledgers, keys_kept=False)
    assert {1, 3} <= seen


def test_stages_of_a_longer_ring_and_several_documents_agree(rings: ThreadRings) -> None:
    case = block_case("heads in turn", 8, "zigzag", documents=(0, 5), num_kv_heads=4)
    found, ledgers = run_sparse(case, rings.groups(8), kernel=KERNEL, stage_bytes=300 * row_bytes(case))
    check(case, found)
    check_bytes(case, ledgers)


def test_stages_are_the_same_on_all_ranks_and_hold_what_fits() -> None:
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


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_bounded_by_the_limit_and_the_largest_hop(rings: ThreadRings, family: str) -> None:
    case = block_case(family, 8, "zigzag")
    hop = most_of_a_hop(case)
    held = {}
    for limit_rows in (1, 2 * hop, 2**40):

        def work(cp_rank: int, limit_rows: int = limit_rows) -> tuple[int, int]:
            buffers = HopBuffers()
            q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
            ring = SparseRingAttention(
                case.schedule, cp_rank, rings.groups(8)[cp_rank], kernel=KERNEL, buffers=buffers,
                stage_bytes=limit_rows * row_bytes(case), keep_keys=False,
            )  # fmt: skip
            for _ in range(2):
                ring(q.requires_grad_(), k, v).backward(dout)
            footprint = ring.footprint(q)
            assert footprint.kept_bytes == 0
            assert footprint.buffer_bytes == buffers.num_bytes
            return footprint.num_stages, buffers.num_bytes

        rings.groups(8)
        found = in_threads(8, work)
        assert len({num_stages for num_stages, _ in found}) == 1
        num_buffers = 4 if found[0][0] == 1 else 6
        held[limit_rows] = max(num_bytes for _, num_bytes in found)
        assert held[limit_rows] <= num_buffers * max(limit_rows, hop) * row_bytes(case)
    assert held[1] < held[2**40] / 2


# ------------------------------------------------------------ order


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


def told(monkeypatch: pytest.MonkeyPatch, case: BlockCase, **options: Any) -> tuple[list[list[str]], list[ToldGroup]]:
    """What each rank's kernels and exchange did, in order, and the groups."""
    wires, stories = Wires(case.layout.cp), {}
    groups = [ToldGroup(wires, rank, stories=stories) for rank in range(case.layout.cp)]
    wires.groups = lambda: groups  # type: ignore[method-assign, assignment, return-value]

    def note(what: str, tables: Any) -> None:
        which = "own" if tables.all_keys else "fetched"
        stories.setdefault(threading.get_ident(), []).append(f"{what} {which}")

    def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
        note("forward", tables)
        return REFERENCE.forward(q, k, v, tables, scale)

    def backward(*arguments: Any, **places: Any) -> Any:
        note("backward", arguments[6])
        return REFERENCE.backward(*arguments, **places)

    kernel = replace(REFERENCE, forward=forward, backward=backward)
    monkeypatch.setattr(sparse_ring, "select_sparse", lambda *_: kernel)
    found, _ = run_sparse_on("cpu", case, wires, kernel=KERNEL, **options)
    check(case, found)
    return [stories[group.thread] for group in groups], groups


FORWARD = [
    "post keys", "post keys", "forward own", "forward fetched", "post keys", "forward fetched", "forward fetched",
]  # fmt: skip


def test_two_stages_are_posted_before_any_kernel_and_the_next_in_place_of_what_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (story, *_), _ = told(monkeypatch, block_case("bigbird", 4, "zigzag"), stage_bytes=1)
    backward = [
        "post keys", "post keys", "backward own", "backward fetched", "post partials", "post keys", "backward fetched",
        "post partials", "backward fetched", "post partials",
    ]  # fmt: skip
    assert story == FORWARD + backward  # of a rank that fetches in every hop


def test_half_of_the_own_heads_run_behind_the_last_partials_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = block_case("bigbird", 4, "zigzag")
    one = ["post keys", "forward own", "forward fetched", "post keys", "backward own", "backward fetched"]
    assert told(monkeypatch, case)[0] == [[*one, "post partials"]] * 4
    monkeypatch.setattr(block_pass, "LINK_BYTES_PER_S", 1.0)  # but there is little to compute meanwhile
    assert told(monkeypatch, case)[0] == [[*one, "post partials"]] * 4
    monkeypatch.setattr(block_pass, "KERNEL_FLOPS", 1.0)
    assert told(monkeypatch, case)[0] == [[*one, "post partials", "backward own"]] * 4


def test_kept_keys_are_run_first_and_own_ones_in_one_call_behind_the_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pass, "HALVING_S", 0)
    case = block_case("window", 4, "zigzag")
    want = ["post keys", "forward own", "forward fetched", "backward fetched", "post partials", "backward own"]
    assert told(monkeypatch, case, keep_keys=True)[0] == [want] * 4


@pytest.mark.parametrize(
    "case",
    [
        block_case("heads in turn", 4, "zigzag", num_kv_heads=4, batch=2),
        grouped_case("longnet and a window, 8 heads", 4, "zigzag", batch=2),
        grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag", batch=2),
    ],
    ids=["two groups", "eight groups", "groups of two sizes"],
)
def test_a_hop_is_one_message_a_direction_whatever_its_heads_and_sequences(
    case: BlockCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_sizes = {len(group.kv_heads) for group in case.schedule.groups}
    assert len(case.schedule.groups) > len(all_sizes)
    for stage_bytes, by_size in ((1, False), (2**40, True)):  # where hops lie together, one for each size of groups
        _, groups = told(monkeypatch, case, stage_bytes=stage_bytes)
        num_sent, num_messages = 0, 0
        for rank, group in enumerate(groups):
            num_sent += sum(what == "send" for what, _, _ in group.log)
            assert all(len(shape) == 4 and shape[1:3] == (2, 2) for _, _, shape in group.log)
            for hop in case.schedule.hops[rank][1:]:
                pairs = zip(case.schedule.groups, hop.fetch, strict=True)
                sizes = {len(group.kv_heads) for group, ranges in pairs if ranges}
                num_messages += len(sizes) if by_size else bool(sizes)
        assert num_sent == 3 * num_messages  # keys twice, and partials
        assert 0 < num_messages <= 12 * (len(all_sizes) if by_size else 1)


def test_what_was_begun_together_is_ended_even_if_posting_fails() -> None:
    case = block_case("bigbird", 2, "zigzag")
    group = ToldGroup(Wires(2), 0, breaks=True)
    ring = SparseRingAttention(case.schedule, 0, group, kernel=KERNEL, coalesced=True)
    q, k, v, _ = (case.layout.scatter(tensor, 0, 1) for tensor in case.tensors())
    with group.wires.baton, pytest.raises(RuntimeError, match="a peer is gone"):
        ring(q, k, v)
    assert group.num_open == 0
    assert ring._abandoned


# ------------------------------------------------------------ kept keys


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_the_same_whether_keys_are_kept_or_fetched_again(
    rings: ThreadRings, family: str, dtype: torch.dtype
) -> None:
    case = block_case(family, 4, "zigzag", dtype=dtype)
    kept, ledgers = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=True)
    again, others = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    check_bytes(case, ledgers, keys_kept=True)
    check_bytes(case, others, keys_kept=False)


def test_small_fetches_are_kept_and_freed_after_backward(rings: ThreadRings) -> None:
    case = block_case("window", 4, "contiguous")
    alive: list[Any] = [None] * 4

    def work(cp_rank: int) -> None:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        buffers = HopBuffers()
        ring = SparseRingAttention(
            case.schedule, cp_rank, rings.groups(4)[cp_rank], kernel=KERNEL, buffers=buffers, keep_keys=True
        )
        run = ring._run_forward

        def watched(*arguments: Any) -> Any:
            result = run(*arguments)
            alive[cp_rank] = weakref.ref(result.keys)
            assert result.keys is not None
            assert result.keys.nbytes == ring.footprint(q).kept_bytes
            return result

        ring._run_forward = watched  # type: ignore[method-assign]
        out = ring(q.requires_grad_(), k, v)
        out.backward(dout)
        assert buffers.num_bytes == ring.footprint(q).buffer_bytes
        del out

    rings.groups(4)
    in_threads(4, work)
    assert [keys() for keys in alive] == [None] * 4


def test_keys_are_kept_where_no_rank_fetches_more_than_a_quarter_and_in_one_stage(rings: ThreadRings) -> None:
    """The window reaches over two blocks: two of the four of a rank's slice, or two of eight."""
    far = block_case("bigbird", 4, "zigzag")
    some, few = (replace(block_case("window", 4, "contiguous"), layout=contiguous(128 * n, 4)) for n in (16, 32))
    for case, small in ((far, False), (some, False), (few, True)):
        assert {plan_blocks(case.schedule, rank)[0].small for rank in range(4)} == {small}
        assert fetches_little(case) == small
    x = torch.zeros(1, 512, 4, 8, dtype=torch.float64)
    ring = SparseRingAttention(far.schedule, 0, rings.groups(4)[0], kernel=KERNEL, keep_keys=True, stage_bytes=1)
    with pytest.raises(ValueError, match="keep_keys=True, but what is fetched is 3 stages of at most stage_bytes=1"):
        ring(x, x[:, :, :2], x[:, :, :2])


def test_a_checkpointed_layer_whose_keys_are_kept_exchanges_them_once(rings: ThreadRings) -> None:
    case = block_case("window", 4, "zigzag")

    def work(cp_rank: int, offload: bool) -> tuple[list[torch.Tensor], Any]:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        ring = SparseRingAttention(case.schedule, cp_rank, rings.groups(4)[cp_rank], kernel=KERNEL, keep_keys=True)
        out = checkpoint(
            ring, *leaves, use_reentrant=False, context_fn=lambda: ring.recomputation(offload=offload)
        )
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves)], ring.ledger  # type: ignore[misc]

    want, _ = run_sparse(case, rings.groups(4), kernel=KERNEL, keep_keys=False)
    for offload in (False, True):
        results = in_threads(4, lambda cp_rank, offload=offload: work(cp_rank, offload))
        found = [case.layout.gather([part[i] for part, _ in results], 1) for i in range(4)]
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        check_bytes(case, [ledger for _, ledger in results], keys_kept=True)


# ------------------------------------------------------------ gradients in place, and plans


def test_kernels_that_can_write_gradients_where_they_are_sent_from(monkeypatch: pytest.MonkeyPatch) -> None:
    case = block_case("heads in turn", 4, "zigzag", num_kv_heads=4, batch=2)
    written: list[bool] = []

    def backward(*arguments: Any, **places: Any) -> Any:
        written.append(set(places) == {"dk", "dv"})
        return REFERENCE.backward(*arguments, **places)

    results = []
    for writes in (True, False):
        kernel = replace(REFERENCE, backward=backward, writes_gradients=writes)
        monkeypatch.setattr(sparse_ring, "select_sparse", lambda *_, kernel=kernel: kernel)
        written.clear()
        found, _ = run_sparse_on("cpu", case, kernel=KERNEL)
        assert set(written) == {writes}
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_run_of_equal_sequences_plans_once_and_one_of_packed_documents_does_not_fill_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[Any] = []

    def plan(*arguments: Any) -> Any:
        planned.append(arguments)
        return plan_blocks(*arguments)

    monkeypatch.setattr(device_blocks, "plan_blocks", plan)
    on_device.cache_clear()
    case = block_case("bigbird", 1, "contiguous")
    x = case.tensors()
    for _ in range(3):
        SparseRingAttention(case.schedule, 0, None, kernel=KERNEL)(*x[:3])
    assert len(planned) == 1
    one = on_device.num_bytes
    monkeypatch.setattr(on_device, "_limit_bytes", 3 * one)
    for start in range(1, 6):
        other = block_case("bigbird", 1, "contiguous", documents=(0, start))
        SparseRingAttention(other.schedule, 0, None, kernel=KERNEL)(*x[:3])
        SparseRingAttention(case.schedule, 0, None, kernel=KERNEL)(*x[:3])  # what comes back stays
        assert on_device.num_bytes <= 3 * one
    assert len(planned) == 6
    assert on_device.num_kept < 6
    monkeypatch.setattr(on_device, "_limit_bytes", 0)
    held = on_device(case.schedule, 0, torch.device("cpu"))
    on_device(block_case("window", 1, "contiguous").schedule, 0, torch.device("cpu"))
    assert on_device.num_kept == 1
    assert on_device(case.schedule, 0, torch.device("cpu")) is held  # a ring still computes by it


def test_what_a_plan_weighs_counts_shared_memory_once_and_what_kernels_make_of_it() -> None:
    blocks = on_device(block_case("bigbird", 4, "zigzag").schedule, 0, torch.device("cpu"))
    before = blocks.num_bytes
    flex_mask(blocks.own_parts[0])
    made = blocks.num_bytes
    assert made > before
    flex_mask(blocks.own_parts[1])
    assert blocks.num_bytes == made
    assert not any(isinstance(value, np.ndarray) for value in vars(blocks.plan).values())
