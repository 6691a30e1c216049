"""Random schedules of faults against the real control core on a virtual clock.

python benchmarks/recovery/sim_core.py --schedules 10000 --seed 0     every invariant after every event
python benchmarks/recovery/sim_core.py --replay SEED                  one schedule again, event by event
python benchmarks/recovery/sim_core.py --benchmark                    decision time with 2,000 members
"""

from __future__ import annotations

import collections
import json
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from elastic_ring.control import coordination
from elastic_ring.control.messages import (
    CoordinatorStarted,
    Event,
    MemberFailed,
    NodeJoined,
    NodeLost,
    Published,
    Report,
    Resumed,
    Tick,
    Vote,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.replay import journal_line
from elastic_ring.control.state import State, members, phase_name
from elastic_ring.errors import ElasticRingError
from elastic_ring.forecast import faults, simulate


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and show every decision")
    parser.add_argument("--benchmark", action="store_true", help="decision time, max ms per event")
    parser.add_argument("--members", type=int, default=2000, help="members in the benchmark, a multiple of cp")
    parser.add_argument("--cp", type=int, default=8, help="ranks of a ring in the benchmark")
    arguments = parser.parse_args()
    if arguments.benchmark:
        return benchmark(arguments.members, arguments.cp)
    if arguments.replay is not None:
        return show(arguments.replay)
    return run_many(arguments.seed, arguments.schedules)


SEED_LIMIT_S = 120
"""CPU time after which a schedule counts as endless; none takes more than a few seconds."""


class Endless(AssertionError):
    """A schedule does not end, in events or without any."""


def run_many(first: int, num_schedules: int) -> int:
    ends: collections.Counter[str] = collections.Counter()
    sources: collections.Counter[str] = collections.Counter()
    num_events, num_copied, num_stored, num_grown, num_cut, failed = 0, 0, 0, 0, 0, []
    signal.signal(signal.SIGVTALRM, _endless)
    for seed in range(first, first + num_schedules):
        schedule, seen = faults.random_schedule(seed), _Sources()
        num_copied += schedule.options.copies != "0"
        num_stored += schedule.save_every > 0
        kinds = {kind for _, kind in schedule.faults}
        num_grown, num_cut = num_grown + ("grow" in kinds), num_cut + ("cut" in kinds)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SEED_LIMIT_S)
            outcome = simulate.simulate(seed, schedule, listen=seen.listen)
        except (AssertionError, ElasticRingError) as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        num_events += outcome.num_events
        sources += seen.counted
        ends[outcome.end.error or outcome.end.message.split(":")[0]] += 1
    print(f"{num_schedules} schedules, {num_copied} with copies, {num_stored} with checkpoints, {num_events} decisions")
    print(f"a corpus grows in {num_grown} of them, the power goes in {num_cut}")
    print(f"recoveries from: {dict(sources.most_common())}; ends: {dict(ends.most_common())}")
    if failed:
        print(f"{len(failed)} FAILED; look closer: python benchmarks/recovery/sim_core.py --replay {failed[0]}")
    return 1 if failed else 0


def _endless(number: int, frame: object) -> None:
    raise Endless(f"not at its end after {SEED_LIMIT_S} s of CPU time")


class _Sources:
    """Where the state came from in each recovery that a run completed."""

    def __init__(self) -> None:
        self.counted: collections.Counter[str] = collections.Counter()

    def listen(self, now: float, term: int, event: Event, decision: coordination.Decision) -> None:
        change = decision.state.last_change
        if change is not None and change.resumed_at == now and change.previous_mesh is not None and change.lost:
            self.counted[change.source] += 1


def show(seed: int) -> int:
    for name, value in faults.describe_seed(seed).items():
        print(f"{name}: {value}")

    def listen(now: float, term: int, event: Event, decision: coordination.Decision) -> None:
        who = getattr(event, "worker", getattr(event, "node", ""))
        print(f"{now:8.3f} t{term} {type(event).__name__} {who}: {decision.reason}")

    try:
        outcome = simulate.simulate(seed, listen=listen)
    except (AssertionError, ElasticRingError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(outcome)
    return 0


def benchmark(num_members: int, cp: int) -> int:
    """Every kind of event of a run with two recoveries, one of a single rank and one of a whole node."""
    options = ControlOptions("benchmark", dp=num_members // cp, cp=cp, total_steps=1000, spares=16)
    state = coordination.initial(options)
    slowest: dict[str, float] = {}
    num_events, now = 0, 0.0
    story = _story(num_members, cp)
    event = next(story)
    while True:
        now += 0.001
        began = time.perf_counter()
        decision = coordination.advance(state, event, now)
        coordination.next_deadline(decision.state)
        json.dumps(journal_line(event, decision, now))  # a command leaves when it is written down, not before
        taken_ms = 1000 * (time.perf_counter() - began)
        state, num_events = decision.state, num_events + 1
        kind = f"{type(event).__name__} in {phase_name(state)}"
        slowest[kind] = max(slowest.get(kind, 0.0), taken_ms)
        try:
            event = story.send(state)
        except StopIteration:
            break
    for kind, taken_ms in sorted(slowest.items(), key=lambda item: -item[1]):
        print(f"{taken_ms:8.2f} ms  {kind}")
    worst_ms = max(slowest.values())
    print(f"{num_members} members, {num_events} events, slowest decision {worst_ms:.1f} ms (limit 50)")
    return 0 if worst_ms <= 50 else 1


def _story(num_members: int, cp: int) -> Generator[Event, State, None]:
    state = yield CoordinatorStarted("b", 1)
    for node in range(num_members // 8 + 2):
        state = yield NodeJoined("b", f"n{node}", 8, 8)
    for worker in list(state.workers.values()):
        state = yield WorkerReady("b", worker.worker, worker.node, 1)
    for step, lost in enumerate(("rank", "node", "error")):
        membership = members(state)
        for name in membership:
            state = yield Resumed("b", name, 1, state.generation, step)
        membership_id = (1, state.generation)
        state = yield Published("b", Vote(step, (1.0,), membership_id))
        state = yield Tick("b")
        if lost == "rank":
            state = yield WorkerLost("b", membership[5], "died", "SIGKILL")
        elif lost == "node":
            state = yield NodeLost("b", state.workers[membership[9]].node)
        else:
            state = yield MemberFailed("b", membership[3], 1, state.generation, "peer", step)
        for rank, name in enumerate(membership):
            if name in state.workers:
                vote = Vote(step, (1.0,), membership_id)
                state = yield Report(
                    "b", name, 1, state.generation, "aborted", step + 1, None, rank % cp, False, last_vote=vote
                )


if __name__ == "__main__":
    sys.exit(main())
