"""What the search is judged by: fronts, hypervolumes and rank correlations of small cases that hands can check."""

from __future__ import annotations

import math

import numpy as np
import pytest

from elastic_ring.tuning.pareto import dominates, front, hypervolume, ranks


def test_domination_needs_one_better_objective_and_none_worse() -> None:
    assert dominates((1, 2), (1, 3))
    assert not dominates((1, 2), (1, 2))
    assert not dominates((0, 9), (1, 2))


def test_fronts_are_peeled_one_after_the_other() -> None:
    points = [(0, 3), (1, 1), (3, 0), (1, 3), (3, 3), (3, 4)]
    assert ranks(points) == [0, 0, 0, 1, 2, 3]
    assert front(points) == [0, 1, 2]


def test_a_point_that_is_no_number_has_no_place_on_a_front() -> None:
    with pytest.raises(ValueError, match="not finite: leave such points out"):
        front([(0.1, 0.2, 0.3), (math.nan, 9, 9), (5, 5, 5)])


def test_a_hypervolume_is_the_volume_of_the_union_of_boxes() -> None:
    assert hypervolume([(1.0, 1.0)], (3, 3)) == 4
    assert hypervolume([(0.0, 2.0), (2.0, 0.0)], (3, 3)) == 3 + 3 - 1
    assert hypervolume([(1, 1, 1), (0, 2, 2)], (3, 3, 3)) == 8 + 3 - 2
    assert hypervolume([(5, 0)], (3, 3)) == 0


def test_a_hypervolume_agrees_with_counting_random_points() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((7, 3))
    thrown = rng.random((200_000, 3)) * 1.1
    hit = (thrown[:, None] >= points[None]).all(-1).any(1).mean() * 1.1**3
    assert hypervolume(points.tolist(), (1.1, 1.1, 1.1)) == pytest.approx(hit, abs=6e-3)
