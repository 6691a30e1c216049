"""Placement balances every static pattern; layout and exchange are chosen by bytes, balance and measured figures."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace

import numpy as np
import pytest

from benchmarks.attention.check_prices import Row, compare, rank_correlation, systems_of
from benchmarks.attention.pattern_bytes import families, main
from elastic_ring.attention.autolayout import LayoutPrice, Sizes, in_whole_blocks, layouts_for
from elastic_ring.attention.layouts.layout import (
    balanced,
    contiguous,
    dealt,
    residue_class,
    striped,
    tokens_max_over_mean,
    work_max_over_mean,
    zigzag,
)
from elastic_ring.attention.patterns.families import BigBird, Dilated
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.costs import CostModel
from experiments.pattern_choice import choose, price_exchanges
from tests.unit.attention.attention_rings import one_thread
from tests.unit.sparse.pattern_cases import RULES

SIZES = Sizes(16, 4)
FAMILIES = families(65536, SIZES)


@pytest.mark.parametrize("cp", [8, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_work_and_tokens_are_within_a_twentieth_of_the_mean_for_every_static_pattern(name, cp):
    pattern = SparsePattern(FAMILIES[name])
    chosen = choose(pattern, 65536, cp, SIZES)
    loads = [chosen.schedule.work(rank) for rank in range(cp)]
    assert max(loads) <= 1.05 * sum(loads) / cp
    assert tokens_max_over_mean(chosen.schedule.layout) <= 1.05
    assert chosen.best.work_max_over_mean == pytest.approx(max(loads) * cp / sum(loads))


@pytest.mark.parametrize("cp", [1, 2, 3, 5, 6, 7, 8, 12])
def test_any_ring_can_be_planned_for_any_length(cp):
    """Layout raises unless its segments are a partition, so making it is the proof."""
    for seq_len in (cp, 61, 1000, 4099):
        for unit in (1, 4, 128):
            for layout in (striped(seq_len, cp, unit_tokens=unit), residue_class(seq_len, cp, 5, unit_tokens=unit)):
                assert layout.cp == cp
            work = np.arange(1, seq_len + 1)
            layout, spread = balanced(work, cp, unit_tokens=unit)
            assert spread == work_max_over_mean(layout, work)


def test_placement_uses_no_more_rounds_than_balance_needs():
    pattern = SparsePattern((Dense(),))
    work = pattern.row_pairs(65536)
    layout, spread = balanced(work, 8)
    assert layout.name == "balanced-2"
    assert spread <= 1.05 < work_max_over_mean(dealt(work, 8, 1), work)
    assert balanced(np.ones(65536, dtype=np.int64), 8)[0].segments == contiguous(65536, 8).segments


def test_a_dilated_branch_stays_inside_its_residue_class():
    rule = Dilated((1024,), (4,), 1)
    layout = residue_class(1024, 4, 4)
    schedule = plan_sparse(SparsePattern((rule,), 32), layout, 2, 1)
    assert [schedule.received_bytes(rank, 64, 2) for rank in range(4)] == [0] * 4


def test_every_layout_and_exchange_is_weighed():
    for name, rules in FAMILIES.items():
        chosen = choose(SparsePattern(rules), 65536, 8, SIZES)
        names = {candidate.layout.name.split("-")[0] for candidate in chosen.candidates}
        assert {"contiguous", "zigzag", "striped"} <= names, name
        assert {c.exchange for c in chosen.candidates} == {"hops", "packed"}
        assert chosen.best.layout.name in chosen.why
        assert len(chosen.candidates) == 2 * len(layouts_for(SparsePattern(rules), 65536, 8))


def test_uneven_layouts_with_fewer_bytes_are_passed_over_and_named():
    chosen = choose(SparsePattern((Dense(),)), 65536, 8, SIZES)
    assert chosen.exchange == "hops"
    assert "passed over as too uneven: contiguous" in chosen.why
    assert choose(SparsePattern((Window(1024),)), 65536, 8, SIZES).best.layout.name == "contiguous"


def test_a_hair_of_balance_is_not_bought_with_many_bytes():
    """A window as wide as a slice: no layout is even within a twentieth, contiguous slices are nearly the evenest."""
    chosen = choose(SparsePattern((Window(1024),)), 8192, 8, Sizes(4, 4, 64))
    assert min(c.work_max_over_mean for c in chosen.candidates) > 1.05
    assert chosen.schedule.layout.name == "contiguous"
    assert chosen.best.all_bytes == min(c.all_bytes for c in chosen.candidates)


def test_a_machine_with_dear_messages_packs_them_and_one_with_slow_links_hides_them():
    pattern = SparsePattern(FAMILIES["longnet, blocks"])
    dear = choose(pattern, 65536, 8, SIZES, CostModel(message_s=1e-2))
    slow = choose(pattern, 65536, 8, SIZES, CostModel(link_bytes_per_s=20e9, message_s=1e-9))
    assert (dear.exchange, slow.exchange) == ("packed", "hops")
    assert (dear.ahead, slow.ahead) == (7, 1)


def test_a_strided_pattern_is_laid_out_by_its_residue_classes():
    chosen = choose(SparsePattern(FAMILIES["strided"]), 65536, 8, SIZES)
    assert chosen.best.layout.name == "residue-class-32"
    others = [c.all_bytes for c in chosen.candidates if c.layout.name in ("contiguous", "zigzag", "striped")]
    assert chosen.best.all_bytes * 2 < min(others)


def test_choices_and_plans_are_equal_everywhere():
    pattern, again = (SparsePattern((Dilated((64, 256), (1, 4)),), 16) for _ in range(2))
    assert choose(pattern, 512, 4, SIZES) == choose(again, 512, 4, SIZES)
    layout = contiguous(512, 4)
    first, second = plan_sparse(pattern, layout, 2, 1), plan_sparse(again, dataclasses.replace(layout), 2, 1)
    assert first == second
    assert (first.groups, first.hops) == (second.groups, second.hops)


def test_prices_follow_the_bytes_of_the_schedule():
    pattern = SparsePattern((RULES["window of blocks"][0],))
    schedule = plan_sparse(pattern, contiguous(4096, 4), SIZES.num_heads, SIZES.num_kv_heads)
    for candidate in price_exchanges(schedule, SIZES, CostModel()):
        assert candidate.all_bytes == 3 * 7 * 2 * 4 * 128 * 2


@pytest.mark.slow
def test_the_job_prints_a_row_for_every_family(capsys):
    assert main(["--tokens", "65536", "--why"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FAMILIES)
    assert "chosen / halo 1.0000" in printed


def test_blocks_of_gpus_are_laid_out_in_whole_blocks_only():
    pattern = SparsePattern((BigBird(2, 0, 3),))
    found = choose(pattern, 128 * 24, 2, Sizes(8, 2), whole_blocks=True)
    assert all(in_whole_blocks(candidate.layout) for candidate in found.candidates)
    with pytest.raises(ValueError, match="take a multiple of 256 tokens"):
        choose(pattern, 1000, 2, Sizes(8, 2), whole_blocks=True)


FIGURES = CostModel(1e10, 1e8, 1e-3, 1e-4, 1e10, 0.5)


def row(predicted: float, measured: float) -> Row:
    return Row("window:128", 0.1, "zigzag/hops", predicted, 0, 1.0, [measured], [3 * measured])


def candidate(forward_s: float) -> LayoutPrice:
    return LayoutPrice(zigzag(8, 2), 0, 1.0, forward_s)


def test_agreement_is_by_rank_and_regret_by_time():
    lines, agreement = compare([row(1.0, 2.0), row(2.0, 3.0), row(3.0, 9.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert (agreement["forward"], agreement["both"], agreement["regret_of_chosen"]) == (1.0, 1.0, 0.0)
    assert [line.endswith("chosen") for line in lines] == [True, False, False, False]
    _, other = compare([row(1.0, 3.0), row(2.0, 2.0), row(3.0, 1.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert other["forward"] == -1.0
    assert other["regret_of_quickest"] == pytest.approx(2.0)


def test_each_layout_runs_with_the_exact_ranges():
    options = Namespace(tokens=1024, ranks=1, heads=(2, 2), head_dim=8)
    with one_thread():
        systems, prices = systems_of("bigbird:2,0,1", options, FIGURES, 0, None)
        for system in systems:
            system.forward()
            system.both()
    assert [system.row.candidate for system in systems] == [f"{p.layout.name}/hops" for p in prices]


def test_rank_correlation_sees_order_only():
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 1, 2]) == pytest.approx(0)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
