"""Forming a mesh without live state: from the newest checkpoint, or from the seed. Pure, no I/O."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.decisions import rollback
from elastic_ring.control.messages import Build, Checkpoint, CheckpointsKnown, MemberFailed, NodesListed, Standby
from elastic_ring.control.ordering import Beginning, order_build
from elastic_ring.control.placement import policy
from elastic_ring.control.state import (
    Building,
    Forming,
    Incident,
    Membership,
    State,
    avoided,
    domains_of,
    gpus_on,
    node_of,
    num_able_to_form,
    reserved,
    spares,
)
from elastic_ring.control.transition import Transition
from elastic_ring.mesh import Mesh


def begin_again(ctx: Transition, membership: Membership, incident: Incident | None, why: str) -> None:
    """No live state is left: every member becomes a spare, and the next mesh begins from storage or from the seed.

    One that is to leave has nothing to hand over any more, and leaves now: it would keep its GPU.
    """
    ready = ctx.ready_among(membership.everyone)
    draining = [worker for worker in ready if ctx.state.workers[worker].draining]
    for worker in ready:
        if worker not in draining:
            ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))
    ctx.release(draining)
    ctx.enter(Forming(ctx.now, incident=incident))
    ctx.explain(why)


def nodes_listed(ctx: Transition, event: NodesListed) -> None:
    """All holders of a shard would start on the node that joins first. A restarted coordinator does not wait again."""
    if not isinstance(ctx.phase, Forming) or not ctx.phase.gathers:
        ctx.explain("no start waits for nodes")
        return
    ctx.edit_phase(awaited=frozenset(event.nodes).difference(ctx.state.nodes), news_at=ctx.now)
    ctx.explain(f"Ray lists {len(event.nodes)} node(s) with room")


def gather(ctx: Transition) -> None:
    """Wait for the nodes that Ray lists, for `gather_s` after the last news of them."""
    phase = ctx.phase
    assert isinstance(phase, Forming)
    missing = phase.awaited.difference(ctx.state.nodes)
    if len(missing) < len(phase.awaited):
        ctx.edit_phase(awaited=missing, news_at=ctx.now)
    elif (until := gathers_until(ctx.state)) is not None and ctx.now >= until:
        ctx.edit_phase(awaited=frozenset())
        ctx.explain(f"workers start without {len(missing)} node(s) that Ray lists: {', '.join(sorted(missing)[:4])}")


def gathers_until(state: State) -> float | None:
    """Until when the first workers wait for nodes that Ray lists; None where all have joined."""
    phase = state.phase
    if not isinstance(phase, Forming) or not phase.awaited:
        return None
    return phase.news_at + state.options.timeouts.gather_s


def try_form(ctx: Transition) -> None:
    """Begin from the newest checkpoint, or from the seed, as soon as `dp` rings and the spares are ready.

    After `start_s`, `min_dp` rings suffice if no worker shows progress in starting; after an incident as soon as nobody
    is starting.
    """
    phase, options = ctx.phase, ctx.options
    assert isinstance(phase, Forming)
    dp = min(options.scaling.dp, num_able_to_form(ctx.state) // options.scaling.cp)
    if dp == options.scaling.dp and phase.full_since is None:
        ctx.edit_phase(full_since=ctx.now)
    elif dp < options.scaling.dp and phase.full_since is not None:
        ctx.edit_phase(full_since=None)
    phase = ctx.phase
    assert isinstance(phase, Forming)
    if phase.full_since is not None:
        is_late = ctx.now >= phase.full_since + options.spare_grace_s or not _is_worth_waiting(ctx)
        num_wanted, counts = options.scaling.mesh.size + options.scaling.spares, ctx.state.pool.total
        if not is_late and counts.starting and (counts.ready < num_wanted or len(spares(ctx.state)) < num_wanted):
            return
    elif dp < options.scaling.min_dp or not _nobody_comes(ctx, phase):
        return
    ready = spares(ctx.state)
    situation = policy.Situation(
        mesh=Mesh(dp, options.scaling.cp),
        members=(),
        holders={},
        empty=(),
        spares=ready,
        node_of=node_of(ctx.state),
        target_dp=dp,
        min_dp=options.scaling.min_dp,
        fresh=True,
        gpus_on=gpus_on(ctx.state),
        domains_of=domains_of(ctx.state),
        reserved=reserved(ctx.state),
        avoided=avoided(ctx.state),
    )
    plan = policy.plan(situation)
    assert isinstance(plan, policy.Plan), plan
    ctx.set(generation=ctx.state.generation + 1)
    restore = ctx.state.checkpoints[-1] if ctx.state.checkpoints else None
    if restore is not None:
        plan = _restoring(plan, restore)
    cause = "start" if ctx.state.last_change is None else "fresh start"
    incident = phase.incident or Incident(cause, ctx.now, None, counted=True)
    step = restore.step if restore is not None else 0
    order_build(ctx, plan, incident, Beginning(step, fresh=True, restore=restore), situation)


def _is_worth_waiting(ctx: Transition) -> bool:
    """Whether more workers make a better mesh: on one node all places are the same, and spares may come later."""
    workers = [worker for worker in ctx.state.workers.values() if worker.status in ("starting", "ready")]
    return ctx.options.waits_for_spares or len({worker.node for worker in workers}) > 1


def _nobody_comes(ctx: Transition, phase: Forming) -> bool:
    """Whether waiting for more workers has no point."""
    if phase.incident is not None and not ctx.state.pool.total.starting:
        return ctx.now >= phase.since + ctx.options.spare_grace_s
    return ctx.now >= phase.since + ctx.options.timeouts.start_s and not ctx.state.pool.total.visible


def _restoring(plan: policy.Plan, restore: Checkpoint) -> policy.Plan:
    """Bits are equal on the mesh that wrote the checkpoint only: another one sums in another order."""
    action = f"restored from the checkpoint of step {restore.step}"
    promise = "bit-exact" if plan.mesh == restore.mesh else "sample-exact"
    return replace(plan, action=action, promise=promise, reason=f"{action}: {plan.mesh}")


def checkpoints_known(ctx: Transition, event: CheckpointsKnown) -> None:
    """Take over the list. While a build goes back, or is about to, later ones are of steps that it gives up."""
    found = tuple(checkpoint for checkpoint in event.checkpoints if checkpoint.folder not in ctx.state.damaged)
    back = rollback.pending(ctx.state)
    if back is not None:
        found = rollback.from_before(back, found)
    order = ctx.phase.order if isinstance(ctx.phase, Building) else None
    if order is not None and order.goes_back:
        found = tuple(checkpoint for checkpoint in found if checkpoint.step <= order.step)
    ctx.set(checkpoints=found, write_s=event.write_s or ctx.state.write_s)
    ctx.explain(f"{len(found)} checkpoint(s)" + (f", the newest of step {found[-1].step}" if found else ""))


def drop_checkpoint(ctx: Transition, order: Build, event: MemberFailed) -> None:
    """The checkpoint of this build did not verify: the one before it is the newest now."""
    assert order.restore is not None
    folder = order.restore.folder
    ctx.set(
        checkpoints=tuple(known for known in ctx.state.checkpoints if known.folder != folder),
        damaged=tuple(dict.fromkeys([*ctx.state.damaged, folder])),
    )
    ctx.explain(f"{folder} cannot be used: {event.detail}")
