"""Going back on purpose, as scripted runs: to which state, with which batches, how often, over a coordinator's end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_ring.control.coordination import replay
from elastic_ring.control.decisions import data_order
from elastic_ring.control.decisions.data_order import NEAR_STEPS, batch_of, journalled
from elastic_ring.control.messages import (
    BatchSkip,
    Build,
    CallbacksAnswered,
    CallbacksAwaited,
    Checkpoint,
    CheckpointsKnown,
    Command,
    CoordinatorStarted,
    CorpusRecalled,
    HeldCopy,
    MemberFailed,
    SnapshotId,
    Standby,
    Status,
    WorkerLost,
)
from elastic_ring.control.state import Building
from elastic_ring.data.sampling.order import Order, SkippingOrder
from elastic_ring.mesh import Mesh
from tests.sim import invariants
from tests.sim.bench import Bench, build_in, end_in, only

MESH = Mesh(2, 1)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, f"step-{step}/lineage-000", MESH)


class Trained:
    """A run of two rings that has trained `steps` steps and knows the checkpoints of `stored`."""

    def __init__(self, steps: int, *stored: int, **options: Any) -> None:
        self.run = Bench({"a": 2, "b": 1}, **{"dp": 2, "cp": 1, "total_steps": 400, **options})
        self.run.form()
        self.train_to(steps, *stored)

    def train_to(self, steps: int, *stored: int) -> None:
        for step in range(self.run.state.committed, steps):
            self.run.commit(step)
        if stored:
            self.run.handle(CheckpointsKnown("k", tuple(map(checkpoint, stored))))

    def spike(self, step: int, first_step: int | None = None) -> tuple[Command, ...]:
        """A member says that the loss of `step` rose, or those from `first_step` on."""
        state, first = self.run.state, step if first_step is None else first_step
        name = self.members[1]
        failed = MemberFailed("w", name, state.term, state.generation, "back", step, "too high", first_step=first)
        return self.run.handle(failed)

    @property
    def members(self) -> tuple[str, ...]:
        change = self.run.state.last_change
        assert change is not None
        return change.members

    def report(self, applied: int, *snapshots: SnapshotId) -> tuple[Command, ...]:
        """Every member reports its live state and its own snapshots."""
        said: tuple[Command, ...] = ()
        for rank in range(len(self.members)):
            held = tuple(HeldCopy(snapshot, (0,), own=True) for snapshot in snapshots)
            said += self.run.report(rank, applied, copies=held)
        return said

    def form_again(self) -> Build:
        phase = self.run.state.phase
        assert isinstance(phase, Building)
        build = phase.order
        self.run.resume_all()
        return build


def test_everyone_goes_back_to_the_newest_checkpoint_from_before_the_spike_and_leaves_out_what_was_used_since() -> None:
    trained = Trained(61, 20, 40, 60)
    trained.spike(60)
    said = trained.report(61)
    assert len(only(Standby, said)) == 2, "the live state is given up, although every shard is held"
    build = trained.form_again()
    assert (build.restore, build.step) == (checkpoint(40), 40)
    assert build.skips == (BatchSkip(40, 21),)
    assert [batch_of(step, build.skips) for step in (39, 40, 41)] == [39, 61, 62]
    assert trained.run.change.steps_undone == 21
    assert [known.step for known in trained.run.state.checkpoints] == [20, 40]


def test_copies_from_before_the_spike_are_newer_than_the_checkpoint_and_undo_less() -> None:
    trained = Trained(61, 40, copies="1", copy_every_steps=10)
    trained.spike(60)
    first = (1, 1)
    build = build_in(trained.report(61, SnapshotId(50, first), SnapshotId(60, first)))
    assert (build.step_back, build.step) == (SnapshotId(50, first), 50)
    assert build.skips == (BatchSkip(50, 11),)


def test_a_streak_goes_back_to_before_its_first_step() -> None:
    trained = Trained(60, 20, 50, 55)
    trained.spike(59, first_step=50)
    trained.report(60)
    build = trained.form_again()
    assert (build.step, build.skips) == (20, (BatchSkip(20, 40),))


def test_a_second_spike_in_the_new_data_goes_back_again_and_no_batch_is_used_twice() -> None:
    trained = Trained(61, 20, 40)
    for step in (40, 50):
        trained.run.handle(CallbacksAwaited("w", trained.members[0], 1, trained.run.state.generation, step))
        trained.run.handle(CallbacksAnswered("d", step, saves=True, keeps=True))
    trained.spike(60)
    trained.report(61)
    trained.form_again()
    said = trained.run.state.callbacks
    assert (said.answered, said.kept) == (None, None), "it is of steps that come with other data now"
    trained.train_to(51, 20, 40)
    trained.spike(50)  # which is batch 71
    trained.report(51)
    build = trained.form_again()
    assert build.skips == (BatchSkip(40, 32),)
    assert batch_of(40, build.skips) == 72
    trained.train_to(47, 20)
    trained.spike(46)  # the checkpoint of step 40 is gone: what was left out from there on goes with it
    trained.report(47)
    assert trained.form_again().skips == (BatchSkip(20, 59),)


def test_one_place_is_gone_back_from_so_often_and_another_as_often_again() -> None:
    trained = Trained(61, 20, rollback_limit=2)
    for _ in range(2):
        trained.spike(60)
        trained.report(61)
        trained.form_again()
        trained.train_to(61, 20)
    end = end_in(trained.spike(60))
    assert end.error == "LossSpike"
    assert "too high. Going back does not help: the run has gone back from there 2 time(s)" in end.message

    other = Trained(61, 20, rollback_limit=1)
    other.spike(60)
    other.report(61)
    other.form_again()
    other.train_to(60 + NEAR_STEPS + 2, 20)
    other.spike(60 + NEAR_STEPS + 1)
    assert other.run.phase == "closing"


def test_without_a_state_from_before_the_run_ends_and_says_so() -> None:
    trained = Trained(61, 60)
    trained.spike(60)
    end = end_in(trained.report(61))
    assert end.error == "LossSpike"
    assert "no copies and no checkpoint are from before step 60" in end.message


def test_a_later_recovery_keeps_what_is_left_out_also_from_a_checkpoint_further_back() -> None:
    trained = Trained(61, 20, 40)
    trained.spike(60)
    trained.report(61)
    trained.form_again()
    trained.train_to(45, 20)
    for worker in trained.members:
        trained.run.handle(WorkerLost("a", worker, "died", "SIGKILL", 45, "forward", "SIGKILL"))
    trained.run.all_ready()
    trained.run.wait(10.0)
    build = getattr(trained.run.state.phase, "order", None)
    assert isinstance(build, Build)
    assert (build.step, build.skips) == (20, (BatchSkip(40, 21),))


def test_a_coordinator_that_dies_before_the_build_goes_back_all_the_same() -> None:
    trained = Trained(61, 40)
    run = trained.run
    run.handle(CoordinatorStarted("c", 2))
    names = list(run.state.workers)
    failed = MemberFailed("w", trained.members[0], 2, run.state.generation, "back", 60, "too high", first_step=60)
    run.handle(failed)
    for name in names:
        run.handle(Status("w", name, 2, run.state.generation, "paused" if name in trained.members else "spare"))
    trained.report(61)
    build = trained.form_again()
    assert (build.step, build.skips) == (40, (BatchSkip(40, 21),))
    state = replay(run.options, run.journal)
    assert state == run.state
    assert journalled(map(json.loads, run.journal))[1] == build.skips


def test_what_earlier_submissions_left_out_holds_from_the_first_build_on() -> None:
    run = Bench({"a": 2}, dp=2, cp=1)
    run.handle(CorpusRecalled("c", (), 70, (BatchSkip(40, 21),)))
    build = build_in(run.all_ready() or run.wait(run.options.spare_grace_s))
    assert build.skips == (BatchSkip(40, 21),)


@pytest.mark.parametrize("what", ["too late a state", "a batch again", "without a reason"])
def test_the_invariants_know_what_may_be_undone_and_left_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "too late a state":
        monkeypatch.setattr(data_order, "checkpoints_before", lambda back, checkpoints: tuple(checkpoints))
    if what == "a batch again":
        monkeypatch.setattr(
            data_order, "leave_out", lambda ctx, back, step: ctx.set(skips=(*ctx.state.skips, BatchSkip(step, 1)))
        )
    trained = Trained(61, 20, 40, 60)
    if what == "without a reason":
        honest = data_order.switch_manifest
        monkeypatch.setattr(
            data_order, "switch_manifest", lambda ctx, step: (honest(ctx, step), ctx.set(skips=(BatchSkip(step, 5),)))
        )
        trained.run.lose(0)
        with pytest.raises(invariants.InvariantBroken, match="invariant 4: batches are left out, and nobody goes back"):
            trained.run.report_all(61)
        return
    trained.spike(60)
    with pytest.raises(invariants.InvariantBroken, match=r"is not before step 60|although 60 was used before"):
        trained.report(61)


def test_an_order_with_skips_uses_each_sequence_once_or_names_it_and_is_a_function_of_seed_and_skips() -> None:
    base, skips = Order(3, 4, 400), (BatchSkip(20, 5), BatchSkip(50, 10))
    order = SkippingOrder(base, skips)
    used = [sample for step in range(85) for sample in order.sample_ids(step)]
    named = [sample for skip in skips for sample in order.left_out(skip)]
    assert sorted(used + named) == list(range(400)), "one epoch"
    assert used[: 20 * 4] == [sample for step in range(20) for sample in base.sample_ids(step)]
    assert order.sample_ids(20) == base.sample_ids(25)
    assert order.sample_ids(50) == base.sample_ids(65)
    assert SkippingOrder(Order(3, 4, 400), skips).sample_ids(77) == order.sample_ids(77)
