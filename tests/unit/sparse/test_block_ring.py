"""A ring over whole blocks, as GPUs run it, here with the spelled-out kernel: values, gradients, bytes and order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.kernels import block_tables
from elastic_ring.attention.kernels.adapters.reference import seen_by, seen_by_key
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import covering, named, select
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.layouts.rows import OneGroup, SeveralGroups
from elastic_ring.attention.lowering import blocks as lowered
from elastic_ring.attention.lowering.device_blocks import on_device
from elastic_ring.attention.merge import add_placed_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.rules import Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.schedule import chunks_of
from elastic_ring.attention.plan.sparse_blocks import plan_blocks
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from experiments.block_function import BlockFunction
from experiments.block_sparse import tables_for
from tests.gpu.gpu_rings import ProcessGroups, run_sparse_on
from tests.unit.attention.attention_rings import ThreadRings, in_threads, relative_error
from tests.unit.sparse.block_cases import (
    AHEAD,
    CUT,
    CUT_AHEAD,
    FAMILIES,
    NEAR,
    BlockCase,
    block_case,
    check_bytes,
    cut_case,
    masked_reference,
)
from tests.unit.sparse.pattern_cases import run_sparse

REFERENCE = named("reference-sparse")
KERNEL = REFERENCE.name
LAYOUTS = ("contiguous", "zigzag", "striped", "by residue")


@pytest.fixture(params=[False, True], ids=["whole", "halves"])
def halves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own gradients in one part, and in two around the fetched ones."""
    if request.param:
        monkeypatch.setattr(lowered, "HALVING_S", 0)


def check(case: BlockCase, found: list[torch.Tensor]) -> None:
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, masked_reference(case), strict=True):
        assert relative_error(got, want) <= 1e-12, (case, name)


def run_and_check(case: BlockCase, rings: ThreadRings, **options: Any) -> tuple[list[torch.Tensor], Any]:
    found, ledgers = run_sparse(case, rings.groups(case.layout.cp), kernel=KERNEL, **options)
    check(case, found)
    check_bytes(case, ledgers)
    return found, ledgers


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("documents", [(0,), (0, 1, 4)])
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_agrees_with_the_masked_reference_and_moves_the_planned_bytes(rings, family, cp, documents, monkeypatch):
    """Documents are attended each for itself. Layouts take turns, and so do own gradients in one part and in two around
    the fetched ones."""
    number = cp + list(FAMILIES).index(family)
    if number % 8 >= 4:
        monkeypatch.setattr(lowered, "HALVING_S", 0)
    run_and_check(block_case(family, cp, LAYOUTS[number % 4], documents, num_kv_heads=4 if cp == 3 else 2), rings)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_blocks_that_look_ahead_agree_with_the_masked_reference(rings, cp):
    """Rules, layouts and packed documents take turns."""
    documents = (0, 1, 4) if cp % 3 else (0,)
    run_and_check(block_case(list(AHEAD)[cp % 4], cp, LAYOUTS[cp % 3], documents, causal=False), rings)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("name", CUT | CUT_AHEAD)
def test_whatever_cuts_blocks_results_are_exact_and_whole_blocks_move(rings, name, cp, monkeypatch):
    """Layouts take turns, and so do own gradients in one part and in two."""
    if cp == 2:
        monkeypatch.setattr(lowered, "HALVING_S", 0)
    layout = ("contiguous", "zigzag", "striped")[(cp + len(name)) % 3]
    case = cut_case(name, cp, layout, num_kv_heads=4 if cp == 3 else 2, batch=1 + cp % 2)
    found, ledgers = run_sparse(case, rings.groups(cp), kernel=KERNEL)
    check(case, found)
    whole = padded(case.schedule)
    assert whole.in_part
    for cp_rank, ledger in enumerate(ledgers):
        assert whole.layout.num_tokens(cp_rank) == 128 * len(
            chunks_of(case.layout, cp_rank, case.schedule.sparse.documents(1111), 128)
        )
        for hop in range(cp):
            want = whole.hop_bytes(cp_rank, hop, case.head_dim, 8, "forward", batch=case.batch)
            assert ledger.received_bytes.get(("forward", hop), 0) == want


