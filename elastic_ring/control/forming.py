"""Handlers of the phase Forming, without live state: wait for nodes and workers, then begin. Pure, no I/O."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import recovery
from elastic_ring.control.decisions import data_order
from elastic_ring.control.messages import (
    CheckpointsKnown,
    NodesListed,
)
from elastic_ring.control.placement import policy
from elastic_ring.control.state import (
    Building,
    Forming,
    Incident,
    State,
    Transition,
    expect,
    num_able_to_form,
    spares,
)
from elastic_ring.mesh import Mesh


def nodes_listed(ctx: Transition, event: NodesListed) -> None:
    """Before the first start wait for the listed nodes: else the node that joins first gets all holders of a shard. A
    restarted coordinator does not wait again."""
    if not isinstance(ctx.phase, Forming) or not ctx.phase.gathers:
        ctx.explain("no start waits for nodes")
        return
    ctx.edit_phase(awaited=frozenset(event.nodes).difference(ctx.state.nodes), news_at=ctx.now)
    ctx.explain(f"Ray lists {len(event.nodes)} node(s) with room")


def gather(ctx: Transition) -> None:
    """Wait for the nodes that Ray lists, for `gather_s` after the last news of them."""
    phase = expect(ctx.state, Forming)
    missing = phase.awaited.difference(ctx.state.nodes)
    if len(missing) < len(phase.awaited):
        ctx.edit_phase(awaited=missing, news_at=ctx.now)
    elif (until := gathers_until(ctx.state)) is not None and ctx.now >= until:
        ctx.edit_phase(awaited=frozenset())
        ctx.explain(f"workers start without {len(missing)} node(s) that Ray lists: {', '.join(sorted(missing)[:4])}")


def gathers_until(state: State) -> float | None:
    """The time until which the first starts wait for nodes that Ray lists; None once all have joined."""
    phase = state.phase
    if not isinstance(phase, Forming) or not phase.awaited:
        return None
    return phase.news_at + state.options.timeouts.gather_s


def try_form(ctx: Transition) -> None:
    """Begin from the newest checkpoint, or from the seed, as soon as `dp` rings and the spares are ready.

    After `start_s`, `min_dp` rings suffice if no worker shows progress in starting; after an incident as soon as no
    worker is starting.
    """
    phase, options, counts = expect(ctx.state, Forming), ctx.options, ctx.state.pool.total
    dp = min(options.scaling.dp, num_able_to_form(ctx.state) // options.scaling.cp)
    if dp < options.scaling.dp:
        if phase.full_since is not None:
            ctx.edit_phase(full_since=None)
        if phase.incident is not None and not counts.starting:
            is_complete = ctx.now >= phase.since + options.spare_grace_s
        else:
            is_complete = ctx.now >= phase.since + options.timeouts.start_s and not counts.visible
        if dp < options.scaling.min_dp or not is_complete:
            return
    else:
        full_since = ctx.now if phase.full_since is None else phase.full_since
        if phase.full_since is None:
            ctx.edit_phase(full_since=full_since)
        # On one node all places are the same, and spares may come later.
        nodes = {worker.node for worker in ctx.state.workers.values() if worker.status in ("starting", "ready")}
        is_late = ctx.now >= full_since + options.spare_grace_s or not (options.waits_for_spares or len(nodes) > 1)
        num_wanted = options.scaling.mesh.size + options.scaling.spares
        if not is_late and counts.starting and (counts.ready < num_wanted or len(spares(ctx.state)) < num_wanted):
            return
    situation = recovery.situation_of(
        ctx.state, Mesh(dp, options.scaling.cp), dp, members=(), holders={}, empty=(), fresh=True
    )
    plan = policy.plan(situation)
    assert isinstance(plan, policy.Plan), plan
    ctx.set(generation=ctx.state.generation + 1)
    restore = ctx.state.checkpoints[-1] if ctx.state.checkpoints else None
    if restore is not None:
        # Bits are equal only on the mesh that wrote the checkpoint: another one sums in another order.
        action = f"restored from the checkpoint of step {restore.step}"
        promise = "bit-exact" if plan.mesh == restore.mesh else "sample-exact"
        plan = replace(plan, action=action, promise=promise, reason=f"{action}: {plan.mesh}")
    elif phase.incident is not None and phase.incident.base is not None and phase.incident.base.mesh != plan.mesh:
        plan = replace(plan, promise="sample-exact")
    cause = "start" if ctx.state.last_change is None else "fresh start"
    incident = phase.incident or Incident(cause, ctx.now, None, counted=True)
    step = restore.step if restore is not None else 0
    recovery.order_build(ctx, plan, incident, recovery.Beginning(step, fresh=True, restore=restore), situation)


def checkpoints_known(ctx: Transition, event: CheckpointsKnown) -> None:
    """Take over the list. While a build goes back, or is about to, later ones are of steps that it gives up."""
    checkpoints = tuple(checkpoint for checkpoint in event.checkpoints if checkpoint.folder not in ctx.state.damaged)
    back = data_order.pending_rollback(ctx.state)
    if back is not None:
        checkpoints = data_order.checkpoints_before(back, checkpoints)
    order = ctx.phase.order if isinstance(ctx.phase, Building) else None
    if order is not None and order.goes_back:
        checkpoints = tuple(checkpoint for checkpoint in checkpoints if checkpoint.step <= order.step)
    ctx.set(checkpoints=checkpoints, write_s=event.write_s or ctx.state.write_s)
    newest = f", the newest of step {checkpoints[-1].step}" if checkpoints else ""
    ctx.explain(f"{len(checkpoints)} checkpoint(s){newest}")
