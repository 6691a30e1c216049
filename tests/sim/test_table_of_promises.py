"""Each loss and change that docs/architecture.md and docs/guarantees.md name, as a scripted run."""

from __future__ import annotations

from elastic_ring.control.messages import (
    CoordinatorStarted,
    DrainRequested,
    Hello,
    KillWorker,
    MemberFailed,
    NodeDraining,
    NodeJoined,
    Published,
    Release,
    Report,
    Standby,
    StartWorker,
    Status,
    Stop,
)
from elastic_ring.control.state import members, mesh_of, spares
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, end_in, only

TWO_NODES = {"a": 3, "b": 3}


def test_a_spare_takes_the_same_place_and_nobody_else_moves() -> None:
    run = Bench(TWO_NODES).form()
    before, (spare,) = members(run.state), spares(run.state)
    stops = only(Stop, run.lose(3))
    assert {stop.worker for stop in stops} == set(before[:3])
    assert {(stop.mode, stop.generation) for stop in stops} == {("abort", 2)}
    order = build_in(run.report_all(applied=7))
    assert order.members == (*before[:3], spare)
    assert (order.step, order.roll_forward, order.fresh) == (7, None, False)
    (heal,) = order.heals
    assert (heal.cp_rank, heal.donor, heal.newcomers) == (1, before[1], (spare,))
    run.resume_all()
    assert run.phase == "running"
    assert (run.change.action, run.change.promise) == ("spare took its place", "bit-exact")
    assert (run.change.step_rerun, run.change.rolled_forward) == (7, None)
    assert [(loss.global_rank, loss.reason) for loss in run.change.lost] == [(3, "died")]
    assert run.change.survivors == before[:3]


def test_a_vote_that_one_survivor_holds_travels_to_all() -> None:
    run = Bench(TWO_NODES).form()
    run.lose(3)
    vote = run.vote(7)
    run.report(0, 8)
    run.report(1, 7)
    order = build_in(run.report(2, 7))
    assert (order.step, order.roll_forward) == (8, vote)
    run.resume_all()
    assert (run.change.rolled_forward, run.change.step_rerun) == (7, None)


def test_a_vote_that_was_received_but_not_applied_counts() -> None:
    run = Bench(TWO_NODES).form()
    run.lose(3)
    vote = run.vote(7)
    run.report(0, 7)
    run.report(1, 7, vote=vote)
    assert build_in(run.report(2, 7)).roll_forward == vote


def test_a_vote_that_only_the_coordinator_has_seen_counts() -> None:
    run = Bench(TWO_NODES).form()
    run.commit(7)
    vote = run.vote(7)
    run.lose(0)
    order = build_in(run.report_all(applied=7))
    assert (order.step, order.roll_forward) == (8, vote)


def test_a_vote_of_a_generation_whose_step_was_given_up_counts_no_more() -> None:
    run = Bench(TWO_NODES).form()
    late = run.vote(7)
    run.lose(3)
    run.recover(applied=7)
    run.handle(Published("w", late))
    assert run.state.committed == 7
    assert run.reason.startswith("stale")


def test_without_a_spare_the_mesh_loses_a_ring_and_leftovers_become_spares() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0).form()
    before = members(run.state)
    run.lose(2)
    order = build_in(run.report_all(applied=5))
    assert order.mesh == Mesh(1, 2)
    assert order.members == before[:2]
    said = run.resume_all()
    assert [stand.worker for stand in only(Standby, said)] == [before[3]], "after the build, not before"
    assert spares(run.state) == (before[3],)
    assert (run.change.action, run.change.promise, run.state.promise) == ("mesh shrank", *["sample-exact"] * 2)


def test_two_losses_that_leave_no_ring_whole_make_one_of_the_halves() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0).form()
    before = members(run.state)
    run.lose(0, 3)
    order = build_in(run.report_all(applied=5))
    assert sorted(order.members) == sorted([before[1], before[2]])
    assert order.members == (before[2], before[1])
    assert order.heals == ()


