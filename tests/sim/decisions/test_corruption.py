"""Wrong results: who is named by which table, that healthy tables name nobody, and what the core does."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.control.decisions.corruption import LOCAL, REDUCED, STATE, Digests, Finding, is_checked, judge
from elastic_ring.control.messages import (
    Build,
    EndRun,
    KillWorker,
    MemberFailed,
    Release,
    Standby,
    StartWorker,
    Stop,
)
from elastic_ring.control.state import members, mesh_of, node_of, spares
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, only

MESHES = [Mesh(2, 1), Mesh(2, 2), Mesh(3, 1), Mesh(3, 2), Mesh(4, 2)]
FIELD = {STATE: "state", REDUCED: "reduced", LOCAL: "own"}


def table(mesh: Mesh, step: int = 0) -> list[Digests]:
    """What healthy ranks tell: replicas of a shard the same, each ring's sequence as the next ring computes it."""

    def number(*key: Any) -> float:
        return float(random.Random(repr((step, *key))).randrange(1, 2**48))

    rows = []
    for rank in range(mesh.size):
        ring, cp_rank = mesh.coordinate(rank).dp_rank, mesh.coordinate(rank).cp_rank
        own, again = number("own", ring, cp_rank), number("own", (ring - 1) % mesh.dp, cp_rank)
        rows.append(Digests(number("s", cp_rank), number("g", cp_rank), number("n", cp_rank), own, again))
    return rows


def wrong(rows: list[Digests], rank: int, field: str) -> list[Digests]:
    """The same with another digest of one rank."""
    return [replace(row, **{field: getattr(row, field) + 1.0}) if i == rank else row for i, row in enumerate(rows)]


def once(rows: list[Digests], mesh: Mesh) -> Finding | None:
    return judge(rows, [None] * mesh.size, "", mesh)


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(1, 2), *MESHES], ids=str)
def test_healthy_tables_name_nobody(mesh: Mesh) -> None:
    for step in range(200):
        assert once(table(mesh, step), mesh) is None
        norms = [Digests(norm_sq=row.norm_sq) for row in table(mesh, step)]
        assert once(norms, mesh) is None, "a step without a check"
    nan = [Digests(norm_sq=math.nan)] * mesh.size
    assert once(nan, mesh) is None, "a gradient that is not finite is no wrong one"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("what", [STATE, REDUCED])
