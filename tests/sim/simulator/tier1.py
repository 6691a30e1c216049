"""Tier 1: goodput under the production control core, on a virtual clock that skips the quiet steps between losses.

The core decides as in a run (who takes whose place, when rings are missing, when they come back); members are stand-ins
that answer after the durations of a `RunShape`. A host is one member where a ring has whole hosts, so a mesh has at
most `MOST_MEMBERS`. Copies in peers are not simulated: a lost shard without a replica goes back to a checkpoint.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_ring.control import coordination
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    CheckpointsKnown,
    Command,
    CoordinatorStarted,
    EndRun,
    Event,
    KillWorker,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Release,
    Report,
    Resumed,
    StartWorker,
    Stop,
    Tick,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.state import Running
from elastic_ring.forecast.goodput import HOUR, Failures, RunShape
from elastic_ring.forecast.renewal import CommonRandomNumbers, rates_of
from tests.sim.simulator.options import simulated

MOST_MEMBERS = 128
STOP_S, WARM_S = 0.1, 60.0
"""Until a member that was stopped reports; until a new process is warm."""


@dataclass(frozen=True)
class Walk:
    """What one simulated run came to. `actions`: how often members were built anew from where."""

    goodput: float
    committed: float
    losses: int
    gpu_years: float
    actions: Counter[str]


def quotient(shape: RunShape) -> RunShape:
    """The same run with hosts for members. Raises ValueError for one that has too many, or rings that share a host."""
    per = shape.gpus_per_host
    if shape.cp % per:
        per = 1
    small = replace(shape, cp=shape.cp // per, spares=shape.spares // per, gpus_per_host=shape.gpus_per_host // per)
    if small.dp * small.cp > MOST_MEMBERS:
        raise ValueError(f"tier 1: {small.dp * small.cp} members are more than {MOST_MEMBERS}")
    return small


class Tier1:
    """One run of `duration_s`, whose losses are those of one draw of `luck`, as tier 2 has them. Which host or worker
    it is follows from the draw's number."""

    def __init__(
        self,
        shape: RunShape,
        failures: Failures,
        gpu_hours: float,
        duration_s: float,
        luck: CommonRandomNumbers,
        draw: int = 0,
    ) -> None:
        self.true, self.shape = shape, quotient(shape)
        self.failures, self.end_s = failures, duration_s
        self.rates = {scope: float(rate) for scope, rate in rates_of(shape, failures, gpu_hours).items()}
        self.luck, self.draw, self.row = luck, draw, 0
        self.random = random.Random(draw)
        small = self.shape
        self.options = simulated(
            "tier1",
            small.dp,
            small.cp,
            10**9,
            spares=small.spares,
            min_dp=1,
            report_s=60.0,
            build_s=1e6,
            start_s=1e6,
            start_max_s=1e6 + 1,
            restore_s=1e6 + 1,
            boundary_s=1e6 + 1,
            grow_delay_s=1.0,
            backoff_s=1.0,
            spare_grace_s=1.0,
            crash_loop_limit=10**9,
            start_failure_limit=10**9,
            build_failure_limit=10**9,
            round_limit=10**9,
            takes_checkpoints=True,
            grow_cost_s=0.0,
            memory_reliefs=(),
        )
        self.state = coordination.initial(self.options)
        self.now, self.order, self.names = 0.0, itertools.count(), itertools.count()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes: dict[str, int] = {}
        self.workers: dict[str, str] = {}
        self.build: Build | None = None
        self.resumed_s: float | None = None
        self.base = 0
        self.saved = (0, 0.0)
        self.ticking: float | None = None
        self.losses = 0
        self.away = 0
        self.detect_s = 0.0
        self.actions: Counter[str] = Counter()

    def run(self) -> Walk:
        self._advance(CoordinatorStarted("c", 1))
        slots = self.shape.gpus_per_host
        for _ in range(-(-self.shape.num_gpus // slots)):
            self._join(slots)
        self._next_loss()
        begun = None
        while self.queue and self.queue[0][0] <= self.end_s:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            if begun is None and self.resumed_s is not None:
                begun = self.now
        self.now = self.end_s
        begun = self.end_s if begun is None else begun
        committed = self._applied() * float(self.shape.step_s)
        goodput = committed / (self.end_s - begun) / (1.0 + float(self.shape.wait_s / self.shape.interval_s))
        years = self.true.num_gpus * self.end_s / (8766 * HOUR)
        return Walk(goodput, committed, self.losses, years, self.actions)

    # ------------------------------------------------------------ clock

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay_s, next(self.order), action))

    def _advance(self, event: Event) -> None:
        decision = coordination.advance(self.state, event, self.now)
        self.state = decision.state
        if not isinstance(self.state.phase, Running) and self.resumed_s is not None:
            self.base, self.resumed_s = self._applied(), None
        for command in decision.commands:
            self._obey(command)
        due = coordination.next_deadline(self.state)
        if due is not None and (self.ticking is None or due < self.ticking):
            self.ticking = due
            self._later(max(0.0, due - self.now) + 1e-6, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self.ticking == due:
            self.ticking = None
            self._advance(Tick("t"))

    # ------------------------------------------------------------ steps

    def _step_s(self) -> float:
        """A step of the present mesh: fewer rings share the same batch."""
        dp = self.build.mesh.dp if self.build is not None else self.shape.dp
        return float(self.shape.step_s) * self.shape.dp / dp

    def _until_step_ends(self) -> float:
        if self.resumed_s is None:
            return STOP_S
        return self._step_s() - (self.now - self.resumed_s) % self._step_s() + 1e-6

    def _applied(self) -> int:
        """Steps that are committed now; those of quiet time are counted, not run."""
        if self.resumed_s is None:
            return self.base
        return self.base + int((self.now - self.resumed_s) / self._step_s())

    def _save(self) -> None:
        """The newest checkpoint as of now, told before a loss: one every interval since training went on."""
        if self.resumed_s is None or self.build is None:
            return
        every = float(self.shape.interval_s)
        first = self.saved[1] + every
        if self.now < first:
            return
        at = first + (self.now - first) // every * every
        step = self.base + int(max(0.0, at - self.resumed_s) / self._step_s())
        self.saved = (step, at)
        known = (Checkpoint(step, f"step-{step}", self.build.mesh),)
        self._advance(CheckpointsKnown("k", known))

    # ------------------------------------------------------------ the fleet

    def _join(self, slots: int) -> None:
        name = f"n{next(self.names)}"
        self.nodes[name] = slots
        self._advance(NodeJoined("n", name, slots))

    def _next_loss(self) -> None:
        gap, *numbers = (float(column[self.draw]) for column in self.luck.row(self.row))
        self.row += 1
        self._later(gap / sum(self.rates.values()), lambda: self._lose(*numbers))

    def _lose(self, pick: float, whom: float, normal: float) -> None:
        """One loss, found after `detect_s`; what it takes is away until it is repaired, all of it at once."""
        self._next_loss()
        scopes = list(self.rates)
        until = list(itertools.accumulate(self.rates[scope] for scope in scopes))
        scope = next((one for one, end in zip(scopes, until, strict=True) if pick <= end / until[-1]), scopes[-1])
        number = self.true.hosts_of(scope)
        hosts = self.true.full_hosts if scope == "reclaim" else self.true.num_hosts
        if not self.nodes or (number and whom * hosts < self.away):
            return
        self.losses += 1
        self.detect_s = float(self.shape.detect_of(scope))
        self._save()
        if scope == "process":
            alive = sorted(self.workers)
            if alive:
                self._die(self.random.choice(alive))
            return
        spot = self.true.spot
        median_s, deviation = self.failures.repair_hours[0] * HOUR, self.failures.repair_hours[1]
        if spot is not None and scope in ("reclaim", "dry"):
            median_s, deviation = float(spot.off_s), spot.off_deviation
        away_s = median_s * math.exp(deviation * normal)
        nodes = self._neighbours(min(len(self.nodes), number))
        self.away += len(nodes)
        if scope == "reclaim" and spot is not None:
            self.detect_s = 0.0
            self._advance(NodeDraining("n", nodes[0], self.now + spot.notice_s))
            self._later(spot.notice_s, lambda: self._take(nodes, away_s - spot.notice_s))
        else:
            self._take(nodes, away_s)

    def _take(self, nodes: list[str], away_s: float) -> None:
        for node in nodes:
            slots = self.nodes.pop(node, None)
            for worker in [worker for worker, place in self.workers.items() if place == node]:
                del self.workers[worker]
            if slots is not None:
                self._advance(NodeLost("n", node))
            self._later(max(away_s, 1.0), lambda slots=slots or self.shape.gpus_per_host: self._return(slots))  # type: ignore[misc]

    def _return(self, slots: int) -> None:
        self.away -= 1
        self._join(slots)

    def _neighbours(self, number: int) -> list[str]:
        """Hosts of one switch: they stand side by side."""
        nodes = list(self.nodes)
        first = self.random.randrange(len(nodes))
        return [nodes[(first + place) % len(nodes)] for place in range(number)]

    def _die(self, worker: str) -> None:
        if self.workers.pop(worker, None) is not None:
            self._advance(WorkerLost("n", worker, "died", "SIGKILL"))

    # ------------------------------------------------------------ commands

    def _obey(self, command: Command) -> None:
        if isinstance(command, StartWorker):
            if command.node in self.nodes:
                self.workers[command.worker] = command.node
                self._later(WARM_S, lambda: self._ready(command))
        elif isinstance(command, KillWorker | Release):
            self._later(STOP_S, lambda: self._gone(command.worker))
        elif isinstance(command, Stop):
            delay_s = STOP_S if command.mode == "abort" else self._until_step_ends()
            if command.mode != "save":
                self._later(delay_s, lambda: self._report(command))
        elif isinstance(command, Build):
            self._build(command)
        elif isinstance(command, EndRun):
            raise RuntimeError(f"tier 1: the run ended: {command.error} {command.message}")

    def _ready(self, command: StartWorker) -> None:
        if command.worker in self.workers:
            self._advance(WorkerReady("w", command.worker, command.node, 1))

    def _gone(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self._advance(WorkerLost("n", worker, "exited"))

    def _report(self, command: Stop) -> None:
        """State of a member that paused: all have the same number of steps, for a loss comes between two votes."""
        build = self.build
        if command.worker not in self.workers or build is None or command.worker not in build.members:
            return
        shard = build.members.index(command.worker) % build.mesh.cp
        kind = "aborted" if command.mode == "abort" else "boundary"
        told = (build.term, build.generation) if kind == "boundary" else (command.term, command.generation)
        valid = self.shard_valid
        self._advance(
            Report(
                "w",
                command.worker,
                *told,
                kind,
                self._applied(),
                None,
                shard if valid else None,
                False,
                state_id=(build.term, build.generation) if valid else (0, 0),
            )
        )

    @property
    def shard_valid(self) -> bool:
        return self.resumed_s is not None or self.base > 0

    def _build(self, order: Build) -> None:
        """All members resume once the slowest part is over; a newer order makes this one void."""
        if self.build is not None and order.generation == self.build.generation:
            self.build = order
            return
        self.build = order
        where = "checkpoint" if order.restore is not None else "replica" if order.heals else "own shards"
        self.actions[where] += 1
        lasts = float(self.shape.rebuild_s) + self.detect_s - STOP_S
        lasts += float(self.shape.heal_s) if order.heals else 0.0
        lasts += float(self.shape.restore_s) if order.restore is not None else 0.0
        self._later(max(lasts, 0.0), lambda: self._resume(order))

    def _resume(self, order: Build) -> None:
        build = self.build
        if (
            build is None
            or build.generation != order.generation
            or any(one not in self.workers for one in build.members)
        ):
            return
        for worker in build.members:
            self._advance(Resumed("w", worker, build.term, build.generation, build.step))
        if isinstance(self.state.phase, Running):
            self.base, self.resumed_s = build.step, self.now + 0.5 * self._step_s()
            if self.saved[1] == 0.0:  # a run begins from something that it can go back to
                self._advance(CheckpointsKnown("k", (Checkpoint(build.step, f"step-{build.step}", build.mesh),)))
            if self.saved[1] == 0.0 or build.restore is not None:
                self.saved = (build.step, self.now)
