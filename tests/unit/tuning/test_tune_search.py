"""The search: its space makes patterns, its sampler asks well and repeats itself, bad trials are stopped."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from benchmarks.quality.replay import SHARE, Grid, best_alone, replay, searched
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks
from elastic_ring.tuning.climb import Climb
from elastic_ring.tuning.fidelity import REJECTED_GAP, handiest, planned, rule_costs
from elastic_ring.tuning.quality.cost import placed
from elastic_ring.tuning.quality.families import Family
from elastic_ring.tuning.sampler import LONG, SHORT, ProxySampler, cheap_of, corrected, told
from elastic_ring.tuning.search import asked_for, store_settings
from elastic_ring.tuning.space import AXES, LAYOUTS, OFF, Candidate, candidates
from elastic_ring.tuning.stopping import is_behind
from elastic_ring.tuning.trial import NonDominatedRank, judged, read_log

TABLE = Path(__file__).parents[3] / "benchmarks" / "quality" / "grid.json"


def layer(rule: str, seq_len: int, block: int) -> SparsePattern:
    group = LayerPatterns(parse_pattern(rule).groups, block).of_layer(0)
    return SparsePattern(group.heads(4, 4), block)


# ------------------------------------------------------------ the space


def test_no_two_points_of_the_space_keep_the_same() -> None:
    kept = {}
    for candidate in candidates():
        masks = candidate.scaled(128).masks(128, 4)
        layers = [masks.of_layer(number, torch.device("cpu")) for number in (0, 1)]
        shown = tuple("dense" if mask is None else mask.expand(4, -1, -1).numpy().tobytes() for mask in layers)
        assert shown not in kept, (candidate.name, kept.get(shown))
        kept[shown] = candidate.name
    assert len(set(kept.values())) == len(kept) > 64


@pytest.mark.parametrize("seq_len", [512, 8192])
def test_every_point_is_a_pattern_of_the_density_that_it_names(seq_len: int) -> None:
    for candidate in candidates():
        pattern = candidate.scaled(seq_len).pattern()
        assert pattern is not None
        pattern.check(2, 4, 2)
        for rule in set(candidate.layers(seq_len)) - {"dense"}:
            density = layer(rule, seq_len, candidate.unit(seq_len)).density(seq_len)
            assert density == pytest.approx(candidate.keep, rel=OFF + 0.01), (candidate.name, rule)


def test_no_point_keeps_a_query_s_own_block_alone() -> None:
    for candidate in candidates():
        for rule in set(candidate.layers(512)) - {"dense"}:
            kinds = layer(rule, 512, candidate.unit(512)).kinds(512)
            assert (np.tril(kinds, -1) != 0).any(1)[1:].all(), (candidate.name, rule)


@pytest.mark.parametrize("num_layers", [2, 6])
def test_a_file_says_what_the_point_keeps_for_any_depth(num_layers: int) -> None:
    for candidate in candidates():
        pattern = parse_pattern(candidate.file(8192, num_layers, "zigzag", {"gap": 0.1}))
        pattern.check(num_layers, 8, 4)
        assert pattern.block == candidate.unit(8192)
        for number, rule in enumerate(candidate.layers(8192, num_layers)):
            assert pattern.of_layer(number).rules == parse_pattern(rule).groups[0].rules
        dense = [rule == "dense" for rule in candidate.layers(8192, num_layers)]
        assert dense == [False] * (num_layers - 1) + [candidate.mix == "last dense"]


def test_a_value_that_the_space_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=0\.3: the space has 0\.12, 0\.2, 0\.35"):
        Candidate.of({"family": "near", "keep": 0.3, "num_blocks": 32, "mix": "all"})
    with pytest.raises(ValueError, match="1000 tokens: take a multiple of 64"):
        next(candidates()).text(1000)


def test_for_gpus_only_patterns_of_whole_blocks_are_proposed() -> None:
    options = argparse.Namespace(for_gpus=True, pattern_len=8192, pattern_layers=4)
    kept = asked_for(options, Climb())
    assert {candidate.family for candidate in kept} == set(AXES["family"]) - {"window"}
    assert {candidate.num_blocks for candidate in kept} == set(AXES["num_blocks"])
    for candidate in kept:
        pattern = parse_pattern(candidate.file(8192, 4, "zigzag", {}))
        for name in LAYOUTS:
            check_layer_blocks(pattern, make_layout(name, 8192, 8))
    options.pattern_len = 2048
    with pytest.raises(ValueError, match=r"--for-gpus: GPUs refuse every pattern at --pattern-len 2048"):
        asked_for(options, Climb())
    options.for_gpus = False
    assert asked_for(options, Climb()) == list(candidates())


def test_bytes_and_work_of_a_layout_are_counted_against_the_dense_ring() -> None:
    zigzag, contiguous = (make_layout(name, 512, 4) for name in ("zigzag", "contiguous"))
    assert placed(Family("dense", "dense", 16), zigzag) == pytest.approx((1, 1))
    # Contiguous, the last of four ranks has 7 of 16 parts of the triangle.
    assert placed(Family("dense", "dense", 16), contiguous)[1] == pytest.approx(7 / 4, abs=0.01)
    window = Family("near", "bigbird:2,0,0,unit=16", 16)
    assert placed(window, contiguous)[0] < placed(window, zigzag)[0] < 0.2


def test_a_plan_rejects_what_cannot_flow_through_the_depth() -> None:
    climb, found = Climb(cost_len=512), {}
    for name in ("near/0.2/64/all", "near/0.2/64/last dense"):
        candidate = next(c for c in candidates() if c.name == name)
        rules = {rule: rule_costs(rule, candidate.unit(512), climb) for rule in candidate.layers(512)}
        found[name] = planned(candidate, climb, rules)["rejected"]
    assert found["near/0.2/64/all"].startswith("reach 0.3")
    assert found["near/0.2/64/last dense"] == ""


# ------------------------------------------------------------ the sampler and the replay


def made_up() -> dict[str, Any]:
    """A table in which more density costs more and helps, and the proxy nearly knows; a third is rejected."""
    base: dict[str, Any] = {"climb": {"cost_len": 512}, "short": 2.0, "long": 1.0, "plans": {}, "proxies": {}}
    base["rules"] = {"dense": {"ratio": 1.0, "work": {"zigzag": 1.0, "contiguous": 1.9}}}
    losses = {}
    for number, candidate in enumerate(candidates()):
        helps = 0.04 * list(AXES["family"]).index(candidate.family)
        for rule in candidate.layers(512):
            ratio = candidate.keep * (1.2 - helps)
            base["rules"].setdefault(rule, {"ratio": ratio, "work": {"zigzag": 1.2, "contiguous": 1.1}})
        density = candidate.keep + 0.3 * (candidate.mix == "last dense")
        gap = 0.3 - 0.3 * density - helps * 0.2 + 0.05 * (number * 7 % 5)
        base["plans"][candidate.name] = {
            "density": density,
            "reach": min(1.0, 2 * density),
            "rejected": "reach" if number % 3 == 0 else "",
            "bytes": {"zigzag": density, "contiguous": density * (0.5 + helps)},
        }
        base["proxies"][candidate.name] = {"mass": 0.4 + density / 2 + helps, "error": 0.5 - helps}
        losses[candidate.name] = [2.0 + gap + 0.1, 1.0 + gap]
    return {"about": "made up", "base": base, "losses": losses}


def test_the_sampler_repeats_itself_and_never_asks_twice_or_for_what_the_plan_rejects() -> None:
    grid = Grid(made_up())
    asked, ended = searched(ProxySampler(cheap_of(grid.base), 3), grid, 10)
    assert (asked, ended) == searched(ProxySampler(cheap_of(grid.base), 3), grid, 10)
    assert len(set(asked)) == 10
    assert not any(grid.base["plans"][name]["rejected"] for name in asked)
    assert grid.share(grid.names) == pytest.approx(1)


def test_the_samplers_beside_it_are_charged_for_admitted_points_only_and_differ() -> None:
    grid = Grid(made_up())
    found = [
        searched(sampler, grid, 20)
        for sampler in (optuna.samplers.RandomSampler(seed=0), optuna.samplers.TPESampler(seed=0, n_startup_trials=3))
    ]
    for asked, ended in found:
        assert len(set(asked)) == 20
        assert set(asked) <= set(grid.names)
        assert set(ended) < set(asked), "nobody was stopped early"
    assert found[0][0] != found[1][0]


def test_points_that_are_not_to_be_proposed_are_not() -> None:
    table = made_up()
    chosen = [candidate for candidate in candidates() if candidate.family == "longnet"]
    asked = searched(ProxySampler(cheap_of(table["base"], chosen), 0), Grid(table), 8)[0]
    assert {name.split("/")[0] for name in asked} == {"longnet"}


def test_a_short_gap_counts_with_what_longer_training_changed_elsewhere() -> None:
    assert corrected({"a": 0.3, "b": 0.5, "c": 0.1}, {"a": 0.1, "b": 0.2}) == pytest.approx(
        {"a": 0.1, "b": 0.2, "c": 0.1 - 0.25}
    )
    assert corrected({"a": 0.3}, {}) == {}


def test_the_sampler_hears_how_long_a_gap_was_trained_for() -> None:
    study = optuna.create_study(directions=["minimize"] * 3)
    axes: dict[str, Any] = {axis: optuna.distributions.CategoricalDistribution(of) for axis, of in AXES.items()}
    chosen = list(candidates())[:3]
    gaps = ({SHORT: 0.4, LONG: 0.1}, {SHORT: 0.5, LONG: None}, {SHORT: None, LONG: None})
    for candidate, gap in zip(chosen, gaps, strict=True):
        params = {axis: getattr(candidate, axis) for axis in AXES}
        value = next((gap[key] for key in (LONG, SHORT) if gap[key] is not None), REJECTED_GAP)
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=axes, values=[value, 1, 1], user_attrs=dict(gap))
        )
    asked, found = told(study, -1)
    assert asked == [candidate.name for candidate in chosen]
    assert found == pytest.approx(dict(zip(asked, (0.1, 0.5 - 0.3, REJECTED_GAP), strict=True)))


def test_a_diverged_point_does_not_spoil_what_is_predicted_for_others() -> None:
    cheap = cheap_of(made_up()["base"])
    gaps = {name: 0.1 + 0.01 * number for number, name in enumerate(cheap.names[:5])}
    with_it = ProxySampler(cheap, 1).choose([*gaps, cheap.names[9]], {**gaps, cheap.names[9]: REJECTED_GAP})
    assert with_it in cheap.names
    assert with_it not in {*gaps, cheap.names[9]}


# ------------------------------------------------------------ trials


def test_a_training_that_diverged_is_a_rejection() -> None:
    assert judged(0.25, LONG) == {"gap": 0.25, LONG: 0.25}
    for gap in (math.nan, math.inf):
        found = judged(gap, LONG)
        assert (found["gap"], found[LONG]) == (REJECTED_GAP, None)
        assert found["rejected"].startswith("diverged")


def test_the_handiest_layout_has_the_fewest_bytes_of_those_that_are_fast() -> None:
    assert handiest({"zigzag": (1.0, 0.5), "contiguous": (1.04, 0.1)}) == "contiguous"
    assert handiest({"zigzag": (1.0, 0.5), "contiguous": (1.2, 0.1)}) == "zigzag"


def told_at(log: Path, scheduler: NonDominatedRank, name: str, fidelity: int, gap: float) -> str:
    found = {"gap": gap, "places": {"zigzag": [gap, gap], "contiguous": [gap + 0.1, gap]}, "rejected": ""}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "fidelity": fidelity, "found": found}) + "\n")
    result = {"gap": gap, "rejected": "", "name": name, "fidelity": fidelity}  # Tune flattens what lies deeper
    answer: str = scheduler.on_trial_result(None, SimpleNamespace(trial_id=name), result)
    return answer


def test_a_trial_behind_two_fronts_is_stopped_and_only_after_a_training_fidelity(tmp_path: Path) -> None:
    log = tmp_path / "trials.jsonl"
    scheduler = NonDominatedRank(log, keep=2, least=3)
    assert [told_at(log, scheduler, name, 1, gap) for gap, name in enumerate("abcd")] == ["CONTINUE"] * 4
    assert [told_at(log, scheduler, name, 2, gap) for gap, name in enumerate("abc")] == ["CONTINUE", "CONTINUE", "STOP"]
    assert told_at(log, scheduler, "d", 2, 0.5) == "CONTINUE"
    assert told_at(log, scheduler, "e", 3, 9.0) == "CONTINUE"


def test_a_search_that_goes_on_compares_with_what_was_measured_before(tmp_path: Path) -> None:
    log = tmp_path / "trials.jsonl"
    for gap, name in enumerate("ab"):
        told_at(log, NonDominatedRank(log, keep=2, least=3), name, 2, gap)
    with log.open("a", encoding="utf-8") as file:
        file.write('{"name": "cut sho')
    assert len(read_log(log)) == 2
    log.write_text("".join(json.dumps(line) + "\n" for line in read_log(log)), encoding="utf-8")
    assert told_at(log, NonDominatedRank(log, keep=2, least=3), "c", 2, 2) == "STOP"


def test_a_pattern_is_behind_only_if_it_is_in_every_layout() -> None:
    seen = {"a": [(0.0, 0.0)], "b": [(1.0, 1.0)], "c": [(2.0, 2.0), (3.0, -1.0)], "d": [(2.0, 2.0), (3.0, 3.0)]}
    assert not is_behind("c", seen, keep=2, least=4)
    assert is_behind("d", seen, keep=2, least=4)
    assert not is_behind("d", seen, keep=2, least=5)


def test_a_search_that_goes_on_refuses_options_that_it_would_ignore(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path / "s", trials=7, concurrent=2, seed=0, for_gpus=False, pattern_len=8192)
    store_settings(options)
    store_settings(options)
    options.pattern_len = 4096  # only where files are for, unless GPUs decide what is asked
    store_settings(options)
    options.trials, options.seed = 9, 1
    with pytest.raises(ValueError, match=r"was begun with --trials 7, not 9, --seed 0, not 1; give the same"):
        store_settings(options)


def test_a_folder_where_others_could_leave_code_is_not_searched_in(tmp_path: Path) -> None:
    """Ray Tune unpickles what lies in it."""
    options = argparse.Namespace(out=tmp_path / "s", trials=7, concurrent=2, seed=0, for_gpus=False, pattern_len=8192)
    store_settings(options)
    assert [(tmp_path / "s" / name).stat().st_mode & 0o777 for name in (".", "search")] == [0o755, 0o700]
    state = tmp_path / "s" / "search" / "state.pkl"
    state.touch(mode=0o600)
    for folder, mode in (("s", 0o777), ("s", 0o775), ("s/search", 0o755), ("s/search", 0o775)):
        (tmp_path / folder).chmod(mode)
        store_settings(options)  # an earlier version made them so, or a umask of 002
        assert [(tmp_path / "s" / name).stat().st_mode & 0o777 for name in (".", "search")] == [0o755, 0o700]
        state.chmod(0o664)
        (tmp_path / folder).chmod(mode)
        if folder != "s":
            for _ in range(2):
                with pytest.raises(ValueError, match=r"another user's, or open to others.*chmod 700"):
                    store_settings(options)
            (tmp_path / folder).chmod(0o700)
        store_settings(options)
        state.chmod(0o600)
    if os.geteuid() == 0:
        (tmp_path / "s").chmod(0o775)
        os.chown(tmp_path / "s" / "options.json", 65534, 65534)
        with pytest.raises(ValueError, match=r"another user's, or open to others.*chmod 755"):
            store_settings(options)
        (tmp_path / "s").chmod(0o755)
    (tmp_path / "s" / "search").rename(tmp_path / "theirs")
    (tmp_path / "s" / "search").symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="is a link"):
        store_settings(options)


# ------------------------------------------------------------ the measured grid


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid(json.loads(TABLE.read_text(encoding="utf-8")))


def test_the_measured_grid_is_the_space_that_is_searched(grid: Grid) -> None:
    assert 60 <= len(grid.names) <= 68
    assert set(grid.base["plans"]) == {candidate.name for candidate in candidates()}
    for candidate in candidates():
        assert set(candidate.layers(grid.base["climb"]["cost_len"])) <= set(grid.base["rules"])
    assert Climb(**grid.base["climb"]) == Climb()


@pytest.mark.slow
def test_an_eighth_of_the_measured_grid_gives_its_front(grid: Grid) -> None:
    """Five seeds; no single point is nearly the front, and random choice shows how hard that is."""
    shares = replay(grid, range(5))
    assert min(shares["this search"]) >= 0.95
    assert grid.num_on_front >= SHARE
    assert best_alone(grid)[1] < 0.8
    assert sum(shares["random"]) / 5 < 0.9
    assert shares["random"] != shares["TPE"]
