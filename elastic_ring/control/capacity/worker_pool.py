"""The pool of workers and nodes: starts, losses, drains, free slots.

No steps and no votes here; the phases handle what a loss means for the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from elastic_ring.control.messages import (
    KillWorker,
    NodeDraining,
    NodeJoined,
    StartWorker,
    WorkerReady,
    WorkerStarting,
)
from elastic_ring.control.pool import Node, Pool, Worker
from elastic_ring.control.state import LostWorker, Running, State, Transition, membership_of


def node_joined(ctx: Transition, event: NodeJoined) -> None:
    old = ctx.state.nodes.get(event.node, Node(event.node, 0))
    new = replace(
        old, num_slots=event.num_slots, num_gpus=event.num_gpus, domains=event.domains, is_reserved=event.is_reserved
    )
    if old == new and event.node in ctx.state.nodes:
        ctx.explain("room as known")
        return
    ctx.put_node(new)
    ctx.set(pool_changed_at=ctx.now, nodes_changed_at=ctx.now)
    limit = "" if event.num_gpus is None else f" and GPUs for {event.num_gpus} member(s)"
    ctx.explain(f"node {event.node} has room for {event.num_slots}{limit}")


def node_draining(ctx: Transition, event: NodeDraining) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is None or (node.draining and node.leaves_at == event.leaves_at):
        ctx.explain("nothing new about that node")
        return
    ctx.put_node(replace(node, draining=True, leaves_at=event.leaves_at))
    drain(ctx, ctx.state.pool.on.get(event.node, ()))
    ctx.explain(f"node {event.node} will leave" + (f" in {event.leaves_at - ctx.now:.1f} s" if event.leaves_at else ""))


def drain(ctx: Transition, names: Sequence[str]) -> None:
    """Workers of the last membership hand over their state at the next boundary; all others leave now."""
    membership = membership_of(ctx.state)
    needed = membership.part if membership else frozenset()
    leave_now, kill_now = [], []
    for name in names:
        worker = ctx.state.workers.get(name)
        if worker is None or worker.draining or worker.status == "stopping":
            ctx.explain(f"{name} is already leaving")
            continue
        ctx.put(replace(worker, draining=True))
        if worker.status == "starting":
            kill_now.append(name)
        elif name not in needed:
            leave_now.append(name)
        else:
            ctx.explain(f"{name} hands over at the next boundary")
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
    deadline = max(worker.deadline, min(ctx.now + ctx.options.timeouts.start_s, worker.start_deadline))
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
        ctx.put_node(replace(node, start_failures=0, start_errors=0, backoff_until=0.0))
    ctx.put(replace(worker, status="ready"))
    ctx.set(pool_changed_at=ctx.now, warm_up_s=max(0.0, ctx.now - worker.hired_at))
    ctx.explain(f"{worker.worker} is ready on {worker.node}")


def lose(ctx: Transition, *lost_workers: LostWorker) -> tuple[LostWorker, ...]:
    """Remove workers that are gone. Returns those that were ready, or stopping and not written off."""
    losses, failed_starts, left = [], [], []
    for lost in lost_workers:
        name, reason = lost.worker, lost.reason
        worker = ctx.state.workers.get(name)
        if worker is None:
            ctx.explain(f"{name} was already gone")
            continue
        left.append(name)
        if worker.status == "starting":
            failed_starts.append((worker.node, lost.detail if reason == "start-failed" else ""))
            ctx.explain(f"{name} did not start on {worker.node}: {reason}")
        elif not worker.written_off:
            losses.append(replace(lost, node=worker.node, draining=worker.draining))
            ctx.explain(f"{name} lost: {reason}")
        else:
            ctx.explain(f"{name} is gone, as it should be")
    if left:
        ctx.set_pool(ctx.state.pool.having(dict.fromkeys(left)))
        ctx.set(pool_changed_at=ctx.now)
    for node, why in failed_starts:
        _count_failed_start(ctx, node, why)
    return tuple(losses)


def lose_node(ctx: Transition, node: str) -> tuple[LostWorker, ...]:
    if node not in ctx.state.nodes:
        ctx.explain("node was already gone")
        return ()
    ctx.set_pool(ctx.state.pool.without_node(node))
    ctx.set(pool_changed_at=ctx.now)
    names = ctx.state.pool.on.get(node, ())
    ctx.explain(f"node {node} lost with {len(names)} worker(s)")
    return lose(ctx, *(LostWorker(name, node, None, "node lost", f"node {node} is gone") for name in names))


def expire(ctx: Transition) -> tuple[LostWorker, ...]:
    """Kill workers whose start timed out; kill stopping workers again and write them off. Returns new losses."""
    earliest = ctx.state.pool.earliest
    if earliest is None or earliest > ctx.now:
        return ()
    due = [w for w in ctx.state.workers.values() if w.status != "ready" and w.deadline <= ctx.now]
    losses = []
    for worker in due:
        if worker.status == "starting":
            late = f"no progress in starting for {ctx.options.timeouts.start_s} s"
            if worker.deadline >= worker.start_deadline:
                late = f"not warm after {ctx.options.timeouts.start_max_s} s"
            ctx.kill([worker.worker], late, written_off=True)
            ctx.explain(f"{worker.worker}: {late}")
            _count_failed_start(ctx, worker.node, "")
        else:
            ctx.kill([worker.worker], "still there after its order to leave", written_off=True)
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
    ctx.put_node(node)


def refuse_if_nobody_starts(ctx: Transition) -> None:
    """End a run that never formed if every node's workers fail to start with an error of their own.

    Starts that timed out or died do not count: they are tried again after a backoff.
    """
    if ctx.state.pool.total.live:
        return
    limit = ctx.options.start_failure_limit
    nodes = [n for n in ctx.state.nodes.values() if n.num_slots and n.num_gpus != 0 and not n.draining]
    if nodes and all(node.start_errors >= limit for node in nodes):
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
    before = ctx.state.num_started
    _start_members(ctx)
    while ctx.state.pool.free and _Wants(ctx.state).num_missing_on_gpus > 0:
        usable = ctx.state.pool.usable(ctx.state.pool.free, ctx.now)
        if not usable:
            break
        rank = _spread(ctx.state)
        start(ctx, min(usable, key=lambda node: (node.avoided, rank(node))).node)
    may_stand_by = ctx.now >= standbys_from(ctx.state)
    while may_stand_by and ctx.state.pool.shelf and _Wants(ctx.state).num_missing > 0:
        pool = ctx.state.pool
        usable = pool.usable(pool.shelf, ctx.now)
        if not usable:
            break
        start(ctx, min(usable, key=lambda node: (node.avoided, pool.num_beyond(node))).node)
    if ctx.state.num_started > before:
        ctx.explain(f"{ctx.state.num_started - before} worker(s) start")


def _start_members(ctx: Transition) -> None:
    wants = _Wants(ctx.state)
    missing = min(wants.num_missing_on_gpus, wants.num_members - wants.num_able)
    if missing <= 0 or not ctx.state.pool.free:
        return
    usable = ctx.state.pool.usable(ctx.state.pool.free, ctx.now)
    ranked = [(*_start_rank(ctx.state.pool, node, ctx.options.scaling.cp), place) for place, node in enumerate(usable)]
    heapify(ranked)
    while ranked and missing > 0:
        missing -= 1
        place = ranked[0][-1]
        start(ctx, usable[place].node)
        pool = ctx.state.pool
        if pool.gpus_left(usable[place]) > 0:  # only this node's rank is another one now
            heapreplace(ranked, (*_start_rank(pool, usable[place], ctx.options.scaling.cp), place))
        else:
            heappop(ranked)


def start(ctx: Transition, node: str) -> str:
    """Start a worker on the node; its name."""
    state = ctx.state
    name = f"w{state.num_started}.t{state.term}"
    started = Worker(
        name,
        node,
        "starting",
        ctx.now + state.options.timeouts.start_s,
        start_deadline=ctx.now + state.options.timeouts.start_max_s,
        hired_at=ctx.now,
    )
    ctx.send(StartWorker(ctx.cause, name, node, state.term))
    ctx.put(started)
    ctx.set(num_started=state.num_started + 1)
    return name


def standbys_from(state: State) -> float:
    """From when on standbys may be started: news of nodes comes one by one, and the next may have a free GPU, which is
    better."""
    return state.nodes_changed_at + min(STANDBY_AFTER_S, state.options.timeouts.start_s / 20)


class _Wants:
    """How many workers are missing, and on which nodes one more is useful.

    `num_members` are wanted for the mesh, `scaling.spares` beside them. A worker within its node's GPUs is able: it can
    be a member now. One beyond them is a standby, which can replace only members of its own node; standbys make good
    for spares that find no free GPU, up to their share on each node. They never count as members of a mesh that lacks
    GPUs.
    """

    def __init__(self, state: State) -> None:
        pool, self._num_spares = state.pool, state.options.scaling.spares
        beyond = [(pool.num_beyond(node), pool.share(node)) for node in map(state.nodes.__getitem__, pool.crowded)]
        self.num_members = state.options.scaling.most_rings * state.options.scaling.cp
        self.num_able = pool.total.staying - sum(number for number, _ in beyond)
        self.num_standing_by = sum(min(both) for both in beyond)

    @property
    def num_missing_on_gpus(self) -> int:
        return max(0, self.num_members + self._num_spares - self.num_able)

    @property
    def num_missing(self) -> int:
        """How many spares have neither a GPU of their own nor a standby in their stead."""
        num_spares = max(0, self.num_able - self.num_members)
        return max(0, self._num_spares - num_spares - self.num_standing_by)


def _spread(state: State) -> Callable[[Node], tuple[int, ...]]:
    """Sort key of a spare's node: where least stands that would fail with it, by failure domain, the widest first, then
    by node."""
    num_in: Counter[tuple[str, ...]] = Counter()  # counted once for all nodes: there may be thousands
    for node in state.nodes.values():
        for domain in _domains(node):
            num_in[domain] += state.pool.counts_on(node.node).staying
    return lambda node: (*(num_in[domain] for domain in _domains(node)), state.pool.counts_on(node.node).staying)


def _domains(node: Node) -> list[tuple[str, ...]]:
    return [node.domains[: level + 1] for level in range(len(node.domains))]


def _start_rank(pool: Pool, node: Node, cp: int) -> tuple[bool, bool, bool, int]:
    """Sort key: avoided nodes last; nodes that complete an incomplete ring, then nodes with room for a ring, fewest
    workers first."""
    num_there, room = pool.counts_on(node.node).staying, pool.gpus_left(node)
    begun = num_there % cp
    completes = begun > 0 and room >= cp - begun
    return node.avoided, not completes, room < cp, num_there


def start_deadlines(state: State) -> list[float]:
    """When nodes in backoff that are needed may be tried again, and from when on standbys may start."""
    wants, pool = _Wants(state), state.pool
    due = [state.nodes[name].backoff_until for name in (pool.free if wants.num_missing_on_gpus else ())]
    if wants.num_missing:
        earliest = standbys_from(state)
        due += [max(state.nodes[name].backoff_until, earliest) for name in pool.shelf]
    return [at for at in due if at > 0.0]


def num_surplus(state: State) -> int:
    """How many more workers there are than members and spares."""
    wants = _Wants(state)
    return max(0, wants.num_able + wants.num_standing_by - wants.num_members - state.options.scaling.spares)


def vacant_nodes(state: State) -> frozenset[str]:
    """Nodes on which the run has no process and wants none: they may leave. None while it changes its mesh."""
    if not isinstance(state.phase, Running):
        return frozenset()
    wants, pool = _Wants(state), state.pool
    needed = pool.free if wants.num_missing_on_gpus else frozenset()
    needed |= pool.shelf if wants.num_missing else frozenset()
    needed |= {node for node, _ in state.moves.newcomers_on}
    return frozenset(name for name in state.nodes if not pool.counts_on(name).used and name not in needed)
