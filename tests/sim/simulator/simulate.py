"""A whole run on a virtual clock: the real control core over simulated workers, nodes, network and coordinators.

`simulate(seed)` is a pure function of its seed. It raises `InvariantBroken` the moment a promise of the design
page does not hold, and `NotFinished` if the run does not end although faults have ceased.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic_ring.control import coordination
from elastic_ring.control.decisions.data_order import batch_of, pending_rollback
from elastic_ring.control.messages import (
    Build,
    CheckpointsKnown,
    Command,
    CoordinatorStarted,
    DrainNode,
    DrainRequested,
    EndRun,
    Event,
    KillWorker,
    MemoryTight,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodesListed,
    Published,
    ScaleRequested,
    SnapshotId,
    StartWorker,
    Tick,
    Vote,
    WorkerCommand,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.state import State
from tests.sim import invariants
from tests.sim.invariants import require
from tests.sim.simulator.corpus import SimCorpus
from tests.sim.simulator.faults import Schedule
from tests.sim.simulator.storage import SimStorage
from tests.sim.simulator.worker import Group, SimWorker

AHEAD_S = (0.0, 3540.0, 3598.0, 3600.0, 3602.0, 3660.0, 7200.0)
"""By how much the clocks of coordinators' hosts differ."""


class NotFinished(AssertionError):
    """The run does not end, although faults have stopped and there is capacity."""


@dataclass
class Coordinator:
    """`journal` is what it read and wrote. `newest` is asked before commands leave, as the real one does. `ahead_s`: of
    its host's clock; the next one may run on another host."""

    state: State
    term: int
    journal: list[str] = field(default_factory=list)
    alive: bool = True
    tick_at: float | None = None
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    seed: int
    end: EndRun
    num_events: int
    num_generations: int
    virtual_s: float
    facts: dict[str, int]


Listener = Callable[[float, int, Event, coordination.Decision], None]


