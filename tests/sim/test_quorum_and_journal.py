"""The decision about the next step from reports alone, and the journal that gives the same commands again."""

from __future__ import annotations

import json
import typing

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control import messages
from elastic_ring.control.coordination import Decision, advance, journal_line, replay, standing, term_note
from elastic_ring.control.decisions.quorum import decide
from elastic_ring.control.facts import StepSkipped
from elastic_ring.control.messages import Build, Heal, Published, Report, Vote, from_json, to_json
from elastic_ring.control.state import Ended, Idle, Phase, State, members
from elastic_ring.errors import JournalDamaged
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench
from tests.sim.simulator.faults import random_schedule
from tests.sim.simulator.options import simulated
from tests.sim.truth import World

OLD, NEW = (1, 4), (1, 5)


def _report(applied: int, shard: int | None = 0, reduced_by: tuple[int, int] = NEW, **more: object) -> Report:
    fields = {"vote": None, "has_gradient": True, "gradient_membership_id": reduced_by, **more}
    return Report("w", "x", 1, 6, "aborted", applied, shard=shard, **fields)  # type: ignore[arg-type]


def test_nobody_holds_the_vote_so_the_step_runs_again() -> None:
    decided = decide({"a": _report(7), "b": _report(7, 1)}, None, 7, 5, NEW)
    assert (decided.step, decided.roll_forward, decided.holders) == (7, None, {"a": 0, "b": 1})


def test_a_gradient_that_other_members_reduced_does_not_fit_the_vote() -> None:
    ahead = _report(8, last_vote=Vote(7, (1.0,), NEW))
    decided = decide({"a": ahead, "b": _report(7, 1, reduced_by=OLD), "c": _report(7, 1)}, None, 7, 7, NEW)
    assert decided.holders == {"a": 0, "c": 1}


def test_whoever_has_no_gradient_any_more_cannot_follow() -> None:
    ahead = _report(8, last_vote=Vote(7, (1.0,), NEW))
    assert decide({"a": ahead, "b": _report(7, 1, has_gradient=False)}, None, 7, 7, NEW).holders == {"a": 0}


def test_a_vote_that_was_given_up_before_the_last_build_does_not_count() -> None:
    assert decide({"a": _report(7, vote=Vote(7, (1.0,), OLD))}, None, 7, 7, NEW).step == 7
    assert decide({"a": _report(7, vote=Vote(7, (1.0,), NEW))}, None, 7, 7, NEW).step == 8


def test_a_report_without_a_shard_moves_nothing_but_its_vote_counts() -> None:
    decided = decide({"a": _report(7), "b": _report(99, None, vote=Vote(7, (1.0,), NEW))}, None, 7, 5, NEW)
    assert (decided.step, decided.holders) == (8, {"a": 0})


def test_every_message_survives_json() -> None:
    build = Build(
        "c", "w", 1, 2, Mesh(1, 2), ("a", "b"), 3, Vote(2, (0.1, float("inf")), (1, 2)), (Heal(0, "a", ("b",)),), False
    )
    for message in (build, _report(3, vote=Vote(3, (1e-17,), NEW)), messages.EndRun("c", "", "m", (("a", "b"),))):
        assert from_json(json.loads(json.dumps(to_json(message)))) == message


def _recovered(**options: float) -> Bench:
    run = Bench({"a": 3, "b": 3}, **options).form()
    run.handle(Published("w", Vote(3, (float("nan"),), (1, 1))))
    run.lose(3)
    run.recover(applied=4)
    return run


def test_a_journal_replays_to_the_same_state() -> None:
    run = _recovered()
    state = replay(run.options, run.journal)
    assert (state.generation, state.committed, members(state)) == (2, 4, members(run.state))
    assert (state.workers, state.story) == (run.state.workers, run.state.story)