def test_a_replica_that_differs_is_named_by_majority_and_by_nobody_among_two(mesh: Mesh, what: str) -> None:
    for rank in range(mesh.size):
        found = once(wrong(table(mesh), rank, FIELD[what]), mesh)
        assert found is not None
        assert found.quantity == what
        assert found.differs == mesh.replicas(mesh.coordinate(rank).cp_rank)
        assert found.ranks == ((rank,) if mesh.dp >= 3 else ())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_whose_local_gradients_are_always_wrong_is_named_by_the_rings_on_both_sides(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        rows = wrong(wrong(table(mesh), rank, "own"), rank, "again")
        found = once(rows, mesh)
        assert found is not None
        assert found.quantity == LOCAL
        assert rank in found.differs
        assert found.ranks == ((rank,) if mesh.dp >= 3 else ())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("field", ["own", "again"])
def test_a_fault_that_comes_once_is_named_by_the_second_attempt(mesh: Mesh, field: str) -> None:
    for rank in range(mesh.size):
        first = wrong(table(mesh), rank, field)
        found = once(first, mesh)
        assert found is not None
        assert (found.quantity, found.ranks) == (LOCAL, ()), "one of the two rings, but which?"
        again = judge(table(mesh), list(first), LOCAL, mesh)
        assert again is not None
        assert (again.ranks, again.is_over) == ((rank,), True)
        assert f"wrong is rank {rank}, whose processor" in again.describe(7)


def test_two_replicas_whose_sums_differed_once_are_told_apart_by_the_second_attempt() -> None:
    mesh = Mesh(2, 2)
    first = wrong(table(mesh), 3, "reduced")
    assert once(first, mesh) == Finding(REDUCED, (), (1, 3))
    assert judge(table(mesh), list(first), REDUCED, mesh) == Finding(REDUCED, (3,), (3,), is_over=True)


def test_what_differs_twice_at_two_replicas_names_nobody() -> None:
    mesh = Mesh(2, 1)
    rows = wrong(wrong(table(mesh), 1, "own"), 1, "again")
    found = judge(rows, list(rows), LOCAL, mesh)
    assert found is not None
    assert (found.ranks, found.is_over) == ((), False)


def test_a_fault_before_the_sum_over_a_ring_names_the_ring_only() -> None:
    mesh = Mesh(2, 2)
    first = wrong(wrong(table(mesh), 2, "own"), 3, "own")
    assert judge(table(mesh), list(first), LOCAL, mesh) == Finding(LOCAL, (), (2, 3), is_over=True)


def test_a_newcomer_in_the_second_attempt_tells_nothing_of_the_first() -> None:
    mesh = Mesh(2, 2)
    first: list[Digests | None] = list(wrong(table(mesh), 3, "own"))
    first[0] = None
    found = judge(table(mesh), first, LOCAL, mesh)
    assert found is not None
    assert found.ranks == (3,)


def test_what_changes_in_a_ring_that_got_a_newcomer_names_nobody() -> None:
    """The fault may have been the predecessor's: it spoiled the sums of all ranks of its ring."""
    mesh = Mesh(2, 2)
    first: list[Digests | None] = list(wrong(table(mesh), 3, "own"))
    first[2] = None  # of the ring of rank 3
    found = judge(table(mesh), first, LOCAL, mesh)
    assert found is not None
    assert (found.ranks, found.is_over) == ((), True)


def test_one_step_in_so_many_is_checked() -> None:
    assert [step for step in range(12) if is_checked(step, 4)] == [3, 7, 11]
    assert not any(is_checked(step, 0) for step in range(12))


# ---------------------------------------------------------------- the core


def tell(run: Bench, teller: str, *accused: str) -> tuple:  # type: ignore[type-arg]
    return run.handle(MemberFailed("m", teller, 1, 1, "corrupt", 5, "rank 1 is wrong", accused))


def test_the_accused_is_killed_whoever_tells_first_and_nobody_else_is() -> None:
    run = Bench({"a": 2, "b": 2, "c": 3}, spares=2).form()
    wrong_one, before = members(run.state)[1], members(run.state)
    node = node_of(run.state)[wrong_one]
    said = tell(run, before[2], wrong_one)
    assert [command.worker for command in only(KillWorker, said)] == [wrong_one]
    assert {command.mode for command in only(Stop, said)} == {"abort"}
    assert run.state.nodes[node].avoided
    assert tell(run, before[3], wrong_one) == (), "of the generation before"
    said = run.report_all(5)
    (order, *_) = only(Build, said)
    assert [name for name in order.members if name in before] == [name for name in before if name != wrong_one]
    assert node_of(run.state)[order.members[1]] == "c"
    said += run.resume_all() + run.wait(5.0)
    assert all(command.node != node for command in only(StartWorker, said)), "another node has room"
    assert mesh_of(run.state) == Mesh(2, 2)
    change = run.state.last_change
    assert change is not None
    assert [(lost.worker, lost.reason) for lost in change.lost] == [(wrong_one, "computed wrongly")]
    assert change.promise == "bit-exact"


def test_where_nobody_can_be_named_the_same_members_run_the_step_again() -> None:
    run = Bench({"a": 5}, spares=1).form()
    before = members(run.state)
    said = tell(run, before[2])
    assert not only(KillWorker, said)
    (order, *_) = only(Build, run.report_all(5))
    assert (order.members, order.step) == (before, 5)


# ---------------------------------------------------------------- a third opinion


def disagree(run: Bench, *suspects: str) -> tuple:  # type: ignore[type-arg]
    """The members of the generation that runs do not agree on step 5, and name nobody; then they report."""
    named = suspects or members(run.state)
    failed = MemberFailed("m", members(run.state)[0], 1, run.state.generation, "corrupt", 5, "differs", suspects=named)
    return run.handle(failed) + (run.report_all(5) if run.phase == "closing" else ())


def of_two_rings(spares: int = 1) -> Bench:
    run = Bench({"a": 1, "b": 1, "c": spares}, dp=2, cp=1, spares=spares).form()
    for step in range(5):
        run.commit(step)
    return run


def test_a_spare_tells_which_of_two_rings_is_always_wrong() -> None:
    run = of_two_rings()
    first, second = members(run.state)
    (order, *_) = only(Build, disagree(run))
    assert order.members == (first, second), "a fault that comes once is named by a second attempt"
    run.resume_all()
    (order, *_) = only(Build, disagree(run))
    (spare,) = set(order.members) - {first, second}
    assert order.members == (spare, second)
    assert first not in spares(run.state), "until the step tells"
    assert not only(Standby, run.resume_all())
    run.commit(5)
    (left,) = [one for one in only(Release, run.sent) if one.wrong]
    assert left.worker == first
    assert f"they agree without {first}, which was wrong" in left.wrong
    assert run.state.nodes[node_of(run.state)[first]].avoided
    assert run.state.suspects is None
    assert members(run.state) == (spare, second), "training goes on meanwhile"


def test_whoever_was_replaced_and_was_not_wrong_is_the_spare_for_the_next() -> None:
    run = of_two_rings()
    first, second = members(run.state)
    for _ in range(2):
        disagree(run)
        run.resume_all()
    said = disagree(run, *members(run.state))
    assert [one.worker for one in only(Standby, said)] == [first], "it still differs without it"
    (order, *_) = only(Build, said)
    assert second not in order.members
    assert first in order.members
    run.resume_all()
    run.commit(5)
    assert [one.worker for one in only(Release, run.sent) if one.wrong] == [second]


def test_without_a_spare_nobody_is_named_and_the_run_ends() -> None:
    run = Bench({"a": 1, "b": 1}, dp=2, cp=1, spares=0).form()
    disagree(run)
    run.resume_all()
    (end,) = only(EndRun, disagree(run))
    assert end.error == "RunFailed"
    assert "there is no spare for a third opinion" in end.message


def test_a_run_whose_suspects_were_all_replaced_ends() -> None:
    run = of_two_rings()
    for _ in range(3):
        disagree(run)
        run.resume_all()
    (end,) = only(EndRun, disagree(run))
    assert "each suspect was replaced in turn" in end.message


def test_a_loss_during_the_third_attempt_accuses_nobody() -> None:
    run = of_two_rings()
    first = members(run.state)[0]
    for _ in range(2):
        disagree(run)
        run.resume_all()
    run.lose(1)  # the mesh is another one: one ring agrees with itself
    run.recover(5)
    run.commit(5)
    assert not [one for one in only(Release, run.sent) if one.wrong]
    assert run.state.suspects is None
    assert not run.state.nodes[node_of(run.state)[first]].avoided
