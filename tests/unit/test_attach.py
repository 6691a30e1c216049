"""What a submission that is refused is told."""

from __future__ import annotations

import pytest

from elastic_ring import RunConfig
from elastic_ring.runtime.attach import differences, refuse_other_settings

RECORDED = {
    "digest": "a", "scaling": {"dp": 2, "cp": 2}, "step": {"steps": 3, "seed": 0}, "run": {"name": "x", "faults": []},
}  # fmt: skip


def test_what_differs_from_the_recorded_settings_is_named() -> None:
    run = {"name": "y", "faults": ["exit@step=1"]}
    wanted = {**RECORDED, "digest": "b", "step": {"steps": 4, "seed": 0}, "run": run}
    told = differences(RECORDED, wanted)
    assert told == ", in run.faults: [] there, ['exit@step=1'] here; step.steps: 3 there, 4 here"


def test_a_pattern_that_only_one_of_them_has_is_named_and_long_values_are_cut() -> None:
    told = differences({**RECORDED, "pattern": "w" * 100}, RECORDED)
    assert told == f", in pattern: {'w' * 60}… there, None here"


def test_only_some_of_many_are_told() -> None:
    wanted = {**RECORDED, "scaling": {"dp": 3, "cp": 4}, "step": {"steps": 4, "seed": 1}}
    assert differences(RECORDED, wanted).endswith("step.seed: 0 there, 1 here and 1 more")


def test_code_is_named_where_no_setting_differs() -> None:
    assert "model, loss" in differences(RECORDED, {**RECORDED, "digest": "b"})
    with pytest.raises(ValueError, match=r"'x' is taken by a run with other settings \(here, in step\.steps\)"):
        refuse_other_settings(RunConfig("x", "r"), "a", "b", "here", ", in step.steps")
