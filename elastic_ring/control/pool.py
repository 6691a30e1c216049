"""The workers that exist, whatever they do: starting them, losing them, nodes coming and going.

Knows nothing of steps and votes. What a loss means for the mesh is the phases' business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from elastic_ring.control.messages import KillWorker, NodeDraining, NodeJoined, StartWorker, WorkerReady
from elastic_ring.control.state import Loss, Node, State, Worker, crew_of
from elastic_ring.control.turn import Turn


def node_joined(turn: Turn, event: NodeJoined) -> None:
    known = turn.state.nodes.get(event.node, Node(event.node, 0))
    room = (event.num_slots, event.num_seats)
    if (known.num_slots, known.num_seats) == room and event.node in turn.state.nodes:
        turn.say("room as known")
        return
    known = replace(known, num_slots=event.num_slots, num_seats=event.num_seats)
    turn.set(nodes={**turn.state.nodes, event.node: known}, pool_changed_at=turn.now)
    limit = "" if event.num_seats is None else f" and GPUs for {event.num_seats} member(s)"
    turn.say(f"node {event.node} has room for {event.num_slots}{limit}")


def node_draining(turn: Turn, event: NodeDraining) -> None:
    node = turn.state.nodes.get(event.node)
    if node is None or node.draining:
        turn.say("nothing new about that node")
        return
    turn.set(nodes={**turn.state.nodes, event.node: replace(node, draining=True)})
    drain(turn, [w.worker for w in turn.state.workers.values() if w.node == event.node])
    turn.say(f"node {event.node} will leave")


def drain(turn: Turn, names: Sequence[str]) -> None:
    """Workers with a part in the mesh hand over at the next boundary; all others leave now."""
    crew = crew_of(turn.state)
    needed = set(crew.everyone) if crew else set()
    workers = dict(turn.state.workers)
    leave_now, kill_now = [], []
    for name in names:
        worker = workers.get(name)
        if worker is None or worker.draining or worker.life == "dying":
            turn.say(f"{name} is already leaving")
            continue
        workers[name] = replace(worker, draining=True)
        if worker.life == "starting":
            kill_now.append(name)
        elif name not in needed:
            leave_now.append(name)
        else:
            turn.say(f"{name} hands over at the next boundary")
    turn.set(workers=workers)
    turn.fence(kill_now, "drained before it was warm", written_off=True)
    if leave_now:
        turn.release(leave_now)
        turn.say(f"{', '.join(leave_now)} had no place and leave now")


def worker_ready(turn: Turn, event: WorkerReady) -> bool:
    """True if this is news. A worker that the journal does not know is of another coordinator: it is fenced."""
    worker = turn.state.workers.get(event.worker)
    if worker is None:
        turn.send(KillWorker(turn.cause, event.worker, "unknown to this coordinator", turn.state.term))
        turn.say(f"{event.worker} is unknown here or counts as lost: fenced")
        return False
    if worker.life != "starting":
        turn.say(f"{event.worker} is known to be {worker.life}")
        return False
    node = turn.state.nodes.get(worker.node)
    if node is not None and node.start_failures:
        turn.set(nodes={**turn.state.nodes, node.node: replace(node, start_failures=0, backoff_until=0.0)})
    turn.put(replace(worker, life="ready"))
    turn.set(pool_changed_at=turn.now)
    turn.say(f"{event.worker} is ready on {worker.node}")
    return True


def lose(turn: Turn, names: Sequence[str], reason: str, detail: str) -> tuple[Loss, ...]:
    """Forget workers that are gone. Returns those that somebody may still have counted on."""
    workers = dict(turn.state.workers)
    losses, failed_starts = [], []
    for name in names:
        worker = workers.pop(name, None)
        if worker is None:
            turn.say(f"{name} was already gone")
        elif worker.life == "starting":
            failed_starts.append((worker.node, detail if reason == "start-failed" else ""))
            turn.say(f"{name} did not start on {worker.node}: {reason}")
        elif not worker.written_off:
            losses.append(Loss(name, worker.node, None, reason, detail))
            turn.say(f"{name} lost: {reason}")
        else:
            turn.say(f"{name} is gone, as it should be")
    if len(workers) != len(turn.state.workers):
        turn.set(workers=workers, pool_changed_at=turn.now)
    for node, why in failed_starts:
        _count_failed_start(turn, node, why)
    return tuple(losses)


def lose_node(turn: Turn, node: str) -> tuple[Loss, ...]:
    if node not in turn.state.nodes:
        turn.say("node was already gone")
        return ()
    turn.set(nodes={name: value for name, value in turn.state.nodes.items() if name != node}, pool_changed_at=turn.now)
    names = [worker.worker for worker in turn.state.workers.values() if worker.node == node]
    turn.say(f"node {node} lost with {len(names)} worker(s)")
    return lose(turn, names, "node lost", f"node {node} is gone")


def expire(turn: Turn) -> tuple[Loss, ...]:
    """Starts that took too long are given up; killed workers that linger are killed again and written off."""
    due = [w for w in turn.state.workers.values() if w.life != "ready" and w.deadline <= turn.now]
    losses = []
    for worker in due:
        if worker.life == "starting":
            turn.fence([worker.worker], f"not warm after {turn.options.start_s} s", written_off=True)
            turn.say(f"{worker.worker} took longer than {turn.options.start_s} s to start")
            _count_failed_start(turn, worker.node, "")
        else:
            turn.fence([worker.worker], "still there after it was told to go", written_off=True)
            if not worker.written_off:
                turn.say(f"no news of the death of {worker.worker}: it counts as lost")
                losses.append(Loss(worker.worker, worker.node, None, "unreachable", "killed, death not confirmed"))
    return tuple(losses)


def _count_failed_start(turn: Turn, name: str, why: str) -> None:
    """`why`: the error that the worker itself answered with, empty if it gave none."""
    node = turn.state.nodes.get(name)
    if node is None:
        return
    failures = node.start_failures + 1
    over = failures - turn.options.start_failure_limit
    until = node.backoff_until
    if over >= 0:
        wait_s = turn.options.backoff_s * 2 ** min(over, 4)
        until = turn.now + wait_s
        turn.say(f"{failures} starts in a row failed on {name}: no start there for {wait_s:g} s")
    node = replace(node, start_failures=failures, backoff_until=until, last_failure=why)
    turn.set(nodes={**turn.state.nodes, name: node})


def refuse_if_nobody_starts(turn: Turn) -> None:
    """A run that never had a member, on nodes that all answer a start with an error, is told so at last.

    A start that took too long or died proves nothing: it is tried again after a while.
    """
    limit = turn.options.start_failure_limit
    nodes = [n for n in turn.state.nodes.values() if n.num_slots and n.num_seats != 0 and not n.draining]
    if not nodes or any(worker.life != "dying" for worker in turn.state.workers.values()):
        return
    if all(node.start_failures >= limit and node.last_failure for node in nodes):
        worst = nodes[-1]
        turn.end(
            "RunFailed",
            f"no worker starts: {limit} or more failed in a row on each of {len(nodes)} node(s). The last, on "
            f"{worst.node}: {worst.last_failure}",
        )


def fill_slots(turn: Turn) -> None:
    """Start as many workers as are wanted and the nodes have room for: rings packed, replicas spread.

    First where members can still sit, so that a dead member's GPU is taken over on its own node; then standby
    processes beyond that, on the node that has fewest.
    """
    state = turn.state
    wants = _Wants(state)
    if wants.num_missing <= 0:
        return
    usable = [n for n in state.nodes.values() if n.backoff_until <= turn.now and wants.may_start_on(n)]
    if not usable:
        return
    seats = {node.node: left for node in usable if (left := wants.seats_left(node)) > 0}
    workers, num_started = dict(state.workers), state.num_started
    for _ in range(wants.num_missing):
        if seats:
            node = min(seats, key=lambda name: _start_rank(wants.staying[name], seats[name], state.options.cp))
            seats[node] -= 1
            if seats[node] == 0:
                del seats[node]
        elif shelf := [node for node in usable if wants.may_start_on(node)]:
            node = min(shelf, key=wants.num_beyond).node
            wants.num_standbys -= 1
        else:
            break
        name = f"w{num_started}.t{state.term}"
        num_started += 1
        wants.staying[node] += 1
        wants.used[node] += 1
        workers[name] = Worker(name, node, "starting", turn.now + state.options.start_s)
        turn.send(StartWorker(turn.cause, name, node, state.term))
    turn.say(f"{num_started - state.num_started} worker(s) start")
    turn.set(workers=workers, num_started=num_started)


class _Wants:
    """How many workers are missing, and which nodes can be of use.

    Workers beyond their node's seats replace only what dies there: no more of them count than there are spares
    wanted, and on each node its share of these. So neither a node that joins first takes up the standbys of all, nor
    do more processes on the GPUs that there are stand for workers of a mesh that lacks GPUs.
    """

    def __init__(self, state: State) -> None:
        self._options = state.options
        present = [worker for worker in state.workers.values() if worker.life != "dying" and not worker.draining]
        self.used = Counter(worker.node for worker in state.workers.values())
        self.staying = Counter(worker.node for worker in present)
        # Whoever is to hand over still holds its GPU, and hands over only once another place can be filled.
        self.leaving = Counter(w.node for w in state.workers.values() if w.draining and w.life == "ready")
        limited = [node for node in state.nodes.values() if node.num_seats is not None]
        num_able = len(present) - sum(self.num_beyond(node) for node in limited)
        num_standing_by = sum(min(self.num_beyond(node), self._share(node)) for node in limited)
        self.num_standbys = max(0, state.options.spares - num_standing_by)
        self.num_missing = state.options.dp_limit * state.options.cp - num_able + self.num_standbys

    def num_beyond(self, node: Node) -> int:
        """Workers that stay on this node for whom it has no seat."""
        return 0 if node.num_seats is None else max(0, self.staying[node.node] - self._seats(node.node, node.num_seats))

    def seats_left(self, node: Node) -> int:
        """How many more workers fit there and could sit."""
        room = node.num_slots - self.used[node.node]
        if node.num_seats is None:
            return room
        return min(room, self._seats(node.node, node.num_seats) - self.staying[node.node])

    def _seats(self, node: str, num_seats: int) -> int:
        return max(0, num_seats - self.leaving[node])

    def may_start_on(self, node: Node) -> bool:
        """Whether one more worker fits there and would be of use."""
        if node.draining or node.num_slots <= self.used[node.node]:
            return False
        standby = self.num_standbys > 0 and self.num_beyond(node) < self._share(node)
        return standby or self.seats_left(node) > 0

    def _share(self, node: Node) -> int:
        """How many standbys a node may have at most: all of them if it alone can hold the mesh."""
        return -(-self._options.spares * (node.num_seats or 0) // (self._options.dp * self._options.cp))


def _start_rank(num_there: int, room: int, cp: int) -> tuple[bool, bool, int]:
    """A ring that is begun on a node is completed there; then the emptiest node with room for a whole ring."""
    begun = num_there % cp
    completes = begun > 0 and room >= cp - begun
    return not completes, room < cp, num_there


def start_deadlines(state: State) -> list[float]:
    """When nodes that are backed off, and would be used, may be tried again."""
    if not any(node.backoff_until for node in state.nodes.values()):
        return []
    wants = _Wants(state)
    if wants.num_missing <= 0:
        return []
    return [node.backoff_until for node in state.nodes.values() if node.backoff_until and wants.may_start_on(node)]
