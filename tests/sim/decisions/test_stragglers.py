"""Stragglers: who is one and who is none, over synthetic times; what the core does about one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from elastic_ring.control.decisions.detectors import (
    JUDGED_EVERY,
    MIN_STEPS,
    WARM_STEPS,
    Detectors,
    StepMeasured,
    StragglerWatch,
    judge,
    ratios,
)
from elastic_ring.control.facts import Fact
from elastic_ring.control.messages import Build, Release, StartWorker, Stop, StragglerFound, WorkerLost
from elastic_ring.control.state import members, mesh_of, node_of, spares
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, only

HOUR_S, STEP_S = 3600.0, 0.5
MESHES = [Mesh(2, 1), Mesh(1, 2), Mesh(2, 2), Mesh(4, 2), Mesh(3, 4)]
Work = Callable[[int, int, random.Random], float]
"""(step, global rank, draw) -> how long the rank works, in seconds."""


def busy(step: int, rank: int, draw: random.Random) -> float:
    """Every rank's CPU is taken away for half a minute at a time, a fifth of the time."""
    taken = random.Random(f"{rank}/{step // 60}").random() < 0.2
    return 0.4 * (draw.uniform(1.5, 4.0) if taken else draw.uniform(0.95, 1.1))


HEALTHY: dict[str, Work] = {
    "quiet": lambda step, rank, draw: 0.4 + draw.gauss(0.0, 0.004),
    "noisy": lambda step, rank, draw: 0.4 * draw.lognormvariate(0.0, 0.3),
    "heavy tails": lambda step, rank, draw: 0.4 * (1 + draw.paretovariate(2.0)),
    "busy CPUs": busy,
    "compiling now and then": lambda step, rank, draw: 0.4 + (30.0 if draw.random() < 0.03 else 0.0),
    "uneven slices": lambda step, rank, draw: 0.4 * (1.0 + 0.3 * (rank % 2)) + draw.gauss(0.0, 0.02),
    "uneven documents": lambda step, rank, draw: 0.4 * draw.choice((0.5, 1.0, 1.6)),
    "all slow for a while": lambda step, rank, draw: (2.0 if 2000 < step < 3000 else 0.4) + draw.gauss(0.0, 0.02),
    "GPUs, measured in one step of ten": lambda step, rank, draw: 0.4 if step % 10 == 1 else 0.0,
}


def found(work: Work, mesh: Mesh, span_s: float = HOUR_S, seed: int = 0) -> list[tuple[float, int]]:
    """When, in seconds, and which ranks are found, in a run of steps of STEP_S."""
    watch, draw, seen = StragglerWatch(180.0, 1.5), random.Random(seed), []
    for step in range(int(span_s / STEP_S)):
        work_s = [max(0.0, work(step, rank, draw)) for rank in range(mesh.size)]
        straggler = watch.observe((1, 1), mesh, STEP_S, work_s)
        if straggler is not None:
            seen.append((step * STEP_S, straggler.global_rank))
    return seen


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(2, 2), Mesh(3, 4)], ids=str)
def test_an_hour_of_healthy_steps_gives_no_alarm(kind: str, mesh: Mesh) -> None:
    assert found(HEALTHY[kind], mesh) == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["quiet", "noisy", "compiling now and then", "GPUs, measured in one step of ten"])
def test_a_rank_that_becomes_twice_as_slow_is_found_within_a_window(kind: str, mesh: Mesh) -> None:
    slow = mesh.size - 1

    def work(step: int, rank: int, draw: random.Random) -> float:
        return HEALTHY[kind](step, rank, draw) * (2.2 if rank == slow and step >= 1000 else 1.0)

    seen = found(work, mesh, span_s=900.0)
    assert {rank for _, rank in seen} == {slow}
    first_s = seen[0][0] - 1000 * STEP_S
    assert 0.7 * 180 < first_s < 1.1 * 180, "three quarters of a window are slow by then"
    assert len(seen) == 2, "once in each window"


def test_a_rank_that_was_slow_from_the_start_is_found() -> None:
    assert {rank for _, rank in found(lambda step, rank, draw: 0.9 if rank == 0 else 0.4, Mesh(2, 2), 400.0)} == {0}


def test_a_slice_that_costs_more_is_no_straggler_and_a_slow_rank_of_it_is_one() -> None:
    """Two cp_ranks whose slices cost 1 and 2: compared with those of the same slice."""
    assert judge([ratios([1, 2, 1, 2, 1, 2], Mesh(3, 2))] * 20, 1.5) is None
    found = judge([ratios([1, 2, 1, 4, 1, 2], Mesh(3, 2))] * 20, 1.5)
    assert found is not None
    assert (found.global_rank, found.ratio) == (3, 2.0)


