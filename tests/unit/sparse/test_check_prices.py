"""What is put beside prices runs what it says, and the search for patterns plans with measured figures."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest

from benchmarks.attention.check_prices import Row, compare, rank_correlation, systems_of
from elastic_ring.attention.autolayout import LayoutPrice
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.costs import CostModel
from tests.unit.attention.attention_rings import one_thread

FIGURES = CostModel(1e10, 1e8, 1e-3, 1e-4, 1e10, 0.5)


def row(predicted: float, measured: float) -> Row:
    return Row("window:128", 0.1, "zigzag/hops", predicted, 0, 1.0, [measured], [3 * measured])


def candidate(forward_s: float) -> LayoutPrice:
    return LayoutPrice(zigzag(8, 2), 0, 1.0, forward_s)


def test_agreement_is_by_rank_and_regret_by_time() -> None:
    lines, agreement = compare([row(1.0, 2.0), row(2.0, 3.0), row(3.0, 9.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert (agreement["forward"], agreement["both"], agreement["regret_of_chosen"]) == (1.0, 1.0, 0.0)
    assert [line.endswith("chosen") for line in lines] == [True, False, False, False]
    _, other = compare([row(1.0, 3.0), row(2.0, 2.0), row(3.0, 1.0)], [candidate(s) for s in (1.0, 2.0, 3.0)])
    assert other["forward"] == -1.0
    assert other["regret_of_quickest"] == pytest.approx(2.0)


def test_each_layout_runs_with_the_exact_ranges() -> None:
    options = Namespace(tokens=1024, ranks=1, heads=(2, 2), head_dim=8)
    with one_thread():
        systems, prices = systems_of("bigbird:2,0,1", options, FIGURES, 0, None)
        for system in systems:
            system.forward()
            system.both()
    assert [system.row.candidate for system in systems] == [f"{p.layout.name}/hops" for p in prices]


def test_rank_correlation_sees_order_only() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 1, 2]) == pytest.approx(0)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
