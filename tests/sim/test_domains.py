"""Where members stand: replicas in different failure domains, rings packed into one, one holder of a shard reserved."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from elastic_ring.control.coordination import Decision, next_deadline
from elastic_ring.control.messages import Build, CoordinatorStarted, Event, NodeJoined, NodesListed, StartWorker
from elastic_ring.control.placement import policy
from elastic_ring.control.state import domains_of, members, node_of, reserved
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, only
from tests.sim.simulator.faults import random_schedule
from tests.sim.simulator.options import simulated
from tests.sim.truth import simulate


def _formed(dp: int, cp: int, nodes: dict[str, int], **more: Any) -> policy.Plan:
    on = {f"{node}.{slot}": node for node, slots in nodes.items() for slot in range(slots)}
    situation = policy.Situation(
        mesh=Mesh(dp, cp),
        members=(),
        holders={},
        empty=(),
        spares=tuple(on),
        node_of=on,
        target_dp=dp,
        min_dp=1,
        fresh=True,
        **more,
    )
    plan = policy.plan(situation)
    assert isinstance(plan, policy.Plan)
    return plan


def _nodes(plan: policy.Plan, rank: int) -> str:
    return plan.members[rank].split(".")[0]


def _zones_of_shards(plan: policy.Plan, zone_of: dict[str, str]) -> dict[int, list[str]]:
    found = defaultdict(list)
    for rank in range(plan.mesh.size):
        found[rank % plan.mesh.cp].append(zone_of[_nodes(plan, rank)])
    return dict(found)


def test_replicas_stand_in_different_zones_and_each_ring_in_one() -> None:
    nodes = {f"{zone}{index}": 2 for index in range(4) for zone in "ab"}
    plan = _formed(4, 4, nodes, domains_of={node: (node[0],) for node in nodes})
    rings = [{_nodes(plan, rank)[0] for rank in plan.mesh.ring(ring)} for ring in range(4)]
    assert sorted(map(sorted, rings)) == [["a"], ["a"], ["b"], ["b"]]


def test_without_labels_both_rings_may_stand_in_one_zone() -> None:
    """What the labels change: the first nodes are all of one zone."""
    nodes = {"a0": 2, "a1": 2, "b0": 2, "b1": 2}
    blind = _formed(2, 2, nodes)
    zoned = _formed(2, 2, nodes, domains_of={node: (node[0],) for node in nodes})
    zone_of = {node: node[0] for node in nodes}
    assert set(_zones_of_shards(blind, zone_of)[0]) == {"a"}
    assert set(_zones_of_shards(zoned, zone_of)[0]) == {"a", "b"}


def test_racks_count_where_the_zone_is_the_same_and_hosts_where_the_rack_is() -> None:
    places = {"n0": ("z", "r1", "h1"), "n1": ("z", "r1", "h1"), "n2": ("z", "r1", "h2"), "n3": ("z", "r2", "h3")}
    plan = _formed(2, 2, dict.fromkeys(places, 2), domains_of=places)
    assert {places[_nodes(plan, rank)][1] for rank in (0, 2)} == {"r1", "r2"}
    del places["n3"]
    plan = _formed(2, 2, dict.fromkeys(places, 2), domains_of=places)
    assert {places[_nodes(plan, rank)][2] for rank in (0, 2)} == {"h1", "h2"}


def test_one_holder_of_each_shard_is_on_reserved_nodes_and_the_others_on_spot() -> None:
    nodes = {"spot0": 2, "spot1": 2, "spot2": 2, "kept0": 2, "kept1": 2}
    plan = _formed(3, 2, nodes, reserved=frozenset({"kept0", "kept1"}))
    for cp_rank in range(2):
        kinds = sorted(_nodes(plan, dp_rank * 2 + cp_rank)[:4] for dp_rank in range(3))
        assert kinds == ["kept", "spot", "spot"]


def test_whatever_the_nodes_a_shard_reaches_every_zone_that_has_room_and_nodes_come_first() -> None:
    rng = random.Random(5)
    for _ in range(300):
        cp, zones = rng.randint(1, 3), rng.randint(2, 3)
        nodes = {f"{zone}x{index}": cp for zone in range(zones) for index in range(rng.randint(1, 3))}
        dp = rng.randint(2, len(nodes))
        plan = _formed(dp, cp, nodes, domains_of={node: (node[0],) for node in nodes})
        for rank in range(cp):
            places = [_nodes(plan, dp_rank * cp + rank) for dp_rank in range(dp)]
            assert len(set(places)) == dp, "no two holders on one node: every ring has a node of its own"
            assert len({place[0] for place in places}) == min(dp, zones)


def test_labels_of_nodes_reach_the_placement_and_a_lost_zone_takes_no_shard() -> None:
    run = Bench({}, spares=0)
    for name, zone, kept in (("a0", "a", False), ("a1", "a", True), ("b0", "b", False), ("b1", "b", False)):
        run.handle(NodeJoined("n", name, 1, None, (zone,), kept))
    run.form()
    assert domains_of(run.state) == {"a0": ("a",), "a1": ("a",), "b0": ("b",), "b1": ("b",)}
    assert reserved(run.state) == {"a1"}
    on = node_of(run.state)
    rings = [{on[worker][0] for worker in members(run.state)[ring * 2 : ring * 2 + 2]} for ring in range(2)]
    assert sorted(map(sorted, rings)) == [["a"], ["b"]]


def test_nodes_that_join_one_after_the_other_share_the_first_mesh() -> None:
    """Whatever the order and the delay in which their news comes: no two holders of a shard stand on one node."""
    options = simulated("gathered", dp=2, cp=2, total_steps=3, spares=1)
    calm = replace(random_schedule(0), options=options, faults=(), lost=0.0, faults_end_s=60.0, gpus=(), save_every=0)
    for seed in range(40):
        builds: list[tuple[Build, dict[str, str]]] = []

        def listen(now: float, term: int, event: Event, decision: Decision) -> None:
            builds.extend((order, node_of(decision.state)) for order in only(Build, decision.commands))  # noqa: B023

        assert simulate(seed, replace(calm, nodes=(8, 8, 2)[: 2 + seed % 2]), listen=listen).end.error == ""
        order, on = builds[0]
        for rank in range(order.mesh.cp):
            held_on = [on[worker] for worker in order.members[rank :: order.mesh.cp]]
            assert len(set(held_on)) == len(held_on), f"seed {seed}: {held_on}"


def test_the_first_workers_wait_for_listed_nodes_and_not_for_long() -> None:
    run = Bench({}, spares=1)
    gather_s = run.options.timeouts.gather_s
    run.handle(NodesListed("n", ("a", "b", "c")))
    assert only(StartWorker, run.handle(NodeJoined("n", "a", 8), 0.9 * gather_s)) == []
    assert only(StartWorker, run.handle(NodeJoined("n", "b", 8), 0.9 * gather_s)) == []
    assert next_deadline(run.state) == run.now + gather_s, "news of a node renews the wait"
    started = only(StartWorker, run.wait(gather_s))
    assert Counter(start.node for start in started).keys() == {"a", "b"}, "the third does not come"
    assert next_deadline(run.state) != run.now
    single = Bench({}, spares=1)
    single.handle(NodesListed("n", ("a",)))
    assert len(only(StartWorker, single.handle(NodeJoined("n", "a", 8)))) == 5, "one node waits for nothing"
    restarted = Bench({}, spares=1)
    restarted.handle(CoordinatorStarted("c", 2))
    restarted.handle(NodesListed("n", ("a", "b")))
    assert len(only(StartWorker, restarted.handle(NodeJoined("n", "a", 8)))) == 5, "nor does a restarted coordinator"
