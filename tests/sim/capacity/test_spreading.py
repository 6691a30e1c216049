"""Holders of one shard that share a node move apart once another node has room: no step lost, and never fewer rings."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from elastic_ring.control import spreading
from elastic_ring.control.messages import (
    Build,
    Command,
    KillWorker,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Release,
    Report,
    ScaleRequested,
    StartWorker,
    Stop,
    WorkerLost,
)
from elastic_ring.control.spreading import MIN_INTERVAL_S
from elastic_ring.control.state import members, membership_of, node_of, spares
from tests.sim.bench import Bench, build_in, only
from tests.sim.invariants import InvariantBroken
from tests.sim.simulator.faults import Schedule, random_schedule
from tests.sim.simulator.options import simulated
from tests.sim.simulator.simulate import Listener
from tests.sim.truth import simulate


def _joined_later(slots: int = 8, gpus: int | None = None, **options: int) -> Bench:
    """Two rings of two and their spares on node a, then node b; what is to move there has started."""
    run = Bench({"a": 8}, **{"spares": 1, **options}).form()
    run.handle(NodeJoined("n", "b", slots, gpus))
    assert not only(StartWorker, run.sent), "new room has to last"
    run.wait(run.options.run.grow_delay_s)
    return run


def _lasts(run: Bench) -> list[Stop]:
    return only(Stop, run.wait(run.options.run.grow_delay_s))


def _let_go(run: Bench) -> set[str]:
    """The released workers end."""
    released = {release.worker for release in only(Release, run.sent)}
    for worker in sorted(released):
        run.handle(WorkerLost("a", worker, "exited"))
    return released


def test_a_ring_moves_to_a_node_that_came_later_and_its_members_leave() -> None:
    run = _joined_later()
    assert [start.node for start in only(StartWorker, run.sent)] == ["b", "b"]
    before = members(run.state)
    assert not _lasts(run), "nobody is stopped for newcomers that are not ready"
    run.all_ready()
    assert {stop.mode for stop in _lasts(run)} == {"boundary"}
    order = build_in(run.report_all(5, "boundary"))
    on = node_of(run.state)
    assert (order.step, order.mesh.dp, order.members[:2]) == (5, 2, before[:2])
    assert [on[worker] for worker in order.members] == ["a", "a", "b", "b"]
    assert {(heal.donor, *heal.newcomers) for heal in order.heals} == {*zip(before[:2], order.members[2:], strict=True)}
    assert run.change.promise == "bit-exact"
    run.sent = run.resume_all()
    assert _let_go(run) == set(before[2:])
    run.wait(2 * MIN_INTERVAL_S)
    assert not only(Stop, run.sent), "nobody else moves"
    assert len(run.state.workers) == 5, "as many as before"


def test_a_spare_that_stands_there_is_the_newcomer_and_without_room_nobody_moves() -> None:
    run = _joined_later(slots=1)
    assert [start.node for start in only(StartWorker, run.sent)] == ["b"]
    run.all_ready()
    assert _lasts(run)
    order = build_in(run.report_all(5, "boundary"))
    assert [node_of(run.state)[worker] for worker in order.members].count("b") == 1, "as far as there is room"
    assert not only(StartWorker, _joined_later(slots=8, gpus=0).sent)
    assert not only(StartWorker, _joined_later(slots=0).sent)


def test_nobody_leaves_where_the_newcomers_die_before_all_have_paused_and_the_next_try_comes_later() -> None:
    run = _joined_later()
    run.all_ready()
    assert _lasts(run)
    before = members(run.state)
    for worker in [name for name, node in node_of(run.state).items() if node == "b"]:
        run.handle(WorkerLost("a", worker, "died"))
    order = build_in(run.report_all(5, "boundary"))
    assert (order.members, order.step) == (before, 5)
    run.resume_all()
    assert not only(StartWorker, run.wait(MIN_INTERVAL_S - 10.0))
    assert only(StartWorker, run.wait(10.0))


def test_a_node_that_is_lost_while_members_move_there_costs_no_ring() -> None:
    run = _joined_later()
    run.all_ready()
    assert _lasts(run)
    before = members(run.state)
    run.report_all(5, "boundary")
    run.handle(NodeLost("n", "b"))
    sent = run.report_all(5)
    for cp_rank, worker in enumerate(before[2:]):
        sent += run.handle(Report("w", worker, 1, run.state.generation, "aborted", 5, None, cp_rank, True))
    order = build_in(sent)
    assert (order.members, order.step) == (before, 5)
    assert run.change.promise == "bit-exact"


def test_members_move_no_more_once_a_step_was_longer_than_a_boundary_may_be() -> None:
    run = _joined_later()
    run.all_ready()
    assert _lasts(run)
    started = {name for name, node in node_of(run.state).items() if node == "b"}
    before = members(run.state)
    assert {stop.mode for stop in only(Stop, run.wait(run.options.timeouts.boundary_s))} == {"abort"}
    assert build_in(run.report_all(5)).members == before
    run.sent = run.resume_all()
    assert _let_go(run) == started, "nobody is to take a place any more"
    for _ in range(5):
        assert not only(Stop, run.wait(2 * MIN_INTERVAL_S))


def test_a_larger_node_that_comes_meanwhile_leaves_nobody_idle() -> None:
    run = _joined_later(slots=4)
    run.handle(NodeJoined("n", "c", 8))
    run.wait(run.options.run.grow_delay_s)
    assert not only(StartWorker, run.sent), "newcomers start elsewhere already"
    run.all_ready()
    assert _lasts(run)
    order = build_in(run.report_all(5, "boundary"))
    assert [node_of(run.state)[worker] for worker in order.members] == ["a", "a", "b", "b"]
    run.sent = run.resume_all()
    _let_go(run)
    assert len(run.state.workers) == 5


def test_who_was_started_for_it_leaves_where_the_room_is_not_to_be_used_any_more() -> None:
    run = _joined_later()
    started = [start.worker for start in only(StartWorker, run.sent)]
    run.all_ready()
    run.handle(NodeJoined("n", "a", 2))  # now nothing else than the node of the newcomers has room
    run.handle(NodeDraining("n", "b", run.now + 100.0))
    assert _let_go(run) == set(started)
    assert not _lasts(run)
    assert {node_of(run.state)[worker] for worker in members(run.state)} == {"a"}


def test_the_moves_of_a_scaled_down_run_are_dropped() -> None:
    run = _joined_later()
    sent = run.handle(ScaleRequested("u", 2, 0))
    assert not run.state.movers
    killed = {kill.worker for kill in only(KillWorker, sent)}
    assert killed == {name for name, node in node_of(run.state).items() if node == "b"} - set(spares(run.state))


EIGHT = "abcdefgh"


def _nodes_of(run: Bench) -> list[str]:
    """By rank."""
    on = node_of(run.state)
    return [on[worker] for worker in members(run.state)]


def _are_apart(run: Bench) -> bool:
    membership = membership_of(run.state)
    assert membership is not None
    mesh, nodes = membership.mesh, _nodes_of(run)
    return all(len({nodes[rank] for rank in mesh.replicas(cp_rank)}) == mesh.dp for cp_rank in range(mesh.cp))


def _settle(run: Bench, said: tuple[Command, ...] = ()) -> None:
    """Time passes: newcomers become warm, boundaries are reached, builds are made, who is released ends."""
    for _ in range(60):
        if only(Build, said):
            said += run.resume_all()
        for release in only(Release, said):
            run.handle(WorkerLost("a", release.worker, "exited"))
        said = run.wait(run.options.run.grow_delay_s) + run.all_ready()
        membership = membership_of(run.state)
        if membership is not None and {stop.mode for stop in only(Stop, said)} == {"boundary"}:
            said += run.report_all(membership.step + 1, "boundary")


@pytest.mark.parametrize("arrival", ["all at once", "room for more rings", "one after the other"])
def test_on_eight_nodes_holders_are_apart_and_the_node_of_rank_0_may_be_lost(arrival: str) -> None:
    if arrival == "all at once":
        run = Bench(dict.fromkeys(EIGHT, 4), dp=4, spares=2).form()
    else:
        grows = {"dp": 2, "max_dp": 4} if arrival == "room for more rings" else {"dp": 4, "min_dp": 4}
        run = Bench({"a": 10}, spares=2, **grows).form()
        for node in EIGHT[1:]:
            run.handle(NodeJoined("n", node, 4), 3.0)
    _settle(run)
    mesh, lost, membership = run.change.mesh, _nodes_of(run)[0], membership_of(run.state)
    assert (run.phase, mesh.dp, _are_apart(run)) == ("running", 4, True), _nodes_of(run)
    assert membership is not None
    run.handle(NodeLost("n", lost))
    _settle(run, run.report_all(membership.step + 3))
    assert (run.phase, run.change.mesh, _are_apart(run), lost in _nodes_of(run)) == ("running", mesh, True, False)
    commands = [command for line in run.journal for command in json.loads(line).get("commands", ())]
    assert all(command.get("restore") is None for command in commands), "the other holders had it"


def _hosts_come_and_go(seed: int) -> Schedule:
    """Runs that outlive several moves; nothing else happens in them."""
    rng = random.Random(seed)
    options = simulated("hosts", *rng.choice([(2, 2), (2, 1), (3, 2)]), total_steps=rng.randint(200, 500), spares=1)
    faults = [(rng.uniform(1.0, 40.0), rng.choice(["join", "join", "kill-node", "restart"])) for _ in range(8)]
    calm = replace(random_schedule(0), options=options, lost=0.0, doubled=0.0, gpus=(), save_every=0)
    return replace(calm, nodes=(9,), faults=tuple(sorted(faults)), faults_end_s=60.0)


def _simulate_all(listen: Listener | None = None) -> None:
    for seed in range(12):
        simulate(seed, _hosts_come_and_go(seed), listen=listen)


def test_after_hosts_have_come_and_gone_no_holders_go_on_sharing_a_node() -> None:
    num_moves = 0

    def listen(now: float, term: int, event: object, decision: object) -> None:
        nonlocal num_moves
        num_moves += "requested a boundary: spread" in decision.reason  # type: ignore[attr-defined]

    _simulate_all(listen)
    assert num_moves > 6


def test_a_run_that_does_not_move_them_breaks_the_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "settle", lambda ctx: None)
    with pytest.raises(InvariantBroken, match="invariant 6"):
        _simulate_all()
