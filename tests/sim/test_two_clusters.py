"""Two submissions of one run over one storage: whichever is frozen, wherever and for how long, at most one commits."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.sim import sim_terms
from tests.sim.invariants import InvariantBroken
from tests.sim.sim_terms import BOUND_S, TermWorld, random_terms

FROZEN_S = (0.2, 3.0, 30.0)


def two_clusters(seed: int, freeze_at: int, frozen: int, frozen_s: float, *, refused_at_read: int = 0) -> TermWorld:
    """A trains; B takes the run over after 4 s. Before the turn `freeze_at` from then on the first or second of them is
    frozen, and the coordinator of A is started again in every other world."""
    world = TermWorld(seed)
    first = world.submit("a")
    world.run_until(4.0)
    second = world.submit("b", refused_at_read=refused_at_read)
    world.freeze_at[world.num_turns + freeze_at] = (first, second)[frozen], frozen_s
    if seed % 2:
        world.at(6.0, lambda: first.start(is_restart=True))
    world.run_until(60.0)
    return world


def test_wherever_one_of_two_is_frozen_at_most_one_commits_and_the_other_stops_within_the_bound() -> None:
    reached = set()
    for freeze_at in range(1, 61):
        for frozen in (0, 1):
            for seed, frozen_s in enumerate(FROZEN_S):
                world = two_clusters(seed, freeze_at, frozen, frozen_s)
                world.check_end()
                assert [one.stopped for one in world.submissions] == [True, False]
                late = [one for one in world.storage.written if one.is_aside]
                assert len(late) <= 1, "one manifest may have been on its way"
                reached.add(bool(late))
    assert reached == {True, False}, "the worlds include a commit that came late"


def test_a_submission_that_is_refused_voids_its_claim_and_the_other_goes_on() -> None:
    ended = set()
    for seed in range(100):
        world = two_clusters(seed, 0, 0, 0.0, refused_at_read=1 + seed % 2)
        first, second = world.submissions
        assert second.refused
        assert {claim.term for claim in world.storage.claims if claim.attempt == "b"} == world.storage.withdrawn
        assert bool(world.storage.withdrawn) == (second.refused_at_read == 2), "what can be refused is, before a claim"
        assert not first.stopped or second.refused_at_read == 2
        ended.add(first.stopped)
    assert ended == {True, False}, "a claim counts at once, so it may stop the other before it is void"


def test_two_that_begin_at_once_leave_one_and_any_number_of_freezes_changes_nothing() -> None:
    for seed in range(80):
        rng = random.Random(seed)
        world = TermWorld(seed)
        made = [world.submit(name) for name in "abc"[: rng.choice([2, 3])]]
        for _ in range(rng.randint(0, 6)):
            world.freeze_at[rng.randint(1, 150)] = rng.choice(made), rng.choice([0.5, 2.0, 20.0])
        world.run_until(120.0)
        world.check_end()
        assert sum(not one.stopped for one in made) == 1


def test_whenever_the_claims_are_removed_at_most_one_commits_and_a_later_submission_goes_on() -> None:
    """By a purge of the storage. Who had the run stops within the bound, though nobody has claimed it since."""
    for seed in range(150):
        rng = random.Random(seed)
        world = TermWorld(seed)
        world.submit("a")
        for at_s in sorted(rng.uniform(0.1, 20.0) for _ in range(rng.randint(1, 3))):
            world.run_until(at_s)
            world.storage.claims.clear()
            if rng.random() < 0.5:
                world.submit(f"b{at_s:.3f}")
            if rng.random() < 0.5:
                world.freeze_at[world.num_turns + rng.randint(1, 30)] = rng.choice(world.submissions), 5.0
        world.run_until(30.0)
        world.submit("last")
        world.run_until(60.0)
        world.check_end()
        assert [one.attempt for one in world.submissions if not one.stopped] == ["last"]


def test_random_submissions_whose_claims_vanish_and_whose_clocks_differ_leave_at_most_one() -> None:
    facts = sum((random_terms(seed) for seed in range(300)), Counter[str]())
    assert min(facts[what] for what in ("submit", "freeze", "restart", "purge", "refused")) > 200
    assert facts["late"] > 0


@pytest.mark.parametrize("defect", ["nobody looks at its own claim", "nobody watches the status"])
def test_random_submissions_find_a_defect(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    if defect == "nobody looks at its own claim":
        refuse = sim_terms.refuse_if_replaced
        monkeypatch.setattr(sim_terms, "refuse_if_replaced", lambda *facts, **own: refuse(*facts))
    else:
        monkeypatch.setattr(sim_terms, "WATCHED_S", 0.0)

    def broken(seed: int) -> bool:
        try:
            random_terms(seed)
        except InvariantBroken:
            return True
        return False

    assert any(map(broken, range(300)))


@pytest.mark.parametrize("defect", ["nobody looks", "late ones count"])
def test_the_simulator_finds_a_missing_look_and_a_late_commit_that_counts(
    monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    if defect == "nobody looks":
        monkeypatch.setattr(sim_terms.Submission, "_look", lambda self: iter(()))
        monkeypatch.setattr(sim_terms, "COMMIT_S", 3 * BOUND_S)
    else:
        monkeypatch.setattr(sim_terms, "is_late", lambda *facts: False)

    def broken(freeze_at: int) -> bool:
        try:
            two_clusters(2, freeze_at, 0, 30.0)
        except InvariantBroken:
            return True
        return False

    assert any(map(broken, range(1, 61)))
