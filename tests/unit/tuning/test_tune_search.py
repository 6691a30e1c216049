"""The search: its space makes patterns, its sampler asks well, bad trials stop, the front is told."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from matplotlib.text import Text

from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import StepConfig
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.identity import CONTENTS, VERSION, Identity
from elastic_ring.tuning.report import (
    Prediction,
    dominates,
    draw,
    front,
    front_results,
    hypervolume,
    pattern_results,
    patterns_in_doubt,
    ranks,
    recommend,
    report,
    spread,
    training_terms,
)
from elastic_ring.tuning.sampler import LOSSES, ProxySampler, read_study
from elastic_ring.tuning.search import NonDominatedRank, run_name_of, store_settings
from elastic_ring.tuning.space import DENSE, DENSITIES, FAMILIES, OFF, PatternCost, patterns, read_space

# ------------------------------------------------------------ the space


@pytest.mark.parametrize(("context", "whole_blocks"), [(512, False), (32_768, True)])
def test_every_point_is_a_pattern_of_the_density_that_it_names(context: int, whole_blocks: bool) -> None:
    for family, density in itertools.product(FAMILIES, DENSITIES):
        space = {"family": family, "density": density, "layers": "{rule}"}
        try:
            every = patterns(space, StepConfig(context_tokens=context), 4, whole_blocks=whole_blocks)
        except ValueError:
            continue
        for text in every:
            kept = LayerPatterns(parse_pattern(text).groups, context // 64).density(context, 4, 4, 4)
            assert kept == pytest.approx(density, rel=OFF + 0.01), text
            assert not whole_blocks or "unit=" not in text or int(text.rpartition("=")[2]) % 128 == 0
    assert len(patterns({}, StepConfig(context_tokens=context), 4, whole_blocks=whole_blocks)) > 60


def test_the_users_axes_fill_the_users_patterns_and_layers_follow_them(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        'pattern = ["sinks:64+window:{w}", "topk:8;dense@0"]\nw = [512, 1024]\n'
        'layers = ["{rule}", "{rule};dense@{last}"]\n'
    )
    step = StepConfig(context_tokens=8192)
    assert patterns(read_space(tmp_path / "space.toml"), step, 6, whole_blocks=True) == [
        "sinks:64+window:512",
        "sinks:64+window:512;dense@5",
        "sinks:64+window:1024",
        "sinks:64+window:1024;dense@5",
        "topk:8;dense@0",
    ]
    [text] = patterns({"family": "near", "density": 0.2, "block": 128}, step, 6, whole_blocks=False)
    assert text.startswith("bigbird:")


@pytest.mark.parametrize(
    ("space", "why"),
    [
        ({"pattern": "window:{w}"}, "names w, which is no axis"),
        ({"pattern": "window:64", "w": [1]}, "no pattern of the space names {w}"),
        ({"pattern": "windw:64"}, "is no family"),
        ({"family": "windw"}, "must be one of window, near"),
        ({"pattern": "window:64", "layers": "{rule};dense@{end}"}, "known are rule, last, half"),
        ({"family": "near", "density": 0.001}, "has no pattern at 512 tokens"),
    ],
)
def test_a_space_that_cannot_be_meant_is_refused(space: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        patterns(space, StepConfig(context_tokens=512), 4, whole_blocks=False)


# ------------------------------------------------------------ the sampler


def costs(num: int = 30) -> dict[str, PatternCost]:
    """Patterns of rising density; more density has more bytes."""
    density = np.linspace(0.1, 1.0, num).tolist()
    return {f"p{i}": PatternCost(d, round(1e6 * d**2), (d, float(i % 3))) for i, d in enumerate(density)}


def study_of(curves: dict[str, list[float]]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["minimize"] * 3)
    space = {"pattern": optuna.distributions.CategoricalDistribution(list(curves))}
    for name, losses in curves.items():
        study.add_trial(
            optuna.trial.create_trial(
                params={"pattern": name}, distributions=space, values=[9.0] * 3, user_attrs={LOSSES: losses}
            )
        )
    return study


def test_the_sampler_repeats_itself_and_never_asks_twice() -> None:
    def proposed() -> list[str]:
        sampler, seen, losses = ProxySampler(costs(), seed=3), list[str](), dict[str, float]()
        for _ in range(12):
            seen.append(sampler.choose(seen, losses))
            losses[seen[-1]] = 3.0 - float(seen[-1][1:]) / 30
        return seen

    first = proposed()
    assert first == proposed()
    assert len(set(first)) == 12
    places = sorted(int(name[1:]) for name in first)
    assert places[0] < 5, "it looks at one end of the front only"
    assert places[-1] > 24, "it looks at one end of the front only"


def test_a_curve_that_was_cut_counts_with_what_the_others_gained_later() -> None:
    curves = {"whole": [5.0, 4.0, 3.0], "another": [6.0, 5.0, 5.0], "cut": [7.0], "rejected": []}
    proposed, losses = read_study(study_of(curves), number=99)
    assert proposed == list(curves)
    assert losses == {"whole": 3.0, "another": 5.0, "cut": 7.0 - (2.0 + 1.0) / 2}
    assert read_study(optuna.create_study(), number=99) == ([], {})


# ------------------------------------------------------------ stopping


def decide(results: dict[str, dict[str, Any]], name: str, losses: list[float], **more: Any) -> str:
    plain = {"step_s": 1.0, "bytes": 1, "rejected": "", "done": False}
    results[name] = {"pattern": name, "losses": losses, **plain, **more}
    trials = [SimpleNamespace(trial_id=each, last_result=latest) for each, latest in results.items()]
    controller = SimpleNamespace(get_trials=lambda: trials)
    trial: Any = SimpleNamespace(trial_id=name)
    result: Any = results[name]
    return NonDominatedRank(keep=2, least=3).on_trial_result(controller, trial, result)


def test_a_trial_behind_two_fronts_of_those_as_far_is_stopped_and_dense_never() -> None:
    results: dict[str, dict[str, Any]] = {}
    assert [decide(results, name, [loss]) for loss, name in enumerate("abc")] == ["CONTINUE", "CONTINUE", "STOP"]
    assert decide(results, "d", [0.5]) == "CONTINUE"
    assert decide(results, "e", [9.0], step_s=0.1) == "CONTINUE", "it is the fastest"
    assert decide(results, "f", [0.0, 9.0]) == "CONTINUE", "nobody else has come so far"
    assert decide(results, DENSE, [9.0]) == "CONTINUE"
    assert decide(results, "g", [], rejected="it does not fit") == "CONTINUE"


# ------------------------------------------------------------ fronts


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


# ------------------------------------------------------------ the report


def result(pattern: str, loss: float, step_s: float, seed: int = 0, **more: Any) -> Any:
    plain = {"bytes": round(1e6 * step_s), "density": step_s, "losses": [9.0, loss], "rejected": ""}
    return {"pattern": pattern, "loss": loss, "step_s": step_s, "seed": seed, **plain, **more}


TRIALS = [
    result(DENSE, 3.0, 1.0),
    result(DENSE, 3.1, 1.02, seed=1),
    result("window:512", 3.05, 0.5),
    result("window:256", 3.3, 0.3),
    result("window:128", 3.0, 0.2, losses=[9.0]),
    result("topk:4", 1e9, 1e9, losses=[], rejected="it does not fit"),
    result("strided:4", 3.4, 0.4),
]


def test_neighbours_within_the_spread_of_seeds_are_in_doubt_and_a_second_seed_counts_against_its_own_dense() -> None:
    assert spread(TRIALS) == (pytest.approx(0.1), 1)
    results = pattern_results(TRIALS)
    assert [best.pattern for best in front_results(results)] == [DENSE, "window:512", "window:256"]
    assert patterns_in_doubt(results, 0.1) == ["window:512"], "dense has two seeds, and window:256 is worse for sure"
    line = "window:512 beside dense: 0.50 times its step, +0.0500 in loss"
    assert [recommend(results, nats)[1] for nats in (0.1, 0.01)] == [line] * 2, "dense alone is no advice"
    slower = [*TRIALS[:2], result("window:512", 2.98, 1.27, bytes=1), result("window:256", 3.3, 1.1, bytes=1)]
    kept, line = recommend(pattern_results(slower), 0.1)
    assert (kept.pattern, line[:30]) == (DENSE, "no pattern is faster than dens")
    better, line = recommend(pattern_results(slower), 0.01)
    assert (better.pattern, line[18:]) == ("window:512", "dense: 1.26 times its step, -0.0200 in loss")
    second = pattern_results([*TRIALS, result("window:512", 3.12, 0.5, seed=1)])
    assert next(each for each in second if each.pattern == "window:512").gap == pytest.approx((0.05 + 0.02) / 2)
    assert patterns_in_doubt(second, 0.1) == []
    with pytest.raises(ValueError, match="dense itself was not trained"):
        pattern_results(TRIALS[2:])


def test_the_table_names_what_pattern_takes_and_no_label_of_the_picture_covers_another(tmp_path: Path) -> None:
    trained = training_terms(StepConfig(steps=8), Mesh(1, 1), "cpu", {})
    text = report(TRIALS, tmp_path, "Some steps.", trained)
    names = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "--pattern" not in line]
    assert names == [one["pattern"] for one in json.loads((tmp_path / "front.json").read_text())["front"]]
    assert all(parse_pattern(name) for name in names)
    assert "5 of 6 patterns" not in text
    assert "4 of 6 patterns trained to the end, 3 on the front. Spread of seeds 0.1000 nats" in text
    close = [result(f"sinks:64+window:{512 + i};dense@0-3", 3.01 + i * 1e-6, 0.5 - i * 1e-6) for i in range(20)]
    best = front_results(pattern_results([*TRIALS[:2], *close]))
    assert len(best) == 21
    figure = draw(best, best, 0.1, tmp_path / "front.png")
    boxes = [Text.get_window_extent(label) for label in figure.axes[0].texts]  # without the lines to the points
    assert len(boxes) == 21
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_run_with_what_was_found_is_told_beside_the_search_and_where_the_two_differ(tmp_path: Path) -> None:
    contents = {"model": "M(width=32)", "data": "D 1", "optim.peak_lr": "0.1", "optim.total_steps": "8", "pattern": ""}
    same = training_terms(StepConfig(steps=8), Mesh(1, 1), "cpu", contents)
    report(TRIALS, tmp_path, "Some steps.", same)
    search = Prediction.read(tmp_path, parse_pattern("window:512"))
    line = search.compare(same, 0.51, 3.17)
    assert line.startswith("search: step predicted 0.5 s, seen 0.51 s (-2.0 %); loss predicted 3.1000, seen 3.1700 (")
    assert line.endswith("(+0.0700, within the spread of seeds, 0.1000)")
    assert "outside the spread" in search.compare(same, 0.5, 3.3)
    longer = search.compare({**same, "steps": 9}, 0.5, 3.3)
    assert "seen 0.5 s (+0.0 %)" in longer
    assert longer.endswith("loss predicted 3.1000, seen 3.3000; the search had steps 8, not 9")
    ring = search.compare({**same, "mesh": str(Mesh(1, 2))}, 0.4, None)
    assert ring == "search: step predicted 0.5 s, seen 0.4 s; the search had mesh dp=1 x cp=1, not dp=1 x cp=2"
    data = search.compare({**same, "data": "D 2", "optim.peak_lr": "0.2"}, 0.5, 3.1)
    assert data == (
        "search: step predicted 0.5 s, seen 0.5 s (+0.0 %); loss predicted 3.1000, seen 3.1000; the search had data "
        "D 1, not D 2, optim.peak_lr 0.1, not 0.2"
    )
    model = search.compare({**same, "model": "M(width=64)"}, 0.5, 3.1)
    assert model.endswith(
        "seen 0.5 s; loss predicted 3.1000, seen 3.1000; the search had model M(width=32), not M(width=64)"
    )
    assert Prediction.read(tmp_path, None).loss == pytest.approx(3.05), "dense"
    with pytest.raises(ValueError, match="has not trained this pattern to the end, but dense, window:512"):
        Prediction.read(tmp_path, parse_pattern("window:64"))
    with pytest.raises(ValueError, match="name the --out of a search"):
        Prediction.read(tmp_path / "none", None)


# ------------------------------------------------------------ the folder


def test_a_search_that_goes_on_refuses_options_that_it_would_ignore(tmp_path: Path) -> None:
    given, own = {"--trials": 7, "arguments": "--steps 3"}, Identity({"data": "D 1", VERSION: CONTENTS})
    store_settings(tmp_path / "s", given, own)
    store_settings(tmp_path / "s", given, own)
    with pytest.raises(ValueError, match=r"begun with other contents: data: D 1 there, D 2 here; give the same, or"):
        store_settings(tmp_path / "s", given, Identity({"data": "D 2", VERSION: CONTENTS}))
    with pytest.raises(
        ValueError, match=r"was begun with --trials 7, not 9; arguments --steps 3, not .*; give the same"
    ):
        store_settings(tmp_path / "s", {"--trials": 9, "arguments": "--steps 4"}, own)
    assert [run_name_of(Path(name)) for name in ("runs/my search", "...", "a" * 99)] == ["my-search", "found", "a" * 80]


def test_a_folder_where_others_could_leave_code_is_not_searched_in(tmp_path: Path) -> None:
    """Ray Tune unpickles what lies in it."""
    out, given = tmp_path / "s", {"--trials": 7}
    store_settings(out, given, Identity())
    assert [(out / name).stat().st_mode & 0o777 for name in (".", "search")] == [0o755, 0o700]
    state = out / "search" / "state.pkl"
    state.touch(mode=0o600)
    for folder, mode in (("s", 0o777), ("s", 0o775), ("s/search", 0o755), ("s/search", 0o775)):
        (tmp_path / folder).chmod(mode)
        store_settings(out, given, Identity())  # an earlier version made them so, or a umask of 002
        assert [(out / name).stat().st_mode & 0o777 for name in (".", "search")] == [0o755, 0o700]
        state.chmod(0o664)
        (tmp_path / folder).chmod(mode)
        if folder != "s":
            for _ in range(2):
                with pytest.raises(ValueError, match=r"another user's, or open to others.*chmod 700"):
                    store_settings(out, given, Identity())
            (tmp_path / folder).chmod(0o700)
        store_settings(out, given, Identity())
        state.chmod(0o600)
    if os.geteuid() == 0:
        out.chmod(0o775)
        os.chown(out / "options.json", 65534, 65534)
        with pytest.raises(ValueError, match=r"another user's, or open to others.*chmod 755"):
            store_settings(out, given, Identity())
        out.chmod(0o755)
    (out / "search").rename(tmp_path / "theirs")
    (out / "search").symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="is a link"):
        store_settings(out, given, Identity())
