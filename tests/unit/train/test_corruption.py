"""Flipped bits on real processes: the step in which one is found is not applied, the right rank is named, and the step
that runs again has the bits of a run without a fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ring.errors import ElasticRingError
from elastic_ring.mesh import Mesh
from elastic_ring.train.transaction import TransactionOptions
from elastic_ring.train.vote import ReplicasDiverged
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import begin, facts, make_task, rebuild, run_steps

EVERY, SQUARE, REPLICAS, THREE = 3, Mesh(2, 2), Mesh(2, 1), Mesh(3, 1)
CHECKED = EVERY - 1
"""The step whose digests are compared."""


@pytest.fixture(scope="module")
def four() -> Iterator[Membership]:
    with membership(4) as made:
        yield made


def detect(me: Any, how: str) -> None:
    me.state.options = TransactionOptions(corruption=how, check_every_steps=EVERY)


def flip(me: Any, phase: str, stays: bool = False) -> None:
    me.state.flips.plan(phase, stays)


def attempt(me: Any, num_steps: int) -> tuple[str, str, tuple[int, ...]]:
    """How some steps end: the error's name, its text and whom it names; or "", what the last one only told, nobody."""
    try:
        run_steps(me, num_steps - 1)
        outcome, _ = me.state.run(me.state.applied, boundary=False)
    except ElasticRingError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "", outcome.finding.describe(outcome.vote.step) if outcome.finding else "", ()


def prepare(four: Membership, mesh: Mesh, how: str) -> range:
    """All have run the steps before the checked one."""
    ranks = range(mesh.size)
    four.all(begin, four.meeting(), mesh, make_task(), ranks=ranks)
    four.all(detect, how, ranks=ranks)
    four.all(run_steps, CHECKED, ranks=ranks)
    return ranks


@pytest.fixture(scope="module")
def undisturbed(four: Membership) -> dict[Mesh, list[str]]:
    """The digest of each rank's state after the checked step, without detection."""
    found = {}
    for mesh in (SQUARE, REPLICAS, THREE):
        ranks = prepare(four, mesh, "off")
        four.all(run_steps, 1, ranks=ranks)
        found[mesh] = [fact["digest"] for fact in four.all(facts, ranks=ranks)]
    return found


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("mesh", [SQUARE, REPLICAS, THREE], ids=str)
def test_a_check_changes_no_bit_and_tells_nothing_of_healthy_ranks(
    four: Membership, undisturbed: dict[Mesh, list[str]], mesh: Mesh
) -> None:
    ranks = prepare(four, mesh, "act")
    assert four.all(attempt, 1, ranks=ranks) == [("", "", ())] * mesh.size
    assert [fact["digest"] for fact in four.all(facts, ranks=ranks)] == undisturbed[mesh]


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(("phase", "what"), [("backward", "local gradient"), ("reduce", "reduced gradient")])
@pytest.mark.parametrize("mesh", [SQUARE, REPLICAS], ids=str)
def test_two_rings_name_the_rank_of_a_flipped_bit_by_a_second_attempt_with_the_bits_of_no_fault(
    four: Membership, undisturbed: dict[Mesh, list[str]], mesh: Mesh, phase: str, what: str
) -> None:
    ranks, wrong = prepare(four, mesh, "act"), mesh.size - 1
    before = four.all(facts, ranks=ranks)
    four.call(wrong, flip, phase)
    first = four.all(attempt, 1, ranks=ranks)
    assert {(name, named) for name, _, named in first} == {("ComputedWrongly", ())}
    assert all(what in text and "nobody can be named" in text for _, text, _ in first)
    assert [fact["digest"] for fact in four.all(facts, ranks=ranks)] == [fact["digest"] for fact in before]
    four.all(rebuild, four.meeting(), mesh, ranks=ranks)
    second = four.all(attempt, 1, ranks=ranks)
    assert {(name, named) for name, _, named in second} == {("ComputedWrongly", (wrong,))}
    assert all(f"wrong is rank {wrong}" in text for _, text, _ in second)
    four.all(rebuild, four.meeting(), mesh, ranks=ranks)
    assert four.all(attempt, 1, ranks=ranks) == [("", "", ())] * mesh.size
    assert [fact["digest"] for fact in four.all(facts, ranks=ranks)] == undisturbed[mesh]


@pytest.mark.parametrize("phase", ["reduce", "apply"])
def test_three_replicas_name_the_wrong_one_at_once(
    four: Membership, undisturbed: dict[Mesh, list[str]], phase: str
) -> None:
    ranks = prepare(four, THREE, "act")
    if phase == "apply":  # the state of the checked step is wrong, which the next check finds
        four.all(begin, four.meeting(), THREE, make_task(), ranks=ranks)
        four.all(detect, "act", ranks=ranks)
        four.all(run_steps, CHECKED - 1, ranks=ranks)
        four.call(1, flip, phase)
        four.all(run_steps, 1, ranks=ranks)
    else:
        four.call(1, flip, phase)
    found = four.all(attempt, 1, ranks=ranks)
    assert {(name, named) for name, _, named in found} == {("ComputedWrongly", (1,))}
    assert all(("state" if phase == "apply" else "reduced gradient") in text for _, text, _ in found)


def test_a_dry_run_tells_of_a_wrong_local_gradient_and_goes_on(four: Membership) -> None:
    ranks = prepare(four, REPLICAS, "log")
    four.call(1, flip, "backward")
    told = four.all(attempt, 1, ranks=ranks)
    assert told == [("", "step 2: the local gradient of ranks 0, 1 differs; nobody can be named", ())] * 2


@pytest.mark.parametrize("how", ["off", "log"])
def test_a_dry_run_ends_before_replicas_part(four: Membership, how: str) -> None:
    ranks = prepare(four, REPLICAS, how)
    four.call(1, flip, "reduce")
    assert {name for name, *_ in four.all(attempt, 1, ranks=ranks)} == {ReplicasDiverged.__name__}


def test_what_differs_in_two_attempts_of_two_rings_names_nobody_and_is_applied_by_nobody(four: Membership) -> None:
    ranks = prepare(four, REPLICAS, "act")
    before = four.all(facts, ranks=ranks)
    four.call(1, flip, "backward", True)
    for _ in range(2):
        assert {(name, named) for name, _, named in four.all(attempt, 1, ranks=ranks)} == {("ComputedWrongly", ())}
        assert [fact["digest"] for fact in four.all(facts, ranks=ranks)] == [fact["digest"] for fact in before]
        four.all(rebuild, four.meeting(), REPLICAS, ranks=ranks)
