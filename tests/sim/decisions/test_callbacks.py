"""Callbacks in the control core: their answer takes effect at a validation, once, whoever dies meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.control.coordination import replay
from elastic_ring.control.messages import (
    Answer,
    CallbacksAnswered,
    CallbacksAwaited,
    Checkpoint,
    CheckpointsKnown,
    CoordinatorStarted,
    Finalize,
    Finalized,
    NodeJoined,
    NodeLost,
    Status,
)
from elastic_ring.control.phases import is_newest_answer
from elastic_ring.control.state import end_step, members
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, end_in, only

NODES = {"a": 3, "b": 3}
STOP = CallbacksAnswered("d", 2, stop="the loss rises")


def formed(**options: Any) -> Bench:
    run = Bench(NODES, **options).form()
    run.commit(0)
    run.commit(1)
    return run


def ask(run: Bench, step: int) -> list[Answer]:
    speaker = members(run.state)[0]
    return only(Answer, run.handle(CallbacksAwaited("w", speaker, run.state.term, run.state.generation, step)))


def test_a_stop_ends_the_run_at_the_validation_where_it_is_told() -> None:
    run = formed()
    assert ask(run, 2) == []
    answers = only(Answer, run.handle(STOP))
    assert [(one.worker, one.step, one.stops) for one in answers] == [(name, 2, True) for name in members(run.state)]
    assert only(Finalize, run.report_all(2, kind="finished"))
    said = run.handle(Finalized("w", members(run.state)[0], run.state.term, run.state.generation, "abc"))
    assert end_in(said).message == "stopped after 2 steps: the loss rises"
    assert end_in(said).error == ""


def test_members_that_ask_again_after_a_loss_hear_the_same_and_nothing_else_is_taken() -> None:
    run = formed()
    ask(run, 2)
    run.handle(STOP)
    run.lose(3)
    assert build_in(run.report_all(2)).step == 2
    run.resume_all()
    assert {(one.worker, one.stops) for one in ask(run, 2)} == {(name, True) for name in members(run.state)}
    before, repeated, other = run.state, replace(STOP, cause="d-2"), CallbacksAnswered("d", 2, stop="another reason")
    for event in (repeated, other):
        run.handle(event)
    assert run.state is before
    assert (is_newest_answer(before, repeated), is_newest_answer(before, other)) == (True, False)
    assert replay(run.options, run.journal) == run.state


@pytest.mark.parametrize("dp", [2, 1])
def test_steps_that_come_again_hear_the_same_answers_and_another_branch_is_asked_anew(dp: int) -> None:
    """All is lost and the checkpoint of step 1 is left, for the same mesh or for one whose sums have other bits."""
    run = formed(spares=0, min_dp=1, takes_checkpoints=True)
    run.handle(CheckpointsKnown("k", (Checkpoint(1, "step-1", Mesh(2, 2)),)))
    ask(run, 2)
    run.handle(replace(STOP, keeps=True))
    for node in NODES if dp == 2 else ("a",):
        run.handle(NodeLost("n", node))
    if dp == 2:
        run.handle(NodeJoined("n", "c", 4))
    else:
        run.lose(*(rank for rank, name in enumerate(members(run.state)) if name in run.state.workers))
    run.form()
    assert (run.phase, run.change.step, run.change.mesh.dp) == ("running", 1, dp)
    answers = ask(run, 2)
    assert [one.stops for one in answers] == ([True] * 4 if dp == 2 else [])
    assert (end_step(run.state), run.state.callbacks.kept) == ((2, 2) if dp == 2 else (run.options.total_steps, None))


@pytest.mark.parametrize("after_s", [1.0, 59.0])
def test_a_new_coordinator_gives_the_driver_all_its_time_again(after_s: float) -> None:
    run = formed()
    ask(run, 2)
    run.wait(after_s)
    run.handle(CoordinatorStarted("c", 2))
    for worker in list(run.state.workers):
        run.handle(Status("w", worker, 2, run.state.generation, "running"))
    assert run.phase == "running"
    assert not only(Answer, run.wait(59.0))
    assert only(Answer, run.handle(STOP))
    assert end_step(run.state) == 2


def test_without_an_answer_training_goes_on_and_a_late_one_waits_for_the_next_validation() -> None:
    run = formed(callback_s=10.0)
    ask(run, 2)
    assert not only(Answer, run.wait(9.0))
    assert {one.stops for one in only(Answer, run.wait(1.1))} == {False}
    assert only(Answer, run.handle(STOP)) == []
    run.commit(2)
    run.commit(3)
    ask(run, 4)
    late = run.handle(CallbacksAnswered("d", 4, stop="the loss rises", saves=True, keeps=True))
    assert {(one.stops, one.saves) for one in only(Answer, late)} == {(True, True)}
    assert (end_step(run.state), run.state.callbacks.kept) == (4, 4)
    assert {(one.stops, one.saves) for one in ask(run, 2)} == {(False, False)}, "an older step runs again without"
    assert {one.saves for one in ask(run, 4)} == {True}
