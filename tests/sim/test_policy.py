"""Which worker gets which rank: brute force over small clusters, and the cases of docs/architecture.md."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from elastic_ring.control.placement import policy
from elastic_ring.mesh import Mesh


def _fresh(dp: int, cp: int, nodes: dict[str, int]) -> policy.Situation:
    node_of = {f"{node}{slot}": node for node, slots in nodes.items() for slot in range(slots)}
    return policy.Situation(
        mesh=Mesh(dp, cp),
        members=(),
        holders={},
        empty=(),
        spares=tuple(node_of),
        node_of=node_of,
        target_dp=dp,
        min_dp=1,
        fresh=True,
    )


def _num_pairs(members: tuple[str, ...], cp: int, node_of: dict[str, str]) -> int:
    holders = Counter((rank % cp, node_of[worker]) for rank, worker in enumerate(members))
    return sum(count * (count - 1) // 2 for count in holders.values())


def _fewest_pairs(situation: policy.Situation) -> int:
    """Over all ways to fill the members, by node."""
    size, cp = situation.mesh.size, situation.mesh.cp
    nodes = sorted(situation.node_of.values())
    return min(
        _num_pairs(tuple(str(i) for i in range(size)), cp, {str(i): node for i, node in enumerate(chosen)})
        for chosen in set(itertools.permutations(nodes, size))
    )


@pytest.mark.parametrize(
    ("dp", "cp", "nodes"),
    [
        (2, 2, {"a": 2, "b": 2}),
        (2, 2, {"a": 3, "b": 2}),
        (2, 2, {"a": 3, "b": 3}),
        (2, 2, {"a": 1, "b": 3}),
        (2, 3, {"a": 2, "b": 2, "c": 2}),
        (3, 2, {"a": 2, "b": 2, "c": 2}),
        (2, 3, {"a": 3, "b": 3, "c": 1}),
        (3, 2, {"a": 3, "b": 3}),
        (2, 2, {"a": 1, "b": 1, "c": 1, "d": 1}),
        (3, 1, {"a": 2, "b": 2}),
    ],
)
def test_a_formation_has_the_fewest_holders_of_one_shard_on_a_node(dp: int, cp: int, nodes: dict[str, int]) -> None:
    situation = _fresh(dp, cp, nodes)
    planned = policy.plan(situation)
    assert isinstance(planned, policy.Plan)
    assert _num_pairs(planned.members, cp, dict(situation.node_of)) == _fewest_pairs(situation)


def test_rings_are_packed_and_replicas_spread() -> None:
    situation = _fresh(4, 4, dict.fromkeys("abcd", 5))
    planned = policy.plan(situation)
    assert isinstance(planned, policy.Plan)
    rings = [{situation.node_of[planned.members[rank]] for rank in planned.mesh.ring(ring)} for ring in range(4)]
    assert [len(ring) for ring in rings] == [1, 1, 1, 1]
    assert len(set.union(*rings)) == 4


def _random_situation(rng: random.Random) -> policy.Situation:
    dp, cp = rng.randint(1, 4), rng.randint(1, 3)
    mesh = Mesh(dp, cp)
    members = tuple(f"m{rank}" for rank in range(mesh.size))
    alive = [worker for worker in members if rng.random() < 0.8]
    holders = {w: int(w[1:]) % cp for w in alive if rng.random() < 0.9}
    spares = tuple(f"s{index}" for index in range(rng.randint(0, 4)))
    return policy.Situation(
        mesh=mesh,
        members=members,
        holders=holders,
        empty=tuple(w for w in alive if w not in holders),
        spares=spares,
        node_of={worker: rng.choice("abc") for worker in (*members, *spares)},
        target_dp=dp,
        min_dp=1,
        draining=frozenset(worker for worker in alive if rng.random() < 0.15),
    )


def test_every_plan_is_sound_whatever_is_lost() -> None:
    rng, kinds = random.Random(3), Counter[str]()
    for _ in range(3000):
        situation = _random_situation(rng)
        planned = policy.plan(situation)
        kinds[type(planned).__name__] += 1
        held = set(situation.holders.values())
        if isinstance(planned, policy.NoHolder):
            assert set(planned.cp_ranks) == set(range(situation.mesh.cp)) - held
            continue
        if isinstance(planned, policy.NotEnoughWorkers):
            assert planned.num_workers + planned.num_missing == situation.mesh.cp
            continue
        _check_plan(situation, planned)
    assert min(kinds.values()) > 50, kinds


def _check_plan(situation: policy.Situation, planned: policy.Plan) -> None:
    mesh, alive = planned.mesh, {*situation.holders, *situation.empty}
    healed = {worker: heal for heal in planned.heals for worker in heal.newcomers}
    assert len(set(planned.members)) == mesh.size
    assert set(planned.members) <= alive | set(situation.spares)
    assert set(planned.leaving) == alive - set(planned.members)
    for rank, worker in enumerate(planned.members):
        cp_rank = mesh.coordinate(rank).cp_rank
        if worker in healed:
            assert healed[worker].cp_rank == cp_rank
            assert situation.holders[healed[worker].donor] == cp_rank
            assert healed[worker].donor not in healed
        else:
            assert situation.holders[worker] == cp_rank
    staying = [w for w in (*alive, *situation.spares) if w not in situation.draining]
    most = min(situation.target_dp, len(staying) // mesh.cp)
    if most >= 1:
        assert mesh.dp == most, "as many whole rings as there are workers for"
        assert not set(planned.members) & situation.draining
    if planned.promise == "bit-exact":
        assert mesh == situation.mesh
        kept = [w for w in situation.holders if w not in situation.draining]
        assert all(planned.members[int(worker[1:])] == worker for worker in kept)
