"""Random schedules of faults against the real control core on a virtual clock.

python benchmarks/recovery/sim_core.py --schedules 10000 --seed 0     every invariant after every event; and as many
                                                                      schedules of submissions that share a storage
python benchmarks/recovery/sim_core.py --replay SEED                  one schedule again, event by event
python benchmarks/recovery/sim_core.py --benchmark --members 1024,2048,4096,8192,16384    what the core costs
"""

from __future__ import annotations

import collections
import json
import resource
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of
from elastic_ring.control import coordination
from elastic_ring.control.coordination import journal_line
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
from elastic_ring.control.state import State, members, phase_name
from elastic_ring.errors import ElasticRingError
from tests.sim.sim_terms import random_terms
from tests.sim.simulator import faults
from tests.sim.simulator.options import simulated
from tests.sim.truth import simulate


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=500, help="how many seeds to run; SIGTERM ends it earlier")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and show every decision")
    parser.add_argument("--benchmark", action="store_true", help="CPU seconds of forming and of recoveries")
    parser.add_argument("--members", type=list_of(int), default=[2000], help="sizes in it, multiples of cp")
    parser.add_argument("--cp", type=int, default=8, help="ranks of a ring in the benchmark")
    parser.add_argument("--save", action="store_true", help="write what is printed into benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.benchmark:
        return benchmark(arguments.members, arguments.cp, arguments.save)
    if arguments.replay is not None:
        return show(arguments.replay)
    return run_many(arguments.seed, arguments.schedules, arguments.save)


RECOVERIES = ("rank", "node", "error")
"""What is lost in the benchmark, one after the other."""
SEED_LIMIT_S = 120
"""CPU time after which a schedule counts as endless; none takes more than a few seconds."""


class Endless(AssertionError):
    """A schedule does not end, in events or without any."""


def run_many(first: int, num_schedules: int, is_saved: bool) -> int:
    counts, broken = collections.Counter[str](), list[str]()
    ends, sources = collections.Counter[str](), collections.Counter[str]()
    stops = list[int]()
    signal.signal(signal.SIGVTALRM, _endless)
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    began_s, last = time.process_time(), first - 1
    while last + 1 < first + num_schedules and not stops:
        last = seed = last + 1
        schedule, seen = faults.schedule_with_edges(seed), _Seen()
        kinds = {kind for _, kind in schedule.faults}
        counts.update(
            {
                "with copies": schedule.options.run.copies != "0",
                "with checkpoints": schedule.save_every > 0,
                "with a growing corpus": "grow" in kinds,
                "with power cuts": "cut" in kinds,
                "with joins later": bool(schedule.joins_s) or "join" in kinds,
                "with clocks that differ": schedule.clocks_differ,
            }
        )
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SEED_LIMIT_S)
            outcome = simulate(seed, schedule, listen=seen.listen)
            sources += seen.sources
            counts += seen.counted
            ends[outcome.end.error or outcome.end.message.split(":")[0]] += 1
            counts.update({f"of submissions: {what}": number for what, number in random_terms(seed).items()})
        except (AssertionError, ElasticRingError) as error:
            broken.append(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
            results.show(broken[-1])
        if (seed + 1 - first) % 1000 == 0:
            print(f"{seed + 1 - first} schedules, {len(broken)} broken", file=sys.stderr, flush=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    took_s = time.process_time() - began_s
    text = f"seeds {first} to {last}, each a run and a storage that submissions share: {took_s:.0f} s of CPU time\n"
    text += results.table(("what", "number"), sorted(counts.items())) + "\n"
    text += f"recoveries from: {dict(sources.most_common())}; ends: {dict(ends.most_common())}\n"
    text += results.verdict(broken, "no invariant broken")
    results.show(text)
    if is_saved:
        figures = {"counts": counts, "sources": sources, "ends": ends, "broken": broken}
        results.save("simulator", f"sim_core-{first}-{last}", text, figures)
    if broken:
        results.show(f"look closer: python benchmarks/recovery/sim_core.py --replay {broken[0].split()[1].rstrip(':')}")
    return 1 if broken else 0


def _endless(number: int, frame: object) -> None:
    raise Endless(f"not at its end after {SEED_LIMIT_S} s of CPU time")


class _Seen:
    """What there was in one run, and where the state came from in each recovery that it completed."""

    def __init__(self) -> None:
        self.sources, self.counted = collections.Counter[str](), collections.Counter[str]()

    def listen(self, now: float, term: int, event: Event, decision: coordination.Decision) -> None:
        self.counted["decisions"] += 1
        self.counted["nodes that join"] += isinstance(event, NodeJoined)
        self.counted["coordinators"] += isinstance(event, CoordinatorStarted)
        self.counted["moves apart"] += decision.state.moved_at == now
        change = decision.state.last_change
        if change is not None and change.resumed_at == now and change.previous_mesh is not None and change.lost:
            self.sources[change.source] += 1


def show(seed: int) -> int:
    schedule = faults.schedule_with_edges(seed)
    print(f"seed: {seed}")
    for name in ("options", "nodes", "gpus", "joins_s", "clocks_differ", "faults", "lost", "doubled", "save_every"):
        print(f"{name}: {getattr(schedule, name)}")

    def listen(now: float, term: int, event: Event, decision: coordination.Decision) -> None:
        who = getattr(event, "worker", getattr(event, "node", ""))
        print(f"{now:8.3f} t{term} {type(event).__name__} {who}: {decision.reason}")

    try:
        outcome = simulate(seed, listen=listen)
    except (AssertionError, ElasticRingError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(outcome)
    return 0


def benchmark(sizes: list[int], cp: int, is_saved: bool) -> int:
    """A curve over `sizes`: forming, then three recoveries, from one rank, one node, and an exchange that failed."""
    runs = [_Measured(size, cp) for size in sizes]
    head = ("members", "forming s", *(f"{what} s" for what in RECOVERIES), "journal s", "slowest ms", "in", "MiB")
    rows = [run.row() for run in runs]
    figures = {"rows": [dict(zip(head, row, strict=True)) for row in rows]}
    text = f"CPU seconds of the control core in sum, cp={cp}\n{results.table(head, rows)}\n"
    missed = [line for run in runs for line in run.missed()]
    text += results.verdict(missed)
    results.show(text)
    if is_saved:
        results.save("recovery", "core_curve", text, figures)
    return 1 if missed else 0


class _Measured:
    """What a run of so many members takes, in CPU seconds of the core. The journal's lines are counted apart, but a
    decision has been made when its line is there: a command leaves then, not before."""

    def __init__(self, num_members: int, cp: int) -> None:
        self.num_members = num_members
        self.core_s: dict[str, float] = dict.fromkeys(("forming", *RECOVERIES), 0.0)
        self.journal_s, self.slowest_s, self.slowest = 0.0, 0.0, ""
        options = simulated("benchmark", dp=num_members // cp, cp=cp, total_steps=1000, spares=16)
        state, now = coordination.initial(options), 0.0
        events = story(num_members, cp)
        part, event = next(events)
        while True:
            # All answers come within a quarter of `report_s`: whoever is later is killed as silent.
            now += options.timeouts.report_s / 4 / num_members
            state = self._advance(part, state, event, now)
            try:
                part, event = events.send(state)
            except StopIteration:
                break
        self.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    def _advance(self, part: str, state: State, event: Event, now: float) -> State:
        began_s = time.process_time()
        decision = coordination.advance(state, event, now)
        coordination.next_deadline(decision.state)
        decided_s = time.process_time()
        json.dumps(journal_line(event, decision, now))
        taken_s = time.process_time() - began_s
        self.core_s[part] += decided_s - began_s
        self.journal_s += taken_s - (decided_s - began_s)
        if taken_s > self.slowest_s:
            self.slowest_s, self.slowest = taken_s, f"{type(event).__name__} in {phase_name(state)}"
        return decision.state

    def row(self) -> list[object]:
        seconds = [self.core_s[part] for part in ("forming", *RECOVERIES)]
        return [self.num_members, *seconds, self.journal_s, 1000 * self.slowest_s, self.slowest, self.peak_mib]

    def missed(self) -> list[str]:
        found = [("forming s", self.core_s["forming"], 5.0), ("MiB", float(self.peak_mib), 1024.0)]
        found += [(f"{what} s", self.core_s[what], 1.0) for what in RECOVERIES]
        found += [("slowest decision ms", 1000 * self.slowest_s, 50.0)] if self.num_members <= 2000 else []
        return [
            f"{self.num_members} members, {what}: {value:.3f}, limit {limit:g}"
            for what, value, limit in found
            if value > limit
        ]


def story(num_members: int, cp: int) -> Generator[tuple[str, Event], State, None]:
    """(what it belongs to, event)."""
    state = yield "forming", CoordinatorStarted("b", 1)
    for node in range(num_members // 8 + 2):
        state = yield "forming", NodeJoined("b", f"n{node}", 8, 8)
    for worker in list(state.workers.values()):
        state = yield "forming", WorkerReady("b", worker.worker, worker.node, 1)
    part = "forming"
    for step, lost in enumerate((*RECOVERIES, "")):
        membership = members(state)
        for name in membership:
            state = yield part, Resumed("b", name, 1, state.generation, step)
        if not lost:
            break
        part, membership_id = lost, (1, state.generation)
        state = yield part, Published("b", Vote(step, (1.0,), membership_id))
        state = yield part, Tick("b")
        if lost == "rank":
            state = yield part, WorkerLost("b", membership[5], "died", "SIGKILL")
        elif lost == "node":
            state = yield part, NodeLost("b", state.workers[membership[9]].node)
        else:
            state = yield part, MemberFailed("b", membership[3], 1, state.generation, "peer", step)
        for rank, name in enumerate(membership):
            if name in state.workers:
                vote = Vote(step, (1.0,), membership_id)
                shard = rank % cp
                report = ("aborted", step + 1, None, shard, False)
                state = yield part, Report("b", name, 1, state.generation, *report, last_vote=vote)


if __name__ == "__main__":
    sys.exit(main())
