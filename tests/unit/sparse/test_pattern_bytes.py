"""Sparse rings move exactly the bytes that some query needs, counted from what was handed to the group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from benchmarks.attention.pattern_bytes import families, mean_bytes, mean_dense_bytes
from elastic_ring.attention.autolayout import Sizes
from elastic_ring.attention.layouts.layout import Layout, contiguous, residue_class, striped, zigzag
from elastic_ring.attention.patterns.families import Dilated
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from experiments.pattern_choice import choose
from tests.unit.attention.attention_rings import ThreadRings, one_thread, relative_error
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

LAYOUTS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": lambda s, c: striped(s, c, unit_tokens=3),
    "residue": lambda s, c: residue_class(s, c, 4),
}


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


def needed_head_tokens(case: SparseCase, reader: int, source: int) -> int:
    """Tokens times K/V heads of `source` that some query of `reader` sees, counted on the whole mask."""
    mask = case.mask()
    rows, columns = (case.layout.positions(rank) for rank in (reader, source))
    seen = mask[:, rows][:, :, columns].any(1)
    by_kv_head = seen.view(case.num_kv_heads, case.num_heads // case.num_kv_heads, -1).any(1)
    return int(by_kv_head.sum())


def check(case: SparseCase, rings: ThreadRings) -> list[torch.Tensor]:
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
def test_attention_that_is_not_causal_agrees_with_the_masked_reference_and_moves_what_is_needed(
    rings: ThreadRings, name: str, cp: int
) -> None:
    """Layouts and packed documents take turns."""
    rule, sees = AHEAD[name]
    number = cp + list(AHEAD).index(name)
    layout = list(LAYOUTS.values())[number % 4](67, cp)
    case = SparseCase((rule,), (sees,), layout, (0, 1, 22, 43) if number % 3 else (0,), causal=False)
    for which, got, want in zip(("out", "dq", "dk", "dv"), check(case, rings), masked_attention(case), strict=True):
        assert relative_error(got, want) <= 1e-12, which


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_what_moves_is_what_some_query_needs_to_the_byte(rings: ThreadRings, name: str, layout: str) -> None:
    for cp, starts in ((3, (0, 22, 43)), (6, (0,))):
        case = SparseCase((RULES[name][0],), (sees_of(name, 67),), LAYOUTS[layout](67, cp), starts)
        check(case, rings)


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_kv_head_moves_only_what_its_own_query_heads_need(rings: ThreadRings, num_kv_heads: int) -> None:
    whole = longnet_case(zigzag(61, 5), 4, num_kv_heads, dtype=torch.bfloat16)
    check(whole, rings)
    check(longnet_case(contiguous(61, 5), 4, num_kv_heads, 4 // num_kv_heads), rings)


def test_a_key_too_many_is_caught(rings: ThreadRings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the schedule marks one key more than some query sees, and the results stay right."""
    from elastic_ring.attention.plan import sparse_schedule

    mark = sparse_schedule._mark

    def generous(rule, block, chunks, foreign, needed, causal) -> None:  # type: ignore[no-untyped-def]
        mark(rule, block, chunks, foreign, needed, causal)
        needed[-1] = True

    monkeypatch.setattr(sparse_schedule, "_mark", generous)
    case = SparseCase((Window(5),), (lambda q, k: q - k < 5,), contiguous(31, 3))
    with pytest.raises(AssertionError):
        check(case, rings)


def test_the_dense_rule_moves_what_the_dense_schedule_moves() -> None:
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
def test_a_window_moves_its_halo_and_no_more(window: int) -> None:
    sizes, layout = Sizes(4, 2, 64), contiguous(16001, 8)
    starts = [start for ((start, _),) in layout.segments]
    halo = [min(window - 1, start) * 2 * 2 * 64 * 2 for start in starts]
    assert receives(layout, SparsePattern((Window(window),)), sizes) == halo
    if window < 2000:  # longer than a rank's slice it leaves the first ranks idle, and balance costs bytes
        chosen = choose(SparsePattern((Window(window),)), 16001, 8, sizes)
        assert chosen.best.all_bytes <= 1.1 * sum(halo)


@pytest.mark.parametrize("cp", [8, 16])
def test_longnet_moves_at_most_a_twentieth_of_the_dense_rings_bytes(cp: int) -> None:
    sizes, seq_len = Sizes(16, 4), 131072
    for name in ("longnet, blocks", "longnet, one offset"):
        pattern = SparsePattern(families(seq_len, sizes)[name])
        chosen = choose(pattern, seq_len, cp, sizes)
        assert mean_bytes(pattern, chosen.schedule.layout, sizes) <= 0.05 * mean_dense_bytes(seq_len, cp, sizes)
        assert all(isinstance(rule, Dilated) for rule in pattern.heads)
