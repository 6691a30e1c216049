"""The memory ladder in the control core: all members climb together, one relief a generation, and come down again."""

from __future__ import annotations

import random

import pytest

from elastic_ring.control.decisions.detectors import PRESSURE_STEPS, PressureWatch, Tight, host_share
from elastic_ring.control.decisions.memory_ladder import reliefs_on
from elastic_ring.control.messages import (
    Build,
    CoordinatorStarted,
    KillWorker,
    MemberFailed,
    MemoryTight,
    Status,
    Stop,
    WorkerLost,
)
from elastic_ring.control.state import members, spares
from tests.sim.bench import Bench, build_in, end_in, only
from tests.sim.simulator.faults import random_schedule
from tests.sim.truth import simulate

NODES = {"a": 3, "b": 3}
DETAIL = "RuntimeError: DefaultCPUAllocator: you tried to allocate 4096 bytes, in loss (job.py:7)"


def short(run: Bench, rank: int, step: int, generation: int | None = None) -> None:
    of = run.state.generation if generation is None else generation
    run.handle(MemberFailed("w", members(run.state)[rank], run.state.term, of, "memory", step, DETAIL))


def again(run: Bench, applied: int) -> Build:
    """Everyone reports, and the ring closes again."""
    build = run.recover(applied)
    assert run.phase == "running"
    return build


def test_a_shortage_runs_the_same_step_again_with_one_relief_more_on_all_members() -> None:
    run = Bench(NODES).form()
    before = members(run.state)
    run.commit(0)
    short(run, 2, 1)
    assert "relief 1 of 2, caches" in run.reason
    short(run, 1, 1, generation=1)  # the same step on a second member comes late: its generation is over
    sent = run.report_all(1)
    builds = only(Build, sent)
    assert {build.memory_reliefs for build in builds} == {("caches",)}
    assert [build.worker for build in builds] == list(members(run.state)) == list(before)
    assert (builds[0].step, builds[0].heals) == (1, ())
    assert not only(KillWorker, sent)
    run.resume_all()
    assert run.change.action == "rebuilt in place"
    assert (run.change.step_rerun, run.change.promise) == (1, "bit-exact")
    assert not run.state.crashes
    assert run.state.user_errors.count == 0
    assert run.state.memory.num_shortages == 1


def test_the_reliefs_stay_through_other_recoveries_and_newcomers_get_them_too() -> None:
    run = Bench(NODES).form()
    short(run, 0, 0)
    again(run, 0)
    run.lose(3)
    build = again(run, 0)
    assert build.memory_reliefs == ("caches",)
    assert build.heals


def test_after_the_last_relief_the_run_ends_and_says_what_was_tried_who_asked_and_what_to_change() -> None:
    run = Bench(NODES).form()
    for reliefs in (("caches",), ("caches", "recompute")):
        short(run, 0, 0)
        assert again(run, 0).memory_reliefs == reliefs
    last = members(run.state)[3]
    short(run, 3, 0)
    end = end_in(run.sent)
    assert end.error == "OutOfMemory"
    for part in (last, "4096 bytes, in loss", "caches are freed", "recompute: ", "loss_chunk_tokens", "(cp)"):
        assert part in end.message, part


def test_a_shortage_while_the_ring_is_built_climbs_too_and_counts_once() -> None:
    run = Bench(NODES).form()
    short(run, 0, 0)
    build_in(run.report_all(0))
    short(run, 1, 0)
    assert run.phase == "closing"
    assert again(run, 0).memory_reliefs == ("caches", "recompute")
    assert run.state.fruitless_builds == 0


def test_a_new_coordinator_that_hears_of_a_shortage_twice_takes_one_relief() -> None:
    run = Bench(NODES).form()
    workers, generation = members(run.state), run.state.generation
    run.handle(CoordinatorStarted("c", 2))
    for _ in range(2):
        run.handle(MemberFailed("w", workers[0], 2, generation, "memory", 0, DETAIL))
    for worker in run.state.workers:
        run.handle(Status("w", worker, 2, generation, "paused" if worker == workers[0] else "running"))
    assert run.phase == "closing"
    assert again(run, 0).memory_reliefs == ("caches",)


def test_after_enough_steps_without_a_shortage_a_relief_goes_at_a_boundary_and_the_next_time_later() -> None:
    run = Bench(NODES, memory_relax_steps=3).form()
    short(run, 0, 0)
    again(run, 0)

    def steps_until_relaxed(step: int) -> int:
        for done in range(1, 20):
            run.commit(step + done - 1)
            if run.state.phase.boundary:  # type: ignore[union-attr]
                build = run.recover(step + done, kind="boundary")
                assert build.memory_reliefs == ()
                assert run.change.planned
                return done
        raise AssertionError("never")

    assert steps_until_relaxed(0) == 3
    short(run, 0, 3)
    assert again(run, 3).memory_reliefs == ("caches",)
    assert steps_until_relaxed(3) == 6


