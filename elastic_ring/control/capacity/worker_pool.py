"""The pool of workers and nodes: starts, losses, drains, free slots.

No steps and no votes here; the phases handle what a loss means for the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from elastic_ring.control.messages import (
    KillWorker,
    NodeDraining,
    NodeJoined,
    StartWorker,
    WorkerLost,
    WorkerReady,
    WorkerStarting,
)
from elastic_ring.control.state import LostWorker, Node, Running, State, Worker, membership_of
from elastic_ring.control.transition import Transition


def node_joined(ctx: Transition, event: NodeJoined) -> None:
    known = ctx.state.nodes.get(event.node, Node(event.node, 0))
    new = replace(
        known, num_slots=event.num_slots, num_gpus=event.num_gpus, domains=event.domains, is_reserved=event.is_reserved
    )
    if known == new and event.node in ctx.state.nodes:
        ctx.explain("room as known")
        return
    ctx.set(nodes={**ctx.state.nodes, event.node: new}, pool_changed_at=ctx.now, nodes_changed_at=ctx.now)
    limit = "" if event.num_gpus is None else f" and GPUs for {event.num_gpus} member(s)"
    ctx.explain(f"node {event.node} has room for {event.num_slots}{limit}")


def node_draining(ctx: Transition, event: NodeDraining) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is None or (node.draining and node.leaves_at == event.leaves_at):
        ctx.explain("nothing new about that node")
        return
    ctx.set(nodes={**ctx.state.nodes, event.node: replace(node, draining=True, leaves_at=event.leaves_at)})
    drain(ctx, [w.worker for w in ctx.state.workers.values() if w.node == event.node])
    ctx.explain(f"node {event.node} will leave" + (f" in {event.leaves_at - ctx.now:.1f} s" if event.leaves_at else ""))


def drain(ctx: Transition, names: Sequence[str]) -> None:
    """Workers of the last membership hand over their state at the next boundary; all others leave now."""
    membership = membership_of(ctx.state)
    needed = set(membership.everyone) if membership else set()
    workers = dict(ctx.state.workers)
    leave_now, kill_now = [], []
    for name in names:
        worker = workers.get(name)
        if worker is None or worker.draining or worker.status == "stopping":
            ctx.explain(f"{name} is already leaving")
            continue
        workers[name] = replace(worker, draining=True)
        if worker.status == "starting":
            kill_now.append(name)
        elif name not in needed:
            leave_now.append(name)
        else:
            ctx.explain(f"{name} hands over at the next boundary")
    ctx.set(workers=workers)
    ctx.kill(kill_now, "drained before it was warm", written_off=True)
    if leave_now:
        ctx.release(leave_now)
        ctx.explain(f"{', '.join(leave_now)} had no place and leave now")


MIN_PROGRESS_CPU_S = 0.1
STANDBY_AFTER_S = 5.0


def worker_starting(ctx: Transition, event: WorkerStarting) -> None:
    """Extend the start deadline if CPU time shows progress, or a compiler runs, up to `start_max_s`: a loaded machine
    starts slowly, and one worker may wait for what another one compiles."""
    worker = ctx.state.workers.get(event.worker)
    if worker is None or worker.status != "starting":
        ctx.explain(f"{event.worker} does not count as starting")
        return
    if event.cpu_s < (worker.start_cpu_s or 0.0) + MIN_PROGRESS_CPU_S and not event.compiles:
        if worker.doing != event.doing:
            ctx.put(replace(worker, doing=event.doing))
        ctx.explain(f"{event.worker} shows no progress in starting")
        return
    deadline = max(worker.deadline, min(ctx.now + ctx.options.start_s, worker.start_deadline))
    ctx.put(replace(worker, deadline=deadline, start_cpu_s=event.cpu_s, doing=event.doing))
    ctx.explain(f"{event.worker} is starting, {event.cpu_s:.1f} s of CPU used")


def worker_ready(ctx: Transition, event: WorkerReady) -> bool:
    """Mark a starting worker as ready; True if it was starting. Kill a worker that this coordinator does not know."""
    worker = ctx.state.workers.get(event.worker)
    if worker is None:
        ctx.send(KillWorker(ctx.cause, event.worker, "unknown to this coordinator", ctx.state.term))
        ctx.explain(f"{event.worker} is unknown here or counts as lost: fenced")
        return False
    if worker.status != "starting":
        ctx.explain(f"{event.worker} is known to be {worker.status}")
        return False
    mark_ready(ctx, worker)
    return True


def mark_ready(ctx: Transition, worker: Worker) -> None:
    """A start succeeded: forget the failed ones before it on this node."""
    node = ctx.state.nodes.get(worker.node)
    if node is not None and node.start_failures:
        ctx.set(
            nodes={**ctx.state.nodes, node.node: replace(node, start_failures=0, start_errors=0, backoff_until=0.0)}
        )
    ctx.put(replace(worker, status="ready"))
    ctx.set(pool_changed_at=ctx.now, warm_up_s=max(0.0, ctx.now - worker.hired_at))
    ctx.explain(f"{worker.worker} is ready on {worker.node}")


def worker_lost(ctx: Transition, event: WorkerLost) -> tuple[LostWorker, ...]:
    known = {name: value for name, value in vars(event).items() if name != "cause"}
    return _lose(ctx, LostWorker(node="", global_rank=None, **known))


def _lose(ctx: Transition, *gone: LostWorker) -> tuple[LostWorker, ...]:
    """Remove workers that are gone. Returns those that were ready, or stopping and not written off."""
    workers = dict(ctx.state.workers)
    losses, failed_starts = [], []
    for lost in gone:
        name, reason = lost.worker, lost.reason
        worker = workers.pop(name, None)
        if worker is None:
            ctx.explain(f"{name} was already gone")
        elif worker.status == "starting":
            failed_starts.append((worker.node, lost.detail if reason == "start-failed" else ""))
            ctx.explain(f"{name} did not start on {worker.node}: {reason}")
        elif not worker.written_off:
            losses.append(replace(lost, node=worker.node, draining=worker.draining))
            ctx.explain(f"{name} lost: {reason}")
        else:
            ctx.explain(f"{name} is gone, as it should be")
    if len(workers) != len(ctx.state.workers):
        ctx.set(workers=workers, pool_changed_at=ctx.now)
    for node, why in failed_starts:
        _count_failed_start(ctx, node, why)
    return tuple(losses)


def lose_node(ctx: Transition, node: str) -> tuple[LostWorker, ...]:
    if node not in ctx.state.nodes:
        ctx.explain("node was already gone")
        return ()
    ctx.set(nodes={name: value for name, value in ctx.state.nodes.items() if name != node}, pool_changed_at=ctx.now)
    names = [worker.worker for worker in ctx.state.workers.values() if worker.node == node]
    ctx.explain(f"node {node} lost with {len(names)} worker(s)")
    return _lose(ctx, *(LostWorker(name, node, None, "node lost", f"node {node} is gone") for name in names))


def expire(ctx: Transition) -> tuple[LostWorker, ...]:
    """Kill workers whose start timed out; kill stopping workers again and write them off. Returns new losses."""
    due = [w for w in ctx.state.workers.values() if w.status != "ready" and w.deadline <= ctx.now]
    losses = []
    for worker in due:
        if worker.status == "starting":
            late = f"no progress in starting for {ctx.options.start_s} s"
            if worker.deadline >= worker.start_deadline:
                late = f"not warm after {ctx.options.start_max_s} s"
            ctx.kill([worker.worker], late, written_off=True)
            ctx.explain(f"{worker.worker}: {late}")
            _count_failed_start(ctx, worker.node, "")
        else:
            ctx.kill([worker.worker], "still there after it was told to go", written_off=True)
            if not worker.written_off:
                ctx.explain(f"no news of the death of {worker.worker}: it counts as lost")
                losses.append(
                    LostWorker(worker.worker, worker.node, None, "unreachable", "killed, death not confirmed")
                )
    return tuple(losses)


def _count_failed_start(ctx: Transition, name: str, why: str) -> None:
    """`why`: the worker's own error; empty if it gave none."""
    node = ctx.state.nodes.get(name)
    if node is None:
        return
    failures = node.start_failures + 1
    over = failures - ctx.options.start_failure_limit
    until = node.backoff_until
    if over >= 0:
        wait_s = ctx.options.backoff_s * 2 ** min(over, 4)
        until = ctx.now + wait_s
        ctx.explain(f"{failures} starts in a row failed on {name}: no start there for {wait_s:g} s")
    node = replace(node, start_failures=failures, backoff_until=until)
    if why:
        node = replace(node, start_errors=node.start_errors + 1, last_failure=why)
    ctx.set(nodes={**ctx.state.nodes, name: node})


