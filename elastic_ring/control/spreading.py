"""Members that move to other nodes because holders of one shard share a node while another has room. Pure, no I/O.

A growth, or a host that comes back, leaves them so. Newcomers start on the nodes with room; once they are ready, they
take the places of as many holders at a boundary, in the way of a drain. The mesh keeps its size and its bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from elastic_ring.control.capacity import scaling, worker_pool
from elastic_ring.control.placement import policy
from elastic_ring.control.recovery import situation_of
from elastic_ring.control.state import Membership, Moves, Running, State, Transition, node_of

SPREAD = "spread"
"""The boundary's reason."""
MIN_INTERVAL_S = 60.0
"""Members move no more often than this, or than `grow_interval_s` where that is longer."""


def plan_moves(state: State, membership: Membership, now: float) -> Moves:
    """The moves after which no two holders of a shard share a node, as far as nodes have room that hold none of it.

    Ring 0 stays. Members of one ring move to one node where that has room for them, and rather to newcomers that are
    there than to free GPUs.
    """
    cp, nodes = membership.mesh.cp, node_of(state)
    on = [nodes.get(worker, "") for worker in membership.members]
    holders = Counter((rank % cp, node) for rank, node in enumerate(on))
    if max(holders.values()) < 2:
        return Moves()
    newcomers, free = Counter[str](), Counter[str]()
    for place in state.pool.usable(frozenset(state.nodes), now):
        if not place.draining and not place.avoided:
            newcomers[place.node] = _num_newcomers(state, membership, place.node, ("starting", "ready"))
            free[place.node] = newcomers[place.node] + max(0, state.pool.gpus_left(place))
    free += Counter()  # without nodes that have no room
    moved_to: Counter[tuple[int, str]] = Counter()  # (ring, node) → members of the ring that move there
    leaving: list[str] = []
    arriving: Counter[str] = Counter()
    for rank in reversed(range(cp, membership.mesh.size)) if free else ():
        ring, cp_rank = divmod(rank, cp)
        if holders[cp_rank, on[rank]] < 2:
            continue
        keys = {
            node: (moved_to[ring, node], newcomers[node] > arriving[node], number)
            for node, number in free.items()
            if number > 0 and not holders[cp_rank, node]
        }
        if keys:
            node = max(keys, key=keys.__getitem__)
            holders[cp_rank, on[rank]] -= 1
            holders[cp_rank, node] += 1
            moved_to[ring, node] += 1
            arriving[node] += 1
            free[node] -= 1
            leaving.append(membership.members[rank])
    return Moves(tuple(leaving), tuple(arriving.items()))


def _num_newcomers(state: State, membership: Membership, node: str, statuses: Sequence[str]) -> int:
    """The workers of the node that are no members and would each have a GPU of their own."""
    workers = [state.workers[name] for name in state.pool.on.get(node, ()) if name not in membership.part]
    number = sum(worker.status in statuses and not worker.draining for worker in workers)
    return max(0, number - state.pool.num_beyond(state.nodes[node])) if node in state.nodes else 0


def settle(ctx: Transition) -> None:
    """Plan the moves anew after each change of the pool or of the members. Where nothing is to move, let go of the
    workers that moves have left over."""
    state, phase = ctx.state, ctx.phase
    if not isinstance(phase, Running) or phase.boundary:
        return
    key = (state.pool.version, len(state.pool.usable(state.pool.free, ctx.now)), phase.membership.id)
    if state.moves_of == key:
        return
    moves = Moves()
    if phase.membership.mesh.dp > 1 and not state.gives_up and state.moved_at != math.inf:
        moves = plan_moves(state, phase.membership, ctx.now)
    ctx.set(moves=moves, moves_of=key)
    if not moves.leaving and state.movers:
        _dismiss(ctx, phase.membership)