def test_nothing_is_judged_before_enough_steps_and_seconds_and_a_change_of_members_begins_anew() -> None:
    watch = StragglerWatch(8.0, 1.5)
    slow = [0.4, 0.4, 0.4, 2.0]

    def when(generation: int) -> int:
        for step in range(1000):
            if watch.observe((1, generation), Mesh(2, 2), 0.1, slow) is not None:
                return step
        raise AssertionError("not found")

    assert when(1) == when(2)
    assert WARM_STEPS + 80 - 1 <= when(3) <= WARM_STEPS + 80 + JUDGED_EVERY
    few = StragglerWatch(0.1, 1.5)
    assert [few.observe((1, 1), Mesh(2, 2), 0.1, slow) is None for _ in range(WARM_STEPS + MIN_STEPS)].index(False) == (
        WARM_STEPS + MIN_STEPS - 1
    )


def test_times_that_some_rank_has_not_measured_say_nothing() -> None:
    assert ratios([0.4, 0.0], Mesh(2, 1)) == ratios([], Mesh(2, 1)) == ratios([0.4], Mesh(1, 1)) == ()


# ---------------------------------------------------------------- the core


def test_a_spare_of_another_node_takes_the_stragglers_place_and_its_node_is_the_last_to_be_hired_on() -> None:
    run = Bench({"a": 2, "b": 2, "c": 3}, spares=2).form()
    before, slow = members(run.state), members(run.state)[1]
    said = run.handle(StragglerFound("s", slow, 2.5))
    assert {command.mode for command in only(Stop, said)} == {"boundary"}
    (started,) = only(StartWorker, said)
    assert started.node == "c"
    (order, *_) = only(Build, run.report_all(5, "boundary"))
    newcomer = order.members[1]
    assert [name for name in order.members if name != newcomer] == [name for name in before if name != slow]
    assert {node_of(run.state)[name] for name in spares(run.state)} | {node_of(run.state)[newcomer]} == {"c"}
    said = run.resume_all()
    assert [command.worker for command in only(Release, said)] == [slow]
    assert mesh_of(run.state) == Mesh(2, 2)


def test_where_no_other_node_has_room_its_node_is_hired_on() -> None:
    run = Bench({"a": 3}, dp=1, spares=1).form()
    slow = members(run.state)[1]
    run.handle(StragglerFound("s", slow, 2.5))
    run.recover(5, "boundary")
    said = run.handle(WorkerLost("a", slow, "exited"))
    (started,) = only(StartWorker, (*said, *run.wait(5.0)))
    assert started.node == "a"


def test_without_a_spare_a_straggler_stays() -> None:
    run = Bench({"a": 2, "b": 2}, spares=0).form()
    said = run.handle(StragglerFound("s", members(run.state)[1], 2.5))
    assert said == ()
    assert not any(worker.draining for worker in run.state.workers.values())


def test_a_spare_is_no_straggler_and_a_straggler_is_replaced_once() -> None:
    run = Bench({"a": 3, "b": 3}, spares=2).form()
    assert run.handle(StragglerFound("s", spares(run.state)[0], 2.5)) == ()
    assert run.handle(StragglerFound("s", members(run.state)[1], 2.5))
    assert run.handle(StragglerFound("s", members(run.state)[1], 2.5)) == ()


@pytest.mark.parametrize("setting", ["log", "act"])
def test_what_detectors_find_the_core_acts_upon_where_settings_say_so(setting: str) -> None:
    run = Bench({"a": 3, "b": 3}, spares=2, straggler=setting, memory_pressure=setting).form()
    detectors, slow = Detectors(run.options.run), members(run.state)[2]
    texts = []
    for step in range(400):
        work_s, shares = [0.1, 0.1, 0.4, 0.1], [0.99, 0.1, 0.1, 0.1]
        measured = StepMeasured(step, (1, 1), Mesh(2, 2), step * STEP_S, STEP_S, work_s=work_s, memory_shares=shares)
        for finding in detectors.observe(measured, run.state):
            run.handle(finding)
            texts += [finding.text] if isinstance(finding, Fact) else []
    did = {"log": "nothing is done", "act": "a spare is to take its place"}[setting]
    assert any(text.startswith(f"straggler: {slow}, rank 2 on node ") and did in text for text in texts)
    assert (run.state.workers[slow].draining, bool(run.state.memory.pressure)) == (setting == "act",) * 2
    assert bool(run.state.phase.boundary) == (setting == "act")  # type: ignore[union-attr]