def refuse_if_nobody_starts(ctx: Transition) -> None:
    """End a run that never formed if every node's workers fail to start with an error of their own.

    Starts that timed out or died do not count: they are tried again after a backoff.
    """
    limit = ctx.options.start_failure_limit
    nodes = [n for n in ctx.state.nodes.values() if n.num_slots and n.num_gpus != 0 and not n.draining]
    if not nodes or any(worker.status != "stopping" for worker in ctx.state.workers.values()):
        return
    if all(node.start_errors >= limit for node in nodes):
        worst = nodes[-1]
        ctx.end(
            "RunFailed",
            f"no worker starts: {limit} or more failed in a row on each of {len(nodes)} node(s). The last, on "
            f"{worst.node}: {worst.last_failure}",
        )


def fill_slots(ctx: Transition) -> None:
    """Start the missing workers as far as nodes have room: rings packed, replicas spread, avoided nodes last.

    First on free GPUs, members and spares alike: a spare with a GPU of its own can replace a member of any node. Only
    for spares that no GPU is left for, standbys are started beside members, on the node that has fewest.
    """
    wants = _Wants(ctx.state)
    names = [*_start_on_gpus(ctx, wants), *_start_standbys(ctx, wants)]
    if names:
        ctx.explain(f"{len(names)} worker(s) start")