class World:
    """The clock, the network, the nodes; everything in it is deterministic given the seed."""

    def __init__(self, seed: int, schedule: Schedule, listen: Listener | None = None) -> None:
        self.seed, self.schedule, self.options = seed, schedule, schedule.options
        self.listen = listen
        self.random, self.clocks = random.Random(seed * 7919 + 1), random.Random(f"hosts' clocks of {seed}")
        self.now, self.num_events = 0.0, 0
        self.end: EndRun | None = None
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.workers: dict[str, SimWorker] = {}
        self.nodes: dict[str, int] = {}
        self.leaving: dict[str, float] = {}  # when nodes with a drain notice go
        self.gpus: dict[str, int] = {}
        self.joined_at = 0.0  # what is told of one node comes in its order: the newest word holds
        self.groups: dict[tuple[int, int], Group] = {}
        self.coordinators: list[Coordinator] = []
        self.unheard: list[Event] = []
        self.published: dict[int, Vote] = {}
        self.armed: list[str] = []
        self.seen: list[Event] = []
        self.facts: dict[str, int] = {}
        self.raised: Counter[int] = Counter()  # by step: how often somebody's user code raised
        self.start_errors: Counter[str] = Counter()  # by node: how often a start failed with an error of its own
        self.deaths: list[tuple[int, str]] = []  # the steps applied and the phase, of each that was killed
        self.healthy_reports: set[str] = set()
        self.most_reliefs_needed = 0
        self.storage = SimStorage(self)
        self.corpus = SimCorpus(self)
        self.first_term = 1  # of this submission
        self.poisoned_batches: set[int] = set()  # of the undisturbed order: their loss is a spike
        self.memory_faults = 0  # how often copies in memory were damaged or lost
        self.given_up = (0, 0)  # (term, generation) of the newest build that went back
        self.undone_on_purpose: list[SnapshotId] = []  # to which step, and by which build

    def begin(self) -> None:
        """The first coordinator, the nodes and the schedule's faults."""
        self._start_coordinator(coordination.initial(self.options), [])
        for index, slots in enumerate(self.schedule.nodes):
            delay_s = self.schedule.joins_s[index] if self.schedule.joins_s else 0.0
            self._join(slots, self.schedule.gpus[index] if self.schedule.gpus else None, delay_s)
        self.advance(self.coordinators[-1], NodesListed("n", tuple(self.nodes)))
        for at, kind in self.schedule.faults:
            self.later(at, lambda kind=kind: self.fault(kind))  # type: ignore[misc]
        self.later(self.schedule.faults_end_s, self.relieve)

    def run_for(self, duration_s: float) -> None:
        """Advance the virtual clock by `duration_s`, or until the run ends."""
        until = self.now + duration_s
        while self.queue and self.end is None and self.queue[0][0] <= until:
            at, _, action = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            action()
        self.now = until if self.end is None else self.now

    def finish(self, limit_s: float) -> Outcome:
        """Run to the end and check it. Raises: NotFinished if it takes longer than `limit_s` more."""
        self.run_for(limit_s)
        state = self.coordinators[-1].state
        if self.end is None:
            story = "\n".join(f"  {name}: {reason}" for name, reason in state.story)
            raise NotFinished(f"seed {self.seed}: still {type(state.phase).__name__} at {self.now:g} s\n{story}")
        self.judge_end(self.end)
        return Outcome(self.seed, self.end, self.num_events, state.generation, self.now, self.facts)

    def judge(self, before: State, after: State, commands: tuple[Command, ...]) -> None:
        """For subclasses that hold each decision against what the workers really have."""

    def judge_end(self, end: EndRun) -> None:
        """Likewise for the end of the run."""

    # ------------------------------------------------------------ clock and network

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay_s, next(self.order), action))

    def _of_this_submission(self, action: Callable[[], object]) -> Callable[[], None]:
        """The action, which does nothing any more once the power has gone."""
        first_term = self.first_term

        def act() -> None:
            if first_term == self.first_term:
                action()

        return act

    def tell(self, event: Event, reliable: bool = False) -> None:
        """To whatever coordinators there are; the agents' own news is repeated until somebody hears it."""
        self._carry(self._of_this_submission(lambda: self._hear(event, reliable)), reliable)

    def _carry(self, action: Callable[[], None], reliable: bool) -> None:
        calm = self.now >= self.schedule.faults_end_s
        if not reliable and not calm and self.random.random() < self.schedule.lost:
            return
        for _ in range(2 if not calm and self.random.random() < self.schedule.doubled else 1):
            slow = not calm and self.random.random() < 0.05
            self.later(self.random.uniform(0.001, 0.7 if slow else 0.02), action)

    def _hear(self, event: Event, reliable: bool) -> None:
        alive = [coordinator for coordinator in self.coordinators if coordinator.alive]
        if len(self.seen) < 2000:
            self.seen.append(event)
        if reliable and (not alive or alive[-1] is not self.coordinators[-1]):
            self.unheard.append(event)
        for coordinator in alive:
            self.advance(coordinator, self._by_its_clock(coordinator, event))

    def _by_its_clock(self, coordinator: Coordinator, event: Event) -> Event:
        """An agent says in how many seconds its node goes, and the node monitor counts from now on."""
        if isinstance(event, NodeDraining):
            return replace(event, leaves_at=event.leaves_at + coordinator.ahead_s)
        return event

    @property
    def clock(self) -> float:
        """The deciding coordinator's."""
        return self.now + self.coordinators[-1].ahead_s

    # ------------------------------------------------------------ coordinators

    def _start_coordinator(self, state: State, journal: list[str], term: int = 0) -> Coordinator:
        ahead_s = self.clocks.choice(AHEAD_S) if self.schedule.clocks_differ else 0.0
        coordinator = Coordinator(state, max(term, state.term + 1), list(journal), ahead_s=ahead_s)
        self.coordinators.append(coordinator)
        self.advance(coordinator, CoordinatorStarted("c", coordinator.term))
        for node, leaves_at in self.leaving.items() if ahead_s else ():
            self.tell(NodeDraining("n", node, leaves_at), reliable=True)
        if self.storage.stored:
            self.storage.tell()
        self.corpus.watched_by(coordinator)
        unheard, self.unheard = self.unheard, []
        for event in unheard:
            self.advance(coordinator, self._by_its_clock(coordinator, event))
        return coordinator

    def advance(self, coordinator: Coordinator, event: Event) -> None:
        if self.end is not None:
            return
        self.num_events += 1
        before, now = coordinator.state, self.now + coordinator.ahead_s
        decision = coordination.advance(before, event, now)
        if self.listen is not None:
            self.listen(now, coordinator.term, event, decision)
        invariants.check(before, event, decision)
        newest = coordinator is self.coordinators[-1]
        if newest:
            self.judge(before, decision.state, decision.commands)
        coordinator.state = decision.state
        if decision.state is not before or decision.commands:
            coordinator.journal.append(json.dumps(coordination.journal_line(event, decision, now)))
        if newest:
            self._gone_back(before, decision.commands)
            for command in decision.commands:
                self._send(command)
        due = coordination.next_deadline(decision.state)
        if isinstance(event, Tick) and due is not None and due <= now:
            late = f"the deadline of {due:g} s is still there after a tick at {now:g} s: it would tick without end"
            raise NotFinished(f"seed {self.seed}: {late}\n{decision.reason}")
        if due is not None and (coordinator.tick_at is None or due < coordinator.tick_at):
            coordinator.tick_at = due
            self.later(max(0.0, due - now) + 1e-6, lambda: self._tick(coordinator, due))

    def _gone_back(self, before: State, commands: tuple[Command, ...]) -> None:
        order = next((command for command in commands if isinstance(command, Build)), None)
        if order is not None and order.goes_back and (order.term, order.generation) not in self.groups:
            self.given_up = max(self.given_up, (order.term, order.generation))
            if pending_rollback(before) is not None:
                self.undone_on_purpose.append(SnapshotId(order.step, (order.term, order.generation)))
            self.storage.gone_back(order)

    def _tick(self, coordinator: Coordinator, due: float) -> None:
        if coordinator.tick_at == due:
            coordinator.tick_at = None
            if coordinator.alive:
                self.advance(coordinator, Tick("t"))

    def _restart(self, old_lives_on: bool) -> None:
        """The next coordinator takes the term first and reads the journal then, so nothing is missing in it."""
        old = self.coordinators[-1]
        old.alive = False
        state = coordination.replay(self.options, old.journal)
        require(state == old.state, 1, "the replayed journal gives another state")
        start = self._of_this_submission(lambda: self._start_coordinator(state, old.journal))
        self.later(self.random.uniform(0.0, 1.0), start)
        if old_lives_on:
            self.later(1.1, self._of_this_submission(lambda: setattr(old, "alive", True)))
            self.later(6.0, lambda: setattr(old, "alive", False))

    def _cut(self) -> None:
        """The power goes: every process ends at once, and nothing that is on its way arrives. Then the run is submitted
        again, on new nodes."""
        last = self.coordinators[-1]
        for coordinator in self.coordinators:
            coordinator.alive = False
        for worker in [worker for worker in self.workers.values() if worker.alive]:
            worker.alive = False
            worker._abort("gone")
        self.nodes.clear()
        self.leaving.clear()
        self.gpus.clear()
        self.unheard.clear()
        self.healthy_reports = set()
        self.first_term = max(self.first_term, last.term) + 1
        submit = self._of_this_submission(lambda: self._submit_again(last))
        self.later(self.random.uniform(0.5, 2.0), submit)

    def _submit_again(self, last: Coordinator) -> None:
        """From the newest checkpoint, or from step 0, with what `last` wrote down of the corpus."""
        stored = tuple(stored.checkpoint for stored in self.storage.stored)
        self.published = {k: vote for k, vote in self.published.items() if stored and k < stored[-1].step}
        coordinator = self._start_coordinator(coordination.initial(self.options), [], self.first_term)
        self.advance(coordinator, CheckpointsKnown("k", stored))
        self.advance(coordinator, self.corpus.recalled(last))
        for index, slots in enumerate(self.schedule.nodes):
            self._join(slots, self.schedule.gpus[index] if self.schedule.gpus else None)

    # ------------------------------------------------------------ commands

    def _send(self, command: Command) -> None:
        if isinstance(command, EndRun):
            self.end = command
        elif isinstance(command, DrainNode):
            self.later(self.random.uniform(0.5, 3.0), lambda: self._remove_left(command.node))
        elif isinstance(command, StartWorker):
            self._carry(lambda: self._start(command), reliable=False)
        elif isinstance(command, KillWorker):
            self._carry(lambda: self._kill(command.worker), reliable=False)
        elif isinstance(command, WorkerCommand) and command.worker in self.workers:
            self._carry(lambda: self.workers[command.worker].obey(command), reliable=False)

    def _start(self, command: StartWorker) -> None:
        if command.worker in self.workers or command.node not in self.nodes:
            return
        worker = SimWorker(self, command.worker, command.node)
        self.workers[command.worker] = worker
        present = sum(w.alive and w.node == command.node for w in self.workers.values())
        if self.take_fault("bad-start") or present > self.nodes[command.node] + 1:
            self.start_errors[command.node] += 1
            self.later(0.1, lambda: self.die(worker, "start-failed"))
        else:
            self.later(self.random.uniform(0.2, 1.5), worker.ready)

    def _kill(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            self.tell(WorkerLost("n", name, "died", "was gone"), reliable=True)
        else:
            self.die(worker, "died")

    def die(self, worker: SimWorker, reason: str) -> None:
        if worker.alive:
            worker.alive, doing = False, worker.doing
            worker._abort("gone")
            phase = {"compute": "forward", "resuming": "rebuild"}.get(doing, doing)
            self.deaths.append((worker.applied, phase))
            self.tell(WorkerLost("n", worker.name, reason, "SIGKILL", worker.applied, phase, "SIGKILL"), reliable=True)

    def has_free_gpu(self, node: str) -> bool:
        """Whether some GPU of the node is held by no living process."""
        limit = self.gpus.get(node)
        return limit is None or sum(w.alive and w.holds_gpu for w in self.workers.values() if w.node == node) < limit

    def group(self, order: Build) -> Group:
        return self.groups.setdefault((order.term, order.generation), Group(order, self.memory_faults))

    # ------------------------------------------------------------ faults

    def _join(self, slots: int, gpus: int | None = None, delay_s: float = 0.0) -> None:
        """`delay_s`: until its agent has connected; Ray lists it before."""
        name = f"n{len(self.nodes)}.{next(self.order)}"
        self.nodes[name] = slots
        self.joined_at = self.now
        if gpus is not None:
            self.gpus[name] = gpus
        if delay_s:
            self.later(delay_s, self._of_this_submission(lambda: self._connect(name)))
        else:
            self._connect(name)

    def _connect(self, node: str) -> None:
        """Its agent does, which says what the node has by now."""
        if node in self.nodes:
            self.joined_at = self.now
            known = self.nodes[node], self.gpus.get(node), *self._place_of(node)
            self.tell(NodeJoined("n", node, *known), reliable=True)

    def _place_of(self, node: str) -> tuple[tuple[str, ...], bool]:
        """The failure domains of a node, and whether it is reserved."""
        of_node = random.Random(f"{self.seed} {node}")
        zones = self.schedule.num_zones
        domains = (f"zone-{of_node.randrange(zones)}", f"rack-{of_node.randrange(4)}") if zones else ()
        return domains, zones > 0 and of_node.random() >= self.schedule.spot

    def _join_with_gpus(self) -> None:
        """A node of this schedule's kind comes, or one that is there has more GPUs than before, or fewer."""
        if self.nodes and self.random.random() < 0.3 and self.now > self.joined_at + 1.0:
            known = self.random.choice(list(self.nodes))
            self.joined_at = self.now
            self.gpus[known] = max(0, self.gpus[known] + self.random.choice([-1, 1]))
            told = NodeJoined("n", known, self.nodes[known], self.gpus[known], *self._place_of(known))
            self.tell(told, reliable=True)
        else:
            gpus = self.random.randint(0, 4)
            self._join(gpus + self.random.randint(0, 2), gpus)

    def take_fault(self, kind: str) -> bool:
        if kind in self.armed:
            self.armed.remove(kind)
            return True
        return False

    def inject(self, kind: str, group: Group, spared: str) -> None:
        """If a fault of this kind is armed, kill another member of the group now."""
        others = [name for name in group.order.members if name != spared and self.workers[name].alive]
        if others and self.take_fault(kind):
            self.die(self.workers[self.random.choice(others)], "died")

    def fault(self, kind: str) -> None:
        self.count(kind)
        alive = [worker for worker in self.workers.values() if worker.alive]
        victim = self.random.choice(alive) if alive else None
        if kind in ("corrupt", "bad-start", "flip-in-transfer") or kind.startswith("kill-in"):
            self.armed.append(kind)
        elif kind == "join" and self.schedule.gpus:
            self._join_with_gpus()
        elif kind == "join":
            self._join(self.random.randint(1, 4))
        elif kind in ("restart", "split") and self.coordinators[-1].alive:
            self._restart(old_lives_on=kind == "split")
        elif kind == "damage":
            self.storage.damage()
        elif kind == "grow":
            self.corpus.write()
        elif kind == "cut":
            self._cut()
        elif kind == "spike":
            state = self.coordinators[-1].state
            first = batch_of(state.committed, state.skips) + self.random.randint(1, 8)
            self.poisoned_batches.update(range(first, first + self.random.randint(1, 3)))
        elif kind == "scale":
            limit = self.random.randint(self.options.scaling.min_dp, self.options.scaling.most_rings)
            self.tell(ScaleRequested("u", limit, self.random.choice([None, 0, 1, 2])), reliable=True)
        elif kind in ("flip", "lose-copies"):
            self._memory_fault(kind, alive)
        elif kind == "echo":
            for event in self.random.choices(self.seen, k=20) if self.seen else ():
                self.later(self.random.uniform(0, 1), lambda event=event: self._echo(event))  # type: ignore[misc]
        elif kind in ("kill-node", "drain-node") and len(self.nodes) > 1:
            self._node_fault(kind, self.random.choice(list(self.nodes)))
        elif victim is not None:
            self._worker_fault(kind, victim)

    def _memory_fault(self, kind: str, alive: list[SimWorker]) -> None:
        for worker in self.random.sample(alive, len(alive)):
            if worker.copies.flip() if kind == "flip" else worker.copies.lose():
                self.memory_faults += 1
                return

    def count(self, what: str) -> None:
        self.facts[what] = self.facts.get(what, 0) + 1

    def _echo(self, event: Event) -> None:
        """Deliver a member's message again, late. Messages of agents and users are not repeated."""
        if hasattr(event, "generation") or isinstance(event, Published | WorkerReady):
            self._hear(event, False)

    def _node_fault(self, kind: str, node: str) -> None:
        if kind == "drain-node":
            leaves_s = self.random.uniform(2, 10)
            self.leaving[node] = self.now + leaves_s
            self.tell(NodeDraining("n", node, self.now + leaves_s), reliable=True)
            self.later(leaves_s, lambda: self._node_fault("kill-node", node))
        elif node in self.nodes:
            del self.nodes[node]
            self.leaving.pop(node, None)
            for worker in [w for w in self.workers.values() if w.node == node and w.alive]:
                worker.alive = False
                worker._abort("gone")
            self.later(0.5, lambda: self.tell(NodeLost("n", node), reliable=True))

    def _remove_left(self, node: str) -> None:
        """The cluster removes a node that the run has left, once nobody is there any more."""
        if any(worker.alive and worker.node == node for worker in self.workers.values()):
            self.later(0.5, lambda: self._remove_left(node))
        elif len(self.nodes) > 1:
            self._node_fault("kill-node", node)

    def _worker_fault(self, kind: str, victim: SimWorker) -> None:
        if kind == "kill":
            self.die(victim, "died")
        elif kind == "freeze":
            victim.frozen = True
            thaws = self.random.random() < 0.3
            self.later(1.5, victim.thaw if thaws else lambda: self.die(victim, "hung"))
        elif kind == "glitch" and victim.group is not None and victim.name in victim.group.order.members:
            victim.report_error()
        elif kind == "raise":
            victim.raises = True
        elif kind == "device":
            victim.errs = True
        elif kind == "tight":
            what = self.random.choice(["device", "host"])
            step = self.random.randint(0, self.options.total_steps)
            self.tell(MemoryTight("u", what, step, f"{victim.name} is full"))
        elif kind == "memory-kill":
            self.die(victim, "out of memory")
        elif kind == "memory":
            victim.needs_reliefs = self.random.choice([1, 1, 1, 2, 2, 3])
            self.most_reliefs_needed = max(self.most_reliefs_needed, victim.needs_reliefs)
        elif kind == "apply":
            victim.breaks_apply = True
        elif kind == "poison":
            victim.poisoned = True
        elif kind == "drain":
            self.tell(DrainRequested("u", victim.name), reliable=True)

    def cease(self) -> None:
        """No fault from now on, whatever the schedule says."""
        if self.now < self.schedule.faults_end_s:
            self.schedule = replace(self.schedule, faults_end_s=self.now)
            self.relieve()

    def relieve(self) -> None:
        """Faults cease; a node comes with room for everything that is wanted."""
        for worker in self.workers.values():
            worker.poisoned = worker.raises = worker.breaks_apply = worker.errs = False
            worker.needs_reliefs = 0
        self.armed.clear()
        largest = self.options.scaling.most_rings * self.options.scaling.cp
        self._join(largest + self.options.scaling.spares, largest if self.schedule.gpus else None)