def test_a_leftover_that_may_still_hold_state_is_asked_when_the_build_fails() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0).form()
    before = members(run.state)
    run.lose(2)
    run.report_all(applied=5)
    stops = only(Stop, run.lose(1))
    assert {stop.worker for stop in stops} == {before[0], before[3]}
    run.report(0, 5, shard=0, gradient_membership_id=(1, 1), last_vote=None)
    leftover = Report("w", before[3], 1, run.state.generation, "aborted", 5, None, 1, True)
    order = build_in(run.handle(leftover))
    assert order.members == (before[0], before[3])


def test_a_shard_without_a_holder_or_checkpoint_means_a_new_beginning_until_the_limit_which_is_explained() -> None:
    run = Bench({"a": 4}, dp=1, rollback_limit=2).form()
    for restart in (1, 2):
        run.commit(4)
        run.lose(1)
        order = build_in(run.report(0, 5))
        assert (order.fresh, order.step, order.undone, order.goes_back) == (True, 0, 5, True)
        assert run.state.committed == 0
        run.resume_all()
        assert (run.change.source, run.change.steps_undone, run.change.promise) == ("beginning", 5, "bit-exact")
        assert run.state.num_restarts == restart
        run.all_ready()
    run.commit(4)
    run.lose(1)
    end = end_in(run.report(0, 5))
    assert end.error == "ShardLost"
    assert "begun again 2 times (rollback_limit)" in end.message
    assert "cp_rank 1" in end.message
    assert "step 4" in end.message
    assert "more rings" in end.message
    assert run.phase == "ended"


def test_before_the_first_commit_a_lost_shard_means_a_fresh_start() -> None:
    run = Bench({"a": 3}, dp=1).form()
    run.lose(1)
    order = build_in(run.report(0, 0))
    assert (order.fresh, order.step) == (True, 0)


def test_a_drained_worker_donates_its_own_place_and_leaves_after_the_handover() -> None:
    run = Bench({"a": 3}, dp=1).form()
    before, (spare,) = members(run.state), spares(run.state)
    stops = only(Stop, run.handle(DrainRequested("u", before[1])))
    assert {(stop.worker, stop.mode) for stop in stops} == {(worker, "boundary") for worker in before}
    said = run.report_all(applied=6, kind="boundary")
    order = build_in(said)
    assert (order.members, order.step) == ((before[0], spare), 6)
    assert [(heal.donor, heal.newcomers) for heal in order.heals] == [(before[1], (spare,))]
    assert not only(Release, said)
    said = run.resume_all()
    assert [release.worker for release in only(Release, said)] == [before[1]]
    assert (run.change.action, run.change.promise, run.change.step_rerun) == ("drained", "bit-exact", None)


def test_a_draining_node_without_spares_shrinks_the_mesh_at_a_boundary() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0).form()
    before = members(run.state)
    run.handle(NodeDraining("n", "b"))
    order = build_in(run.report_all(applied=3, kind="boundary"))
    assert (order.mesh, order.members) == (Mesh(1, 2), before[:2])
    assert {release.worker for release in only(Release, run.resume_all())} == set(before[2:])
    assert not only(StartWorker, run.wait(1.0)), "nothing starts on a node that leaves"


def test_a_replacement_starts_once_the_ring_is_closed_and_has_had_a_moment() -> None:
    run = Bench(TWO_NODES, spares=1, restart_delay_s=1.0).form()
    run.wait(2.0)
    said = run.lose(3) + run.report_all(applied=5) + run.resume_all()
    assert not only(StartWorker, said)
    assert not only(StartWorker, run.wait(0.5))
    assert len(only(StartWorker, run.wait(0.6))) == 1