def test_members_that_are_killed_for_their_nodes_memory_climb_too_and_the_third_time_end_the_run() -> None:
    run = Bench({"a": 5, "b": 5}, spares=3).form()
    first = members(run.state)[1]
    run.lose(1, reason="out of memory", step=0, phase="forward")
    assert again(run, 0).memory_reliefs == ("caches",)
    assert first in run.state.memory.why
    run.all_ready()
    run.lose(2, reason="out of memory", step=0, phase="backward")
    assert again(run, 0).memory_reliefs == ("caches", "recompute")
    run.all_ready()
    run.lose(0, reason="out of memory", step=0, phase="forward")
    run.report_all(0)
    end = end_in(run.sent)
    assert end.error == "CrashLoop"
    assert "in forward: out of memory" in end.message
    assert "memory it needs" in end.message


def test_a_death_whose_cause_is_known_late_climbs_for_the_next_build() -> None:
    run = Bench({"a": 5, "b": 5}, spares=3).form()
    lost = members(run.state)[1]
    run.lose(1, step=0, phase="forward", signal="")
    assert build_in(run.report_all(0)).memory_reliefs == ()
    run.handle(WorkerLost("a", lost, "out of memory", "the kernel took it", 0, "forward", "SIGKILL"))
    assert run.state.memory.num_shortages == 1
    assert lost in run.state.memory.why
    run.resume_all()
    run.all_ready()
    run.lose(0, reason="died", step=0, phase="forward")
    assert again(run, 0).memory_reliefs == ("caches",)


def test_a_relief_that_takes_host_memory_is_no_answer_to_a_node_without_any() -> None:
    run = Bench({"a": 5, "b": 5}, spares=3, memory_reliefs=("caches", "offload")).form()
    for reliefs in (("caches",), ("caches",)):
        run.lose(1, reason="out of memory", step=-1, phase="idle")
        assert again(run, 0).memory_reliefs == reliefs
        run.all_ready()
    assert run.state.memory.num_shortages == 2


def test_a_spare_that_is_killed_for_its_nodes_memory_says_nothing_of_the_step() -> None:
    run = Bench({"a": 5, "b": 5}).form()
    spare = next(iter(spares(run.state)))
    run.handle(WorkerLost("a", spare, "out of memory", "it grew", 0, "forward", "SIGKILL"))
    assert run.phase == "running"
    assert run.state.memory.num_shortages == 0


FULL = "memory pressure: w1, rank 1, had 97 % of its device's memory in use in 8 steps in a row"


