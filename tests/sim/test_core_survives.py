"""The control core under random faults on a virtual clock: promises kept, runs finished, bugs noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from elastic_ring.control.coordination import Decision
from elastic_ring.control.messages import Build, Event, Finalize, MemberFailed, Standby, Stop, Vote
from elastic_ring.control.state import phase_name
from elastic_ring.errors import IllegalTransition
from elastic_ring.runtime.gpu import cuda_contexts
from tests.sim.invariants import InvariantBroken
from tests.sim.planted import FIRST_SEEDS, PLANTED
from tests.sim.simulator import worker
from tests.sim.simulator.corpus import SimCorpus
from tests.sim.simulator.faults import FAULTS, GROWN, HELD, OWN, SPIKES, STORED, random_schedule
from tests.sim.simulator.options import changed, simulated
from tests.sim.simulator.simulate import NotFinished
from tests.sim.simulator.worker import SimWorker
from tests.sim.truth import World, simulate


@pytest.mark.parametrize("first", [0, 100, 200, *(pytest.param(first, marks=pytest.mark.slow) for first in (300, 400))])
def test_every_random_schedule_keeps_the_invariants_and_ends(first: int) -> None:
    ends = [simulate(seed).end for seed in range(first, first + 100)]
    finished = [end for end in ends if end.message == "all steps committed"]
    assert len(finished) >= 60, "most schedules leave capacity enough to finish"


@pytest.mark.parametrize("seed", [22099, 26656])
def test_a_node_that_has_fewer_gpus_at_a_boundary_ends_no_run(seed: int) -> None:
    """The core raised, which ended the coordinator."""
    assert simulate(seed).end.message == "all steps committed"


def test_a_seed_replays_exactly() -> None:
    assert simulate(17) == simulate(17)


@pytest.mark.thinned(num=6)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    with pytest.raises((InvariantBroken, NotFinished, IllegalTransition)):
        _run_seeds(300, FIRST_SEEDS.get(bug, 0))


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if "GPU" in bug])
def test_more_members_than_a_node_has_gpus_break_the_invariant_that_says_so(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[bug](monkeypatch)
    with pytest.raises(InvariantBroken, match="invariant 7"):
        _run_seeds(300)


def _run_seeds(num_seeds: int, first: int = 0) -> None:
    for seed in range(first, first + num_seeds):
        simulate(seed, limit_s=200.0)


ONE_WORKER = replace(
    random_schedule(0),
    nodes=(1,),
    gpus=(),
    faults=(),
    lost=0.0,
    doubled=0.0,
    faults_end_s=60.0,
    options=simulated("simulated", dp=1, cp=1, total_steps=30, spares=0, start_s=5.0, backoff_s=3.0),
)


def test_a_member_whose_exchange_breaks_while_it_is_frozen_says_so_when_it_thaws() -> None:
    for seed in range(12):
        outcome = simulate(seed, replace(ONE_WORKER, faults=((2.0, "freeze"), (2.1, "glitch"))), limit_s=30.0)
        assert outcome.end.error in ("", "ShardLost"), "it thaws, or is killed and was the only holder"


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (((0.0, "bad-start"), (0.0, "bad-start"), (0.0, "bad-start")), "RunFailed"),
        (((0.1, "kill"), (0.1, "bad-start"), (0.1, "bad-start")), ""),
    ],
)
def test_a_run_ends_because_nothing_starts_only_if_every_start_erred(
    faults: tuple[tuple[float, str], ...], error: str
) -> None:
    assert simulate(1, replace(ONE_WORKER, faults=faults)).end.error == error


class Upheaval(RuleBasedStateMachine):
    """Faults at moments that hypothesis chooses and shrinks; every invariant is checked after every event."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        planned = random_schedule(seed)
        schedule = replace(planned, faults=(), faults_end_s=1e9)
        self.world = World(seed, schedule)
        self.world.begin()

    @rule(kind=st.sampled_from(sorted({*FAULTS, *OWN, *STORED, *HELD, *GROWN, *SPIKES})))
    def fault(self, kind: str) -> None:
        self.world.fault(kind)

    @rule(duration_s=st.sampled_from([0.02, 0.1, 0.5, 2.0]))
    def time_passes(self, duration_s: float) -> None:
        self.world.run_for(duration_s)

    def teardown(self) -> None:
        self.world.cease()
        self.world.finish(600.0)