def _start_on_gpus(ctx: Transition, wants: _Wants) -> list[str]:
    nodes, cp = ctx.state.nodes, ctx.options.cp
    gpus = {node.node: left for node in wants.usable(ctx.now) if (left := wants.gpus_left(node)) > 0}
    names = []
    while gpus and wants.num_missing_on_gpus > 0:
        rank = wants.spread() if wants.num_able >= wants.num_members else partial(_start_rank, wants.staying, gpus, cp)
        node = min(gpus, key=lambda name: (nodes[name].avoided, rank(name)))
        gpus[node] -= 1
        if gpus[node] == 0:
            del gpus[node]
        wants.num_able += 1
        names.append(_start(ctx, wants, node))
    return names


def _start_standbys(ctx: Transition, wants: _Wants) -> list[str]:
    if ctx.now < standbys_from(ctx.state):
        return []
    names = []
    while wants.num_missing > 0:
        shelf = [node for node in wants.usable(ctx.now) if wants.has_room_for_standby(node)]
        if not shelf:
            break
        node = min(shelf, key=lambda each: (each.avoided, wants.num_beyond(each)))
        wants.num_standing_by += 1
        names.append(_start(ctx, wants, node.node))
    return names


def _start(ctx: Transition, wants: _Wants, node: str) -> str:
    state = ctx.state
    name = f"w{state.num_started}.t{state.term}"
    wants.staying[node] += 1
    wants.used[node] += 1
    started = Worker(
        name, node, "starting", ctx.now + state.options.start_s,
        start_deadline=ctx.now + state.options.start_max_s, hired_at=ctx.now,
    )  # fmt: skip
    ctx.send(StartWorker(ctx.cause, name, node, state.term))
    ctx.set(workers={**state.workers, name: started}, num_started=state.num_started + 1)
    return name


def standbys_from(state: State) -> float:
    """From when on standbys may be started: news of nodes comes one by one, and the next may have a free GPU, which is
    better."""
    return state.nodes_changed_at + min(STANDBY_AFTER_S, state.options.start_s / 20)


