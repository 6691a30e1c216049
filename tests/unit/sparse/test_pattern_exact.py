"""Sparse rings give what one masked dense process gives: values and gradients, for every family of patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring.attention import ring as ring_module
from elastic_ring.attention.kernels.registry import named, select
from elastic_ring.attention.layouts.layout import Layout, balanced, contiguous, residue_class, striped, zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns import families, parse
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import RunFailed
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread, relative_error
from tests.unit.sparse.pattern_cases import (
    RULES,
    SparseCase,
    longnet_case,
    masked_attention,
    run_sparse,
    sees_of,
)


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


def layout_for(index: int, rules: tuple, seq_len: int, cp: int) -> Layout:
    """Every way of laying tokens out, in turn; none of them cuts only at block boundaries."""
    makers = (
        contiguous,
        zigzag,
        lambda s, c: striped(s, c, unit_tokens=3),
        lambda s, c: residue_class(s, c, 4),
        lambda s, c: balanced(SparsePattern(rules, 4).row_pairs(s), c, unit_tokens=4)[0],
    )
    return makers[index % len(makers)](seq_len, cp)


def check(case: SparseCase, rings: ThreadRings, **options: int) -> None:
    found, _ = run_sparse(case, rings.groups(case.layout.cp), **options)
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, masked_attention(case), strict=True):
        assert relative_error(got, want) <= 1e-12, (case, name)


@pytest.mark.thinned(num=5)
@pytest.mark.parametrize("cp", range(1, 9))
@pytest.mark.parametrize("name", RULES)
def test_fp64_agrees_with_the_masked_dense_reference(rings: ThreadRings, name: str, cp: int) -> None:
    """Ragged ends throughout: 67 tokens, blocks of 4. Layouts and packed documents take turns."""
    rules = (RULES[name][0],)
    for index in (cp, cp + 2):
        starts = (0, 1, 22, 43) if index % 2 else (0,)
        case = SparseCase(rules, (sees_of(name, 67),), layout_for(index, rules, 67, cp), starts)
        check(case, rings)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 3, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_with_rules_of_their_own_agree(rings: ThreadRings, cp: int, num_kv_heads: int) -> None:
    for index in range(3):
        check(longnet_case(layout_for(index, (Dense(),), 61, cp), 4, num_kv_heads), rings)
    local, whole = RULES["window across blocks"][0], Dense()
    for rules in ((local, local, local, whole), (local, whole, local, whole), (whole, whole, local, local)):
        sees = tuple(sees_of("dense" if rule == whole else "window across blocks", 61) for rule in rules)
        check(SparseCase(rules, sees, zigzag(61, cp), num_kv_heads=num_kv_heads), rings)


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_posting_everything_at_once_gives_the_same_bits(rings: ThreadRings, ahead: int) -> None:
    case = longnet_case(zigzag(61, 5), 4, 2)
    want, _ = run_sparse(case, rings.groups(5))
    found, _ = run_sparse(case, rings.groups(5, fresh=True), ahead=ahead)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_ring_of_another_size_keeps_the_patterns_meaning(rings: ThreadRings) -> None:
    outs = [run_sparse(longnet_case(zigzag(61, cp), 4, 2), rings.groups(cp))[0] for cp in (1, 3, 4, 7)]
    for found in outs[1:]:
        for got, want in zip(found, outs[0], strict=True):
            assert relative_error(got, want) <= 1e-12


def test_a_packed_document_gets_what_it_gets_alone(rings: ThreadRings) -> None:
    packed = longnet_case(contiguous(61, 3), 4, 2, document_starts=(0, 23))
    found, _ = run_sparse(packed, rings.groups(3))
    q, k, v, _ = (tensor[:, 23:] for tensor in packed.tensors())
    alone = plan_sparse(SparsePattern(packed.rules, 4), contiguous(38, 1), 4, 2)
    assert relative_error(found[0][:, 23:], RingAttention(alone, 0, None)(q, k, v)) <= 1e-12


def test_queries_that_see_nothing_give_zeros_and_no_gradient(rings: ThreadRings) -> None:
    name = "dilated with empty rows"
    case = SparseCase((RULES[name][0],), (sees_of(name, 40),), zigzag(40, 3))
    found, _ = run_sparse(case, rings.groups(3))
    empty = ~case.mask()[0].any(-1)
    assert empty.sum() == 30
    assert not found[0][:, empty].any()
    assert not found[1][:, empty].any()
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_shorter_types_agree_to_their_precision_and_repeat_bit_for_bit(
    rings: ThreadRings, dtype: torch.dtype, allowed: float
) -> None:
    case = longnet_case(zigzag(61, 4), 4, 2, dtype=dtype)
    first, _ = run_sparse(case, rings.groups(4))
    again, _ = run_sparse(case, rings.groups(4, fresh=True))
    for got, same, want in zip(first, again, masked_attention(case), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, same)
        assert relative_error(got, want) <= allowed


def test_what_does_not_fit_the_schedule_is_refused_before_anything_is_sent() -> None:
    schedule = plan_sparse(SparsePattern((Dense(),), 4), contiguous(8, 1), 4, 2)
    q, k = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
    ring = RingAttention(schedule, 0, None)
    with pytest.raises(ValueError, match="plan for these"):
        ring(q, q, q)
    with pytest.raises(ValueError, match="S_local=4"):
        ring(q[:, :4], k[:, :4], k[:, :4])
    with pytest.raises(ValueError, match="needs a group"):
        RingAttention(plan_sparse(schedule.pattern, contiguous(8, 2), 4, 2), 0, None)
    with pytest.raises(ValueError, match="ahead=0"):
        RingAttention(schedule, 0, None, RingOptions(ahead=0))
    with pytest.raises(ValueError, match="rules for 3 heads, the call has 4"):
        plan_sparse(SparsePattern((Dense(),) * 3, 4), contiguous(8, 1), 4, 2)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 5])
@pytest.mark.parametrize("name", ["window across blocks", "dilated tokens", "bigbird", "union"])
def test_longer_sequences_in_the_kernels_own_blocks_agree(rings: ThreadRings, name: str, cp: int) -> None:
    """Blocks of 128 over 701 tokens; the rules, made for blocks of 4, cut through them."""
    rules = (RULES[name][0],)
    case = SparseCase(rules, (sees_of(name, 701),), layout_for(cp, rules, 701, cp), (0, 300), 128, head_dim=16)
    check(case, rings)


def test_a_peer_that_is_lost_raises_on_the_others_and_leaves_no_work_behind(rings: ThreadRings) -> None:
    case = longnet_case(zigzag(61, 3), 4, 2)
    groups = rings.groups(3, fresh=True)
    kept: list[RingAttention] = []

    def work(cp_rank: int) -> None:
        if cp_rank == 2:
            groups[2] = None  # its sockets close
            return
        ring = RingAttention(case.schedule, cp_rank, groups[cp_rank])
        kept.append(ring)
        q, k, v, _ = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        with pytest.raises(RuntimeError):
            ring(q, k, v)
        groups[cp_rank] = ring.group = None

    in_threads(3, work)
    assert len(kept) == 2


@pytest.mark.parametrize("planted", ["forward", "backward"])
def test_a_kernel_with_wrong_gradients_or_values_is_refused_by_its_self_test(
    monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    right = named("aten-cpu")

    def wrong(*tensors: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        first, *rest = getattr(right, planted)(*tensors, **options)
        return (first * 1.001 if "mask" in options else first, *rest)

    changed: dict[str, Any] = {planted: wrong}
    monkeypatch.setattr(ring_module, "select", partial(select, kernels=(replace(right, **changed),)))
    schedule = plan_sparse(SparsePattern((Dense(),), 4), contiguous(8, 1), 1, 1)
    x = torch.zeros(1, 8, 1, 24)
    with pytest.raises(RunFailed, match="out of a masked" if planted == "forward" else "dq of a masked"):
        RingAttention(schedule, 0, None)(x, x, x)
    monkeypatch.undo()
    assert RingAttention(schedule, 0, None)(x, x, x).shape == x.shape


def test_the_pattern_that_the_docs_add_needs_what_they_show_and_no_more(
    rings: ThreadRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's class as it stands, under its short form, on a ring of three, against a mask spelled out."""
    page = Path(__file__).parents[3].joinpath("docs", "attention.md").read_text(encoding="utf-8")
    made = re.search(r"```python\n(.*?)```.*?`(\"checkered\": .*?)`", page, re.DOTALL)
    assert made is not None
    names = {**vars(parse), **vars(families)}
    exec(made[1], names)
    monkeypatch.setattr(parse, "_FAMILIES", {**parse._FAMILIES, **eval(f"{{{made[2]}}}", names)})
    ((rule,),) = [group.rules for group in parse.parse_pattern("checkered:unit=4").groups]
    assert str(rule).startswith("checkered")
    case = SparseCase((rule,), (lambda q, k: (q // 4 - k // 4) % 2 == 0,) * 4, zigzag(67, 3), (0, 22))
    check(case, rings)