def trained_for(run: Bench, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        run.commit(step)


def test_before_memory_runs_out_the_next_relief_is_taken_at_a_boundary_and_taken_back_later() -> None:
    run = Bench(NODES, memory_relax_steps=10).form()
    before = members(run.state)
    trained_for(run, 9)
    said = run.handle(MemoryTight("m", "device", 8, FULL))
    assert {command.mode for command in only(Stop, said)} == {"boundary"}
    assert run.handle(MemoryTight("m", "host", 9, FULL)) == ()
    builds = only(Build, run.report_all(10, kind="boundary"))
    assert {build.memory_reliefs for build in builds} == {("caches",)}
    assert [build.worker for build in builds] == list(before)
    run.resume_all()
    ladder = run.state.memory
    assert run.change.planned
    assert (ladder.num_early, ladder.num_shortages, ladder.pressure, ladder.why) == (1, 0, "", FULL)
    trained_for(run, 9, first=10)
    assert not run.state.phase.boundary  # type: ignore[union-attr]
    trained_for(run, 1, first=19)
    assert build_in(run.report_all(20, kind="boundary")).memory_reliefs == ()


def test_at_most_one_relief_in_eight_steps_and_none_that_takes_more_of_a_full_host() -> None:
    run = Bench(NODES, memory_reliefs=("caches", "offload")).form()
    assert run.handle(MemoryTight("m", "device", 3, FULL)) == ()
    assert "4 steps old" in run.reason
    run.handle(MemoryTight("m", "device", 8, FULL))
    assert build_in(run.report_all(9, kind="boundary")).memory_reliefs == ("caches",)
    run.resume_all()
    assert run.handle(MemoryTight("m", "host", 30, FULL)) == ()
    assert "takes more of it" in run.reason
    run.handle(MemoryTight("m", "device", 30, FULL))
    assert build_in(run.report_all(31, kind="boundary")).memory_reliefs == ("caches", "offload")
    run.resume_all()
    assert run.handle(MemoryTight("m", "device", 50, FULL)) == ()
    assert "no relief is left" in run.reason


def test_reliefs_that_change_bits_are_the_last_and_wait_until_a_step_fails() -> None:
    assert reliefs_on("cuda", 2) == ("caches", "recompute", "offload", "passes", "chunks")
    assert reliefs_on("cpu", 1) == ("caches", "recompute", "chunks")
    run = Bench(NODES, memory_reliefs=("caches", "chunks")).form()
    short(run, 0, 0)
    assert again(run, 0).memory_reliefs == ("caches",)
    assert run.handle(MemoryTight("m", "device", 30, FULL)) == ()
    assert "changes bits" in run.reason
    short(run, 0, 0)
    assert again(run, 0).memory_reliefs == ("caches", "chunks")


def test_a_shortage_before_the_boundary_takes_the_relief_that_was_wanted_and_no_second() -> None:
    run = Bench(NODES).form()
    trained_for(run, 9)
    run.handle(MemoryTight("m", "device", 8, FULL))
    short(run, 1, 9)
    assert again(run, 9).memory_reliefs == ("caches",)
    assert run.state.memory.pressure == ""
    assert not run.state.phase.boundary  # type: ignore[union-attr]


def test_a_relief_that_is_wanted_comes_with_the_build_after_a_loss_or_at_the_next_boundary() -> None:
    run = Bench(NODES).form()
    trained_for(run, 9)
    run.handle(MemoryTight("m", "device", 8, FULL))
    run.lose(3)
    again(run, 9)
    assert run.state.memory.pressure == FULL
    assert run.state.phase.boundary  # type: ignore[union-attr]
    assert build_in(run.report_all(10, kind="boundary")).memory_reliefs == ("caches",)


# ---------------------------------------------------------------- when memory is nearly full


def test_memory_is_tight_after_eight_steps_in_a_row_and_once_until_there_is_room_or_a_new_generation() -> None:
    watch, limit = PressureWatch(0.95), 0.95

    def when(generation: int, shares: list[float], host: float = 0.2) -> list[int]:
        return [
            step for step, share in enumerate(shares) if watch.observe((1, generation), (0.4, share), host) is not None
        ]

    full = [limit] * PRESSURE_STEPS
    assert when(1, [*full[1:], 0.94, *full, *full]) == [2 * PRESSURE_STEPS - 1]
    assert when(1, [0.94, *full]) == []
    assert when(1, [0.89, *full]) == [PRESSURE_STEPS]
    assert when(2, full * 2) == [PRESSURE_STEPS - 1]
    assert watch.device_share == limit


def test_the_fullest_rank_or_the_host_is_named() -> None:
    watch = PressureWatch(0.9)
    assert [watch.observe((1, 1), (0.3, 0.97, 0.95), 0.5) for _ in range(PRESSURE_STEPS)][-1] == Tight(
        "device", 0.97, 1
    )
    assert [watch.observe((1, 2), (0.3, 0.91), 0.99) for _ in range(PRESSURE_STEPS)][-1] == Tight("host", 0.99)
    assert [watch.observe((1, 3), (), 0.99) for _ in range(PRESSURE_STEPS)][-1] == Tight("host", 0.99)


def test_an_hour_of_steps_that_come_near_the_limit_gives_no_alarm() -> None:
    watch, draw = PressureWatch(0.95), random.Random(0)
    for _ in range(7200):
        shares = [0.96 if draw.random() < 0.1 else draw.uniform(0.5, 0.94) for _ in range(2)]
        assert watch.observe((1, 1), shares, draw.uniform(0.2, 0.9)) is None


def test_a_node_is_as_full_as_it_is_near_to_its_guards_limit_and_full_where_everything_waits() -> None:
    assert host_share(0.465, 0.93, {}) == 0.5
    assert host_share(0.465, 0.0, {"some": 0.9, "full": 0.1}) == 0.465
    assert host_share(0.1, 0.93, {"some": 0.9, "full": 0.25}) == 1.0


def test_reliefs_stay_where_nothing_is_to_be_taken_back() -> None:
    run = Bench(NODES, memory_relax_steps=0).form()
    short(run, 0, 0)
    again(run, 0)
    for step in range(50):
        run.commit(step)
    assert run.phase == "running"
    assert not run.state.phase.boundary  # type: ignore[union-attr]


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_simulated_runs_with_shortages_keep_every_invariant(first: int) -> None:
    ends: dict[str, int] = {}
    climbed = 0
    for seed in range(first, first + 60):
        if not any(kind == "memory" for _, kind in random_schedule(seed).faults):
            continue
        reliefs: set[tuple[str, ...]] = set()

        def listen(
            now: float, term: int, event: object, decision: object, reliefs: set[tuple[str, ...]] = reliefs
        ) -> None:
            reliefs.update(build.memory_reliefs for build in only(Build, decision.commands))  # type: ignore[attr-defined]

        end = simulate(seed, listen=listen).end.error
        ends[end] = ends.get(end, 0) + 1
        climbed += len(reliefs - {()})
    assert climbed > 0
    assert ends.get("", 0) > 0
