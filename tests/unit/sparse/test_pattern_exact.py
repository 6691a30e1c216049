"""Sparse rings give what one masked dense process gives, values and gradients, and move the bytes that queries need."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention.pattern_bytes import families as measured
from benchmarks.attention.pattern_bytes import mean_bytes, mean_dense_bytes
from elastic_ring.attention import ring as ring_module
from elastic_ring.attention.autolayout import Sizes
from elastic_ring.attention.kernels.registry import named, select
from elastic_ring.attention.layouts.layout import Layout, balanced, contiguous, residue_class, striped, zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns import families, parse
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import RunFailed
from experiments.pattern_choice import choose
from tests.unit.attention.attention_rings import ThreadRings, in_threads, relative_error
from tests.unit.attention.test_attention_bytes import WireTap
from tests.unit.sparse.pattern_cases import (
    AHEAD,
    RULES,
    SparseCase,
    longnet_case,
    masked_attention,
    run_sparse,
    sees_of,
)


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
def test_fp64_agrees_with_the_masked_dense_reference(rings, name, cp):
    """Ragged ends throughout: 67 tokens, blocks of 4. Layouts and packed documents take turns."""
    rules = (RULES[name][0],)
    for index in (cp, cp + 2):
        starts = (0, 1, 22, 43) if index % 2 else (0,)
        case = SparseCase(rules, (sees_of(name, 67),), layout_for(index, rules, 67, cp), starts)
        check(case, rings)


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("cp", [1, 3, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_with_rules_of_their_own_agree(rings, cp, num_kv_heads):
    for index in range(3):
        check(longnet_case(layout_for(index, (Dense(),), 61, cp), 4, num_kv_heads), rings)
    local, whole = RULES["window across blocks"][0], Dense()
    for rules in ((local, local, local, whole), (local, whole, local, whole), (whole, whole, local, local)):
        sees = tuple(sees_of("dense" if rule == whole else "window across blocks", 61) for rule in rules)
        check(SparseCase(rules, sees, zigzag(61, cp), num_kv_heads=num_kv_heads), rings)


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_posting_everything_at_once_gives_the_same_bits(rings, ahead):
    case = longnet_case(zigzag(61, 5), 4, 2)
    want, _ = run_sparse(case, rings.groups(5))
    found, _ = run_sparse(case, rings.groups(5, fresh=True), ahead=ahead)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_ring_of_another_size_keeps_the_patterns_meaning(rings):
    outs = [run_sparse(longnet_case(zigzag(61, cp), 4, 2), rings.groups(cp))[0] for cp in (1, 3, 4, 7)]
    for found in outs[1:]:
        for got, want in zip(found, outs[0], strict=True):
            assert relative_error(got, want) <= 1e-12


def test_a_packed_document_gets_what_it_gets_alone(rings):
    packed = longnet_case(contiguous(61, 3), 4, 2, document_starts=(0, 23))
    found, _ = run_sparse(packed, rings.groups(3))
    q, k, v, _ = (tensor[:, 23:] for tensor in packed.tensors())
    alone = plan_sparse(SparsePattern(packed.rules, 4), contiguous(38, 1), 4, 2)
    assert relative_error(found[0][:, 23:], RingAttention(alone, 0, None)(q, k, v)) <= 1e-12


def test_queries_that_see_nothing_give_zeros_and_no_gradient(rings):
    name = "dilated with empty rows"
    case = SparseCase((RULES[name][0],), (sees_of(name, 40),), zigzag(40, 3))
    found, _ = run_sparse(case, rings.groups(3))
    empty = ~case.mask()[0].any(-1)
    assert empty.sum() == 30
    assert not found[0][:, empty].any()
    assert not found[1][:, empty].any()
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_shorter_types_agree_to_their_precision_and_repeat_bit_for_bit(rings, dtype, allowed):
    case = longnet_case(zigzag(61, 4), 4, 2, dtype=dtype)
    first, _ = run_sparse(case, rings.groups(4))
    again, _ = run_sparse(case, rings.groups(4, fresh=True))
    for got, same, want in zip(first, again, masked_attention(case), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, same)
        assert relative_error(got, want) <= allowed


def test_what_does_not_fit_the_schedule_is_refused_before_anything_is_sent():
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
def test_longer_sequences_in_the_kernels_own_blocks_agree(rings, name, cp):
    """Blocks of 128 over 701 tokens; the rules, made for blocks of 4, cut through them."""
    rules = (RULES[name][0],)
    case = SparseCase(rules, (sees_of(name, 701),), layout_for(cp, rules, 701, cp), (0, 300), 128, head_dim=16)
    check(case, rings)


def test_a_peer_that_is_lost_raises_on_the_others_and_leaves_no_work_behind(rings):
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
def test_a_kernel_with_wrong_gradients_or_values_is_refused_by_its_self_test(monkeypatch, planted):
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


def test_the_pattern_that_the_docs_add_needs_what_they_show_and_no_more(rings, monkeypatch):
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


# --------------------------------------------------------------------------------------------------------------- bytes


LAYOUTS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": lambda s, c: striped(s, c, unit_tokens=3),
    "residue": lambda s, c: residue_class(s, c, 4),
}


def needed_head_tokens(case: SparseCase, reader: int, source: int) -> int:
    """Tokens times K/V heads of `source` that some query of `reader` sees, counted on the whole mask."""
    mask = case.mask()
    rows, columns = (case.layout.positions(rank) for rank in (reader, source))
    seen = mask[:, rows][:, :, columns].any(1)
    by_kv_head = seen.view(case.num_kv_heads, case.num_heads // case.num_kv_heads, -1).any(1)
    return int(by_kv_head.sum())


def moved(case: SparseCase, rings: ThreadRings) -> list[torch.Tensor]:
    cp = case.layout.cp
    taps = [WireTap(group) for group in rings.groups(cp)]
    found, ledgers = run_sparse(case, taps)
    per_head_token = 2 * 2 * case.head_dim
    for rank, hop in itertools.product(range(cp), range(1, cp)):
        pulled = needed_head_tokens(case, rank, (rank - hop) % cp) * per_head_token
        served = needed_head_tokens(case, (rank + hop) % cp, rank) * per_head_token
        item, partial = case.dtype.itemsize, max(4, case.dtype.itemsize)
        assert ledgers[rank].received_bytes.get(("forward", hop), 0) == pulled * item
        assert ledgers[rank].sent_bytes.get(("forward", hop), 0) == served * item
        assert ledgers[rank].received_bytes.get(("backward", hop), 0) == pulled * item + served * partial
        planned = case.schedule.hop_bytes(rank, hop, case.head_dim, item, "backward", batch=2)
        assert planned == pulled * item + served * partial
        planned = case.schedule.hop_bytes(rank, hop, case.head_dim, item, "forward", batch=2, side="sent")
        assert planned == served * item
    for tap, ledger in zip(taps, ledgers, strict=True):
        assert tap.sent_bytes == sum(ledger.sent_bytes.values())
    return found


@pytest.mark.thinned(num=8)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", AHEAD)
def test_attention_that_is_not_causal_agrees_with_the_masked_reference_and_moves_what_is_needed(rings, name, cp):
    """Layouts and packed documents take turns."""
    rule, sees = AHEAD[name]
    number = cp + list(AHEAD).index(name)
    layout = list(LAYOUTS.values())[number % 4](67, cp)
    case = SparseCase((rule,), (sees,), layout, (0, 1, 22, 43) if number % 3 else (0,), causal=False)
    for which, got, want in zip(("out", "dq", "dk", "dv"), moved(case, rings), masked_attention(case), strict=True):
        assert relative_error(got, want) <= 1e-12, which


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_what_moves_is_what_some_query_needs_to_the_byte(rings, name, layout):
    for cp, starts in ((3, (0, 22, 43)), (6, (0,))):
        case = SparseCase((RULES[name][0],), (sees_of(name, 67),), LAYOUTS[layout](67, cp), starts)
        moved(case, rings)


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_kv_head_moves_only_what_its_own_query_heads_need(rings, num_kv_heads):
    whole = longnet_case(zigzag(61, 5), 4, num_kv_heads, dtype=torch.bfloat16)
    moved(whole, rings)
    moved(longnet_case(contiguous(61, 5), 4, num_kv_heads, 4 // num_kv_heads), rings)


def test_a_key_too_many_is_caught(rings, monkeypatch):
    """The planted bug: the schedule marks one key more than some query sees, and the results stay right."""
    from elastic_ring.attention.plan import sparse_schedule

    mark = sparse_schedule._mark

    def generous(rule, block, chunks, foreign, needed, causal) -> None:  # type: ignore[no-untyped-def]
        mark(rule, block, chunks, foreign, needed, causal)
        needed[-1] = True

    monkeypatch.setattr(sparse_schedule, "_mark", generous)
    case = SparseCase((Window(5),), (lambda q, k: q - k < 5,), contiguous(31, 3))
    with pytest.raises(AssertionError):
        moved(case, rings)


def test_the_dense_rule_moves_what_the_dense_schedule_moves():
    for layout in (contiguous(1000, 5), zigzag(1001, 7)):
        sparse, dense = plan_sparse(SparsePattern((Dense(),)), layout, 4, 2), plan(Pattern(), layout)
        for rank, hop in itertools.product(range(layout.cp), repeat=2):
            for direction in ("forward", "backward"):
                planned = dense.hop_bytes(rank, hop, 16, 2, direction, kv_heads=2)
                assert sparse.hop_bytes(rank, hop, 16, 2, direction) == planned


def receives(layout: Layout, pattern: SparsePattern, sizes: Sizes) -> list[int]:
    schedule = plan_sparse(pattern, layout, sizes.num_heads, sizes.num_kv_heads)
    return [schedule.received_bytes(rank, sizes.head_dim, sizes.itemsize) for rank in range(layout.cp)]


@pytest.mark.parametrize("window", [1, 100, 128, 1000, 5000])
def test_a_window_moves_its_halo_and_no_more(window):
    sizes, layout = Sizes(4, 2, 64), contiguous(16001, 8)
    starts = [start for ((start, _),) in layout.segments]
    halo = [min(window - 1, start) * 2 * 2 * 64 * 2 for start in starts]
    assert receives(layout, SparsePattern((Window(window),)), sizes) == halo
    if window < 2000:  # longer than a rank's slice it leaves the first ranks idle, and balance costs bytes
        chosen = choose(SparsePattern((Window(window),)), 16001, 8, sizes)
        assert chosen.best.all_bytes <= 1.1 * sum(halo)


@pytest.mark.parametrize("cp", [8, 16])
def test_longnet_moves_at_most_a_twentieth_of_the_dense_rings_bytes(cp):
    sizes, seq_len = Sizes(16, 4), 131072
    for name in ("longnet, blocks", "longnet, one offset"):
        pattern = SparsePattern(measured(seq_len, sizes)[name])
        chosen = choose(pattern, seq_len, cp, sizes)
        assert mean_bytes(pattern, chosen.schedule.layout, sizes) <= 0.05 * mean_dense_bytes(seq_len, cp, sizes)
        assert all(isinstance(rule, Dilated) for rule in pattern.heads)