class _Wants:
    """How many workers are missing, and on which nodes one more is useful.

    `num_members` are wanted for the mesh, `options.spares` beside them. A worker within its node's GPUs is able: it can
    be a member now. One beyond them is a standby, which can replace only members of its own node; standbys make good
    for spares that find no free GPU, up to their share on each node. They never count as members of a mesh that lacks
    GPUs.
    """

    def __init__(self, state: State) -> None:
        self._options, self._nodes = state.options, state.nodes
        self.present = [w for w in state.workers.values() if w.status != "stopping" and not w.draining]
        self.used = Counter(worker.node for worker in state.workers.values())
        self.staying = Counter(worker.node for worker in self.present)
        # A draining member uses its GPU until it hands over, and it hands over only to a ready replacement.
        self.leaving = Counter(w.node for w in state.workers.values() if w.draining and w.status == "ready")
        limited = [node for node in state.nodes.values() if node.num_gpus is not None]
        self.num_members = state.options.dp_limit * state.options.cp
        self.num_able = len(self.present) - sum(self.num_beyond(node) for node in limited)
        self.num_standing_by = sum(min(self.num_beyond(node), self._share(node)) for node in limited)

    @property
    def num_missing_on_gpus(self) -> int:
        """How many more workers would use a free GPU."""
        return max(0, self.num_members + self._options.spares - self.num_able)

    @property
    def num_missing(self) -> int:
        """How many spares have neither a GPU of their own nor a standby in their stead."""
        num_spares = max(0, self.num_able - self.num_members)
        return max(0, self._options.spares - num_spares - self.num_standing_by)

    @property
    def num_surplus(self) -> int:
        """How many more workers there are than members and spares."""
        return max(0, self.num_able + self.num_standing_by - self.num_members - self._options.spares)

    def usable(self, now: float) -> list[Node]:
        """Nodes that stay, have a free slot and are not in backoff."""
        return [node for node in self._nodes.values() if node.backoff_until <= now and self._has_slot(node)]

    def is_wanted(self, node: Node) -> bool:
        """Whether one more worker on this node would use a free GPU."""
        return self.num_missing_on_gpus > 0 and self._has_slot(node) and self.gpus_left(node) > 0

    def is_wanted_for_standby(self, node: Node) -> bool:
        return self.num_missing > 0 and self.has_room_for_standby(node)

    def num_beyond(self, node: Node) -> int:
        """Standbys of this node: staying workers beyond its free GPUs."""
        return (
            0
            if node.num_gpus is None
            else max(0, self.staying[node.node] - self._num_free_gpus(node.node, node.num_gpus))
        )

    def gpus_left(self, node: Node) -> int:
        """How many more workers fit on the node and could be members."""
        room = node.num_slots - self.used[node.node]
        if node.num_gpus is None:
            return room
        return min(room, self._num_free_gpus(node.node, node.num_gpus) - self.staying[node.node])

    def has_room_for_standby(self, node: Node) -> bool:
        """Whether the node has less than its share of standbys, and no free GPU, for which its own would be enough."""
        return self.gpus_left(node) <= 0 and self.num_beyond(node) < self._share(node) and self._has_slot(node)

    def spread(self) -> Callable[[str], tuple[int, ...]]:
        """Sort key of a spare's node: where least stands that would fail with it, by failure domain, the widest first,
        then by node."""
        num_in: Counter[tuple[str, ...]] = Counter()  # counted once for all nodes: there may be thousands
        for node in self._nodes.values():
            for domain in _domains(node):
                num_in[domain] += self.staying[node.node]
        return lambda name: (*(num_in[domain] for domain in _domains(self._nodes[name])), self.staying[name])

    def _num_free_gpus(self, node: str, num_gpus: int) -> int:
        return max(0, num_gpus - self.leaving[node])

    def _has_slot(self, node: Node) -> bool:
        return not node.draining and node.num_slots > self.used[node.node]

    def _share(self, node: Node) -> int:
        """The node's maximum number of standbys, by its share of the mesh's GPUs; all if it can hold the mesh alone."""
        return -(-self._options.spares * (node.num_gpus or 0) // (self._options.dp * self._options.cp))


def _domains(node: Node) -> list[tuple[str, ...]]:
    """The failure domains of a node, the widest first."""
    return [node.domains[: level + 1] for level in range(len(node.domains))]


def _start_rank(staying: Counter[str], gpus: dict[str, int], cp: int, node: str) -> tuple[bool, bool, int]:
    """Sort key: nodes that complete an incomplete ring, then nodes with room for a ring, fewest workers first."""
    num_there, room = staying[node], gpus[node]
    begun = num_there % cp
    completes = begun > 0 and room >= cp - begun
    return not completes, room < cp, num_there


def start_deadlines(state: State) -> list[float]:
    """When nodes in backoff that are needed may be tried again, and from when on standbys may start."""
    wants = _Wants(state)
    due = []
    for node in state.nodes.values():
        if wants.is_wanted(node):
            due.append(node.backoff_until)
        elif wants.is_wanted_for_standby(node):
            due.append(max(node.backoff_until, standbys_from(state)))
    return [at for at in due if at > 0.0]


def num_surplus(state: State) -> int:
    """How many more workers there are than wanted."""
    return _Wants(state).num_surplus


def crowded_nodes(state: State) -> frozenset[str]:
    """The nodes that have more workers than GPUs."""
    wants = _Wants(state)
    return frozenset(node.node for node in state.nodes.values() if wants.num_beyond(node) > 0)


def vacant_nodes(state: State) -> frozenset[str]:
    """Nodes on which the run has no process and wants none: they may go. None while it changes its mesh."""
    if not isinstance(state.phase, Running):
        return frozenset()
    wants = _Wants(state)
    return frozenset(
        node.node
        for node in state.nodes.values()
        if not wants.used[node.node] and not wants.is_wanted(node) and not wants.is_wanted_for_standby(node)
    )
