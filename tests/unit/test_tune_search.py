"""The search: its space makes patterns, its sampler asks well and repeats itself, bad trials are stopped."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_ring.attention.spec import parse_pattern
from tune.check_search import SHARE, Grid, asked_by, cheap_of, replay
from tune.sampler import ProxySampler
from tune.space import Candidate, candidates
from tune.trial import NonDominatedRank

TABLE = Path(__file__).parents[2] / "tune" / "grid_64.json"


def test_the_space_has_64_points_with_names_of_their_own() -> None:
    names = [candidate.name for candidate in candidates()]
    assert len(names) == len(set(names)) == 64


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_every_point_is_a_pattern_near_the_density_it_names(seq_len: int) -> None:
    for candidate in candidates():
        pattern = candidate.scaled(seq_len).pattern()
        assert pattern is not None
        pattern.check(2, 4, 2)
        text = candidate.file(seq_len, {"gap": 0.1})
        assert parse_pattern(text).groups == pattern.groups
        assert parse_pattern(text).block == pattern.block
        density = pattern.density(seq_len, 1, 4, 4)
        assert candidate.keep / 3 < density < 3.2 * candidate.keep, candidate


def test_a_value_that_the_space_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=0\.3: the space has 0\.08, 0\.15, 0\.25, 0\.4"):
        Candidate.of({"family": "near", "keep": 0.3, "num_blocks": 16, "mix": "all"})


def made_up() -> dict[str, dict[str, float]]:
    """A table in which more density costs more and helps, and the proxy nearly knows."""
    found = {}
    for number, candidate in enumerate(candidates()):
        helps = {"near": 0.2, "strided": 0.0, "bigbird": 0.1, "hierarchical": 0.05}[candidate.family]
        dense = candidate.keep + 0.3 * (candidate.mix != "all")
        found[candidate.name] = {
            "gap": 0.3 - 0.3 * dense - helps * 0.2 + 0.001 * (number * 7 % 5), "step_s": dense * 0.9 + 0.01,
            "bytes": dense * (0.2 + helps), "density": dense, "mass": 0.4 + dense / 2 + helps, "error": 0.5 - helps,
        }  # fmt: skip
    return found


def test_the_sampler_repeats_itself_and_never_asks_for_a_point_twice() -> None:
    grid = Grid(made_up())
    asked = asked_by(ProxySampler(cheap_of(grid.points), 3), grid, 16)
    assert asked == asked_by(ProxySampler(cheap_of(grid.points), 3), grid, 16)
    assert len(set(asked)) == 16
    assert grid.share(list(grid.points)) == pytest.approx(1)


@pytest.mark.skipif(not TABLE.exists(), reason="the grid has not been measured")
def test_an_eighth_of_the_measured_grid_gives_its_front() -> None:
    """Five seeds, replayed on the kept table; random choice is the measure of how hard that is."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert len(table["points"]) == SHARE * 8
    shares = replay(table, range(5))
    assert min(shares["proxy (this search)"]) >= 0.95
    assert min(shares["random"]) < min(shares["proxy (this search)"])


def test_a_trial_behind_two_fronts_is_stopped_and_only_after_a_training_rung() -> None:
    scheduler = NonDominatedRank(keep=2, least=3)

    def told(trial_id: str, rung: int, gap: float) -> str:
        result = {"rung": rung, "gap": gap, "step_s": gap, "bytes": gap}
        return scheduler.on_trial_result(None, SimpleNamespace(trial_id=trial_id), result)

    assert [told(name, 1, gap) for name, gap in (("a", 0), ("b", 1), ("c", 2), ("d", 3))] == ["CONTINUE"] * 4
    assert [told(name, 2, gap) for name, gap in (("a", 0), ("b", 1), ("c", 2))] == ["CONTINUE", "CONTINUE", "STOP"]
    assert told("d", 2, 0.5) == "CONTINUE"
    assert told("e", 3, 9.0) == "CONTINUE"
