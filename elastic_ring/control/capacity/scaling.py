"""The size of a run: when growth pays, which workers leave when it is scaled down, leaving nodes' deadlines,
and requests to the cluster's autoscaler (`runtime.ray_head` sends them). Pure, no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.messages import DrainNode, ScaleRequested
from elastic_ring.control.state import Running, State, Transition, end_step, expect, num_able_to_form, spares

PACE_STEPS = 3
"""Fewer steps say nothing about how long one takes."""


def step_s(state: State) -> float | None:
    """The mean duration of a step since the last change; None before PACE_STEPS of them."""
    change = state.last_change
    if change is None or change.resumed_at is None or state.committed < change.step + PACE_STEPS:
        return None
    return (state.committed_at - change.resumed_at) / (state.committed - change.step)


def is_worth_it(state: State, dp: int) -> bool:
    """Whether `dp` rings save more until the end of the run than the growth costs.

    A ring more is expected to save as much as each before. `grow_cost_s` of the settings, else a growth costs what the
    last build took, and what the last new worker took from its start until it was warm.
    """
    pace_s, change, cost_s = step_s(state), state.last_change, state.options.run.grow_cost_s
    if pace_s is None or change is None or change.resumed_at is None:
        return True
    if cost_s is None:
        cost_s = change.resumed_at - change.noticed_at + state.warm_up_s
    return (end_step(state) - state.committed) * pace_s * (1 - change.mesh.dp / dp) >= cost_s


def earliest(state: State) -> float:
    """From when on the mesh may grow: new capacity has lasted, and the last change of its size is long enough ago."""
    run, lasted_at = state.options.run, state.pool_changed_at + state.options.run.grow_delay_s
    return lasted_at if state.resized_at is None else max(lasted_at, state.resized_at + run.grow_interval_s)


def scale(ctx: Transition, event: ScaleRequested) -> None:
    """Apply new limits. Surplus workers leave at the next boundary; missing ones start as room comes."""
    options = ctx.options
    limit = max(options.scaling.min_dp, options.scaling.most_rings if event.max_dp is None else event.max_dp)
    num_spares = options.scaling.spares if event.spares is None else max(0, event.spares)
    if (limit, num_spares) == (options.scaling.most_rings, options.scaling.spares):
        ctx.explain("the request changes nothing")
        return
    new = options.scaled(dp_limit=limit, spares=num_spares)
    ctx.state = replace(ctx.state, options=new, pool_changed_at=ctx.now, gives_up=True)
    ctx.explain(f"at most {limit} ring(s) and {num_spares} spare(s) from now on")


def release_surplus(ctx: Transition) -> None:
    phase = ctx.phase
    if not ctx.state.gives_up or not isinstance(phase, Running) or phase.boundary:
        return
    surplus = worker_pool.num_surplus(ctx.state)
    for node in nodes_to_leave(ctx.state, surplus):
        ctx.put_node(replace(ctx.state.nodes[node], draining=True))
        worker_pool.drain(ctx, ctx.state.pool.on.get(node, ()))
        ctx.send(DrainNode(ctx.cause, node, ctx.state.term))
        ctx.explain(f"the run leaves node {node}")
    left = worker_pool.num_surplus(ctx.state)
    crowded = ctx.state.pool.crowded
    # Standbys first, the newest of them: a spare with a GPU of its own covers more.
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
    members, on_node = set(expect(state, Running).membership.members), defaultdict(list)
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


# ---------------------------------------------------------------- nodes that leave


def leaving_members(state: State) -> list[str]:
    """Draining members, by rank."""
    ranks = expect(state, Running).membership.rank_of
    return sorted(state.pool.draining & ranks.keys(), key=ranks.__getitem__)


def can_hand_over(state: State) -> bool:
    return num_able_to_form(state) // state.options.scaling.cp >= state.options.scaling.min_dp


def hand_over_by(state: State, now: float) -> float | None:
    """When a step that still runs is given up so that its members can hand over; None without a deadline.

    `handover_s` before the first member's node is gone, and not before half of what is left.
    """
    leaves_at = _first_to_leave(state)
    return None if leaves_at is None else max(now, leaves_at - min(state.options.handover_s, (leaves_at - now) / 2))


def save_by(state: State, now: float) -> float | None:
    """When a step that still runs is given up for a checkpoint of the state before it; None without a deadline.

    At once if a step and the writing, by their times so far, would take longer than the time left. Else as long
    before the end as the writing and `handover_s`, and not before half of what is left.
    """
    leaves_at = _first_to_leave(state)
    if leaves_at is None:
        return None
    pace_s, left_s = step_s(state), leaves_at - now
    if pace_s is not None and left_s < pace_s + state.write_s:
        return now
    return max(now, leaves_at - min(state.options.handover_s + state.write_s, left_s / 2))


def can_save(state: State, within_s: float) -> bool:
    """Whether a checkpoint requested now is expected to be written in time, if need be without the step under way."""
    saves = isinstance(state.phase, Running) and state.options.run.checkpoint_config.is_on
    return saves and state.write_s <= within_s


def _first_to_leave(state: State) -> float | None:
    nodes = {state.workers[name].node for name in leaving_members(state)} & state.nodes.keys()
    return min((at for node in nodes if (at := state.nodes[node].leaves_at)), default=None)


# ---------------------------------------------------------------- the autoscaler

TRY_AGAIN_S = 20.0
"""After a refusal the run asks for a little more this often: limits may be raised, machines may come free."""


@dataclass(frozen=True)
class Ask:
    """A request to the autoscaler: room for `num_workers` in the whole cluster, 0 for nothing.

    `refused`: the smallest number that was refused lately; None if none was. `refused_at`: when, in seconds on the
    clock of `now`. `is_trial`: this request tests whether the autoscaler grants a little more now.
    """

    num_workers: int = 0
    refused: int | None = None
    refused_at: float = 0.0
    is_trial: bool = False


def sizes(min_dp: int, max_dp: int, cp: int, spares: int) -> tuple[int, ...]:
    """The useful numbers of workers, rising: whole rings, with and without the spares."""
    rings = range(min_dp, max_dp + 1)
    return tuple(sorted({dp * cp for dp in rings} | {dp * cp + spares for dp in rings}))


def outstanding(ask: Ask, num_placed: int) -> int:
    """The number of workers to request from the autoscaler while `num_placed` workers have a process.

    Nothing once they are as many: their nodes are busy, and Ray (v2) counts a request that stays against any node that
    it fits, also against one that the run has left, which then never counts as idle.
    """
    return ask.num_workers if ask.is_trial or ask.num_workers > num_placed else 0


def next_ask(ask: Ask, useful: tuple[int, ...], num_here: int, is_refused: bool, now: float) -> Ask:
    """The next request.

    `useful`: the useful numbers of workers, rising; none for no request. `num_here`: for how many there is room.
    `is_refused`: the autoscaler says that it cannot satisfy `ask`. The run first asks for the largest number. After a
    refusal it bisects between `num_here` and the refused number. When none is left between, it asks for `num_here`, and
    every TRY_AGAIN_S for the next larger one; once that is granted, for the largest again.
    """
    if not useful:
        return Ask()
    if is_refused and ask.num_workers:
        ask = Ask(ask.num_workers, ask.num_workers, now)
    if ask.is_trial and num_here < ask.num_workers:
        return ask  # granted: its nodes are on their way
    if ask.refused is None:
        return Ask(useful[-1])
    left = [number for number in useful if num_here < number < ask.refused]
    if ask.num_workers in left:
        return ask
    if left:
        return Ask(left[len(left) // 2], ask.refused, ask.refused_at)
    more = [number for number in useful if number > num_here]
    if not more:
        return Ask(useful[-1])
    if now >= ask.refused_at + TRY_AGAIN_S:
        return Ask(more[0], is_trial=True)
    here = max((number for number in useful if number <= num_here), default=0)
    return Ask(here, ask.refused, ask.refused_at)
