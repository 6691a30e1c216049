"""Where copies and parities go: other shards, other nodes, evenly, and the same wherever it is computed."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from elastic_ring.control.messages import Build, HeldCopy, ParityGroup, Report, SnapshotId, from_json, to_json
from elastic_ring.control.options import CopyMode, parse_copies
from elastic_ring.control.placement.copies import CopyPlacement, failure_places, place
from elastic_ring.mesh import Mesh
from tests.sim.simulator.options import simulated

MESHES = [Mesh(dp, cp) for dp, cp in itertools.product(range(1, 5), range(1, 5)) if dp * cp > 1]


def _nodes(mesh: Mesh, num_nodes: int, packed: bool) -> list[str]:
    """Ranks on nodes: whole stretches of them on one, or in turn."""
    per_node = -(-mesh.size // num_nodes)
    return [f"n{rank // per_node if packed else rank % num_nodes}" for rank in range(mesh.size)]


LAYOUTS = [
    (mesh, _nodes(mesh, num_nodes, packed))
    for mesh, num_nodes, packed in itertools.product(MESHES, (1, 2, 3, 4, 8), (True, False))
]


@pytest.mark.parametrize("num_copies", [1, 2])
def test_no_rank_holds_its_own_copy_and_every_rank_holds_equally_many(num_copies: int) -> None:
    for mesh, nodes in LAYOUTS:
        found = place(mesh, nodes, CopyMode(num_copies)).copy_holders
        wanted = min(num_copies, mesh.size - 1)
        assert len(found) == mesh.size
        for rank, holders in enumerate(found):
            assert rank not in holders
            assert len(set(holders)) == wanted == len(holders)
        load = Counter(holder for holders in found for holder in holders)
        assert set(load.values()) == {wanted}, (mesh, nodes)


def test_a_copy_is_with_another_shard_than_its_own_wherever_there_is_one() -> None:
    for mesh, nodes in LAYOUTS:
        if mesh.cp > 1:
            for rank, (holder,) in enumerate(place(mesh, nodes, CopyMode(1)).copy_holders):
                assert holder % mesh.cp != rank % mesh.cp, f"{mesh} on {nodes}: {rank} and its copy go together"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cp", [2, 4, 6, 8])
def test_a_ring_on_equal_nodes_has_each_copy_on_another_node(cp: int, packed: bool) -> None:
    for num_nodes in (n for n in range(2, cp + 1) if cp % n == 0):
        nodes = _nodes(Mesh(1, cp), num_nodes, packed)
        for num_copies in {1, min(2, num_nodes - 1)}:
            for rank, holders in enumerate(place(Mesh(1, cp), nodes, CopyMode(num_copies)).copy_holders):
                assert len({nodes[rank], *(nodes[holder] for holder in holders)}) == 1 + num_copies, (nodes, rank)


def test_rings_that_each_fill_a_node_have_copies_where_no_replica_is() -> None:
    mesh, nodes = Mesh(2, 4), ["a", "a", "b", "b", "c", "c", "d", "d"]
    for rank, (holder,) in enumerate(place(mesh, nodes, CopyMode(1)).copy_holders):
        homes = {nodes[replica] for replica in mesh.replicas(rank % 4)}
        assert nodes[holder] not in homes


def test_copies_lie_in_another_zone_where_zones_are_even_else_on_another_rack_or_node() -> None:
    nodes = ["a", "a", "b", "b", "c", "c", "d", "d"]
    racks = {"a": ("east", "1"), "b": ("east", "2"), "c": ("west", "1"), "d": ("west", "2")}
    zones = failure_places(nodes, racks, CopyMode(1))
    assert zones == ["east"] * 4 + ["west"] * 4
    for rank, (holder,) in enumerate(place(Mesh(1, 8), zones, CopyMode(1)).copy_holders):
        assert zones[holder] != zones[rank]
    assert (
        failure_places(nodes, racks, CopyMode(2)) == ["east/1"] * 2 + ["east/2"] * 2 + ["west/1"] * 2 + ["west/2"] * 2
    )
    assert failure_places(nodes, racks | {"c": ("east", "1")}, CopyMode(1)) == [
        "east/1",
        "east/1",
        "east/2",
        "east/2",
        "east/1",
        "east/1",
        "west/2",
        "west/2",
    ]
    assert failure_places(nodes, {}, CopyMode(1)) == nodes
    assert failure_places(["a", "a"], racks, CopyMode(1)) == ["a", "a"]


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_each_rank_is_in_one_group_and_no_holder_in_its_own(group_size: int) -> None:
    for mesh, nodes in LAYOUTS:
        groups = place(mesh, nodes, CopyMode(group_size=group_size)).parity_groups
        assert sorted(rank for group in groups for rank in group.ranks) == list(range(mesh.size))
        for group in groups:
            assert group.holder not in group.ranks
            assert len(group.ranks) <= group_size
        load = Counter(group.holder for group in groups)
        assert max(load.values()) <= -(-len(groups) // mesh.size) + (mesh.size <= group_size)


def test_a_group_and_its_holder_are_on_different_nodes_where_there_are_enough() -> None:
    for cp, group_size in [(4, 2), (6, 2), (8, 3), (8, 2), (9, 2)]:
        nodes = [f"n{rank}" for rank in range(cp)]
        for group in place(Mesh(1, cp), nodes, CopyMode(group_size=group_size)).parity_groups:
            assert len({nodes[rank] for rank in (*group.ranks, group.holder)}) == len(group.ranks) + 1
    mesh, nodes = Mesh(4, 4), [f"n{rank // 4}" for rank in range(16)]
    for group in place(mesh, nodes, CopyMode(group_size=2)).parity_groups:
        assert len({nodes[rank] for rank in (*group.ranks, group.holder)}) == 3
        assert len({rank % 4 for rank in (*group.ranks, group.holder)}) == 3, "no two replicas of one shard"


def test_placement_is_the_same_whenever_it_is_computed_and_fast_for_2000_ranks() -> None:
    mesh, nodes = Mesh(250, 8), [f"n{rank // 8}" for rank in range(2000)]
    for mode in (CopyMode(1), CopyMode(2), CopyMode(group_size=8)):
        begun = time.process_time()
        first = place(mesh, nodes, mode)
        assert time.process_time() - begun < 1.0
        assert place(mesh, list(nodes), mode) == first


def test_what_the_setting_may_be() -> None:
    assert [parse_copies(text) for text in ("0", "1", "2", "parity:3")] == [
        CopyMode(),
        CopyMode(1),
        CopyMode(2),
        CopyMode(group_size=3),
    ]
    for text in ("3", "-1", "", "parity", "parity:1", "parity:x", "parity:-2", "full"):
        with pytest.raises(ValueError, match="copies="):
            parse_copies(text)


def test_the_core_lets_a_mesh_shrink_below_what_its_copies_need() -> None:
    asked = simulated("r", dp=3, cp=1, total_steps=1, copies="2")
    scaled = asked.scaled(dp_limit=1, spares=1)
    assert scaled.copy_mode(Mesh(1, 2)) == CopyMode(2), "as `elastic-ring scale` does while the run trains"


@pytest.mark.parametrize("mode", [CopyMode(2), CopyMode(group_size=4)])
def test_a_mesh_that_shrank_below_that_has_as_many_copies_as_it_can(mode: CopyMode) -> None:
    assert place(Mesh(1, 1), ["a"], mode) == CopyPlacement()
    two = place(Mesh(1, 2), ["a", "b"], mode)
    assert two == CopyPlacement(((1,), (0,))) or two.parity_groups == (ParityGroup((0,), 1), ParityGroup((1,), 0))


def test_what_is_held_and_where_copies_go_survive_the_journal() -> None:
    at = SnapshotId(10, (1, 3))
    held = (HeldCopy(at, (2,), own=True), HeldCopy(at, (0, 1), parity_of=("w1", "w2")))
    report = Report("c", "w", 1, 4, "aborted", 12, None, 2, False, copies=held, state_id=(1, 3))
    assert from_json(to_json(report)) == report
    order = Build(
        "c",
        "w",
        1,
        4,
        Mesh(1, 2),
        ("w", "v"),
        10,
        None,
        (),
        False,
        step_back=at,
        keep=at,
        copy_holders=((1,), (0,)),
        parity_groups=(ParityGroup((0,), 1),),
    )
    assert from_json(to_json(order)) == order
