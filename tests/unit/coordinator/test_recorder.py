"""The run's records: only what the members that committed a step say of it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.detectors import FIRST_INTERVAL_S
from elastic_ring.control.facts import Fact, line_of
from elastic_ring.control.messages import Build, Checkpoint, Tick, Vote
from elastic_ring.control.state import State
from elastic_ring.mesh import Mesh
from elastic_ring.monitor import json_files, plot
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import StepMetrics, Validation, read_metrics
from elastic_ring.monitor.metrics_log import StepTable
from elastic_ring.monitor.page import page_data
from elastic_ring.monitor.report import render_status
from elastic_ring.monitor.result import Result
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles, samples_digest, write_end
from elastic_ring.runtime.driver.attach import end_on_record, other_writer
from elastic_ring.runtime.notices import Compiled, NotRepeatable, StepRecord, Validated
from elastic_ring.train.vote import Outcome, Tally, remark_on
from tests.sim.simulator.options import simulated
from tests.unit.coordinator.builders import opened_recorder, training


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    return opened_recorder(tmp_path)


def files(recorder: RunRecorder) -> RunFiles:
    return RunFiles(RunConfig("records", run_dir=str(recorder.metrics.path.parent)), recorder)


def record(
    step: int, membership_id: tuple[int, int], loss: float = 1.0, *, skipped: bool = False, **changes: Any
) -> StepRecord:
    generation = membership_id[1]
    metrics = StepMetrics(step, loss, 1.0, 0.1, 8, 80.0, 0.1, skipped, generation, Mesh(2, 2), 4, samples="ab")
    outcome = Outcome(Vote(step, Tally().numbers(), membership_id))
    return StepRecord(metrics, outcome, **{"checkpoint_interval_s": FIRST_INTERVAL_S, **changes})


def test_a_late_record_of_a_step_that_is_to_run_again_is_not_published(recorder):
    recorder.steps.begun(0, (1, 1))
    assert [new.metrics.step for new in recorder.publish([record(0, (1, 1)), record(1, (1, 1))])] == [0, 1]
    recorder.steps.begun(2, (1, 3))  # nobody held the result of step 2
    assert recorder.publish([record(2, (1, 1), loss=9.0)]) == []
    assert [new.metrics.loss for new in recorder.publish([record(2, (1, 3), loss=2.0)])] == [2.0]
    assert recorder.metrics.last_step == 2


def test_a_record_that_came_too_early_and_was_given_up_meanwhile_is_not_published(recorder):
    recorder.steps.begun(0, (1, 1))
    assert recorder.publish([record(1, (1, 1), loss=9.0)]) == [], "step 0 is on its way still"
    recorder.steps.begun(1, (1, 3))
    assert [new.metrics.step for new in recorder.publish([record(0, (1, 1))])] == [0]
    assert [new.metrics.loss for new in recorder.publish([record(1, (1, 3), loss=2.0)])] == [2.0]


def test_a_step_that_was_rolled_forward_keeps_the_record_of_those_that_voted(recorder):
    recorder.steps.begun(0, (1, 1))
    recorder.publish([record(0, (1, 1))])
    recorder.steps.begun(2, (1, 3))  # step 1's vote travelled
    assert [new.metrics.step for new in recorder.publish([record(1, (1, 1)), record(2, (1, 3))])] == [1, 2]


def test_time_in_which_the_host_stood_still_is_no_training(recorder):
    recorder.steps.begun(0, (1, 1))
    recorder.publish([record(0, (1, 1), frozen_s=60.0), record(1, (1, 1))])
    assert recorder.goodput.lost.lost_s["frozen"] == 60.0
    assert recorder.recoveries.lines == [
        "step 0: for 60 s nothing ran on the host of rank 0 (paused, suspended or stopped); that is no time of the step"
    ]
    parts = recorder.time_s(100.0)
    assert (parts["waiting"], round(parts["steps"], 3), round(parts["other"], 3)) == (60.0, 0.2, 39.8)


def test_a_coordinator_that_starts_anew_knows_who_began_where(tmp_path):
    again = opened_recorder(tmp_path)
    again.recall(Tick("t"), [Build("t", "w-0", 1, 1, Mesh(2, 2), (), 0, None, (), fresh=True)])
    assert not again.steps.counts(0, (1, 0))
    assert again.steps.counts(0, (1, 1))


def test_a_coordinator_that_starts_anew_undoes_no_step_of_a_run_that_began_at_a_checkpoint(tmp_path):
    start = Checkpoint(10, "a folder", Mesh(2, 2))
    build = Build("t", "w-0", 1, 1, Mesh(2, 2), (), 10, None, (), fresh=True, restore=start)
    for num_steps in (4, 0):
        recorder = opened_recorder(tmp_path)
        recorder.recall(Tick("t"), [build])
        recorder.metrics.begin_at(10)
        recorder.publish([record(step, (1, 1)) for step in range(10, 10 + num_steps)])
        assert (recorder.metrics.last_step, recorder.recoveries.lines) == (13, [])


def test_after_going_back_every_reader_has_the_branch_that_counts(recorder, tmp_path, monkeypatch):
    """Steps 2 to 5 come again with other losses; a validation of the undone branch arrives late."""

    def train(first: int, losses: list[float], membership_id: tuple[int, int]) -> None:
        for step, loss in enumerate(losses, first):
            said = [Validated(step, {"val_loss": loss + 10}, 0.1, membership_id)] if step % 2 else []
            recorder.publish([*said, record(step, membership_id, loss, skipped=loss > 8)])

    start = Checkpoint(2, "a folder", Mesh(2, 2))
    recorder.steps.begun(0, (1, 1))
    train(0, [7.0, 6.0, 5.0, 9.0, 3.0, 2.0], (1, 1))
    recorder.begin_build([Build("t", "w-0", 1, 3, Mesh(2, 2), (), 2, None, (), fresh=True, restore=start)])
    recorder.publish([Validated(5, {"val_loss": 99.0}, 0.1, (1, 1))])
    newest = recorder.metrics.newest
    assert (newest.step.loss, newest.validation, newest.num_skipped) == (6.0, Validation(1, {"val_loss": 16.0}), 0)
    train(2, [5.5, 4.5, 3.5], (1, 3))

    branch, validations = [7.0, 6.0, 5.5, 4.5, 3.5], [(1, 16.0), (3, 14.5)]
    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines] == branch
    assert [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss")] == validations
    made = files(recorder)
    made.write_status(training())
    assert made.status(training())["validation"] == {"step": 3, "val_loss": 14.5}
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "draw_loss", lambda steps, *_: drawn.extend(steps))
    summary = made.write_summary("", exact=True)
    assert drawn == lines, "loss.png"
    assert [float.fromhex(loss) for loss in summary["losses"]] == branch
    assert summary["validation"] == {"step": 3, "val_loss": 14.5}
    assert (summary["skipped_steps"], summary["samples_sha256"]) == (0, samples_digest(lines))
    page = page_data(tmp_path)
    assert (page["loss"], page["validation"]) == ([*enumerate(branch)], {"val_loss": validations})
    assert "loss 3.5000 (step 4)" in render_status(tmp_path)
    assert Result(summary, tmp_path).metrics["loss"] == 3.5
    assert "loss=3.5" in repr(Result({"steps": 9, "losses": [(3.5).hex()] * 9}, tmp_path))
    with StepTable.load(recorder.metrics.path, uses_index=False) as table:
        assert (table.rows.values("loss"), table.newest_validation()) == (branch, {"val_loss": 14.5})


def test_a_member_that_computes_what_is_not_repeatable_makes_the_summary_sample_exact(recorder):
    recorder.steps.begun(0, (1, 1))
    odd = NotRepeatable(0, "put_ does not have a deterministic implementation")
    assert [new.metrics.step for new in recorder.publish([odd, record(0, (1, 1))])] == [0]
    assert files(recorder).write_summary("", exact=True)["exact"] is None


@pytest.mark.parametrize(("loss", "what"), [(2.5, "its gradient is not finite"), (float("nan"), "its loss is nan")])
def test_a_step_that_is_not_finite_is_told_on_console_and_journal(tmp_path, loss, what):
    notes: list[Fact] = []
    made = opened_recorder(tmp_path, notes.append)
    made.steps.begun(0, (1, 1))
    tally = Tally(1.0, 1, 8 * loss, 8, (0.0,) * 4)
    told = remark_on(Outcome(Vote(0, tally.numbers())), lambda step: [7, 9])
    assert told == f"step 0 is skipped and changes nothing: {what}; its sequences are 7, 9"
    made.publish([record(0, (1, 1), loss, skipped=True, remark=told)])
    assert list(map(line_of, notes)) == [{"note": "skipped", "step": 0, "told": told}]
    assert made.recoveries.lines == [told]


def test_compilations_after_step_0_are_counted_in_the_summary_also_by_a_new_coordinator(tmp_path):
    notes: list[Fact] = []
    made = opened_recorder(tmp_path, notes.append)
    made.publish([Compiled(0, "a", [], 12)])
    made.publish([Compiled(3, "a", ["x", "y"], 0)])
    again = opened_recorder(tmp_path)
    for fact in notes:
        again.recall(fact, ())
    again.publish([Compiled(5, "b", ["x"], 7)])
    assert files(made).write_summary("", exact=True)["compilations_after_step_0"] == 2
    (tmp_path / "summary.json").unlink()
    assert files(again).write_summary("", exact=True)["compilations_after_step_0"] == 3


def test_the_summary_counts_the_steps_that_were_skipped(recorder):
    recorder.steps.begun(0, (1, 1))
    recorder.publish([record(step, (1, 1), loss=float("nan"), skipped=True) for step in range(2)])
    summary = files(recorder).write_summary("", exact=True)
    assert (summary["steps"], summary["skipped_steps"], summary["lost_workers"]) == (2, 2, {})


@pytest.mark.parametrize("kept", [0, 2, 3], ids=["moved away", "cut", "whole"])
def test_a_digest_of_fewer_records_than_steps_is_null_and_says_why(recorder, kept):
    recorder.steps.begun(0, (1, 1))
    recorder.publish([record(step, (1, 1)) for step in range(3)])
    path = recorder.metrics.path
    lines = path.read_text().splitlines(keepends=True)
    path.rename(path.with_name("elsewhere"))
    if kept:
        path.write_text("".join(lines[:kept]))
    summary = files(recorder).write_summary("", exact=True)
    told = [line for line in recorder.recoveries.lines if "samples_sha256 and exact are null" in line]
    assert (summary["steps"], summary["exact"], summary["samples_sha256"] is not None, len(told)) == (
        (3, True, True, 0) if kept == 3 else (3, None, False, 1)
    )
    assert kept == 3 or f"has no lines of {3 - kept} step(s), {kept} to 2" in told[0]


def test_after_the_end_nobody_is_a_member_whatever_phase_it_came_in(recorder):
    """Stopped by the user in the middle of training: the core itself has not ended anything."""
    status = recorder.metrics.path.parent / "status.json"
    written = files(recorder)
    written.write_status(training())
    live = json.loads(status.read_text())
    assert [[person["worker"] for person in live[who]] for who in ("members", "spares")] == [["w-0", "w-1"], ["w-2"]]
    assert (live["phase"], live["ended"]) == ("running", False)
    end = {"error": "RunFailed", "message": "stopped by the user", "facts": {}, "attempt": "a"}
    written.write_status(training(), end)
    over = json.loads(status.read_text())
    assert (over["phase"], over["ended"], over["error"]) == ("ended", True, "stopped by the user")
    assert (over["members"], over["spares"], over["mesh"]) == ([], [], {"dp": 0, "cp": 0})
    written.write_status(training())  # a worker that is not killed yet has published
    assert json.loads(status.read_text()) == over


def test_the_end_of_a_run_that_could_not_be_opened_is_told_and_what_was_known_of_it_stays(recorder, monkeypatch):
    folder = recorder.metrics.path.parent
    run, status = RunConfig("records", run_dir=str(folder)), folder / "status.json"
    files(recorder).write_status(training())
    live = read_json(status) or {}
    end = {"error": "RunFailed", "message": "JournalDamaged: line 1", "facts": {}, "attempt": "a"}
    write_end(run, end)
    told = read_json(status) or {}
    assert list(told) == list(live)
    changed = {"phase", "mesh", "members", "spares", "updated_unix_s", "ended", "error", "end"}
    assert {name for name in told if told[name] != live[name]} == changed
    assert (told["phase"], told["members"], told["spares"], told["ended"]) == ("ended", [], [], True)
    assert end_on_record(run, "a") == end
    write_end(run, {**end, "message": "another word of the same attempt"})
    assert read_json(status) == told
    write_end(run, {**end, "attempt": "b"})
    assert end_on_record(run, "b") == {**end, "attempt": "b"}
    monkeypatch.setattr(json_files, "FORMAT", json_files.FORMAT + 1)
    write_end(run, {**end, "attempt": "c"})
    assert end_on_record(run, "c") == {**end, "attempt": "c"}, "a status of another format does not stop the end"


@pytest.mark.parametrize("left", ["", "\x00" * 8, '{"run": '])
def test_a_status_that_a_power_cut_left_unreadable_is_none_and_the_run_goes_on(tmp_path, left):
    run = RunConfig("records", run_dir=str(tmp_path))
    (tmp_path / "status.json").write_text(left)
    assert end_on_record(run, "a") is None
    assert other_writer(run) is None
    (tmp_path / "journal.jsonl").touch()
    assert "state unknown, its status.json is missing or cannot be read" in render_status(tmp_path)
    opened_recorder(tmp_path)


@pytest.mark.parametrize("found", [None, "", "[]", "\x00"])
def test_such_an_end_is_told_too_where_no_status_can_be_read(tmp_path, found):
    if found is not None:
        (tmp_path / "status.json").write_text(found)
    end = {"error": "RunFailed", "message": "OSError: x", "facts": {}, "attempt": "a"}
    write_end(RunConfig("records", run_dir=str(tmp_path)), end)
    assert end_on_record(RunConfig("records", run_dir=str(tmp_path)), "a") == end
    assert render_status(tmp_path).startswith("run records: failed: OSError: x\n")


def test_intervals_without_a_checkpoint_are_told_to_the_driver_and_are_in_the_status(recorder, monkeypatch):
    """A step each minute, no checkpoint, and nobody who says why."""
    recorder.steps.begun(0, (1, 1))
    for step in range(5):
        monkeypatch.setattr(recorder, "now", lambda now=60.0 * step: now)
        (new,) = recorder.publish([record(step, (1, 1))])
        recorder.detect(new, State(simulated("records", 2, 2, 9)), 0.0)
    (line,) = [line for line in recorder.recoveries.lines if "no checkpoint" in line]
    assert line.startswith("no checkpoint for 3 intervals, since step 0")
    recorder.checkpoint({"step": 5, "bytes": 1, "total_s": 1.0, "blocked_s": 0.0, "path": "a folder"})
    assert recorder.detectors.checkpoints.num_intervals == 0


def test_nothing_is_overdue_in_a_coordinator_that_was_started_again_between_checkpoints_an_hour_apart(
    recorder, monkeypatch
):
    """Each step says how far apart they are: nobody else knows that until the next checkpoint."""
    recorder.steps.begun(0, (1, 1))
    for step in range(60):
        monkeypatch.setattr(recorder, "now", lambda now=60.0 * step: now)
        (new,) = recorder.publish([record(step, (1, 1), checkpoint_interval_s=3600.0)])
        recorder.detect(new, State(simulated("records", 2, 2, 9)), 0.0)
    assert (recorder.detectors.checkpoints.num_intervals, recorder.recoveries.lines) == (0, [])


def test_the_journal_ends_with_the_forecast_beside_what_was_seen(tmp_path):
    notes: list[Fact] = []
    made = opened_recorder(tmp_path, notes.append, begin=Begin(planned={"step_s": 1.5, "goodput": 0.99}))
    made.steps.begun(0, (1, 1))
    made.publish([record(0, (1, 1))])
    files(made).write_summary("", exact=True)
    seen = {"step_s": record(0, (1, 1)).metrics.step_s, "goodput": pytest.approx(1.0)}
    assert line_of(notes[-1]) == {"note": "forecast", "forecast": {"step_s": 1.5, "goodput": 0.99}, "seen": seen}
