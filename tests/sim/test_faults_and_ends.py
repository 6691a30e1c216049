"""What ends a run, and faults that are no clean death: silence, poison, user code, failed starts."""

from __future__ import annotations

import pytest

from elastic_ring.control.messages import (
    CoordinatorStarted,
    Finalize,
    Finalized,
    KillWorker,
    NodeLost,
    Release,
    Resumed,
    StartWorker,
    Status,
    Stop,
    StopRequested,
    Trouble,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.state import members, spares, waiting_for
from elastic_ring.errors import IllegalTransition
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, end_in, only

TWO_NODES = {"a": 3, "b": 3}


def test_weights_that_cannot_be_written_are_written_later_and_the_last_failure_is_told() -> None:
    run = Bench({"a": 3, "b": 3}, total_steps=2, finalize_limit=3).form()
    for attempt in range(3):
        run.report_all(applied=2, kind="finished")
        assert run.phase == "finishing"
        rank_0 = members(run.state)[0]
        trouble = Trouble("w", rank_0, 1, run.state.generation, "check", 2, f"OSError: no space, try {attempt}")
        assert run.say(trouble) == ()
        run.wait(run.options.backoff_s + 1)
        if attempt < 2:
            assert run.phase == "closing"
            run.report_all(applied=2)
            run.resume_all()
    end = end_in(run.sent)
    assert end.error == "RunFailed"
    assert "OSError: no space, try 2, 3 times" in end.message


def test_the_third_recovery_at_the_same_step_ends_the_run_with_the_signal() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    for _ in range(2):
        run.lose(3)
        run.report_all(applied=7)
        run.resume_all()
    run.lose(3)
    end = end_in(run.report_all(applied=7))
    assert end.error == "CrashLoop"
    assert "step 7" in end.message
    assert "signal 9" in end.message


def test_deaths_at_different_steps_are_no_crash_loop() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    for step in (7, 8, 7 + 2, 10):
        run.lose(3)
        run.all_ready()
        run.report_all(applied=step)
        run.resume_all()
    assert run.phase == "running"


def test_user_code_that_raises_twice_in_one_step_ends_the_run_traceback_first() -> None:
    run = Bench(TWO_NODES).form()
    first = members(run.state)
    run.say(Trouble("w", first[1], 1, 1, "user", 7, "Traceback: boom"))
    order = build_in(run.report_all(applied=7))
    assert order.seats == first, "nobody is to blame, so everyone stays"
    run.resume_all()
    end = end_in(run.say(Trouble("w", first[2], 1, 2, "user", 7, "Traceback: boom")))
    assert end.error == "UserCodeFailed"
    assert end.message.startswith("Traceback: boom")


def test_errors_of_newcomers_weeks_apart_are_not_errors_of_one_step() -> None:
    """A newcomer has applied no step, whatever step the run is at."""
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    for committed in (7, 80_000):
        run.lose(3)
        order = build_in(run.report_all(applied=committed))
        (newcomer,) = order.heals[0].newcomers
        run.say(Trouble("w", newcomer, 1, run.state.generation, "user", 0, "Traceback: no room"))
        assert (run.state.user_errors.step, run.state.user_errors.count) == (committed, 1)
        run.report_all(applied=committed)
        run.resume_all()
        run.commit(committed)
        assert run.state.user_errors.count == 0, "the step is committed"
        run.all_ready()
    assert run.phase == "running"


def test_a_member_whose_device_errs_in_a_step_is_killed_and_replaced_and_the_step_is_not_blamed() -> None:
    run = Bench({"a": 9, "b": 9}, spares=8).form()
    for attempt in range(5):
        crew = members(run.state)
        said = run.say(Trouble("w", crew[3], 1, run.state.generation, "device", 7, "CUDA error: an ECC error"))
        assert [kill.worker for kill in only(KillWorker, said)] == [crew[3]]
        assert {stop.worker for stop in only(Stop, said)} == set(crew[:3])
        order = build_in(run.report_all(applied=7))
        assert (order.seats[:3], order.step) == (crew[:3], 7)
        assert order.seats[3] != crew[3]
        run.resume_all()
        assert run.phase == "running", f"attempt {attempt}"
    (loss,) = run.change.lost
    assert (loss.global_rank, loss.reason, loss.detail) == (3, "device error", "CUDA error: an ECC error")


def test_a_newcomer_without_room_on_its_device_makes_way_for_the_next() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    survivors = members(run.state)[:3]
    run.lose(3)
    order = build_in(run.report_all(applied=7))
    (newcomer,) = order.heals[0].newcomers
    said = run.say(Trouble("w", newcomer, 1, run.state.generation, "device", 7, "OutOfMemoryError: CUDA out of memory"))
    assert [kill.worker for kill in only(KillWorker, said)] == [newcomer]
    order = build_in(run.report_all(applied=7))
    assert order.seats[:3] == survivors
    assert newcomer not in order.seats
    run.resume_all()
    assert (run.phase, run.state.user_errors.count) == ("running", 0)


def test_the_second_word_of_a_broken_device_changes_nothing() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    trouble = Trouble("w", members(run.state)[3], 1, 1, "device", 7, "CUDA error")
    run.say(trouble)
    state = run.state
    assert run.say(trouble) == ()
    assert run.state is state


def test_a_device_that_errs_on_every_attempt_ends_the_run_with_its_last_words() -> None:
    run = Bench({"a": 40, "b": 40}, spares=60, round_limit=4).form()
    said: tuple[object, ...] = ()
    for _ in range(5):
        run.say(Trouble("w", members(run.state)[3], 1, run.state.generation, "device", 7, "CUDA error: assert"))
        said = run.report_all(applied=7)
        if run.phase == "ended":
            break
        run.resume_all()
    end = end_in(said)  # type: ignore[arg-type]
    assert end.error == "RunFailed"
    assert "device error CUDA error: assert" in end.message


def test_a_device_error_told_to_a_new_coordinator_is_a_loss_too() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    crew = members(run.state)
    run.say(CoordinatorStarted("c", 2))
    said = run.say(Trouble("w", crew[3], 2, 1, "device", 7, "CUDA error"))
    assert [kill.worker for kill in only(KillWorker, said)] == [crew[3]]
    for worker in run.state.workers.values():
        if worker.life == "ready":
            activity = "running" if worker.worker in crew else "spare"
            run.say(Status("w", worker.worker, 2, 1, activity))
    assert run.phase == "closing"
    assert crew[3] not in build_in(run.report_all(applied=7)).seats


@pytest.mark.parametrize(("kind", "error"), [("skipped", "TooManySkipped"), ("check", "RunFailed")])
def test_what_would_only_happen_again_ends_the_run(kind: str, error: str) -> None:
    run = Bench(TWO_NODES).form()
    assert end_in(run.say(Trouble("w", members(run.state)[0], 1, 1, kind, 3, "why"))).error == error


def test_the_end_is_written_by_ring_0_and_releases_everyone() -> None:
    run = Bench(TWO_NODES, total_steps=5).form()
    crew, idle = members(run.state), spares(run.state)
    said = run.report_all(applied=5, kind="finished")
    assert [order.worker for order in only(Finalize, said)] == list(crew[:2])
    said = run.say(Finalized("w", crew[0], 1, 1, "abc"))
    end = end_in(said)
    assert (end.error, dict(end.facts)["weights_sha256"]) == ("", "abc")
    assert {release.worker for release in only(Release, said)} == {*crew, *idle}


def test_a_death_while_finishing_builds_once_more_at_the_last_step() -> None:
    run = Bench(TWO_NODES, total_steps=5).form()
    run.report_all(applied=5, kind="finished")
    run.lose(0)
    assert build_in(run.report_all(applied=5)).step == 5
    run.resume_all()
    assert only(Finalize, run.report_all(applied=5, kind="finished"))


def test_stop_ends_at_the_boundary_or_by_force() -> None:
    for polite in (True, False):
        run = Bench(TWO_NODES).form()
        run.say(StopRequested("u", "ctrl-c"))
        assert run.phase == "running"
        said = run.report_all(4, "boundary") if polite else run.wait(run.options.boundary_s)
        assert "stopped: ctrl-c" in end_in(said).message
        assert end_in(said).error == ""


def test_stop_ends_at_once_when_nothing_runs() -> None:
    run = Bench(TWO_NODES)
    assert "stopped" in end_in(run.say(StopRequested("u", "ctrl-c"))).message


def test_a_lost_node_is_one_incident_whatever_it_takes_along() -> None:
    run = Bench({"a": 2, "b": 2, "c": 2}, spares=2).form()
    run.say(NodeLost("n", "b"))
    order = build_in(run.report_all(applied=3))
    run.resume_all()
    assert order.mesh == Mesh(2, 2)
    assert (len(run.change.lost), run.change.action, run.state.crashes.count) == (2, "spares took their places", 1)


def test_too_few_for_min_dp_waits_parked_until_capacity_comes() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, min_dp=2).form()
    run.lose(3)
    run.report_all(applied=3)
    assert run.phase == "waiting"
    order = build_in(run.all_ready())
    assert (order.mesh, order.step, len(order.heals)) == (Mesh(2, 2), 3, 1)