def test_a_fact_changes_nothing_in_any_phase_and_its_line_replays_to_no_command() -> None:
    fact = StepSkipped(7, "its gradient is not finite")
    phases = typing.get_args(Phase)
    assert {Idle, Ended} < set(phases)
    for phase in phases:
        state = State(simulated("facts", dp=1, cp=1, total_steps=9), object.__new__(phase), term=3)
        assert advance(state, fact, 1.0) == Decision(state, (), "noted")
    run, shown = Bench({"a": 3, "b": 3}).form(), list[tuple[object, object]]()
    notes = [json.dumps(journal_line(fact, Decision(run.state, (), ""), 0.0)), json.dumps({"note": "begin"})]
    state = replay(run.options, [*notes, *run.journal, *notes], lambda event, commands: shown.append((event, commands)))
    assert state == run.state
    assert (shown[0], shown[-1], len(shown)) == ((fact, ()), (fact, ()), len(run.journal) + 2)


def test_other_commands_than_recorded_are_damage_and_the_line_is_named() -> None:
    run = _recovered()
    with pytest.raises(JournalDamaged, match="line 2"):
        replay(simulated("scripted", dp=1, cp=1, total_steps=100), run.journal)
    with pytest.raises(JournalDamaged, match="line 4"):
        replay(run.options, [*run.journal[:3], run.journal[3][:-9], *run.journal[4:]])


def test_a_line_that_was_cut_off_by_the_crash_never_led_to_a_command() -> None:
    run = _recovered()
    assert replay(run.options, [*run.journal[:-1], run.journal[-1][:-5]]) == replay(run.options, run.journal[:-1])


def test_lines_of_a_coordinator_that_was_replaced_are_passed_over() -> None:
    run = _recovered()
    ghost = run.journal[-1]
    run.handle(messages.CoordinatorStarted("c", 2))
    assert replay(run.options, [*run.journal, ghost]) == replay(run.options, run.journal)


def test_what_an_old_coordinator_writes_behind_its_successors_back_does_not_stand() -> None:
    lines = [{"event": 1}, {"event": 2}, {"event": "behind its back"}, term_note(2, 2), {"event": 3}]
    assert standing(lines) == [{"event": 1}, {"event": 2}, term_note(2, 2), {"event": 3}]
    later = [*lines, {"event": "again"}, term_note(3, 5)]
    assert standing(later) == [{"event": 1}, {"event": 2}, term_note(2, 2), {"event": 3}, term_note(3, 5)]


@pytest.mark.parametrize("seed", [3, 8, 21, 34])
def test_the_journal_of_a_turbulent_run_replays(seed: int) -> None:
    world = World(seed, random_schedule(seed))
    world.begin()
    world.finish(600.0)
    newest = world.coordinators[-1]
    assert replay(world.options, newest.journal) == newest.state


def test_members_that_are_in_a_newer_generation_than_a_cut_journal_end_the_run() -> None:
    """Cut before any line, and a new coordinator asks the members that are really there."""
    run, num_refused = _recovered(restart_delay_s=1e3), 0
    for num_lines in range(1, len(run.journal) + 1):
        state = replay(run.options, run.journal[:num_lines])
        if state.num_started < run.state.num_started:
            continue  # `cluster.num_started` shows it
        known, newest = state.generation, run.state.generation
        state = advance(state, messages.CoordinatorStarted("c", 2, num_lines), 99.0).state
        for worker in members(run.state):
            state = advance(state, messages.Status("w", worker, 2, newest, "running"), 99.0).state
        assert isinstance(state.phase, Ended) == (known < newest), num_lines
        if isinstance(state.phase, Ended):
            num_refused += 1
            assert state.phase.end.error == "JournalDamaged"
            assert f"ends after line {num_lines} and knows generation {known} as the newest" in state.phase.end.message
    assert num_refused > 5


def test_a_stores_copy_of_the_journal_that_lags_goes_on_without_the_promise_of_equal_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Bench({"a": 3, "b": 3}).form()
    monkeypatch.setattr(RunConfig, "is_remote", True)
    run.handle(messages.CoordinatorStarted("c", 2))
    for worker in run.state.workers:
        activity = "running" if worker in members(run.state) else "spare"
        run.handle(messages.Status("w", worker, 2, 7 if activity == "running" else 0, activity))
    assert (run.phase, run.state.promise, run.state.generation) == ("closing", "sample-exact", 8)
