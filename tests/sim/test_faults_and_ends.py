"""What ends a run, and faults that are no clean death: silence, poison, user code, failed starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from elastic_ring.control.coordination import next_deadline
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    CheckpointDue,
    CheckpointsKnown,
    Command,
    CoordinatorStarted,
    DrainRequested,
    Finalize,
    Finalized,
    KillWorker,
    MemberFailed,
    NodeLost,
    Release,
    Resumed,
    StartWorker,
    Status,
    Stop,
    WorkerLost,
    WorkerReady,
    WorkerStarting,
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
        failure = MemberFailed("w", rank_0, 1, run.state.generation, "check", 2, f"OSError: no space, try {attempt}")
        assert run.handle(failure) == ()
        run.wait(run.options.backoff_s + 1)
        if attempt < 2:
            assert run.phase == "closing"
            run.recover(applied=2)
    end = end_in(run.sent)
    assert end.error == "RunFailed"
    assert "OSError: no space, try 2, 3 times" in end.message


Death = dict[str, Any]
"""Keywords of `Bench.lose`, and the `rank`."""


def recover_from(*deaths: Death, applied: int = 7) -> tuple[Bench, tuple[Command, ...]]:
    """One recovery after the other, each with the step `applied` to be run next."""
    run, sent = Bench({"a": 40, "b": 40}, spares=60).form(), ()
    for death in deaths:
        run.lose(death["rank"], **{"step": applied, **{k: v for k, v in death.items() if k != "rank"}})
        sent = run.report_all(applied=applied)
        if run.phase == "ended":
            break
        run.resume_all()
    return run, sent


@pytest.mark.parametrize(
    "deaths",
    [
        [{"rank": rank, "phase": "forward", "signal": "SIGSEGV"} for rank in (3, 0, 1)],
        [{"rank": rank, "phase": "backward", "signal": "SIGKILL"} for rank in (3, 2, 3)],
        [{"rank": 3, "phase": "forward", "signal": "SIGKILL", "reason": "hung"}] * 3,
        [
            {"rank": 3, "phase": "forward"},
            {"rank": 0, "phase": "apply"},
            {"rank": 3, "phase": "forward", "signal": "SIGBUS"},
            {"rank": 2, "phase": "forward"},
        ],
    ],
    ids=["its own signal", "one ring in one phase", "hangs", "an outside kill between them"],
)
def test_a_step_whose_own_work_kills_three_times_ends_the_run_and_every_death_is_told(deaths: list[Death]) -> None:
    _, sent = recover_from(*deaths)
    end = end_in(sent)
    assert end.error == "CrashLoop"
    assert "step 7 killed members in 3 recoveries" in end.message
    for number, death in enumerate([d for d in deaths if d.get("phase") != "apply"], 1):
        rank, how = death["rank"], death.get("signal", "SIGKILL")
        assert re.search(rf"\({number}\) w\d+\.t1 \(rank {rank} on [ab]\) in {death['phase']}: {how}", end.message)


@pytest.mark.parametrize("late", [False, True], ids=["before the rebuild", "after it"])
def test_a_signal_that_is_known_only_after_the_exit_began_counts(late: bool) -> None:
    """The ranks are of two rings, whose deaths without a known signal would not count together."""
    run = Bench({"a": 40, "b": 40}, spares=60).form()
    num_deaths = 0
    while run.phase != "ended" and num_deaths < 6:
        worker = members(run.state)[rank := (3, 0, 1)[num_deaths % 3]]
        num_deaths += 1
        run.lose(rank, step=7, phase="forward", signal="")
        known = WorkerLost("a", worker, "died", "killed by SIGSEGV", 7, "forward", "SIGSEGV")
        for notice in () if late else (known, known):
            run.handle(notice)
        sent = run.report_all(applied=7)
        if run.phase != "ended":
            if late:
                run.handle(known)
            run.resume_all()
    end = end_in(sent)
    assert (end.error, num_deaths) == ("CrashLoop", 3)
    assert "(rank 3 on b) in forward: SIGSEGV" in end.message or "(rank 3 on a) in forward: SIGSEGV" in end.message


@pytest.mark.parametrize(
    "deaths",
    [
        [{"rank": rank, "phase": "idle", "signal": "SIGKILL"} for rank in (0, 1, 3, 2)],
        [{"rank": 3, "phase": "idle", "signal": "SIGSEGV"}] * 4,
        [
            {"rank": 0, "phase": "forward"},
            {"rank": 3, "phase": "forward"},
            {"rank": 0, "phase": "backward"},
            {"rank": 2, "phase": "apply"},
        ],
        [{"rank": 1, "phase": phase} for phase in ("reduce", "vote", "reduce", "rebuild")],
        [{"rank": 3, "phase": "forward", "step": 6}] * 4,
        [{"rank": 3, "phase": "", "step": -1, "signal": ""}] * 4,
        [{"rank": 3, "phase": "forward", "reason": "device error"}] * 4,
    ],
    ids=[
        "kills while idle",
        "crashes while idle",
        "kills of different rings and phases",
        "waiting for peers",
        "of another step",
        "nobody knows where",
        "one GPU",
    ],
)
def test_deaths_that_are_not_of_the_steps_own_work_are_no_crash_loop(deaths: list[Death]) -> None:
    run, _ = recover_from(*deaths)
    assert run.phase == "running"


def test_deaths_with_their_node_or_after_a_notice_are_no_crash_loop() -> None:
    run = Bench({"a": 40, "b": 40}, spares=60).form()
    for _ in range(4):
        run.handle(DrainRequested("u", members(run.state)[3]))
        run.lose(3, step=7, phase="forward", signal="SIGTERM")
        run.recover(applied=7)
    assert (run.phase, run.state.crashes) == ("running", ())


def test_a_crash_at_another_step_begins_the_count_anew() -> None:
    run = Bench({"a": 40, "b": 40}, spares=60).form()
    for step in (7, 7, 8, 8, 9):
        run.lose(3, step=step, phase="forward", signal="SIGSEGV")
        run.recover(applied=step)
    assert (run.phase, [crash.step for crash in run.state.crashes]) == ("running", [9])


def test_writing_the_weights_may_be_what_kills() -> None:
    run = Bench({"a": 40, "b": 40}, spares=60, total_steps=5).form()
    sent: tuple[Command, ...] = ()
    for _ in range(3):
        run.report_all(applied=5, kind="finished")
        run.lose(0, step=5, phase="finalize", signal="SIGKILL")
        sent = run.report_all(applied=5)
        if run.phase != "ended":
            run.resume_all()
    assert "writing the weights killed members in 3 recoveries" in end_in(sent).message


def test_user_code_that_raises_twice_in_one_step_ends_the_run_traceback_first() -> None:
    run = Bench(TWO_NODES).form()
    first = members(run.state)
    run.handle(MemberFailed("w", first[1], 1, 1, "user", 7, "Traceback: boom"))
    order = build_in(run.report_all(applied=7))
    assert order.members == first, "nobody is to blame, so everyone stays"
    run.resume_all()
    end = end_in(run.handle(MemberFailed("w", first[2], 1, 2, "user", 7, "Traceback: boom")))
    assert end.error == "UserCodeFailed"
    assert end.message.startswith("Traceback: boom")


def test_errors_of_newcomers_weeks_apart_are_not_errors_of_one_step() -> None:
    """A newcomer has applied no step, whatever step the run is at."""
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    for committed in (7, 80_000):
        run.lose(3)
        order = build_in(run.report_all(applied=committed))
        (newcomer,) = order.heals[0].newcomers
        run.handle(MemberFailed("w", newcomer, 1, run.state.generation, "user", 0, "Traceback: no room"))
        assert (run.state.user_errors.step, run.state.user_errors.count) == (committed, 1)
        run.recover(applied=committed)
        run.commit(committed)
        assert run.state.user_errors.count == 0, "the step is committed"
        run.all_ready()
    assert run.phase == "running"


def test_a_member_whose_device_errs_in_a_step_is_killed_and_replaced_and_the_step_is_not_blamed() -> None:
    run = Bench({"a": 9, "b": 9}, spares=8).form()
    for attempt in range(5):
        membership = members(run.state)
        said = run.handle(
            MemberFailed("w", membership[3], 1, run.state.generation, "device", 7, "CUDA error: an ECC error")
        )
        assert [kill.worker for kill in only(KillWorker, said)] == [membership[3]]
        assert {stop.worker for stop in only(Stop, said)} == set(membership[:3])
        order = build_in(run.report_all(applied=7))
        assert (order.members[:3], order.step) == (membership[:3], 7)
        assert order.members[3] != membership[3]
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
    said = run.handle(
        MemberFailed("w", newcomer, 1, run.state.generation, "device", 7, "OutOfMemoryError: CUDA out of memory")
    )
    assert [kill.worker for kill in only(KillWorker, said)] == [newcomer]
    order = build_in(run.report_all(applied=7))
    assert order.members[:3] == survivors
    assert newcomer not in order.members
    run.resume_all()
    assert (run.phase, run.state.user_errors.count) == ("running", 0)


def test_the_second_word_of_a_broken_device_changes_nothing() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    failure = MemberFailed("w", members(run.state)[3], 1, 1, "device", 7, "CUDA error")
    run.handle(failure)
    state = run.state
    assert run.handle(failure) == ()
    assert run.state is state


def test_a_device_that_errs_on_every_attempt_ends_the_run_with_its_last_words() -> None:
    run = Bench({"a": 40, "b": 40}, spares=60, round_limit=4).form()
    said: tuple[object, ...] = ()
    for _ in range(5):
        run.fail(3, "device", 7, "CUDA error: assert")
        said = run.report_all(applied=7)
        if run.phase == "ended":
            break
        run.resume_all()
    end = end_in(said)  # type: ignore[arg-type]
    assert end.error == "RunFailed"
    assert "device error CUDA error: assert" in end.message


def test_a_device_error_told_to_a_new_coordinator_is_a_loss_too() -> None:
    run = Bench({"a": 4, "b": 4}, spares=3).form()
    membership = members(run.state)
    run.handle(CoordinatorStarted("c", 2))
    said = run.handle(MemberFailed("w", membership[3], 2, 1, "device", 7, "CUDA error"))
    assert [kill.worker for kill in only(KillWorker, said)] == [membership[3]]
    for worker in run.state.workers.values():
        if worker.status == "ready":
            activity = "running" if worker.worker in membership else "spare"
            run.handle(Status("w", worker.worker, 2, 1, activity))
    assert run.phase == "closing"
    assert membership[3] not in build_in(run.report_all(applied=7)).members


@pytest.mark.parametrize(("kind", "error"), [("skipped", "TooManySkipped"), ("check", "RunFailed")])
def test_what_would_only_happen_again_ends_the_run(kind: str, error: str) -> None:
    run = Bench(TWO_NODES).form()
    assert end_in(run.handle(MemberFailed("w", members(run.state)[0], 1, 1, kind, 3, "why"))).error == error


@pytest.mark.parametrize("phase", ["building", "running", "finishing"])
def test_a_storage_that_stays_away_ends_the_run_with_its_place_and_builds_no_ring(phase: str) -> None:
    run = Bench(TWO_NODES, total_steps=5).form()
    if phase == "building":
        run.lose(0)
        run.report_all(applied=3)
    if phase == "finishing":
        run.report_all(applied=5, kind="finished")
    assert run.phase == phase
    told = "s3://bucket/run cannot be written: 503 (12 attempts in 300.0 s)"
    said = run.fail(1, "storage", 3, told)
    end = end_in(said)
    assert not only(Build, said)
    assert (end.error, told in end.message, "submit the run again" in end.message) == ("StorageFailed", True, True)
    finished = dict(end.facts).get("finished")
    assert finished == ("weights not yet written" if phase == "finishing" else None)
    assert ("every step is committed, and the weights are not yet written" in end.message) == (phase == "finishing")


def test_finished_steps_without_weights_are_completed_by_the_next_submission() -> None:
    """It begins at the checkpoint of the last step, and nothing is left to train."""
    run = Bench(TWO_NODES, total_steps=5, takes_checkpoints=True)
    run.handle(CheckpointsKnown("c", (Checkpoint(5, "step-5", Mesh(2, 2)),)))
    run.form()
    assert members(run.state)
    said = run.report_all(applied=5, kind="finished")
    assert only(Finalize, said)


@pytest.mark.parametrize(
    ("first", "told", "links"),
    [
        ("killed", "died: w0.*SIGKILL in forward", False),
        ("memory", "reports a memory error in step 3: MemoryError: 40 GiB", False),
        ("peer", "reports a peer error in step 3: PeerFailed: Connection reset by peer", True),
    ],
)
def test_the_first_cause_of_a_step_is_told_and_no_peers_reset_replaces_it(first: str, told: str, links: bool) -> None:
    run = Bench({"a": 8, "b": 8}, spares=8, round_limit=3).form()
    reset = "Traceback:\nPeerFailed: Connection reset by peer"

    def fail(rank: int, kind: str, detail: str) -> tuple[Command, ...]:
        generation = run.state.generation
        return run.handle(MemberFailed("w", members(run.state)[rank], 1, generation, kind, 3, detail))

    said: tuple[Command, ...] = fail(1, "peer", reset)  # it may come before its cause
    for attempt in range(4):
        said = run.report_all(applied=3)
        if run.phase == "ended":
            break
        run.resume_all()
        if attempt == 0 and first == "killed":
            run.lose(0, step=3, phase="forward")
        elif attempt == 0 and first == "memory":
            fail(0, "memory", "MemoryError: 40 GiB")
        else:
            fail(1, "peer", reset)
    end = end_in(said)
    assert re.search(f"The first cause: .*{told}", end.message), end.message
    assert ("look at the links" in end.message) == links


def test_the_end_is_written_by_ring_0_and_releases_everyone() -> None:
    run = Bench(TWO_NODES, total_steps=5).form()
    membership, idle = members(run.state), spares(run.state)
    said = run.report_all(applied=5, kind="finished")
    assert [order.worker for order in only(Finalize, said)] == list(membership[:2])
    said = run.handle(Finalized("w", membership[0], 1, 1, "abc"))
    end = end_in(said)
    assert (end.error, dict(end.facts)["weights_sha256"]) == ("", "abc")
    assert {release.worker for release in only(Release, said)} == {*membership, *idle}


def test_a_death_while_finishing_builds_once_more_at_the_last_step() -> None:
    run = Bench(TWO_NODES, total_steps=5).form()
    run.report_all(applied=5, kind="finished")
    run.lose(0)
    assert build_in(run.report_all(applied=5)).step == 5
    run.resume_all()
    assert only(Finalize, run.report_all(applied=5, kind="finished"))


def test_a_lost_node_is_one_incident_whatever_it_takes_along() -> None:
    run = Bench({"a": 2, "b": 2, "c": 2}, spares=2).form()
    run.handle(NodeLost("n", "b"))
    order = run.recover(applied=3)
    assert order.mesh == Mesh(2, 2)
    assert (len(run.change.lost), run.change.action, run.state.crashes) == (2, "spares took their places", ())


def test_too_few_for_min_dp_waits_until_capacity_comes() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, min_dp=2).form()
    run.lose(3)
    run.report_all(applied=3)
    assert run.phase == "waiting"
    order = build_in(run.all_ready())
    assert (order.mesh, order.step, len(order.heals)) == (Mesh(2, 2), 3, 1)


def test_a_silent_member_is_asked_again_then_killed_then_replaced() -> None:
    run = Bench(TWO_NODES).form()
    membership = members(run.state)
    run.handle(MemberFailed("w", membership[0], 1, 1, "peer", 3))
    for rank in (0, 1, 2):
        run.report(rank, 3)
    assert [stop.worker for stop in only(Stop, run.wait(run.options.timeouts.report_s / 2))] == [membership[3]]
    assert [kill.worker for kill in only(KillWorker, run.wait(run.options.timeouts.report_s / 2))] == [membership[3]]
    order = build_in(run.wait(run.options.timeouts.report_s))
    assert membership[3] not in order.members


def test_a_ring_that_does_not_close_accuses_nobody_while_state_hangs_on_them() -> None:
    run = Bench(TWO_NODES)
    run.all_ready()
    run.wait(run.options.spare_grace_s)
    run.wait(run.options.timeouts.build_s / 2)
    said = run.wait(run.options.timeouts.build_s / 2)
    assert not only(KillWorker, said)
    assert len(only(Stop, said)) == 4


def test_a_poisoned_device_is_killed_and_healed_elsewhere_but_its_vote_counts() -> None:
    run = Bench(TWO_NODES).form()
    membership, vote = members(run.state), run.vote(3)
    run.handle(MemberFailed("w", membership[0], 1, 1, "peer", 3))
    assert only(KillWorker, run.report(0, 4, healthy=False))
    run.report(1, 3)
    run.report(2, 3)
    order = build_in(run.report(3, 3))
    assert membership[0] not in order.members
    assert order.roll_forward == vote


def test_a_member_that_failed_inside_apply_is_healed_in_its_place() -> None:
    run = Bench(TWO_NODES).form()
    membership = members(run.state)
    run.handle(MemberFailed("w", membership[0], 1, 1, "peer", 3))
    run.report(0, 0, shard=None)
    for rank in (1, 2):
        run.report(rank, 4)
    order = build_in(run.report(3, 4))
    assert order.members == membership
    assert [(heal.donor, heal.newcomers) for heal in order.heals] == [(membership[2], (membership[0],))]


@pytest.mark.parametrize("kind", ["user", "peer"])
def test_an_apply_that_fails_on_every_rank_is_the_users_error_only_if_it_was_theirs(kind: str) -> None:
    run = Bench(TWO_NODES).form()
    run.commit(6)
    run.handle(MemberFailed("w", members(run.state)[0], 1, 1, kind, 7, "Traceback: boom"))
    for rank in range(3):
        run.report(rank, 7, shard=None, vote=run.vote(7))
    said = run.report(3, 7, shard=None, vote=run.vote(7))
    if kind == "user":
        assert (end_in(said).error, "boom" in end_in(said).message) == ("UserCodeFailed", True)
    else:
        assert build_in(said).undone == 8


def test_an_apply_that_fails_on_every_rank_in_the_build_that_rolls_it_forward_is_the_users_error() -> None:
    run = Bench(TWO_NODES).form()
    run.handle(MemberFailed("w", members(run.state)[0], 1, 1, "peer", 7))
    vote = run.vote(7)
    for rank in range(4):
        run.report(rank, 7, vote=vote)
    run.handle(MemberFailed("w", members(run.state)[0], 1, 2, "user", 8, "Traceback: boom"))
    for rank in range(4):
        run.report(rank, 7, shard=None)
    end = end_in(run.sent)
    assert (end.error, dict(end.facts)["step"]) == ("UserCodeFailed", "7")


def test_a_shard_that_is_lost_beside_an_error_in_the_next_step_is_not_blamed_on_the_user() -> None:
    run = Bench(TWO_NODES, dp=1).form()
    run.commit(6)
    run.handle(MemberFailed("w", members(run.state)[0], 1, 1, "user", 7, "Traceback: boom"))
    run.report(0, 7)
    assert build_in(run.report(1, 6, shard=None)).undone == 7


def test_an_error_of_the_users_while_a_checkpoint_is_read_is_tried_again_up_to_its_limit() -> None:
    run = Bench(TWO_NODES, dp=1, spares=0).form()
    run.commit(6)
    saved = Checkpoint(5, "step-5", Mesh(1, 2))
    run.handle(CheckpointsKnown("k", (saved,)))
    run.handle(MemberFailed("w", members(run.state)[0], 1, 1, "peer", 7))
    run.report(0, 7)
    said = run.report(1, 0, shard=None)
    for attempt in (1, 2):
        order = build_in((*said, *run.wait(run.options.spare_grace_s)))
        assert (order.restore, order.step) == (saved, 5)
        failed = MemberFailed("w", order.members[0], 1, order.generation, "user", 5, "Traceback: boom")
        said = run.handle(failed)
        if attempt == 1:
            said = (*run.report(0, 0, shard=None), *run.report(1, 0, shard=None))
    assert "raised 2 times in step 5" in end_in(said).message


def test_returns_to_one_checkpoint_are_no_builds_without_a_step_where_steps_were_committed_between() -> None:
    run = Bench({"a": 8, "b": 8}, spares=0, round_limit=3).form()
    run.handle(CheckpointsKnown("k", (Checkpoint(2, "step-2", Mesh(2, 2)),)))
    for attempt in range(5):
        for step in range(run.state.committed, 5 + attempt):
            run.commit(step)
        run.lose(1, 3, step=5 + attempt, phase="forward")  # all that hold cp_rank 1
        run.report_all(5 + attempt)
        run.all_ready()
        assert run.phase == "building", run.reason
        assert run.change.step == 2
        run.resume_all()
    for _ in range(3):
        run.lose(1, 3)
        run.report_all(2)
        run.all_ready()
        if run.phase == "ended":
            break
        run.resume_all()
    assert "was built 4 times at step 2 and no new step was committed" in run.reason


def test_a_node_on_which_nothing_starts_is_left_alone_for_a_while() -> None:
    run = Bench({"a": 1, "b": 1}, dp=1, cp=1, spares=1, backoff_s=20.0)
    for again in (True, True, False):
        (starting,) = [w.worker for w in run.state.workers.values() if w.node == "a"]
        said = run.handle(WorkerLost("a", starting, "start-failed", "no such module"))
        assert bool(only(StartWorker, said)) is again, "not after the third failure in a row"
    assert "no start there for 20 s" in run.reason
    assert only(StartWorker, run.wait(20.0))


def test_a_backoff_that_is_over_waits_for_the_end_of_a_build_and_does_not_tick_until_then() -> None:
    run = Bench({"a": 1, "b": 1}, dp=1, cp=1, spares=1, backoff_s=20.0)
    for _ in range(3):
        (name,) = [w.worker for w in run.state.workers.values() if w.node == "a"]
        run.handle(WorkerLost("a", name, "start-failed", "no such module"))
    run.all_ready()
    assert run.phase == "building"
    assert not only(StartWorker, run.wait(25.0))
    due = next_deadline(run.state)
    assert due is not None
    assert due > run.now
    assert only(StartWorker, run.resume_all())


def test_a_run_that_no_node_can_start_ends_with_the_last_reason() -> None:
    run = Bench({"a": 2, "b": 2}, dp=2, cp=2, spares=0)
    said: tuple[object, ...] = ()
    for _ in range(12):
        starting = [w.worker for w in run.state.workers.values() if w.status == "starting"]
        if not starting:
            break
        said = run.handle(WorkerLost("a", starting[0], "start-failed", "ModuleNotFoundError: no module named 'mine'"))
    end = end_in(said)  # type: ignore[arg-type]
    assert end.error == "RunFailed"
    assert "no module named 'mine'" in end.message


def test_a_start_that_died_is_not_counted_among_those_that_failed_with_an_error_of_their_own() -> None:
    run = Bench({"a": 1}, dp=1, cp=1, spares=0, backoff_s=20.0)
    for reason, detail in (("died", "killed"), ("start-failed", "broken image"), ("start-failed", "broken image")):
        run.handle(WorkerLost("a", *starting(run), reason, detail))
    assert run.phase == "forming", "two errors"
    run.wait(20.0)
    end = end_in(run.handle(WorkerLost("a", *starting(run), "start-failed", "broken image")))
    assert "broken image" in end.message


def test_a_status_of_a_worker_whose_ready_was_lost_ends_the_count_of_failed_starts() -> None:
    run = Bench({"a": 2}, dp=1, cp=2, spares=0)
    said: tuple[Command, ...] = ()
    for failure in range(3):
        if failure == 2:
            run.handle(Status("w", starting(run)[0], 1, 0, "spare"))
        said = run.handle(WorkerLost("a", starting(run)[-1], "start-failed", "broken image"))
    assert only(StartWorker, said), "not the third failure in a row"


def starting(run: Bench) -> list[str]:
    return [worker.worker for worker in run.state.workers.values() if worker.status == "starting"]


def pass_time(run: Bench, seconds: float, cpu_s: dict[str, float]) -> tuple[Command, ...]:
    """Second by second; each worker of `cpu_s` reports so much more CPU time each second."""
    sent: tuple[Command, ...] = ()
    for _ in range(int(seconds)):
        sent += run.wait(1.0)
        for worker, more_s in cpu_s.items():
            known = run.state.workers.get(worker)
            if known is not None and known.status == "starting":
                sent += run.handle(WorkerStarting("w", worker, (known.start_cpu_s or 0.0) + more_s), 0.0)
    return sent


def test_workers_that_are_slow_but_visibly_start_are_waited_for_and_the_run_forms_as_asked() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, start_s=10.0, start_max_s=100.0)
    slow = starting(run)
    assert pass_time(run, 9, dict.fromkeys(slow, 0.5)) == ()
    for worker in slow[:2]:
        run.handle(WorkerReady("w", worker, run.state.workers[worker].node, 1))
    sent = pass_time(run, 40, dict.fromkeys(slow[2:], 0.5))
    assert not only(KillWorker, sent), "they use CPU"
    assert run.phase == "forming", "not with one ring, while the second is on its way"
    assert "2 of 4 ready on 2 node(s) with an agent, 2 starting" in waiting_for(run.state, run.now)
    order = build_in(run.all_ready())
    assert (order.mesh, set(order.members)) == (Mesh(2, 2), set(slow))


def test_a_worker_that_compiles_without_using_cpu_is_waited_for_and_named_with_its_work() -> None:
    """It waits for a lock on the kernel that another process compiles."""
    run = Bench({"a": 2}, dp=1, cp=2, spares=0, start_s=10.0, start_max_s=60.0)
    first, slow = starting(run)
    killed: list[KillWorker] = []
    for _ in range(50):
        killed += only(KillWorker, run.wait(1.0))
        run.handle(WorkerStarting("w", slow, 1.0, "compiles FlexAttention", compiles=True), 0.0)
        if run.state.workers.get(first) is not None and run.state.workers[first].status == "starting":
            run.handle(WorkerReady("w", first, "a", 1))
    assert killed == []
    assert f"1 of 2 ready on 1 node(s) with an agent, 1 starting; compiles FlexAttention: {slow}" in waiting_for(
        run.state, run.now
    )
    killed += only(KillWorker, pass_time(run, 12, {}))
    assert {kill.worker for kill in killed} == {slow}, "no longer than start_max_s"


@pytest.mark.parametrize(("cpu_s", "limit_s"), [(None, 10.0), (0.0, 10.0), (0.5, 40.0)])
def test_a_worker_that_shows_no_progress_or_starts_for_ever_is_given_up(cpu_s: float | None, limit_s: float) -> None:
    run = Bench({"a": 4}, dp=2, cp=1, spares=0, start_s=10.0, start_max_s=40.0)
    first, slow = starting(run)
    run.handle(WorkerReady("w", first, "a", 1))
    run.handle(WorkerStarting("w", slow, 0.05), 0.0)
    reports = {} if cpu_s is None else {slow: cpu_s}
    assert not only(KillWorker, pass_time(run, limit_s - 1, reports))
    killed = only(KillWorker, pass_time(run, 3, reports))
    assert {kill.worker for kill in killed} == {slow}


def test_without_further_workers_on_their_way_a_run_forms_smaller() -> None:
    run = Bench({"a": 2}, dp=2, cp=2, spares=0, start_s=10.0)
    assert run.all_ready() == ()
    assert build_in(pass_time(run, 11, {})).mesh == Mesh(1, 2)


def test_one_node_that_starts_nothing_does_not_end_a_run_that_another_can_form() -> None:
    run = Bench({"a": 2, "b": 2}, dp=1, cp=2, spares=2)
    for _ in range(9):
        for worker in [w.worker for w in run.state.workers.values() if w.node == "a" and w.status == "starting"]:
            run.handle(WorkerLost("a", worker, "start-failed", "broken image"))
    assert run.phase == "forming"
    run.form()
    assert run.phase == "running"


def test_a_worker_of_another_coordinator_is_fenced() -> None:
    run = Bench(TWO_NODES).form()
    (kill,) = only(KillWorker, run.handle(WorkerReady("w", "w9.t0", "a", 1)))
    assert kill.worker == "w9.t0"


def test_an_event_without_a_row_raises_with_the_story() -> None:
    run = Bench(TWO_NODES).form()
    with pytest.raises(IllegalTransition, match="generation 1 runs"):
        run.handle(Finalized("w", members(run.state)[0], 1, 1, "x"))


def test_duplicates_change_nothing() -> None:
    run = Bench(TWO_NODES).form()
    state = run.state
    run.handle(Resumed("w", members(state)[0], 1, 1, 0))
    assert run.state is state


def test_a_run_that_does_not_train_says_what_it_is_short_of() -> None:
    run = Bench({"a": 1}, dp=1, cp=2, spares=0)
    assert waiting_for(run.state, run.now) == "", "workers have a while to start"
    run.all_ready()
    assert "1 of 2 ready on 1 node(s)" in waiting_for(run.state, run.now + run.options.timeouts.start_s)
    whole = Bench({"a": 2}, dp=1, cp=2, spares=0).form()
    assert waiting_for(whole.state, whole.now + 1e6) == ""


def test_a_checkpoint_that_was_not_written_is_taken_again_in_a_step_and_only_there() -> None:
    run = Bench({"a": 4}).form()
    (stop,) = run.handle(CheckpointDue("c"))
    assert (stop.worker, stop.mode) == (members(run.state)[0], "save")
    run.lose(1)
    assert run.handle(CheckpointDue("c")) == ()


def test_a_run_that_is_to_end_gives_up_a_step_that_takes_too_long_for_a_checkpoint_of_those_before() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, takes_checkpoints=True).form()
    run.commit(6)
    stops = only(Stop, run.handle(CheckpointDue("c", at_once=True)))
    assert {(stop.worker, stop.mode) for stop in stops} == {(worker, "abort") for worker in members(run.state)}
    order = build_in(run.report_all(applied=7))
    assert (order.step, order.saves, order.goes_back) == (7, True, False)
    run.resume_all()
    assert (run.phase, run.change.planned) == ("running", True)