def _dismiss(ctx: Transition, membership: Membership) -> None:
    number = worker_pool.num_surplus(ctx.state)
    unplaced = [name for name in ctx.state.movers if name in ctx.state.workers and name not in membership.part]
    surplus = [name for name in unplaced if ctx.state.workers[name].status != "stopping"][:number]
    ctx.set(movers=())
    ready = ctx.ready_among(surplus)
    ctx.release(ready)
    ctx.kill([name for name in surplus if name not in ready], "no member moves any more", written_off=True)
    if surplus:
        ctx.explain(f"no member moves any more: {', '.join(surplus)} leave")


def start_newcomers(ctx: Transition) -> None:
    """Start the workers that the planned moves lack."""
    phase, state = ctx.phase, ctx.state
    if not isinstance(phase, Running) or phase.boundary or not state.moves.leaving or ctx.now < earliest(state):
        return
    for node, number in state.moves.newcomers_on:
        for _ in range(number - _num_newcomers(state, phase.membership, node, ("starting", "ready"))):
            name = worker_pool.start(ctx, node)
            ctx.set(movers=(*ctx.state.movers, name))
            ctx.explain(f"{name} starts on {node}, where it holds a shard apart from its other holders")


def is_ready(state: State) -> bool:
    """Whether all newcomers of the planned moves are ready."""
    phase = state.phase
    if not isinstance(phase, Running) or not state.moves.leaving:
        return False
    numbers = state.moves.newcomers_on
    return all(_num_newcomers(state, phase.membership, node, ("ready",)) >= number for node, number in numbers)


def earliest(state: State) -> float:
    """From when on members may move."""
    interval_s = max(state.options.run.grow_interval_s, MIN_INTERVAL_S)
    lasted_at = scaling.earliest(state)
    return lasted_at if state.moved_at is None else max(lasted_at, state.moved_at + interval_s)


def starts_due_at(state: State) -> float | None:
    """When newcomers are to start; None if none is missing."""
    phase = state.phase
    if not isinstance(phase, Running) or phase.boundary:
        return None
    for node, number in state.moves.newcomers_on:
        if _num_newcomers(state, phase.membership, node, ("starting", "ready")) < number:
            return earliest(state)
    return None


def may_move(ctx: Transition) -> bool:
    """Whether to request a boundary now. Moves that the placement would not make are given up."""
    state, phase = ctx.state, ctx.phase
    if not isinstance(phase, Running) or ctx.now < earliest(state) or not is_ready(state):
        return False
    is_better = _fewer_share(state, phase.membership, state.moves)
    ctx.set(moved_at=ctx.now)
    if not is_better:
        ctx.set(moves=Moves())
        _dismiss(ctx, phase.membership)
    return is_better


def begin_move(ctx: Transition, membership: Membership) -> frozenset[str]:
    """All members have paused: those that leave their places now, if their newcomers are still ready. Whoever of them
    is surplus afterwards is let go; where the build fails they hold their places."""
    moves = plan_moves(ctx.state, membership, ctx.now)
    ctx.set(moves=moves)
    moves = moves if is_ready(ctx.state) and _fewer_share(ctx.state, membership, moves) else Moves()
    ctx.set(moves=Moves(), moves_of=None, movers=(*ctx.state.movers, *moves.leaving))
    return frozenset(moves.leaving)


def give_up(ctx: Transition) -> None:
    """A step takes longer than a boundary may: to request another one would break it off for nothing."""
    ctx.set(moves=Moves(), moved_at=math.inf)
    ctx.explain("members move no more in this term")


def _fewer_share(state: State, membership: Membership, moves: Moves) -> bool:
    """Whether the next placement keeps the mesh and has fewer holders of one shard on one node."""
    mesh = membership.mesh
    planned = policy.plan(
        situation_of(
            state,
            mesh,
            mesh.dp,
            members=membership.members,
            holders={worker: rank % mesh.cp for rank, worker in enumerate(membership.members)},
            empty=(),
            draining=state.pool.draining | frozenset(moves.leaving),
        )
    )
    if not isinstance(planned, policy.Plan) or planned.mesh != mesh:
        return False
    nodes = node_of(state)

    def num_places(members: Sequence[str]) -> int:
        return len({(rank % mesh.cp, nodes.get(worker, "")) for rank, worker in enumerate(members)})

    return num_places(planned.members) > num_places(membership.members)