def test_a_silent_member_is_asked_again_then_killed_then_replaced() -> None:
    run = Bench(TWO_NODES).form()
    crew = members(run.state)
    run.say(Trouble("w", crew[0], 1, 1, "peer", 3))
    for rank in (0, 1, 2):
        run.report(rank, 3)
    assert [stop.worker for stop in only(Stop, run.wait(run.options.report_s / 2))] == [crew[3]]
    assert [kill.worker for kill in only(KillWorker, run.wait(run.options.report_s / 2))] == [crew[3]]
    order = build_in(run.wait(run.options.report_s))
    assert crew[3] not in order.seats


def test_a_ring_that_does_not_close_accuses_nobody_while_state_hangs_on_them() -> None:
    run = Bench(TWO_NODES)
    run.all_ready()
    run.wait(run.options.spare_grace_s)
    run.wait(run.options.build_s / 2)
    said = run.wait(run.options.build_s / 2)
    assert not only(KillWorker, said)
    assert len(only(Stop, said)) == 4


def test_a_poisoned_device_is_killed_and_healed_elsewhere_but_its_vote_counts() -> None:
    run = Bench(TWO_NODES).form()
    crew, vote = members(run.state), run.vote(3)
    run.say(Trouble("w", crew[0], 1, 1, "peer", 3))
    assert only(KillWorker, run.report(0, 4, healthy=False))
    run.report(1, 3)
    run.report(2, 3)
    order = build_in(run.report(3, 3))
    assert crew[0] not in order.seats
    assert order.roll_forward == vote