_EIGHT_BY_EIGHT = np.tril(np.random.default_rng(0).random((8, 8)) < 0.5)
ODD: dict[str, tuple[BlockCase, dict[str, Any]]] = {
    "a block a rank": (BlockCase((Window(100),), (), contiguous(200, 2), block=128), {}),
    "a rank without tokens": (BlockCase((Window(100),), (), Layout("uneven", 200, (((0, 200),), ())), block=128), {}),
    "two sequences of a pass": (BlockCase((Window(200),), (), zigzag(300, 2).repeated(2), (0, 300), block=128), {}),
    "a rule that reads a table": (
        BlockCase((BlockFunction(lambda i, j: _EIGHT_BY_EIGHT[i, j]),), (), contiguous(1000, 3), block=128),
        {},
    ),
    "units of 64": (BlockCase((Dilated((512,), (3,), 1, 64),), (), contiguous(1000, 2), (0, 300), block=128), {}),
    "keys that are kept": (cut_case("windows and dense heads", 3, "zigzag", num_kv_heads=4), {"keep_keys": True}),
    "two hosts, a stage a hop": (
        cut_case("heads in turn", 4, "contiguous"),
        {"hosts": ("a", "a", "b", "b"), "stage_bytes": 1},
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_pieces_of_cut_blocks_are_exact_too(rings, name):
    case, options = ODD[name]
    found, _ = run_sparse(case, rings.groups(case.layout.cp), kernel=KERNEL, **options)
    check(case, found)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_every_layout_serves_every_grouping_of_heads(rings, layout, num_kv_heads, halves):
    for family in ("heads in turn", "longnet with rows that see nothing"):
        run_and_check(block_case(family, 2, layout, num_kv_heads=num_kv_heads, batch=2), rings)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("family", ["bigbird", "longnet with rows that see nothing", "heads in turn"])
def test_posted_as_one_operation_a_pass_and_direction_the_bits_are_the_same(rings, family, monkeypatch):
    monkeypatch.setattr(lowered, "HALVING_S", 0)
    case = block_case(family, 4, "zigzag")
    want, _ = run_sparse(case, rings.groups(4), kernel=KERNEL)
    links = ProcessGroups(4)
    groups = links.groups()
    links.groups = lambda: groups  # type: ignore[method-assign]
    found, ledgers = run_sparse_on("cpu", case, links, kernel=KERNEL)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    check_bytes(case, ledgers)
    assert [group.num_operations for group in groups] == [3] * 4  # keys twice, partials once


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_equal_calls_give_equal_bits(rings, layout):
    case = block_case("longnet with rows that see nothing", 3, layout, dtype=torch.float32)
    first, _ = run_sparse(case, rings.groups(3), kernel=KERNEL)
    again, _ = run_sparse(case, rings.groups(3, fresh=True), kernel=KERNEL)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_where_nothing_is_fetched_nothing_is_sent(rings):
    _, ledgers = run_and_check(block_case("segments, nothing beyond", 4, "contiguous"), rings)
    assert not any(ledger.sent_bytes or ledger.received_bytes for ledger in ledgers)


def test_queries_that_see_nothing_give_zeros_and_no_gradient(rings):
    case = block_case("one dilation, most rows see nothing", 4, "zigzag")
    found, _ = run_sparse(case, rings.groups(4), kernel=KERNEL)
    empty = ~case.mask()[0].any(-1)
    assert empty.sum() == 12 * 128
    assert not found[0][:, empty].any()
    assert not found[1][:, empty].any()
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.slow
def test_partials_may_travel_in_the_kernels_type_and_do_where_it_rounds(rings):
    case = block_case("bigbird", 3, "zigzag", dtype=torch.bfloat16)
    want, rounding = masked_reference(case), replace(REFERENCE, keeps_type=True)
    for kernel, partials, itemsize in ((KERNEL, None, None), (KERNEL, torch.bfloat16, 2), (rounding, None, 2)):
        options: dict[str, Any] = {} if kernel is rounding else {"partials": partials}
        found, ledgers = run_sparse(case, rings.groups(3), kernel=kernel, **options)
        check_bytes(case, ledgers, itemsize)
        for got, exact in zip(found, want, strict=True):
            assert relative_error(got, exact) <= 4e-3


def test_calls_share_buffers_and_make_none_after_the_first(rings):
    case = block_case("bigbird", 2, "zigzag")

    def work(cp_rank: int) -> tuple[int, int]:
        buffers, sizes = HopBuffers(), []
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        options = RingOptions(kernel=KERNEL, buffers=buffers)
        ring = RingAttention(case.schedule, cp_rank, rings.groups(2)[cp_rank], options)
        for _ in range(2):
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            ring(*leaves).backward(dout)
            sizes.append((buffers.num_bytes, len(buffers._storages)))
        assert sizes[0] == sizes[1]
        return sizes[0]

    rings.groups(2)
    stage = plan_blocks(case.schedule, 0)[0].stages[0]
    rows = 4 * (stage.num_fetched_rows + stage.num_served_rows) * case.head_dim * 8
    assert in_threads(2, work)[0][0] == rows


def test_the_observer_hears_of_every_hop_before_its_keys_are_computed_on(rings):
    case = block_case("bigbird", 3, "zigzag")
    heard: list[list[Any]] = [[] for _ in range(3)]

    def work(cp_rank: int) -> None:
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        options = RingOptions(kernel=KERNEL, observer=lambda *event: heard[cp_rank].append(event))
        ring = RingAttention(case.schedule, cp_rank, rings.groups(3)[cp_rank], options)
        ring(q.requires_grad_(), k, v).backward(dout)

    rings.groups(3)
    in_threads(3, work)
    want = [(direction, 0, hop) for direction in ("forward", "backward") for hop in range(3)]
    assert heard == [want] * 3


def test_a_peer_that_is_lost_raises_on_the_others_and_leaves_no_work_behind(rings):
    case = block_case("bigbird", 3, "zigzag")
    groups = rings.groups(3, fresh=True)
    kept: list[RingAttention] = []

    def work(cp_rank: int) -> None:
        if cp_rank == 2:
            groups[2] = None  # its sockets close
            return
        ring = RingAttention(case.schedule, cp_rank, groups[cp_rank], RingOptions(kernel=KERNEL))
        kept.append(ring)
        q, k, v, _ = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        with pytest.raises(RuntimeError):
            ring(q, k, v)
        assert ring.options.abandoned
        groups[cp_rank] = ring.group = None

    in_threads(3, work)
    assert len(kept) == 2


# ------------------------------------------------------------ what is refused


def test_what_the_kernels_cannot_run_is_refused_by_name_with_a_way_out():
    refused: list[tuple[Any, Layout, tuple[int, ...], str]] = [
        (
            Window(200),
            contiguous(512, 2),
            (0,),
            r"window:200: keeps blocks of 128 tokens in part.*bigbird:3,0,0, .*window",
        ),
        (NEAR, contiguous(512, 2), (0, 128, 200), "begins at position 200, inside a block of 128 .*align_tokens=128"),
        (NEAR, zigzag(512, 4), (0,), "layout zigzag of 512 tokens over cp=4 cuts at .* multiple of 1024 tokens"),
    ]
    for rule, layout, starts, message in refused:
        with pytest.raises(ValueError, match=message):
            plan_blocks(plan_sparse(SparsePattern((rule,), 128, starts), layout, 2, 2), 0)
    case, only_whole = cut_case("a window of tokens", 1, "zigzag"), replace(REFERENCE, covers=("tables",))
    with pytest.raises(ValueError, match="covers tables, not masked_tables"):
        run_sparse(case, [None], kernel=only_whole)


def test_a_kernel_that_fails_with_masks_serves_whole_blocks_and_another_the_rest(caplog):
    def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
        if tables.masks is not None:
            raise ValueError("no unique leading dimension")
        return REFERENCE.forward(q, k, v, tables, scale)

    second = replace(REFERENCE, name="second", only_by_name=False)
    kernels = (replace(second, name="first", forward=forward), second)
    assert select("cpu", torch.float64, 16, True, cover="tables", kernels=kernels).name == "first"
    assert not caplog.records
    assert select("cpu", torch.float64, 16, True, cover="masked_tables", kernels=kernels).name == "second"
    assert "first fails its self-test, passed over: ValueError: no unique leading dimension" in caplog.text


def test_ways_to_keep_a_block_in_part_are_bounded(monkeypatch):
    monkeypatch.setattr(block_tables, "MOST_MASKS", 3)
    whole = padded(cut_case("dilated tokens", 1, "contiguous").schedule)
    with pytest.raises(ValueError, match=r"in more than 3 different ways; choose .* align_tokens=128"):
        plan_blocks(whole, 0)


def test_kernels_are_refused_where_they_cannot_serve():
    for device, pin, message in (
        ("cpu", "flex-sparse", "'flex-sparse' runs on cuda, not on cpu"),
        ("cuda", "flash-attn-4-sparse", "'flash-attn-4-sparse' has no deterministic sparse backward"),
        ("cuda", "flash", "choose one of flash-attn-4-sparse, flex-sparse, reference-sparse"),
    ):
        with pytest.raises(ValueError, match=message):
            select(device, torch.bfloat16, 64, True, pin, cover="tables")
    assert [kernel.name for kernel in covering("tables")] == ["flash-attn-4-sparse", "flex-sparse"]


# ------------------------------------------------------------ the proof and the tables


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_spelled_out_kernel_passes_the_self_test(dtype):
    assert self_test(REFERENCE, dtype=dtype, head_dim=16) is None


@pytest.mark.slow
def test_a_pass_of_a_sparse_kernel_is_cached_on_disk_and_a_failure_is_not(tmp_path):
    def kernel(name: str, factor: float) -> tuple[Kernel, list[int]]:
        calls: list[int] = []

        def forward(*arguments: Any, **options: Any) -> Any:
            calls.append(len(calls))
            out, lse = REFERENCE.forward(*arguments, **options)
            return out * factor, lse

        return replace(REFERENCE, name=name, forward=forward), calls

    for name, factor, runs_again in (("right", 1.0, False), ("wrong", 1.1, True)):
        first, calls = kernel(name, factor)
        found = self_test(first, dtype=torch.float64, head_dim=16, cache_dir=tmp_path)
        assert (found is None) == (factor == 1.0)
        assert calls
        later, calls = kernel(name, factor)  # as in another process: no cache in memory knows it
        assert self_test(later, dtype=torch.float64, head_dim=16, cache_dir=tmp_path) == found
        assert bool(calls) == runs_again
    assert len(list(tmp_path.glob("kernel-*.json"))) == 1


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("planted", ["forward", "backward", "empty rows", "unseen keys", "not where it was told to"])
def test_a_kernel_that_is_wrong_between_stretches_of_keys_is_found(planted):
    def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
        out, lse = REFERENCE.forward(q, k, v, tables, scale)
        if planted == "empty rows":
            return out, lse.nan_to_num(neginf=-30.0)
        return (out * 1.1, lse) if planted == "forward" and k.size(1) != q.size(1) else (out, lse)

    def backward(*arguments: Any, **places: Any) -> Any:
        unplaced = {name: value for name, value in places.items() if name not in ("dk", "dv")}
        dq, dk, dv = REFERENCE.backward(*arguments, **(unplaced if planted.startswith("not") else places))
        if planted == "unseen keys":
            dv[:, :128] += 1
        return (dq, dk.mul_(1.1), dv) if planted == "backward" and dk.size(1) != dq.size(1) else (dq, dk, dv)

    wrong = replace(REFERENCE, name=planted, forward=forward, backward=backward)
    what = {"forward": "out", "empty rows": "lse", "unseen keys": "dv"}.get(planted, "dk")
    assert (self_test(wrong, dtype=torch.float64, head_dim=16) or "").startswith(what)


@pytest.mark.thinned
@pytest.mark.parametrize("documents", [(0,), (0, 3, 10)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_mean_the_pattern_in_both_directions(family, documents):
    case = block_case(family, 4, "zigzag", documents)
    pattern = SparsePattern(case.rules, 128, case.document_starts)
    whole = tables_for(pattern, case.layout.seq_len, 4, torch.device("cpu"))
    mask = case.mask()
    assert torch.equal(seen_by(whole).expand_as(mask), mask)
    assert torch.equal(seen_by_key(whole).expand_as(mask), mask)
    for cp_rank in range(4):
        blocks = on_device(case.schedule, cp_rank, torch.device("cpu"))
        rows = case.layout.positions(cp_rank)
        order = list(blocks.plan.head_order)
        own = mask[order][:, rows][:, :, rows]
        assert torch.equal(seen_by(blocks.own).expand_as(own), own)
        assert torch.equal(seen_by_key(blocks.own).expand_as(own), own)
        for tables in (call.tables for stage in blocks.stages for call in stage.calls):
            assert torch.equal(seen_by(tables), seen_by_key(tables))
            assert seen_by(tables).any(1).any(0).all()  # no key was fetched in vain


def test_shares_are_added_where_they_belong_in_hop_order():
    total, inbox = torch.zeros(1, 4, 2), torch.arange(1.0, 7.0).view(1, 3, 2)
    places = torch.tensor([[0, -1, 1, -1], [-1, -1, 2, -1]], dtype=torch.int32)
    add_placed_(total, inbox, places)
    assert total[0].tolist() == [[1, 2], [0, 0], [8, 10], [0, 0]]


def test_only_queries_that_see_a_fetched_key_meet_them():
    near, far = block_case("window", 4, "contiguous"), block_case("local and dense heads", 4, "zigzag")
    cpu = torch.device("cpu")
    of_near = [plan_blocks(near.schedule, cp_rank)[1].stages[0].readers[0].tolist() for cp_rank in range(4)]
    assert of_near == [[], [0, 1], [0, 1], [0, 1]]  # a window of three blocks reaches back over two
    (call,) = on_device(near.schedule, 1, cpu).stages[0].calls
    assert isinstance(call.queries, OneGroup)
    assert call.queries.tokens == slice(0, 256)
    several = [call.queries for rank in range(4) for call in on_device(far.schedule, rank, cpu).stages[0].calls]
    assert all(isinstance(readers, SeveralGroups) for readers in several)
    for case in (near, far):
        for cp_rank in range(4):
            (tables,) = plan_blocks(case.schedule, cp_rank)[1].stages
            for kept, readers in zip(tables.kept, tables.readers, strict=True):
                assert kept.shape[1] == len(readers)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_lie_by_rows_as_the_kernels_read_them(family, layout):
    case, cpu = block_case(family, 4, layout), torch.device("cpu")
    of_ranks = [on_device(case.schedule, cp_rank, cpu) for cp_rank in range(4)]
    found = [tables_for(SparsePattern(FAMILIES[family]), 2048, 4, cpu)]
    for blocks in of_ranks:
        found += [blocks.own, *blocks.own_parts]
        found += [call.tables for stage in blocks.stages for call in stage.calls]
    for tables in found:
        for lists in (tables.own, tables.own_by_key, tables.full, tables.full_by_key):
            assert lists.counts.stride(-1) == 1
            assert lists.indices.stride(-1) == 1