def test_a_drain_that_nothing_can_replace_asks_for_a_checkpoint_once_and_waits() -> None:
    run = Bench({"a": 2}, dp=1, spares=0).form()
    said = run.handle(DrainRequested("u", members(run.state)[0]))
    assert {stop.mode for stop in only(Stop, said)} == {"save"}
    assert not only(Stop, run.wait(1.0))
    said = run.handle(NodeJoined("n", "b", 2)) + run.all_ready()
    assert {stop.mode for stop in only(Stop, said)} == {"boundary"}


def test_a_new_coordinator_leaves_a_training_mesh_alone() -> None:
    run = Bench(TWO_NODES).form()
    asked = only(Hello, run.handle(CoordinatorStarted("c", 2)))
    ready = [name for name, worker in run.state.workers.items() if worker.status == "ready"]
    assert {hello.worker for hello in asked} >= set(ready)
    said = ()
    for name in ready:
        activity = "running" if name in members(run.state) else "spare"
        said += run.handle(Status("w", name, 2, 1, activity))
    assert run.phase == "running"
    assert (run.state.generation, only(Stop, said)) == (1, [])
    run.handle(MemberFailed("w", members(run.state)[0], 1, 1, "peer", 3))
    assert run.reason.startswith("stale"), "the old term is over"


def test_a_new_coordinator_collects_reports_anew_when_a_member_stopped_training() -> None:
    run = Bench(TWO_NODES).form()
    run.handle(CoordinatorStarted("c", 2))
    said = ()
    for name in [name for name, worker in run.state.workers.items() if worker.status == "ready"]:
        said += run.handle(Status("w", name, 2, 1, "paused" if name in members(run.state) else "spare"))
    assert {(stop.term, stop.generation, stop.mode) for stop in only(Stop, said)} == {(2, 2, "abort")}
    assert build_in(run.report_all(applied=9)).step == 9


def test_a_worker_that_a_new_coordinator_does_not_hear_is_killed_and_replaced() -> None:
    run = Bench(TWO_NODES).form()
    membership = members(run.state)
    run.handle(CoordinatorStarted("c", 2))
    for name in [
        name for name, worker in run.state.workers.items() if worker.status == "ready" and name != membership[2]
    ]:
        run.handle(Status("w", name, 2, 1, "running" if name in membership else "spare"))
    run.wait(run.options.timeouts.hello_s / 2)
    said = run.wait(run.options.timeouts.hello_s)
    assert [kill.worker for kill in only(KillWorker, said)] == [membership[2]]
    run.lose(2)
    assert run.phase == "closing"
    assert membership[2] not in build_in(run.report_all(applied=9)).members


def test_capacity_that_comes_back_makes_spares_first_then_one_change_to_whole_rings() -> None:
    run = Bench({"a": 2, "b": 2}, spares=1, grow_delay_s=2.0).form()
    run.lose(2)
    run.recover(applied=5)
    assert mesh_of(run.state) == Mesh(1, 2)
    run.all_ready()
    assert len(spares(run.state)) == 2
    assert not only(Stop, run.wait(60.0)), "one spare is wanted, so one more is no ring"
    run.handle(NodeJoined("n", "c", 1))
    assert not only(Stop, run.all_ready()), "not before it is quiet"
    stops = only(Stop, run.wait(2.0))
    assert {stop.mode for stop in stops} == {"boundary"}
    order = build_in(run.report_all(applied=9, kind="boundary"))
    assert (order.mesh, order.step) == (Mesh(2, 2), 9)
    run.resume_all()
    assert (run.change.action, run.change.promise, len(spares(run.state))) == ("grew", "sample-exact", 1)


def test_a_bigger_cluster_makes_more_rings_than_asked_up_to_the_limit() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, max_dp=3).form()
    run.handle(NodeJoined("n", "c", 8))
    run.all_ready()
    run.wait(run.options.run.grow_delay_s)
    assert build_in(run.report_all(applied=1, kind="boundary")).mesh == Mesh(3, 2)
