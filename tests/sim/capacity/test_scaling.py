"""A run that is asked for fewer or more rings and spares, and growth that must be worth its cost."""

from __future__ import annotations

from elastic_ring.control.capacity.worker_pool import vacant_nodes
from elastic_ring.control.messages import (
    Build,
    DrainNode,
    NodeJoined,
    Release,
    ScaleRequested,
    Standby,
    StartWorker,
    Stop,
)
from elastic_ring.control.state import members, mesh_of, node_of, spares
from tests.sim.bench import Bench, only


def at_boundary(run: Bench, step: int) -> tuple:  # type: ignore[type-arg]
    """All members pause before `step`; what follows."""
    return run.report_all(step, "boundary")


def gone(run: Bench, commands: tuple) -> None:  # type: ignore[type-arg]
    from elastic_ring.control.messages import WorkerLost

    for command in only(Release, commands):
        run.handle(WorkerLost("a", command.worker, "exited"))


def test_a_voluntary_shrink_leaves_whole_nodes_and_they_become_vacant() -> None:
    run = Bench({"a": 2, "b": 2, "c": 1}, spares=1).form()
    assert mesh_of(run.state).dp == 2  # type: ignore[union-attr]
    said = run.handle(ScaleRequested("u", 1, 0))
    left = {command.node for command in only(DrainNode, said)}
    assert left == {"c", "b"} or left == {"c", "a"}, "the spare's node, and one ring's"
    assert only(Stop, said), "a boundary is asked for"
    gone(run, said)
    said = at_boundary(run, 5)
    (order, *_) = only(Build, said)
    assert order.mesh.dp == 1
    (stays,) = {"a", "b"} - left
    assert {node_of(run.state)[worker] for worker in order.members} == {stays}
    said = run.resume_all()
    gone(run, said)
    assert set(run.state.workers) == set(members(run.state))
    assert vacant_nodes(run.state) == left
    run.wait(5.0)
    assert not only(StartWorker, run.sent), "nobody is hired there again"


def test_on_one_node_the_mesh_shrinks_and_the_rest_is_released() -> None:
    run = Bench({"a": 5}, spares=1).form()
    said = run.handle(ScaleRequested("u", 1, None))
    assert not only(DrainNode, said)
    gone(run, said)
    at_boundary(run, 5)
    said = run.resume_all()
    assert len(only(Standby, said)) == 2
    gone(run, said)
    gone(run, run.wait(1.0))
    assert (mesh_of(run.state).dp, len(spares(run.state)), len(run.state.workers)) == (1, 1, 3)  # type: ignore[union-attr]
    assert vacant_nodes(run.state) == frozenset()


def test_more_rings_are_asked_for_and_come_when_there_is_room() -> None:
    run = Bench({"a": 2}, dp=1, spares=0).form()
    run.handle(NodeJoined("n", "b", 2))
    assert vacant_nodes(run.state) == {"b"}, "nobody is wanted there yet"
    said = run.handle(ScaleRequested("u", 2, None))
    assert {command.node for command in only(StartWorker, said)} == {"b"}
    run.all_ready()
    assert only(Stop, run.wait(run.options.run.grow_delay_s))


def test_never_fewer_than_min_dp() -> None:
    run = Bench({"a": 2, "b": 2}, min_dp=2, spares=0).form()
    run.handle(ScaleRequested("u", 1, None))
    assert run.reason == "the request changes nothing"


def _grown(warm_up_s: float = 0.0, **options: float | None) -> Bench:
    """A run with one ring and room for two, ten steps of a second into its last hundred."""
    run = Bench({"a": 2}, dp=1, max_dp=2, spares=0, **options).form()  # type: ignore[arg-type]
    for step in range(10):
        run.now += 0.99
        run.commit(step)
    run.handle(NodeJoined("n", "b", 2))
    run.now += warm_up_s
    run.all_ready()
    return run


def test_a_mesh_grows_only_where_that_saves_more_than_it_costs() -> None:
    """90 steps are left, of a second each: two rings save 45 s."""
    assert only(Stop, _grown(grow_cost_s=44.0).wait(3.0))
    assert not only(Stop, _grown(grow_cost_s=46.0).wait(3.0))
    assert only(Stop, _grown(grow_cost_s=None).wait(3.0)), "the first build took no time"
    assert only(Stop, _grown(grow_cost_s=None, warm_up_s=44.0).wait(3.0))
    assert not only(Stop, _grown(grow_cost_s=None, warm_up_s=46.0).wait(3.0)), "as long as the new worker took"


def test_a_mesh_does_not_grow_again_soon_after_its_size_has_changed() -> None:
    run = Bench({"a": 2, "b": 2}, max_dp=2, spares=0, grow_interval_s=600.0).form()
    run.lose(2, 3)
    run.recover(1)
    assert mesh_of(run.state).dp == 1  # type: ignore[union-attr]
    run.wait(run.options.restart_delay_s)
    run.all_ready()
    assert not only(Stop, run.wait(590.0))
    assert only(Stop, run.wait(11.0))