TestUpheaval = Upheaval.TestCase
TestUpheaval.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_random_schedules_have_devices_that_err_in_steps_and_in_builds() -> None:
    phases: dict[tuple[int, int], str] = {}
    struck: set[str] = set()
    for seed in range(60):

        def listen(now: float, term: int, event: Event, decision: Decision, seed: int = seed) -> None:
            if isinstance(event, MemberFailed) and event.kind == "device" and "so it is killed" in decision.reason:
                struck.add(phases[seed, term])
            phases[seed, term] = phase_name(decision.state)

        simulate(seed, listen=listen)
    assert {"running", "building"} <= struck


def test_random_schedules_have_steps_of_longer_manifests_that_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new submission or after going back; the simulator itself compares the manifests."""
    votes, again = dict[tuple[int, int], Vote](), set[int]()
    committed = SimCorpus.committed

    def listen(self: SimCorpus, vote: Vote) -> None:
        committed(self, vote)
        known = votes.setdefault((self.world.seed, vote.step), vote)
        if known != vote and self._ran_by[vote.step] is not None:
            again.add(self.world.seed)

    monkeypatch.setattr(SimCorpus, "committed", listen)
    for seed in [seed for seed in range(300) if "cut" in {kind for _, kind in random_schedule(seed).faults}]:
        simulate(seed)
    assert len(again) >= 3


def test_random_schedules_have_runs_that_go_back_on_purpose_to_copies_and_to_checkpoints() -> None:
    found: set[str] = set()

    def listen(now: float, term: int, event: Event, decision: Decision) -> None:
        if "of the order are left out" in decision.reason:
            order = next(command for command in decision.commands if isinstance(command, Build))
            found.add("copies" if order.step_back is not None else "checkpoint")

    for seed in range(300):
        if len(found) < 2 and "spike" in {kind for _, kind in random_schedule(seed).faults}:
            simulate(seed, listen=listen)
    assert found == {"copies", "checkpoint"}


def test_a_step_is_given_up_for_a_checkpoint_where_the_notice_is_too_short_and_the_run_goes_on_from_it() -> None:
    saved: dict[int, int] = {}
    options = changed(ONE_WORKER.options, cp=2, total_steps=120, takes_checkpoints=True)
    schedule = replace(ONE_WORKER, options=options, nodes=(1, 1), save_every=10, faults_end_s=16.0)
    for seed in range(8):

        def listen(now: float, term: int, event: Event, decision: Decision, seed: int = seed) -> None:
            for order in [command for command in decision.commands if isinstance(command, Build)][:1]:
                if order.saves:
                    saved[seed] = order.step
                elif order.restore is not None and seed in saved:
                    assert order.restore.step >= saved[seed]

        end = simulate(seed, replace(schedule, faults=((4.0, "drain-node"),)), listen=listen).end
        assert end.message == "all steps committed"
    assert saved


@pytest.mark.slow
def test_random_schedules_have_processes_that_end_when_they_would_stand_by_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those do that have let go of their node's other GPUs; the runs end as they should all the same."""
    ended: list[str] = []
    ordered = SimWorker._ordered

    def listen(self: SimWorker, command: Stop | Build | Standby | Finalize) -> None:
        ordered(self, command)
        if isinstance(command, Standby) and not self.alive:
            ended.append(self.name)

    monkeypatch.setattr(SimWorker, "_ordered", listen)
    assert worker.SETTLED_STEPS == cuda_contexts.SETTLED_STEPS
    ends = [simulate(seed).end for seed in range(300)]
    assert len(ended) >= 4
    assert sum(end.message == "all steps committed" for end in ends) >= 180
