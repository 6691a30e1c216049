"""The order of the next `Build`, and forming a mesh without live state: from a checkpoint, or from the seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from elastic_ring.control.decisions import data_order, replacements
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    CheckpointsKnown,
    MemberFailed,
    NodesListed,
    SnapshotId,
    Standby,
    Vote,
)
from elastic_ring.control.placement import copies, policy
from elastic_ring.control.pool import with_changes
from elastic_ring.control.state import (
    Building,
    Change,
    Forming,
    Incident,
    Membership,
    State,
    avoided,
    domains_of,
    end_step,
    expect,
    gpus_on,
    node_of,
    num_able_to_form,
    reserved,
    spares,
)
from elastic_ring.control.transition import Transition
from elastic_ring.mesh import Mesh


@dataclass(frozen=True)
class Beginning:
    """The state from which a mesh begins at `step`; the fields as in `Build`."""

    step: int
    roll_forward: Vote | None = None
    fresh: bool = False
    restore: Checkpoint | None = None
    step_back: SnapshotId | None = None
    keep: SnapshotId | None = None

    @property
    def goes_back(self) -> bool:
        """Whether live state is given up for an earlier one."""
        return self.restore is not None or self.step_back is not None

    @property
    def source(self) -> str:
        return "checkpoint" if self.restore is not None else "copy" if self.step_back is not None else "replica"


def situation_of(state: State, mesh: Mesh, target_dp: int, **reports: Any) -> policy.Situation:
    """The input of `policy.plan`: the pool of this state, and the fields that follow from `reports` of members."""
    return policy.Situation(
        mesh=mesh,
        target_dp=target_dp,
        spares=spares(state),
        node_of=node_of(state),
        min_dp=state.options.scaling.min_dp,
        gpus_on=gpus_on(state),
        domains_of=domains_of(state),
        reserved=reserved(state),
        avoided=avoided(state),
        **reports,
    )


def order_build(
    ctx: Transition, plan: policy.Plan, incident: Incident, beginning: Beginning, situation: policy.Situation
) -> None:
    step = beginning.step
    rounds = ctx.state.rounds.again(step)
    ctx.set(rounds=rounds)
    if rounds.count > ctx.options.round_limit:
        ctx.end("RunFailed", _no_commit_reason(ctx.state, incident, rounds.count, step), step=step)
        return
    data_order.switch_manifest(ctx, step)
    if incident.back is not None and beginning.goes_back:
        data_order.leave_out(ctx, incident.back, step)
        incident = replace(incident, back=None)
    state = ctx.state
    donors = tuple((sender, newcomer) for heal in plan.heals for newcomer in heal.newcomers for sender in heal.senders)
    membership = Membership(state.term, state.generation, plan.mesh, plan.members, step, plan.leaving, donors)
    placement = copies.CopyPlacement()
    nodes = tuple(situation.node_of[worker] for worker in plan.members)
    if mode := ctx.options.copy_mode(plan.mesh):
        placement = copies.place(plan.mesh, copies.failure_places(nodes, situation.domains_of, mode), mode)
    order = Build(
        ctx.cause,
        "",
        state.term,
        state.generation,
        plan.mesh,
        plan.members,
        step,
        beginning.roll_forward,
        plan.heals,
        beginning.fresh,
        beginning.restore,
        beginning.step_back,
        beginning.keep,
        placement.copy_holders,
        placement.parity_groups,
        ctx.options.memory_reliefs[: state.memory.num_reliefs],
        state.corpus,
        state.skips,
        bool(incident.saves_for) and not beginning.goes_back,
        nodes,
    )
    if state.fruitless_builds:
        _free_gpus(ctx, plan, situation)
    senders = {sender for heal in plan.heals for sender in heal.senders}
    for worker in (*plan.members, *(worker for worker in plan.leaving if worker in senders)):
        ctx.send(with_changes(order, worker=worker))  # thousands: `dataclasses.replace` would look at each field
    if beginning.goes_back:
        incident = replace(incident, undone=incident.undone + max(0, state.committed - step))
        ctx.set(committed=step, newest_vote=None, given_up=SnapshotId(step, membership.id))
    ctx.set(last_change=_change(ctx.state, plan, incident, beginning, situation))
    replacements.note_replacement(ctx, incident, plan.mesh, plan.members)
    # An error of the user's code before this build has no meaning after it.
    incident = replace(incident, raised_step=None)
    limit_s = state.options.building_s(restores=beginning.restore is not None)
    ask_again_at = ctx.now + state.options.timeouts.build_s / 2
    ctx.enter(Building(membership, order, incident, ctx.now + limit_s, ask_again_at))
    start = f"; roll forward step {beginning.roll_forward.step}" if beginning.roll_forward else ""
    start += f"; back to the copies of step {step}" if beginning.step_back is not None else ""
    ctx.explain(f"generation {state.generation} at step {step}: {plan.reason} ({plan.promise}){start}")


def _change(
    state: State, plan: policy.Plan, incident: Incident, beginning: Beginning, situation: policy.Situation
) -> Change:
    base, step, forward = incident.base, beginning.step, incident.rolled_forward
    rerun = base is not None and not incident.planned and forward is None and step < end_step(state)
    newcomers = set(plan.newcomers)
    stayed = set(base.members) if base is not None and beginning.fresh else set(plan.members) - newcomers
    return Change(
        term=state.term,
        generation=state.generation,
        mesh=plan.mesh,
        previous_mesh=base.mesh if base else None,
        members=plan.members,
        step=step,
        cause=incident.cause,
        action=plan.action,
        promise=plan.promise,
        reason=plan.reason,
        lost=incident.lost,
        drained=tuple(worker for worker in plan.leaving if worker in situation.draining),
        newcomers=plan.newcomers,
        survivors=tuple(w for w in plan.members if w in stayed) if base else (),
        rolled_forward=forward if beginning.step_back is None else None,
        step_rerun=step if rerun else None,
        planned=bool(incident.planned) and not incident.lost,
        noticed_at=incident.noticed_at,
        restored=beginning.restore,
        steps_undone=incident.undone,
        source=beginning.source,
    )


def _free_gpus(ctx: Transition, plan: policy.Plan, situation: policy.Situation) -> None:
    """After a failed build without a death, send `Standby` again to the spares on the newcomers' nodes.

    If a `Standby` was lost, or an older coordinator stopped before it sent it, a spare still uses a GPU that counts as
    free, and the newcomer would wait for that GPU in every attempt.
    """
    crowded = {situation.node_of[worker] for worker in plan.newcomers} & set(situation.gpus_on)
    placed = set(plan.members)
    for worker in situation.spares:
        if worker not in placed and situation.node_of[worker] in crowded:
            ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))


def _no_commit_reason(state: State, incident: Incident, num_builds: int, step: int) -> str:
    lost = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    first = state.first_cause
    is_known = first.step == step and bool(first.text)
    nobody = "nobody" if is_known and not first.is_symptom else "nobody; look at the links between the nodes"
    return (
        f"the ring was built {num_builds} times at step {step} and no step was committed. "
        f"{f'The first cause: {first.text}. ' if is_known else ''}The last cause: {incident.cause}. "
        f"Lost: {lost or nobody}"
    )


# ---------------------------------------------------------------- forming


def begin_again(ctx: Transition, membership: Membership, incident: Incident | None, why: str) -> None:
    """No live state is left: every member becomes a spare, and the next mesh begins from storage or from the seed.

    A draining member has nothing to hand over any more, and leaves now: it would keep its GPU.
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
    situation = situation_of(ctx.state, Mesh(dp, options.scaling.cp), dp, members=(), holders={}, empty=(), fresh=True)
    plan = policy.plan(situation)
    assert isinstance(plan, policy.Plan), plan
    ctx.set(generation=ctx.state.generation + 1)
    restore = ctx.state.checkpoints[-1] if ctx.state.checkpoints else None
    if restore is not None:
        # Bits are equal only on the mesh that wrote the checkpoint: another one sums in another order.
        action = f"restored from the checkpoint of step {restore.step}"
        promise = "bit-exact" if plan.mesh == restore.mesh else "sample-exact"
        plan = replace(plan, action=action, promise=promise, reason=f"{action}: {plan.mesh}")
    cause = "start" if ctx.state.last_change is None else "fresh start"
    incident = phase.incident or Incident(cause, ctx.now, None, counted=True)
    step = restore.step if restore is not None else 0
    order_build(ctx, plan, incident, Beginning(step, fresh=True, restore=restore), situation)


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


def drop_checkpoint(ctx: Transition, order: Build, event: MemberFailed) -> None:
    """The checkpoint of this build did not verify: the one before it is the newest now."""
    assert order.restore is not None
    folder = order.restore.folder
    ctx.set(
        checkpoints=tuple(checkpoint for checkpoint in ctx.state.checkpoints if checkpoint.folder != folder),
        damaged=tuple(dict.fromkeys([*ctx.state.damaged, folder])),
    )
    ctx.explain(f"{folder} cannot be used: {event.detail}")
