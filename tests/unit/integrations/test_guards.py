"""The table of guards and doors: the page has it, and each of its cells is what a test or a refusal shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ring.cli.tune import parse_search
from elastic_ring.cli.zero3 import parse_zero3
from elastic_ring.train.guard_table import (
    ATTENDS,
    CORRUPTION,
    DOORS,
    GUARDS,
    HUGGING_FACE,
    MAX_SKIPPED,
    MEMORY,
    NON_FINITE,
    OWN_MODEL,
    RESUME,
    RING,
    SAMPLES,
    SETTINGS,
    SPIKES,
    STRAGGLERS,
    TOKENS,
    TUNER,
    ZERO3,
    cell,
    table,
)

ROOT = Path(__file__).resolve().parents[3]
STEP, ENGINE_FILE = "unit/train/test_transaction.py", "unit/integrations/test_zero3_engine.py"
SETTINGS_FILE, DETECTORS = "unit/integrations/test_zero3_settings.py", "ray/operate/test_detectors.py"
ENGINE = f"{ENGINE_FILE}::test_an_engine_begins_skips_and_checks_as_the_elastic_ring_does"
WHOLE_RUN = "ray/clusters/test_zero3.py::test_a_ring_of_two_trains_what_one_process_and_the_elastic_ring_train"
GOES_ON = "unit/state/test_checkpoint.py::test_training_goes_on_from_it_as_if_nothing_had_been"
OF_RING = {
    NON_FINITE: f"{STEP}::test_a_step_with_a_non_finite_gradient_anywhere_changes_nothing_but_the_counters",
    MAX_SKIPPED: f"{STEP}::test_more_skipped_steps_in_a_row_than_allowed_raise_on_every_rank_after_they_are_counted",
    SPIKES: f"{DETECTORS}::test_a_poisoned_batch_is_skipped_alike_on_all_ranks_and_told",
    STRAGGLERS: f"{DETECTORS}::test_a_slow_worker_is_found_told_and_replaced_by_a_spare_at_a_boundary",
    CORRUPTION: "unit/train/test_corruption.py::test_three_replicas_name_the_wrong_one_at_once",
    SAMPLES: f"{STEP}::test_every_mesh_uses_the_same_samples",
    TOKENS: f"{SETTINGS_FILE}::test_the_tokens_of_a_ray_dataset_are_compared_with_the_models_rows",
    ATTENDS: "unit/train/test_check.py::test_a_model_that_attends_to_its_own_slice_only_is_refused",
    MEMORY: "unit/train/test_memory_relief.py::"
    "test_a_relief_that_is_taken_between_two_steps_saves_memory_and_changes_no_bit",
}
REJECTED = "unit/tuning/test_tune_trial.py::test_what_cannot_be_trained_is_rejected_and_the_next_one_trains"
SHOWN = {
    **{(RING, guard): test for guard, test in OF_RING.items()},
    # Workers know no kind of model: a contract of imports keeps `integrations` out of `train` and `runtime`.
    **{(door, guard): test for door in (HUGGING_FACE, OWN_MODEL, RESUME) for guard, test in OF_RING.items()},
    (ZERO3, NON_FINITE): ENGINE,
    (ZERO3, MAX_SKIPPED): WHOLE_RUN,
    (ZERO3, SPIKES): ENGINE,
    (ZERO3, ATTENDS): ENGINE,
    (ZERO3, SAMPLES): WHOLE_RUN,
    (ZERO3, TOKENS): OF_RING[TOKENS],
    (HUGGING_FACE, TOKENS): "unit/integrations/test_export.py::"
    "test_a_corpus_that_was_prepared_with_another_tokenizer_is_refused",
    (HUGGING_FACE, ATTENDS): "unit/integrations/test_transformers.py::test_what_a_ring_cannot_do_is_refused_by_name",
    (RESUME, MAX_SKIPPED): GOES_ON,
    (RESUME, ATTENDS): "ray/operate/test_refused.py::test_a_finished_name_says_so_and_another_config_is_refused",
    (TUNER, NON_FINITE): REJECTED,
    (TUNER, MAX_SKIPPED): REJECTED,
    (TUNER, TOKENS): OF_RING[TOKENS],
}


OTHER = {
    **{name: "off" for name in ("loss_spike", "straggler", "corruption", "memory_pressure")},
    **{name: "7" for name in ("straggler_factor", "straggler_window_s", "corruption_every_steps")},
    **{name: "0.5" for name in ("memory_limit", "memory_pressure_share")},
    **{"loss_spike_actions": "clip", "memory_relax_steps": "7"},
}
"""Values that are not the usual ones."""


def test_a_search_refuses_what_it_would_leave_out_also_from_a_file(tmp_path: Path) -> None:
    for flags, told in (
        (["--stop-early", "3"], "stop_early='3'"),
        (["--keep-best", "val_loss"], "keep_best="),
        (["--search", "found"], "search="),
        (["--plan"], "plan=True"),
        (["--checkpoint-every-steps", "5"], "run.checkpoint_config="),
        (["--run.faults", "kill@step=2"], "run.faults="),
    ):
        with pytest.raises(ValueError, match=told):
            parse_search(["--out=x", *flags])
    (tmp_path / "some.toml").write_text('keep_best = "val_loss"\n')
    with pytest.raises(ValueError, match="keep_best="):
        parse_search(["--out=x", "--config", str(tmp_path / "some.toml")])
    (tmp_path / "some.toml").write_text('[run]\ncorruption = "off"\n')
    with pytest.raises(ValueError, match=r"--run\.corruption=off: a search has no such guard"):
        parse_search(["--out=x", "--config", str(tmp_path / "some.toml")])
    assert parse_search(["--out=x", "--run-name", "corruption"])[2].run.name == "corruption"


def test_the_page_has_the_table_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "zero3.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("door", "guard"), [(door, guard) for door in DOORS for guard in GUARDS])
def test_each_cell_has_a_test_that_shows_it_or_is_refused_with_its_reason(door: str, guard: str) -> None:
    found = cell(door, guard)
    if not found.why_not:
        path, _, name = SHOWN[door, guard].partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")
        return
    assert (door, guard) not in SHOWN
    for setting in SETTINGS[guard]:
        flag = f"--run.{setting.replace('_', '-')}"
        if door == ZERO3:
            with pytest.raises(ValueError, match=f"{flag}: .* this door has no such guard: ") as refused:
                parse_zero3([f"{flag}=1"])
            told = str(refused.value)
        else:
            assert door == TUNER, "the other doors are the elastic ring's"
            if setting not in OTHER:  # no setting of a ring
                continue
            with pytest.raises(ValueError, match=f"{flag}=.*: a search has no such guard: ") as refused:
                parse_search(["--out=x", f"{flag}={OTHER[setting]}"])
            told = str(refused.value)
        assert found.why_not in told
