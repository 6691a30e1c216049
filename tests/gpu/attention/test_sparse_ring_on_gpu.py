"""The promises of `tests/unit/sparse/test_block_ring.py`, kept by the GPU's kernels: values, gradients, bytes, bits."""

from __future__ import annotations

import pytest
import torch

from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import covering
from elastic_ring.attention.kernels.verify import warm_up_kernels
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.lowering import blocks as lowered
from elastic_ring.attention.merge import eager_add_placed_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from tests.gpu.gpu_rings import ProcessGroups, run_sparse_on
from tests.unit.attention.attention_rings import relative_error
from tests.unit.sparse.block_cases import (
    CUT,
    CUT_AHEAD,
    FAMILIES,
    GROUPED,
    BlockCase,
    block_case,
    check_bytes,
    cut_case,
    grouped_case,
    masked_reference,
)

KERNELS = covering("tables")
ALLOWED = 6e-3
LAYOUTS = ("contiguous", "zigzag", "striped", "by residue")


def usable(kernel: Kernel, head_dim: int = 128) -> None:
    reason = kernel.refusal("cuda", torch.bfloat16, head_dim, False)
    if reason is not None and "not installed" in reason:
        pytest.skip(f"{kernel.name} {reason}")


def agrees(case: BlockCase, found: list[torch.Tensor]) -> None:
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, masked_reference(case, "cuda"), strict=True):
        assert torch.isfinite(got).all(), name
        assert relative_error(got, want.cpu()) < ALLOWED, name


@pytest.mark.parametrize(("head_dim", "group"), [(128, 1), (128, 4), (64, 1)])
def test_the_first_kernel_passes_its_proof_for_other_groups_of_heads(head_dim, group):
    usable(KERNELS[0], head_dim)
    assert warm_up_kernels(KERNELS[0], "cuda", torch.bfloat16, head_dim, group) is None


@pytest.mark.parametrize(
    ("kernel", "family", "cp"),
    [(KERNELS[0], family, cp) for family in FAMILIES for cp in (1, 2, 4)]
    # Each length is a compilation of this one.
    + [(KERNELS[1], family, 4) for family in ("bigbird", "heads in turn", "one dilation, most rows see nothing")],
    ids=lambda value: value.name if isinstance(value, Kernel) else str(value),
)
def test_a_ring_agrees_with_the_masked_fp64_softmax_and_moves_the_planned_bytes(kernel, family, cp, monkeypatch):
    usable(kernel)
    number = cp + list(FAMILIES).index(family)
    if number % 2:
        monkeypatch.setattr(lowered, "HALVING_S", 0)
    layout = LAYOUTS[number % 4] if kernel is KERNELS[0] else "zigzag"
    num_kv_heads = 4 if number % 3 == 2 else 2
    case = block_case(family, cp, layout, head_dim=128, dtype=torch.bfloat16, num_kv_heads=num_kv_heads)
    found, ledgers = run_sparse_on("cuda", case, kernel=kernel.name, deterministic=False)
    agrees(case, found)
    check_bytes(case, ledgers, 2)


def test_batches_and_partials_in_the_kernels_type_agree():
    kernel = KERNELS[0]
    usable(kernel)
    case = block_case("bigbird", 4, "zigzag", head_dim=128, dtype=torch.bfloat16, batch=2)
    found, ledgers = run_sparse_on("cuda", case, kernel=kernel.name, deterministic=False, partials=torch.bfloat16)
    agrees(case, found)
    check_bytes(case, ledgers, 2)


