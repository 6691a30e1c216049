"""Which workers a run gives up when it is scaled down: whole nodes first. Pure, no I/O."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.messages import DrainNode, ScaleRequested
from elastic_ring.control.state import Running, State, spares
from elastic_ring.control.transition import Transition


def requested(ctx: Transition, event: ScaleRequested) -> None:
    """Take over the numbers. What is too much then leaves at a boundary; what is missing is started as room comes."""
    options = ctx.options
    limit = max(options.scaling.min_dp, options.scaling.most_rings if event.max_dp is None else event.max_dp)
    num_spares = options.scaling.spares if event.spares is None else max(0, event.spares)
    if (limit, num_spares) == (options.scaling.most_rings, options.scaling.spares):
        ctx.explain("the request changes nothing")
        return
    new = options.scaled(dp_limit=limit, spares=num_spares)
    ctx.state = replace(ctx.state, options=new, pool_changed_at=ctx.now, gives_up=True)
    ctx.explain(f"at most {limit} ring(s) and {num_spares} spare(s) from now on")


def settle(ctx: Transition) -> None:
    """Let surplus workers go, while the run trains and no boundary is pending."""
    phase = ctx.phase
    if not ctx.state.gives_up or not isinstance(phase, Running) or phase.boundary:
        return
    surplus = worker_pool.num_surplus(ctx.state)
    for node in nodes_to_leave(ctx.state, surplus):
        ctx.put_nodes({node: replace(ctx.state.nodes[node], draining=True)})
        worker_pool.drain(ctx, ctx.state.pool.on.get(node, ()))
        ctx.send(DrainNode(ctx.cause, node, ctx.state.term))
        ctx.explain(f"the run leaves node {node}")
    left = worker_pool.num_surplus(ctx.state)
    crowded = ctx.state.pool.crowded
    # The newest first, of those standbys: a spare with a GPU of its own covers more.
    order = sorted(reversed(spares(ctx.state)), key=lambda name: ctx.state.workers[name].node not in crowded)
    released = order[: max(0, left)]
    if released:
        ctx.release(released)
        ctx.explain(f"spares not wanted any more: {', '.join(released)}")
    if phase.membership.mesh.dp <= ctx.options.scaling.most_rings and worker_pool.num_surplus(ctx.state) <= 0:
        ctx.set(gives_up=False)


def nodes_to_leave(state: State, surplus: int) -> list[str]:
    """Nodes whose workers may all go without undercutting the wanted number: those with fewest members first, then the
    largest, so that as few members as possible hand over and as few nodes as possible stay."""
    phase = state.phase
    assert isinstance(phase, Running)
    members, on_node = set(phase.membership.members), defaultdict(list)
    for worker in state.workers.values():
        if worker.status != "stopping" and not worker.draining:
            on_node[worker.node].append(worker.worker)
    order = sorted(on_node, key=lambda node: (sum(w in members for w in on_node[node]), -len(on_node[node]), node))
    able = sum(state.workers[w].status == "ready" for workers in on_node.values() for w in workers)
    needed = state.options.scaling.most_rings * state.options.scaling.cp
    chosen = []
    for node in order:
        ready = sum(state.workers[worker].status == "ready" for worker in on_node[node])
        if len(on_node[node]) <= surplus and able - ready >= needed and not state.nodes[node].draining:
            chosen.append(node)
            surplus -= len(on_node[node])
            able -= ready
    return chosen