def test_a_member_that_failed_inside_apply_is_healed_in_its_place() -> None:
    run = Bench(TWO_NODES).form()
    crew = members(run.state)
    run.say(Trouble("w", crew[0], 1, 1, "peer", 3))
    run.report(0, 0, shard=None)
    for rank in (1, 2):
        run.report(rank, 4)
    order = build_in(run.report(3, 4))
    assert order.seats == crew
    assert [(heal.donor, heal.newcomers) for heal in order.heals] == [(crew[2], (crew[0],))]


@pytest.mark.parametrize(("kind", "error"), [("user", "UserCodeFailed"), ("peer", "ShardLost")])
def test_an_apply_that_fails_on_every_rank_is_the_users_error_only_if_it_was_theirs(kind: str, error: str) -> None:
    run = Bench(TWO_NODES).form()
    run.commit(6)
    run.say(Trouble("w", members(run.state)[0], 1, 1, kind, 7, "Traceback: boom"))
    for rank in range(3):
        run.report(rank, 7, shard=None, vote=run.vote(7))
    end = end_in(run.report(3, 7, shard=None, vote=run.vote(7)))
    assert end.error == error
    assert ("boom" in end.message) is (kind == "user")


def test_a_node_on_which_nothing_starts_is_left_alone_for_a_while() -> None:
    run = Bench({"a": 1, "b": 1}, dp=1, cp=1, spares=1, backoff_s=20.0)
    for again in (True, True, False):
        (starting,) = [w.worker for w in run.state.workers.values() if w.node == "a"]
        said = run.say(WorkerLost("a", starting, "start-failed", "no such module"))
        assert bool(only(StartWorker, said)) is again, "not after the third failure in a row"
    assert "no start there for 20 s" in run.reason
    assert only(StartWorker, run.wait(20.0))


def test_a_run_that_no_node_can_start_ends_with_the_last_reason() -> None:
    run = Bench({"a": 2, "b": 2}, dp=2, cp=2, spares=0)
    said: tuple[object, ...] = ()
    for _ in range(12):
        starting = [w.worker for w in run.state.workers.values() if w.life == "starting"]
        if not starting:
            break
        said = run.say(WorkerLost("a", starting[0], "start-failed", "ModuleNotFoundError: no module named 'mine'"))
    end = end_in(said)  # type: ignore[arg-type]
    assert end.error == "RunFailed"
    assert "no module named 'mine'" in end.message


def test_one_node_that_starts_nothing_does_not_end_a_run_that_another_can_form() -> None:
    run = Bench({"a": 2, "b": 2}, dp=1, cp=2, spares=2)
    for _ in range(9):
        for worker in [w.worker for w in run.state.workers.values() if w.node == "a" and w.life == "starting"]:
            run.say(WorkerLost("a", worker, "start-failed", "broken image"))
    assert run.phase == "forming"
    run.form()
    assert run.phase == "running"


def test_a_worker_of_another_coordinator_is_fenced() -> None:
    run = Bench(TWO_NODES).form()
    (kill,) = only(KillWorker, run.say(WorkerReady("w", "w9.t0", "a", 1)))
    assert kill.worker == "w9.t0"


def test_an_event_without_a_row_raises_with_the_story() -> None:
    run = Bench(TWO_NODES).form()
    with pytest.raises(IllegalTransition, match="generation 1 runs"):
        run.say(Finalized("w", members(run.state)[0], 1, 1, "x"))


def test_duplicates_change_nothing() -> None:
    run = Bench(TWO_NODES).form()
    state = run.state
    run.say(Resumed("w", members(state)[0], 1, 1, 0))
    assert run.state is state


def test_a_run_that_does_not_train_says_what_it_is_short_of() -> None:
    run = Bench({"a": 1}, dp=1, cp=2, spares=0)
    assert waiting_for(run.state, run.now) == "", "workers have a while to start"
    run.all_ready()
    assert "1 of 2 ready on 1 node(s)" in waiting_for(run.state, run.now + run.options.start_s)
    whole = Bench({"a": 2}, dp=1, cp=2, spares=0).form()
    assert waiting_for(whole.state, whole.now + 1e6) == ""