@pytest.mark.parametrize("family", ["bigbird", "heads in turn"])
def test_the_deterministic_ring_repeats_every_bit_in_one_operation_a_pass_and_direction(family):
    case = block_case(family, 4, "zigzag", head_dim=128, dtype=torch.bfloat16)
    links = ProcessGroups(4)
    groups = links.groups()
    links.groups = lambda: groups  # type: ignore[method-assign]
    first, _ = run_sparse_on("cuda", case, links, deterministic=True)
    assert [group.num_operations for group in groups] == [3] * 4
    for _ in range(2):
        again, _ = run_sparse_on("cuda", case, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("family", ["bigbird", "heads in turn", "longnet with rows that see nothing"])
@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_stages_and_kept_keys_agree_with_the_masked_fp64_softmax(kernel, family):
    """Every hop for itself; all at once and kept; all at once and fetched again, which where the kernel is
    deterministic gives the same bits."""
    chosen = next(each for each in KERNELS if each.name == kernel)
    usable(chosen)
    case = block_case(family, 4, "zigzag", head_dim=128, dtype=torch.bfloat16, batch=2)
    runs = []
    for options in ({"stage_bytes": 1}, {"keep_keys": True}, {"keep_keys": False}):
        found, ledgers = run_sparse_on("cuda", case, kernel=kernel, deterministic=chosen.deterministic, **options)
        agrees(case, found)
        check_bytes(case, ledgers, 2, keys_kept=bool(options.get("keep_keys")))
        runs.append(found)
    if chosen.deterministic:
        assert all(torch.equal(a, b) for a, b in zip(runs[1], runs[2], strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("group", [1, 4])
def test_kernels_pass_their_proof_with_masks_of_blocks(kernel, group):
    usable(kernel)
    assert warm_up_kernels(kernel, "cuda", torch.bfloat16, 128, group) is None


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", CUT | CUT_AHEAD)
def test_whatever_cuts_blocks_the_result_is_that_of_the_masked_fp64_softmax(kernel, name):
    usable(kernel)
    cp = 1 + len(name) % 3 if kernel is KERNELS[0] else 2
    layout = ("contiguous", "zigzag", "striped")[len(name) % 3]
    case = cut_case(name, cp, layout, head_dim=128, dtype=torch.bfloat16, batch=2 - cp % 2)
    found, _ = run_sparse_on("cuda", case, kernel=kernel.name, deterministic=kernel.deterministic)
    agrees(case, found)
    if kernel.deterministic:
        again, _ = run_sparse_on("cuda", case, kernel=kernel.name, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("stage_bytes", [1, 2**40], ids=["a stage a hop", "one stage"])
@pytest.mark.parametrize("name", GROUPED)
def test_several_head_groups_agree_with_the_masked_fp64_softmax(name, stage_bytes):
    usable(KERNELS[0])
    layout = LAYOUTS[list(GROUPED).index(name) % 4]
    case = grouped_case(name, 4, layout, head_dim=128, dtype=torch.bfloat16)
    options = {"kernel": KERNELS[0].name, "deterministic": False, "stage_bytes": stage_bytes}
    found, ledgers = run_sparse_on("cuda", case, **options)
    agrees(case, found)
    check_bytes(case, ledgers, 2, keys_kept=None if stage_bytes > 1 else False)


def test_several_head_groups_repeat_every_bit_where_the_kernel_does():
    case = grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag", head_dim=128, dtype=torch.bfloat16)
    first, _ = run_sparse_on("cuda", case, deterministic=True)
    again, _ = run_sparse_on("cuda", case, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    agrees(case, first)


def test_queries_that_see_nothing_give_zeros_and_no_gradient():
    case = block_case("one dilation, most rows see nothing", 4, "zigzag", head_dim=128, dtype=torch.bfloat16)
    empty = ~case.mask()[0].any(-1)
    for kernel in KERNELS:
        if kernel.refusal("cuda", torch.bfloat16, 128, False) is None:
            found, _ = run_sparse_on("cuda", case, kernel=kernel.name, deterministic=False)
            assert not found[0][:, empty].any(), kernel.name
            assert not found[1][:, empty].any(), kernel.name
            assert all(torch.isfinite(tensor).all() for tensor in found), kernel.name


def test_shares_added_by_rows_are_their_eager_twins():
    from elastic_ring.attention import fused_merge

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.randn(2, 301, 128, generator=generator).to("cuda", dtype)
        # K and V of a row lie side by side, and sequences between them.
        inbox = torch.randn(500, 2, 2, 128, generator=generator).cuda()[:, :, 1].transpose(0, 1)
        places = torch.full((3, 301), -1, dtype=torch.int32)
        for hop in range(3):
            rows = torch.randperm(301, generator=generator)[:150]
            places[hop, rows] = torch.randperm(500, generator=generator)[:150].int()
        places, twin = places.cuda(), total.clone()
        fused_merge.add_placed_(total, inbox, places)
        eager_add_placed_(twin, inbox, places)
        assert torch.equal(total, twin)


def test_an_own_kernel_is_chosen_and_refused_by_name():
    schedule = plan_sparse(SparsePattern(FAMILIES["window"], 128), contiguous(512, 1), 2, 2)
    x = torch.randn(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16)
    assert RingAttention(schedule, 0, None)(x, x, x).shape == x.shape
    with pytest.raises(ValueError, match="'flash-attn-4-sparse' has no deterministic sparse backward"):
        RingAttention(schedule, 0, None, RingOptions(kernel="flash-attn-4-sparse"))(x, x, x)
