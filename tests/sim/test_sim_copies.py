"""Simulated runs whose members hold copies: which losses they survive, and how many steps these undo."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_ring.control.coordination import Decision
from elastic_ring.control.decisions import quorum
from elastic_ring.control.messages import Build, Event, Published, Resumed
from elastic_ring.control.state import Building, Change
from tests.sim.copies_truth import complete_steps
from tests.sim.invariants import InvariantBroken
from tests.sim.simulator.faults import HELD, Schedule, random_schedule
from tests.sim.simulator.options import changed, simulated
from tests.sim.simulator.simulate import Outcome
from tests.sim.truth import World

EVERY = 3
ONE_RING = replace(
    random_schedule(0),
    nodes=(2, 2, 2),
    gpus=(),
    faults=(),
    lost=0.0,
    doubled=0.0,
    faults_end_s=60.0,
    save_every=0,
    options=simulated(
        "simulated", dp=1, cp=4, total_steps=20, spares=2, start_s=5.0, copies="1", copy_every_steps=EVERY
    ),
)


class Run:
    """A run that a test stops at a moment, to lose members or damage what they hold."""

    def __init__(self, schedule: Schedule, seed: int = 0) -> None:
        self.changes: list[Change] = []
        self.world = World(seed, schedule, self._listen)
        self.world.begin()

    def _listen(self, now: float, term: int, event: Event, decision: Decision) -> None:
        change = decision.state.last_change
        if change is not None and change.resumed_at == now:
            self.changes.append(change)

    @property
    def members(self) -> tuple[str, ...]:
        return self.world.groups[max(self.world.groups)].order.members

    def until(self, rank: int, step: int, doing: str) -> None:
        """Run until this rank does this in `step`."""
        for _ in range(40_000):
            self.world.run_for(0.002)
            if self.world.groups:
                worker = self.world.workers[self.members[rank]]
                if (worker.applied, worker.doing) == (step, doing):
                    return
        raise AssertionError(f"rank {rank} never was in {doing} of step {step}")

    def lose(self, *ranks: int) -> None:
        for name in [self.members[rank] for rank in ranks]:
            assert self.world.workers[name].alive
            self.world.die(self.world.workers[name], "died")

    def until_back(self) -> Build:
        """Run until the next build that goes back is ordered; no member has obeyed it yet."""
        coordinator = self.world.coordinators[-1]
        known = coordinator.state.generation
        for _ in range(40_000):
            self.world.run_for(0.0005)
            phase = coordinator.state.phase
            if isinstance(phase, Building) and phase.order.generation > known and phase.order.goes_back:
                return phase.order
        raise AssertionError("no build goes back")

    def finish(self) -> Outcome:
        outcome = self.world.finish(120.0)
        assert outcome.end.message == "all steps committed", outcome
        return outcome


@pytest.mark.parametrize("doing", ["compute", "reduce", "vote", "apply"])
@pytest.mark.parametrize("rank", range(4))
def test_one_ring_survives_any_one_loss_in_any_phase_and_undoes_at_most_two_rounds(rank: int, doing: str) -> None:
    for step in (7, 8, 9):
        run = Run(ONE_RING, seed=step)
        run.until(rank, step, doing)
        run.lose(rank)
        run.finish()
        (change,) = [change for change in run.changes if change.lost]
        assert (change.source, change.promise) == ("copy", "bit-exact")
        assert change.steps_undone <= 2 * EVERY
        assert change.step >= step - 2 * EVERY


@pytest.mark.parametrize("ranks", list(itertools.combinations(range(4), 2)))
def test_with_two_copies_any_two_at_once(ranks: tuple[int, int]) -> None:
    run = Run(replace(ONE_RING, options=changed(ONE_RING.options, copies="2")))
    run.until(0, 8, "compute")
    run.lose(*ranks)
    run.finish()
    assert [change.source for change in run.changes if change.lost] == ["copy"]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("copies", ["parity:2", "parity:3"])
def test_with_parity_any_one(rank: int, copies: str) -> None:
    run = Run(replace(ONE_RING, options=changed(ONE_RING.options, copies=copies)))
    run.until(0, 8, "compute")
    run.lose(rank)
    run.finish()
    assert [change.source for change in run.changes if change.lost] == ["copy"]


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_both_holders_of_one_shard_at_two_rings(cp_rank: int, spares: int) -> None:
    options = changed(ONE_RING.options, dp=2, cp=2, spares=spares)
    run = Run(replace(ONE_RING, options=options, nodes=(2, 2, 2) if spares else (2, 2)))
    run.until(0, 8, "compute")
    run.lose(cp_rank, 2 + cp_rank)
    run.finish()
    change = next(change for change in run.changes if change.lost)
    assert (change.source, change.mesh.dp) == ("copy", 2 if spares else 1)


def test_losses_one_after_another_each_come_back_once_new_copies_have_arrived() -> None:
    run = Run(ONE_RING)
    for rank, step in ((1, 5), (2, 9), (3, 13)):
        run.until(rank, step, "compute")
        run.lose(rank)
        run.world.run_for(1.0)
    run.finish()
    assert [change.source for change in run.changes if change.lost] == ["copy"] * 3


def test_a_damaged_copy_is_found_and_the_one_before_it_is_used() -> None:
    run = Run(ONE_RING)
    run.until(2, 8, "compute")
    run.world.run_for(0.01)
    (holder,) = run.world.groups[max(run.world.groups)].order.copy_holders[2]
    held = run.world.workers[run.members[holder]].copies.of_peers
    newest, before = sorted((key for key in held if key[1] == run.members[2]), reverse=True)
    held[newest] = held[newest].flipped()
    run.world.memory_faults += 1
    run.lose(2)
    outcome = run.finish()
    (change,) = [change for change in run.changes if change.lost]
    assert (change.source, change.step) == ("copy", before[0].step)
    assert outcome.facts["damaged copy found"] == 1


def gone_back(copies: str, spikes: set[int], to: int) -> Run:
    """A run whose first spike makes everyone go back to step `to`, although the copies of step 6 had all arrived."""
    for seed in range(60):
        run = Run(replace(ONE_RING, options=changed(ONE_RING.options, copies=copies)), seed)
        run.until(0, 4, "compute")
        run.world.poisoned_batches |= spikes
        (group,) = run.world.groups.values()
        if run.until_back().step == to and 6 in complete_steps(
            group, run.world.options.copy_mode(group.order.mesh).num_copies
        ):
            return run
    raise AssertionError("the copies of step 6 never arrived in time")


def finish_from(run: Run, step: int) -> None:
    """The loss led to copies of `step`, and the run ends with the history that began there."""
    run.finish()
    (change,) = [change for change in run.changes if change.lost]
    assert (change.source, change.step) == ("copy", step)


@pytest.mark.parametrize("copies", ["1", "parity:2"])
def test_a_loss_while_the_run_goes_back_on_purpose_leaves_undone_what_that_undoes(copies: str) -> None:
    run = gone_back(copies, {6}, to=3)
    run.world.run_for(0.03)
    run.lose(1)
    finish_from(run, 3)


@pytest.mark.parametrize("copies", ["1", "parity:2"])
def test_a_loss_after_two_spikes_in_a_row_leaves_undone_what_the_second_undoes(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gone_back(copies, {7, 8}, to=6)  # from there on with batch 8
    tell = run.world.tell

    def lossy(event: Event, reliable: bool = False) -> None:
        if not isinstance(event, Resumed | Published):
            tell(event, reliable)

    with monkeypatch.context() as patch:  # the coordinator does not learn that the mesh ran
        patch.setattr(run.world, "tell", lossy)
        assert run.until_back().step == 3
    run.world.run_for(0.03)
    run.lose(1)
    finish_from(run, 3)


@pytest.mark.parametrize("forgets", [False, True])
def test_members_that_missed_the_build_that_goes_back_do_not_bring_the_undone_steps_back(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gone_back("1", {6}, to=3)
    workers = [run.world.workers[name] for name in run.members]
    for worker in workers:
        worker.frozen = True
    run.world.run_for(0.03)
    for worker in workers:
        worker.inbox.clear()
        worker.thaw()
    assert all(max(worker.copies.own).step == 6 for worker in workers)
    if forgets:
        honest = quorum._all
        monkeypatch.setattr(quorum, "_all", lambda reports, cp, given_up: honest(reports, cp, None))
    run.lose(1)
    if not forgets:
        finish_from(run, 3)
        return
    with pytest.raises(InvariantBroken, match="invariant 3: back to"):
        run.finish()


@pytest.mark.slow
def test_random_schedules_go_back_to_copies_and_find_damaged_ones() -> None:
    sources: list[str] = []
    facts: set[str] = set()
    seeds = [seed for seed in range(400) if random_schedule(seed).options.run.copies != "0"]
    assert {random_schedule(seed).options.run.copies for seed in seeds} >= {"1", "2", "parity:2", "parity:3"}
    for seed in seeds[:150]:
        run = Run(random_schedule(seed), seed)
        facts |= run.world.finish(600.0).facts.keys()
        sources += [change.source for change in run.changes if change.lost]
    assert sources.count("copy") >= 15
    assert {*HELD, "damaged copy found"} <= facts
