"""The step between replicas and checkpoints, as scripted runs: what a loss undoes where peers hold copies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_ring.control.coordination import replay
from elastic_ring.control.messages import (
    BuildFailed,
    Checkpoint,
    CheckpointsKnown,
    Command,
    HeldCopy,
    MemberFailed,
    Published,
    Report,
    SnapshotId,
    Standby,
    WorkerLost,
)
from elastic_ring.control.state import spares, waiting_for
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, only

FIRST = (1, 1)  # (term, generation) of the first mesh
AT_10, AT_20 = SnapshotId(10, FIRST), SnapshotId(20, FIRST)


def own(rank: int, at: SnapshotId, cp: int) -> HeldCopy:
    return HeldCopy(at, (rank % cp,), own=True)


class Copied:
    """A run whose members report copies as `Build.copy_holders` and `Build.parity_groups` have it."""

    def __init__(self, nodes: dict[str, int], **options: Any) -> None:
        self.run = Bench(nodes, **{"copies": "1", "total_steps": 100, **options})
        self.order = build_in(self.run.all_ready() or self.run.wait(self.run.options.spare_grace_s))
        self.run.resume_all()

    def holds(self, worker: str, *at: SnapshotId) -> tuple[HeldCopy, ...]:
        """What this member of the first mesh holds once the snapshots `at` are complete everywhere."""
        order, cp = self.order, self.order.mesh.cp
        rank = order.members.index(worker)
        held = [own(rank, snapshot, cp) for snapshot in at]
        for owner, holders in enumerate(order.copy_holders):
            if rank in holders:
                held += [HeldCopy(snapshot, (owner % cp,)) for snapshot in at]
        for group in order.parity_groups:
            if rank == group.holder:
                named = tuple(order.members[member] for member in group.ranks)
                held += [
                    HeldCopy(snapshot, tuple(member % cp for member in group.ranks), parity_of=named) for snapshot in at
                ]
        return tuple(held)

    def report(self, worker: str, applied: int, copies: tuple[HeldCopy, ...], **more: Any) -> tuple[Command, ...]:
        rank = self.order.members.index(worker)
        fields = {"shard": rank % self.order.mesh.cp, "vote": None, "has_gradient": True, "state_id": FIRST, **more}
        report = Report(
            "w", worker, self.run.state.term, self.run.state.generation, "aborted", applied, copies=copies, **fields
        )
        return self.run.handle(report)

    def survivors_report(self, applied: int, *at: SnapshotId, **more: Any) -> tuple[Command, ...]:
        said: tuple[Command, ...] = ()
        for worker in self.order.members:
            if worker in self.run.state.workers:
                said += self.report(worker, applied, self.holds(worker, *at), **more)
        return said


@pytest.mark.parametrize("rank", range(4))
def test_a_ring_of_four_survives_the_loss_of_any_one_from_its_copy(rank: int) -> None:
    made = Copied({"a": 2, "b": 2, "c": 2}, dp=1, cp=4)
    run, before = made.run, made.order.members
    run.commit(13)
    (spare,) = spares(run.state)
    run.lose(rank)
    order = build_in(made.survivors_report(14, AT_10))
    assert (order.step, order.step_back, order.keep, order.fresh) == (10, AT_10, AT_10, False)
    assert order.members == tuple(spare if place == rank else worker for place, worker in enumerate(before))
    (heal,) = order.heals
    (holder,) = made.order.copy_holders[rank]
    assert (heal.cp_rank, heal.donor, heal.newcomers) == (rank, before[holder], (spare,))
    assert run.state.committed == 10
    run.resume_all()
    change = run.change
    assert (change.source, change.steps_undone, change.step, change.promise) == ("copy", 4, 10, "bit-exact")
    assert change.action == "spare took its place"


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_with_two_copies_it_survives_any_two_at_once(ranks: tuple[int, int]) -> None:
    made = Copied({"a": 2, "b": 2, "c": 2}, dp=1, cp=4, spares=2, copies="2")
    made.run.lose(*ranks)
    order = build_in(made.survivors_report(12, AT_10))
    assert (order.step_back, made.run.change.source) == (AT_10, "copy")
    assert sorted(heal.cp_rank for heal in order.heals) == list(ranks)


@pytest.mark.parametrize("rank", range(4))
def test_one_loss_in_a_group_is_the_parity_and_the_others_snapshots(rank: int) -> None:
    made = Copied({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, dp=1, cp=4, copies="parity:3")
    run, before = made.run, made.order.members
    run.lose(rank)
    order = build_in(made.survivors_report(15, AT_10))
    (group,) = [group for group in made.order.parity_groups if rank in group.ranks]
    (heal,) = order.heals
    others = tuple(before[member] for member in group.ranks if member != rank)
    assert (heal.donor, heal.parity_from, heal.newcomers) == (before[group.holder], others, (order.members[rank],))


def test_two_losses_in_one_group_are_one_too_many() -> None:
    made = Copied({"a": 6}, dp=1, cp=4, spares=2, copies="parity:3")
    group = max(made.order.parity_groups, key=lambda group: len(group.ranks))
    made.run.commit(9)
    made.run.lose(*group.ranks[:2])
    order = build_in(made.survivors_report(10, AT_10))
    assert (order.step, order.step_back, order.undone) == (0, None, 10)


def test_both_holders_of_a_shard_lost_at_two_rings_come_back_from_the_copy_on_one_ring() -> None:
    made = Copied({"a": 2, "b": 2}, dp=2, cp=2, spares=0)
    run, before = made.run, made.order.members
    run.lose(1, 3)
    order = build_in(made.survivors_report(13, AT_10))
    assert (order.mesh, order.step_back, order.heals) == (Mesh(1, 2), AT_10, ())
    assert order.members == (before[0], before[2]), "the second has the copy of cp_rank 1 itself: nothing to send"
    assert run.change.promise == "sample-exact"


def test_while_every_shard_has_a_live_holder_nobody_goes_back_and_the_copies_are_kept() -> None:
    made = Copied({"a": 3, "b": 3}, dp=2, cp=2)
    made.run.lose(1)
    order = build_in(made.survivors_report(13, AT_10))
    assert (order.step, order.step_back, order.keep) == (13, None, AT_10)
    assert made.run.change.source == "replica"


def test_the_newest_snapshot_that_all_hold_is_taken_not_one_under_way() -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    made.run.lose(0)
    (holder,) = made.order.copy_holders[0]
    for worker in made.order.members[1:]:
        copies = made.holds(worker, AT_10, AT_20)
        if worker == made.order.members[holder]:  # that of rank 0 had not arrived
            copies = tuple(copy for copy in copies if copy.own or copy.snapshot == AT_10)
        said = made.report(worker, 22, copies)
    assert build_in(said).step_back == AT_10
    assert made.run.change.steps_undone == 12


def test_a_build_keeps_the_snapshot_whose_copies_have_arrived_not_a_newer_one_without_any() -> None:
    made = Copied({"a": 5, "b": 5}, dp=1, cp=4)
    made.run.handle(MemberFailed("w", made.order.members[0], 1, 1, "peer", 21))
    for worker in made.order.members:
        held = made.holds(worker, AT_10, AT_20)
        said = made.report(worker, 21, tuple(copy for copy in held if copy.own or copy.snapshot == AT_10))
    order = build_in(said)
    assert (order.step, order.step_back, order.keep) == (21, None, AT_10)


def test_snapshots_of_one_step_from_two_generations_are_not_mixed() -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    made.run.commit(10)
    made.run.lose(0)
    (holder,) = made.order.copy_holders[0]
    other = SnapshotId(10, (1, 0))
    for worker in made.order.members[1:]:
        copies = made.holds(worker, other if worker == made.order.members[holder] else AT_10)
        said = made.report(worker, 12, copies)
    assert (build_in(said).step, made.run.change.source) == (0, "beginning")


@pytest.mark.parametrize(("stored", "source"), [(5, "copy"), (10, "copy"), (11, "checkpoint")])
def test_the_newer_of_copy_and_checkpoint_is_taken(stored: int, source: str) -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    made.run.handle(CheckpointsKnown("k", (Checkpoint(stored, f"step-{stored}", Mesh(1, 4)),)))
    made.run.lose(2)
    said = made.survivors_report(14, AT_10)
    assert len(only(Standby, said)) == (3 if source == "checkpoint" else 0)
    order = build_in(said)
    assert (order.step, made.run.change.source) == (max(stored, 10) if source == "checkpoint" else 10, source)


def test_a_step_back_whose_build_fails_is_decided_again_and_the_steps_count_once() -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    run = made.run
    run.lose(2)
    order = build_in(made.survivors_report(14, AT_10))
    run.handle(BuildFailed("w", order.members[0], 1, order.generation, "digest differs"))
    # Two have gone back already; one still has the live state that was given up, and brings nothing back.
    loaded = {"state_id": (1, order.generation)}
    for number, worker in enumerate(worker for worker in order.members if worker in made.order.members):
        more = loaded if number < 2 else {}
        said = made.report(worker, 10 if number < 2 else 14, made.holds(worker, AT_10), **more)
    newcomer = order.members[2]
    said = run.handle(Report("w", newcomer, 1, run.state.generation, "aborted", 0, None, None, False))
    again = build_in(said)
    assert (again.step, again.step_back, again.generation) == (10, AT_10, order.generation + 1)
    run.resume_all()
    assert (run.change.steps_undone, run.state.committed) == (4, 10)


def test_a_donor_that_dies_during_the_step_back_leads_to_the_checkpoint() -> None:
    made = Copied({"a": 6}, dp=1, cp=4, spares=2)
    run = made.run
    run.handle(CheckpointsKnown("k", (Checkpoint(3, "step-3", Mesh(1, 4)),)))
    run.lose(2)
    order = build_in(made.survivors_report(14, AT_10))
    (heal,) = order.heals
    run.handle(WorkerLost("a", heal.donor, "died"))
    for worker in order.members:
        if worker not in run.state.workers:
            continue
        if worker in made.order.members:
            said = made.report(worker, 14, made.holds(worker, AT_10))
        else:
            said = run.handle(Report("w", worker, 1, run.state.generation, "aborted", 0, None, None, False))
    assert only(Standby, said)
    order = build_in(said)
    assert (order.restore is not None, order.step) == (True, 3)
    run.resume_all()
    assert (run.change.source, run.change.steps_undone) == ("checkpoint", 11)


def test_too_few_workers_wait_with_their_copies() -> None:
    made = Copied({"a": 2, "b": 2}, dp=1, cp=4, spares=0)
    run = made.run
    run.lose(3)
    made.survivors_report(14, AT_10)
    assert run.phase == "waiting"
    assert "1 ring(s) of 4; a ring keeps its cp: " in waiting_for(run.state, run.now)
    order = build_in(run.all_ready())
    assert (order.step_back, run.change.source) == (AT_10, "copy")


def test_a_vote_of_the_steps_that_were_given_up_changes_nothing() -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    late = made.run.vote(14)
    made.run.lose(2)
    made.survivors_report(14, AT_10)
    made.run.resume_all()
    made.run.handle(Published("w", late))
    assert made.run.state.committed == 10


def test_the_journal_gives_the_same_step_back_again() -> None:
    made = Copied({"a": 5}, dp=1, cp=4)
    made.run.lose(2)
    made.survivors_report(14, AT_10)
    made.run.resume_all()
    lines = [json.dumps(json.loads(line)) for line in made.run.journal]
    assert replay(made.run.options, lines) == made.run.state
    orders = [command for line in lines for command in json.loads(line)["commands"] if command["type"] == "Build"]
    assert orders[-1]["step_back"] == {"step": 10, "membership_id": [1, 1]}
