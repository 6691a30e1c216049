"""The deadline of a node that leaves is kept: its members hand over before it, whatever the step under way takes."""

from __future__ import annotations

import pytest

from elastic_ring.control.messages import Build, Checkpoint, CheckpointsKnown, NodeDraining, Stop
from elastic_ring.control.state import mesh_of, node_of
from tests.sim.bench import Bench


def _modes(said: tuple) -> set[str]:  # type: ignore[type-arg]
    return {command.mode for command in said if isinstance(command, Stop)}


@pytest.mark.parametrize(("notice_s", "given_up_after_s"), [(120.0, 110.0), (30.0, 20.0), (8.0, 4.0), (0.0, 0.0)])
def test_a_step_that_is_too_long_is_given_up_in_time(notice_s: float, given_up_after_s: float) -> None:
    """`handover_s` (10) before the node goes, and never before half of the notice is over."""
    run = Bench({"a": 2, "b": 2}, spares=0, boundary_s=600.0).form()
    said = run.handle(NodeDraining("n", "b", run.now + 0.01 + notice_s))
    if notice_s:
        assert _modes(said) == {"boundary"}
        assert _modes(run.wait(given_up_after_s - 0.1)) == set(), "the step may still end"
        said = run.wait(0.2)
    else:
        said = run.wait(0.0)
    assert _modes(said) == {"abort"}
    said = run.report_all(3)
    orders = [command for command in said if isinstance(command, Build)]
    assert {node_of(run.state)[worker] for worker in orders[0].members} == {"a"}
    assert mesh_of(run.state).dp == 1  # type: ignore[union-attr]


def test_a_step_that_ends_in_time_is_not_given_up() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, boundary_s=600.0).form()
    run.handle(NodeDraining("n", "b", run.now + 120.0))
    said = run.report_all(3, "boundary")
    assert [command.step for command in said if isinstance(command, Build)][:1] == [3]


def test_without_a_deadline_a_long_step_has_the_time_of_any_boundary() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0, boundary_s=600.0).form()
    assert _modes(run.handle(NodeDraining("n", "b"))) == {"boundary"}
    assert _modes(run.wait(590.0)) == set()
    assert _modes(run.wait(11.0)) == {"abort"}


def test_whom_nobody_can_replace_saves_before_the_node_goes() -> None:
    run = Bench({"a": 2}, dp=1, spares=0).form()
    assert _modes(run.handle(NodeDraining("n", "a", run.now + 30.0))) == {"save"}
    assert "requests a checkpoint" in run.reason
    assert _modes(run.handle(NodeDraining("n", "a", run.now + 20.0))) == set(), "asked for once"


def _alone(step_s: float, write_s: float, notice_s: float) -> tuple[Bench, tuple]:  # type: ignore[type-arg]
    """One ring on a node that leaves after ten steps of `step_s`; the last checkpoint took `write_s` to write."""
    run = Bench({"a": 2}, dp=1, spares=0, takes_checkpoints=True).form()
    for step in range(10):
        run.now += step_s - 0.01
        run.commit(step)
    checkpoint = Checkpoint(4, "step-4/lineage-000", mesh_of(run.state))  # type: ignore[arg-type]
    run.handle(CheckpointsKnown("k", (checkpoint,), write_s))
    return run, run.handle(NodeDraining("n", "a", run.now + 0.01 + notice_s))


@pytest.mark.parametrize(("step_s", "write_s"), [(40.0, 1.0), (25.0, 6.0), (1.0, 31.0)])
def test_a_step_that_cannot_end_and_be_written_in_time_is_given_up_at_once_and_the_state_before_it_saved(
    step_s: float, write_s: float
) -> None:
    run, said = _alone(step_s, write_s, notice_s=30.0)
    assert _modes(said) == {"save", "abort"}
    orders = [command for command in run.report_all(10) if isinstance(command, Build)]
    assert {(order.step, order.saves) for order in orders} == {(10, True)}
    assert not _modes(run.resume_all()), "once for each node"
    assert not _modes(run.wait(29.0))
    assert run.phase == "running"
    run.lose(0)
    assert not [order for order in run.report_all(10) if isinstance(order, Build) and order.saves]


def test_a_step_that_should_end_in_time_is_given_up_only_when_it_does_not() -> None:
    run, said = _alone(5.0, 4.0, notice_s=60.0)
    assert _modes(said) == {"save"}
    assert not _modes(run.wait(45.9)), "handover_s (10) and the writing before the node goes"
    assert _modes(run.wait(0.2)) == {"abort"}

    run, _ = _alone(5.0, 4.0, notice_s=60.0)
    run.commit(10)
    assert not _modes(run.wait(59.0)), "the step has ended, and its checkpoint is being written"


def test_a_step_is_never_given_up_for_a_checkpoint_where_none_are_taken() -> None:
    run = Bench({"a": 2}, dp=1, spares=0).form()
    run.handle(NodeDraining("n", "a", run.now + 30.0))
    assert not _modes(run.wait(29.0))
