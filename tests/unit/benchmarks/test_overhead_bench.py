"""What the overhead bench can fail on, from figures: the bound where there is one, and the losses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from benchmarks.recovery import bench_overhead as bench

FIGURES: dict[str, Any] = {
    "model": "small model",
    "blocks": 3,
    "steps_per_block": 4,
    "ratio": 1.01,
    "worst_loss_error": 0.0,
    "median_product_s": 1.01,
    "mean_product_s": 1.01,
    "median_plain_s": 1.0,
    "mean_plain_s": 1.0,
}


def test_a_bound_above_the_limit_and_other_losses_are_missed() -> None:
    text, missed = bench.report({**FIGURES, "upper_bound": 1.04}, 0.05)
    assert "upper bound +4.00 % (limit 5 %)" in text
    assert missed == []
    _, missed = bench.report({**FIGURES, "upper_bound": 1.06, "worst_loss_error": 0.1}, 0.05)
    assert [line.split(" ")[1] for line in missed] == ["upper", "losses"]


def test_one_after_the_other_tells_no_bound_and_holds_the_losses_alone() -> None:
    text, missed = bench.report({**FIGURES, "ratio": 1.5, "upper_bound": None}, 0.05)
    assert "one after the other" in text
    assert "limit" not in text
    assert missed == []
    _, missed = bench.report({**FIGURES, "upper_bound": None, "worst_loss_error": 0.1}, 0.05)
    assert len(missed) == 1


def test_what_copies_cost_is_the_ratio_of_both_overheads_and_its_bound_is_held() -> None:
    def figures(product_s: float) -> dict[str, Any]:
        return {"product_s": [[1.0, product_s], [product_s, 1.0]], "plain_s": [[0.5, 0.5], [0.5, 0.5]]}

    cost = bench.cost_of_copies(figures(1.0), figures(1.04))
    assert [cost[name] for name in ("overhead_without", "overhead_with", "cost")] == pytest.approx([2.0, 2.04, 1.02])
    assert cost["cost_upper_bound"] == pytest.approx(1.02)
    asked = Namespace(model="small", copies="1", copy_every=2, blocks=3, block_steps=2)
    assert bench.report_copies(cost, 0.05, asked, [])[1] == []
    done = {"said": "copies of step 1", "bytes": 2_000_000_000, "total_s": 3.0, "blocked_s": 0.004}
    text, missed = bench.report_copies(cost, 0.01, asked, [done, {"said": "no copies of step 2: the last ones"}])
    assert "copies cost +2.00 %" in text
    assert "1 snapshots of 2.00 GB copied, median 3.00 s, longest 3.00 s; training waited 4.0 ms" in text
    assert "1 times a rank left a round out" in text
    assert missed == ["the upper bound is +2.00 %, more than 1 %"]


@pytest.mark.parametrize("options", [["--dp", "2"], ["--model", "small", "--cp", "2"], ["--apart", "--block-steps=2"]])
def test_options_that_would_mean_nothing_are_refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_overhead.py", *options])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
