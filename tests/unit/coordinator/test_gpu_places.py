"""A node's GPUs limit how many members sit on it: who is placed, who is started, when the mesh grows and waits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from elastic_ring.control.capacity.worker_pool import STANDBY_AFTER_S
from elastic_ring.control.messages import (
    BuildFailed,
    DrainRequested,
    NodeJoined,
    NodeLost,
    Standby,
    StartWorker,
    Stop,
    WorkerLost,
    from_json,
    to_json,
)
from elastic_ring.control.placement import policy
from elastic_ring.control.pool import placeable
from elastic_ring.control.state import members, mesh_of, spares, waiting_for
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, only

FOUR_EACH = {"a": 4, "b": 4}
MESH = {"dp": 2, "cp": 4}

# ------------------------------------------------------------ who is placed


def _crosswise(**changes: object) -> policy.Situation:
    """2 x 4 with halves of both rings on each node; rank 1 of node a has died, its twin, rank 5, is there too."""
    members = tuple(f"m{rank}" for rank in range(8))
    node_of = {worker: "a" if rank % 4 < 2 else "b" for rank, worker in enumerate(members)}
    holders = {worker: rank % 4 for rank, worker in enumerate(members) if rank != 1}
    situation = policy.Situation(
        mesh=Mesh(2, 4),
        members=members,
        holders=holders,
        empty=(),
        spares=("at-b", "at-a"),
        node_of={**node_of, "at-a": "a", "at-b": "b"},
        target_dp=2,
        min_dp=1,
    )
    return replace(situation, **changes)  # type: ignore[arg-type]


def test_a_dead_member_is_replaced_by_its_own_nodes_standby_even_if_the_others_looks_better():
    free = policy.plan(_crosswise())
    assert isinstance(free, policy.Plan)
    assert free.members[1] == "at-b", "without limits the holders of one shard are kept apart"
    bound = policy.plan(_crosswise(gpus_on=FOUR_EACH))
    assert isinstance(bound, policy.Plan)
    assert bound.members == ("m0", "at-a", *(f"m{rank}" for rank in range(2, 8)))
    assert (bound.action, bound.promise) == ("spare took its place", "bit-exact")


def test_a_standby_on_a_full_node_replaces_nobody_elsewhere():
    planned = policy.plan(_crosswise(gpus_on=FOUR_EACH, spares=("at-b",)))
    assert isinstance(planned, policy.Plan)
    assert planned.mesh == Mesh(1, 4)
    assert "at-b" not in planned.members


def test_too_few_gpus_are_told_apart_from_too_few_workers():
    both = policy.plan(_crosswise(gpus_on=FOUR_EACH, spares=("at-b",), min_dp=2))
    assert both == policy.NotEnoughWorkers(num_workers=7, num_missing=1, num_crowded=1)
    assert policy.plan(_crosswise(spares=(), min_dp=2)) == policy.NotEnoughWorkers(7, 1, 0)


def test_a_draining_members_gpu_is_free_for_nobody_until_it_has_left():
    healthy = {f"m{rank}": rank % 4 for rank in range(8)}
    draining = {"holders": healthy, "spares": ("at-a",), "draining": frozenset({"m0"}), "gpus_on": FOUR_EACH}
    planned = policy.plan(_crosswise(**draining))
    assert isinstance(planned, policy.Plan)
    assert (planned.mesh, "at-a" in planned.members, "m0" in planned.members) == (Mesh(1, 4), False, False)
    kept = policy.plan(_crosswise(**draining, min_dp=2))
    assert isinstance(kept, policy.Plan)
    assert kept.members == tuple(healthy), "it stays where nothing else keeps min_dp rings"


def test_fewer_gpus_than_members_leave_members_out_who_may_still_donate():
    healthy = {f"m{rank}": rank % 4 for rank in range(8)}
    planned = policy.plan(_crosswise(holders=healthy, spares=(), gpus_on={"a": 3}))
    assert isinstance(planned, policy.Plan)
    assert planned.mesh == Mesh(1, 4)
    assert planned.leaving
    short = policy.plan(_crosswise(holders=healthy, spares=(), gpus_on={"a": 0}, min_dp=2))
    assert short == policy.NotEnoughWorkers(4, 4, 4)
    two = policy.plan(_crosswise(holders=healthy, spares=(), gpus_on={"a": 0}))
    assert isinstance(two, policy.Plan)
    assert set(two.members) == {"m2", "m3", "m6", "m7"}
    assert {(heal.donor, heal.cp_rank) for heal in two.heals} <= {(w, r) for w, r in healthy.items()}


def _random_situation(rng: random.Random) -> policy.Situation:
    dp, cp = rng.randint(1, 4), rng.randint(1, 3)
    members = tuple(f"m{rank}" for rank in range(dp * cp))
    alive = [worker for worker in members if rng.random() < 0.8]
    holders = {w: int(w[1:]) % cp for w in alive if rng.random() < 0.9}
    standbys = tuple(f"s{index}" for index in range(rng.randint(0, 6)))
    fresh = rng.random() < 0.2
    return policy.Situation(
        mesh=Mesh(dp, cp),
        members=() if fresh else members,
        holders={} if fresh else holders,
        empty=() if fresh else tuple(w for w in alive if w not in holders),
        spares=(*members, *standbys) if fresh else standbys,
        node_of={worker: rng.choice("abc") for worker in (*members, *standbys)},
        target_dp=dp,
        min_dp=rng.randint(1, dp),
        fresh=fresh,
        draining=frozenset(worker for worker in alive if not fresh and rng.random() < 0.15),
        gpus_on={node: rng.randint(0, 5) for node in "abc" if rng.random() < 0.8},
    )


def _num_able(situation: policy.Situation, workers: set[str]) -> int:
    """Node by node: holders of GPUs up to the limit, others up to what no holder has."""
    held, total = {*situation.holders, *(set(situation.empty) & situation.draining)}, 0
    for node in "abc":
        here = {worker for worker, at in situation.node_of.items() if at == node}
        limit = situation.gpus_on.get(node, len(here))
        total += min(limit, len(workers & held & here))
        total += min(max(0, limit - len(held & here)), len((workers - held) & here))
    return total


def test_no_plan_exceeds_a_nodes_gpus_and_each_has_all_the_rings_that_fit():
    rng, kinds, num_bound = random.Random(5), Counter[str](), 0
    for _ in range(4000):
        situation = _random_situation(rng)
        planned, cp = policy.plan(situation), situation.mesh.cp
        kinds[type(planned).__name__] += 1
        if isinstance(planned, policy.NoHolder):
            continue
        held = {*situation.holders, *situation.empty}
        everyone = {*held, *situation.spares}
        num_able = _num_able(situation, everyone - situation.draining)
        if num_able // cp < situation.min_dp:
            num_able = _num_able(situation, everyone)
        num_bound += num_able < len(everyone - situation.draining)
        if isinstance(planned, policy.NotEnoughWorkers):
            assert num_able // cp < situation.min_dp
            assert planned == policy.NotEnoughWorkers(
                num_able, situation.min_dp * cp - num_able, len(everyone) - num_able
            )
            continue
        assert planned.mesh.dp == min(situation.target_dp, num_able // cp)
        assert len(set(planned.members)) == planned.mesh.size
        placed = Counter(situation.node_of[worker] for worker in planned.members)
        newcomers = Counter(situation.node_of[worker] for worker in planned.members if worker not in held)
        holding = Counter(situation.node_of[worker] for worker in held)
        for node, limit in situation.gpus_on.items():
            assert placed[node] <= limit
            assert not newcomers[node] or newcomers[node] + holding[node] <= limit
        for heal in planned.heals:
            assert situation.holders[heal.donor] == heal.cp_rank
    assert num_bound > 1000
    assert min(kinds.values()) > 100, kinds


def test_limits_that_nobody_reaches_change_no_plan():
    rng = random.Random(6)
    for _ in range(1500):
        situation = _random_situation(rng)
        assert policy.plan(replace(situation, gpus_on=dict.fromkeys("abc", 99))) == policy.plan(
            replace(situation, gpus_on={})
        )


def test_the_first_come_first_and_holders_do_not_go_by_the_queue():
    node_of = dict.fromkeys("uvwxyz", "a")
    assert placeable("uvwxyz", "wx", node_of, {"a": 3}) == ["u", "w", "x"]
    assert placeable("uvwxyz", "wxy", node_of, {"a": 2}) == ["w", "x"]
    assert placeable("uvwxyz", "wxy", node_of, {}) == list("uvwxyz")


# ------------------------------------------------------------ who is started


def _nodes(run: Bench, *names: str) -> Counter[str]:
    return Counter(run.state.workers[name].node for name in names)


def _all_nodes(run: Bench) -> Counter[str]:
    return _nodes(run, *run.state.workers)


def _recover(run: Bench, rank: int, applied: int) -> tuple[str, ...]:
    """One member dies and the ring is closed; the new members."""
    run.lose(rank)
    order = build_in(run.report_all(applied))
    run.resume_all()
    return order.members


def _rank_on(run: Bench, node: str) -> int:
    return next(rank for rank, name in enumerate(members(run.state)) if run.state.workers[name].node == node)


def test_standbys_go_one_to_each_node_and_replace_their_own_nodes_members():
    run = Bench({"a": 9, "b": 9}, FOUR_EACH, **MESH, spares=2).form()
    assert _all_nodes(run) == {"a": 5, "b": 5}
    assert _nodes(run, *spares(run.state)) == {"a": 1, "b": 1}
    for step, node in enumerate("abba", 1):
        before = members(run.state)
        rank = _rank_on(run, node)
        (standby,) = [name for name in spares(run.state) if run.state.workers[name].node == node]
        assert _recover(run, rank, step) == (*before[:rank], standby, *before[rank + 1 :])
        assert run.change.action == "spare took its place"
        run.all_ready()
        assert _all_nodes(run) == {"a": 5, "b": 5}, "the replacement starts where the dead one was"
    assert run.state.promise == "bit-exact"


def test_without_a_standby_there_the_mesh_shrinks_until_a_replacement_has_started_there():
    run = Bench({"a": 9, "b": 9}, FOUR_EACH, **MESH, spares=1, grow_delay_s=2.0, restart_delay_s=1.0).form()
    (standby,) = spares(run.state)
    bare = "b" if run.state.workers[standby].node == "a" else "a"
    _recover(run, _rank_on(run, bare), 3)
    assert mesh_of(run.state) == Mesh(1, 4)
    assert standby not in members(run.state)
    assert len(spares(run.state)) == 4, "a ring's worth of spares, but not one of GPUs"
    assert not only(Stop, run.wait(0.9))
    (start,) = only(StartWorker, run.wait(0.2))
    assert start.node == bare
    assert not only(Stop, run.wait(60.0)), "nothing that cannot grow asks for a boundary"
    run.all_ready()
    assert {stop.mode for stop in only(Stop, run.wait(2.0))} == {"boundary"}
    order = build_in(run.report_all(9, "boundary"))
    run.resume_all()
    assert (order.mesh, run.change.action) == (Mesh(2, 4), "grew")
    assert _nodes(run, *order.members) == FOUR_EACH
    assert spares(run.state) == (standby,)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_uneven_nodes_hold_as_many_members_as_they_have_gpus(order):
    run = Bench(dict.fromkeys(order, 12), {"a": 8, "b": 2}, **MESH, spares=3).form()
    assert _all_nodes(run) == {"ab": {"a": 9, "b": 2}, "ba": {"a": 8, "b": 3}}[order]
    for step in range(1, 9):
        assert _nodes(run, *members(run.state))["b"] <= 2
        _recover(run, step % 8, step)
        assert mesh_of(run.state) == Mesh(2, 4)
        assert _nodes(run, *members(run.state))["b"] <= 2
        run.all_ready()


def test_gpus_for_no_third_ring_ask_for_no_boundary_however_many_workers_stand_by():
    run = Bench({"a": 12, "b": 12}, {"a": 8, "b": 2}, **MESH, spares=4, max_dp=3).form()
    assert len(spares(run.state)) == 6, "two with a GPU of their own and four standbys"
    assert not only(Stop, run.wait(60.0))
    run.handle(NodeJoined("n", "c", 2, 2))
    run.all_ready()
    assert only(Stop, run.wait(run.options.run.grow_delay_s))
    assert build_in(run.report_all(5, "boundary")).mesh == Mesh(3, 4)


def test_a_node_with_room_for_many_and_few_gpus_does_not_take_up_what_others_need():
    run = Bench({"a": 30}, {"a": 2}, **MESH, spares=2)
    assert _all_nodes(run) == {"a": 3}, "two that can sit and its share of the standbys"
    run.all_ready()
    run.wait(run.options.timeouts.start_s)
    assert run.phase == "forming"
    told = waiting_for(run.state, run.now)
    assert "3 of 8 ready" in told
    assert "GPUs for 2 of them only" in told
    run.handle(NodeJoined("n", "b", 30, 8))
    assert _all_nodes(run) == {"a": 3, "b": 8}, "the spares have GPUs of their own"
    run.form()
    assert _nodes(run, *members(run.state))["a"] <= 2


def test_a_node_without_a_single_gpu_gets_no_standby():
    run = Bench({"a": 9, "b": 9}, {"a": 0, "b": 4}, dp=1, cp=4, spares=2)
    assert _all_nodes(run) == {"b": 6}


def test_what_a_lost_node_held_starts_on_the_node_that_comes_for_it():
    run = Bench({"a": 6, "b": 6}, FOUR_EACH, **MESH, spares=2).form()
    run.handle(NodeLost("n", "b"))
    build_in(run.report_all(3))
    run.resume_all()
    assert mesh_of(run.state) == Mesh(1, 4)
    assert _all_nodes(run) == {"a": 5}, "no more of them could sit, and one standby is its share"
    run.handle(NodeJoined("n", "c", 6, 4))
    assert _all_nodes(run) == {"a": 5, "c": 4}
    run.wait(STANDBY_AFTER_S)
    assert _all_nodes(run) == {"a": 5, "c": 5}
    run.all_ready()
    run.wait(run.options.run.grow_delay_s)
    order = build_in(run.report_all(8, "boundary"))
    assert (order.mesh, _nodes(run, *order.members)) == (Mesh(2, 4), {"a": 4, "c": 4})


# ------------------------------------------------------------ waiting, draining, news


def test_waiting_says_that_gpus_are_missing_and_goes_on_when_there_are_more():
    run = Bench({"a": 5, "b": 5}, FOUR_EACH, **MESH, spares=1, min_dp=2).form()
    (standby,) = spares(run.state)
    bare = "b" if run.state.workers[standby].node == "a" else "a"
    run.lose(_rank_on(run, bare))
    run.report_all(3)
    assert run.phase == "waiting"
    assert waiting_for(run.state, run.now) == (
        "waiting, with every shard held, for 1 more worker(s) for 2 ring(s) of 4, each with a GPU of its own: "
        "1 are there whose nodes have none left"
    )
    taken = run.state.workers[standby].node
    said = run.handle(NodeJoined("n", taken, 5, 5))
    assert standby in build_in(said).members, "the node has one more"


def test_a_drained_member_of_a_full_node_is_replaced_once_its_gpu_is_free():
    run = Bench({"a": 6, "b": 6}, FOUR_EACH, **MESH, spares=2).form()
    leaver = members(run.state)[0]
    run.handle(DrainRequested("u", leaver))
    order = build_in(run.report_all(3, "boundary"))
    assert (order.mesh, leaver in order.members) == (Mesh(1, 4), False)
    run.resume_all()
    run.handle(WorkerLost("a", leaver, "exited"))
    run.all_ready()
    run.wait(run.options.run.grow_delay_s)
    order = build_in(run.report_all(6, "boundary"))
    assert (order.mesh, _nodes(run, *order.members)) == (Mesh(2, 4), FOUR_EACH)


def test_a_drain_that_only_the_leavers_own_gpu_could_make_good_asks_for_no_boundary():
    run = Bench({"a": 6}, {"a": 4}, dp=1, cp=4, spares=1).form()
    said = run.handle(DrainRequested("u", members(run.state)[0]))
    assert {stop.mode for stop in only(Stop, said)} == {"save"}
    assert not only(Stop, run.wait(60.0))
    said = run.handle(NodeJoined("n", "b", 1, 1)) + run.all_ready()
    assert {stop.mode for stop in only(Stop, said)} == {"boundary"}


def test_other_gpus_are_news_and_the_same_ones_are_not():
    run = Bench({"a": 6}, {"a": 4}, dp=1, cp=4, spares=1).form()
    before = run.state
    run.handle(NodeJoined("n", "a", 6, 4))
    assert (run.reason, run.state) == ("room as known", before)
    run.handle(NodeJoined("n", "a", 6, 5))
    assert run.state.nodes["a"].num_gpus == 5
    assert run.state.pool_changed_at == run.now


def test_after_a_build_that_failed_without_a_death_the_spares_beside_the_newcomer_let_go_of_their_gpus():
    """One that missed its `Standby` holds a GPU that counts as free; the newcomer would wait for it every time."""
    run = Bench({"a": 9, "b": 9}, FOUR_EACH, **MESH, spares=4).form()
    rank = _rank_on(run, "a")
    run.lose(rank)
    said = run.report_all(3)
    newcomer = build_in(said).members[rank]
    assert not only(Standby, said), "the first attempt takes the way of every healthy run"
    run.handle(BuildFailed("w", newcomer, 1, run.state.generation, "none of 4 GPUs got free"))
    last = {"last_vote": None, "gradient_membership_id": (1, 1)}
    for other in range(8):
        said = run.report(other, 3, **last, **({"shard": None} if other == rank else {}))
    assert build_in(said).members[rank] == newcomer
    idle = [name for name in spares(run.state) if run.state.workers[name].node == "a"]
    assert [stand.worker for stand in only(Standby, said)] == idle
    assert len(idle) == 1


# ------------------------------------------------------------ journals


def test_a_journal_from_before_there_were_limits_loads():
    old = {"type": "NodeJoined", "cause": "n", "node": "a", "num_slots": 3}
    assert from_json(old) == NodeJoined("n", "a", 3, None)


@pytest.mark.parametrize("num_gpus", [None, 0, 4])
def test_a_nodes_gpus_survive_the_journal(num_gpus):
    event = NodeJoined("n", "a", 3, num_gpus)
    assert from_json(to_json(event)) == event
