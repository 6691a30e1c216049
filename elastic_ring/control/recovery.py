"""Recovery, from an incident to the next `Build`: stop members, collect reports, decide the step, place workers.

The only module that turns a quorum and a plan into commands. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic_ring.control import crash_loop, policy, quorum
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    CheckpointsKnown,
    MemberFailed,
    Report,
    Standby,
    Vote,
    WorkerLost,
)
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    Forming,
    Incident,
    LostWorker,
    Membership,
    able_to_form,
    gpus_on,
    node_of,
    spares,
    visibly_starting,
)
from elastic_ring.control.transition import Transition
from elastic_ring.mesh import Mesh


def open_incident(
    ctx: Transition,
    membership: Membership,
    cause: str,
    losses: tuple[LostWorker, ...] = (),
    planned: tuple[str, ...] = (),
) -> Incident:
    """A new incident of running members, noticed now."""
    return add_losses(Incident(cause, ctx.now, membership, planned=planned), losses)


def add_losses(incident: Incident, losses: tuple[LostWorker, ...]) -> Incident:
    members = incident.base.members if incident.base else ()
    ranks = {worker: rank for rank, worker in enumerate(members)} if losses else {}
    ranked = tuple(replace(loss, global_rank=ranks.get(loss.worker)) for loss in losses)
    return replace(incident, lost=incident.lost + ranked)


def learn_cause(ctx: Transition, event: WorkerLost) -> None:
    """What ended a worker whose death was reported before its cause was known.

    On GPU nodes the agent reports a death when the exit begins; the signal or exit code follows once the kernel has
    freed the GPU's memory. The crash may have been counted by then.
    """
    if not event.signal and event.reason != "exited":
        return

    def learned(losses: tuple[LostWorker, ...]) -> tuple[LostWorker, ...]:
        return tuple(
            replace(lost, reason=event.reason, detail=event.detail, signal=event.signal)
            if lost.worker == event.worker and lost.reason in ("died", "hung") and not lost.signal
            else lost
            for lost in losses
        )

    if isinstance(ctx.phase, Closing | Building):
        incident = replace(ctx.phase.incident, lost=learned(ctx.phase.incident.lost))
        if incident != ctx.phase.incident:
            ctx.edit_phase(incident=incident)
            ctx.explain(f"{event.worker} ended by {event.signal or event.reason}")
    crashes = tuple(replace(crash, deaths=learned(crash.deaths)) for crash in ctx.state.crashes)
    if crashes != ctx.state.crashes:
        ctx.set(crashes=crashes)


def begin_closing(ctx: Transition, membership: Membership, incident: Incident, why: str) -> None:
    """Stop all workers that may hold state; a new generation collects their reports."""
    ctx.set(generation=ctx.state.generation + 1)
    live = ctx.ready_among(membership.everyone)
    ctx.stop(live, "abort")
    ctx.enter(Closing(membership, incident, ctx.now + ctx.options.report_s))
    ctx.explain(f"closing generation {membership.generation} as {ctx.state.generation}, {len(live)} to report: {why}")


def learn_vote(ctx: Transition, membership: Membership, vote: Vote | None) -> bool:
    """Record a vote and its step as committed; True if it was new. `quorum.decide` says which votes count."""
    if vote is None or (vote.step >= membership.step and vote.membership_id != membership.id):
        return False
    known = ctx.state.newest_vote
    if known is not None and known.step >= vote.step:
        return False
    ctx.set(newest_vote=vote)
    ctx.commit(vote.step + 1)
    return True


def try_close(ctx: Transition) -> None:
    """Rebuild once every member has reported or is gone."""
    phase = ctx.phase
    assert isinstance(phase, Closing)
    everyone = phase.membership.everyone
    live = ctx.ready_among(everyone)
    if ctx.pending_deaths(everyone) or any(worker not in phase.reports for worker in live):
        return
    reports = {worker: phase.reports[worker] for worker in live}
    base = phase.incident.base or phase.membership
    rebuild(ctx, phase.membership, phase.incident, reports, base.mesh.dp)


def rebuild(
    ctx: Transition, membership: Membership, incident: Incident, reports: Mapping[str, Report], target_dp: int
) -> None:
    """All members have reported and none trains: decide the step, place the workers, order the next build."""
    state = ctx.state
    decided = quorum.decide(reports, state.newest_vote, state.committed, membership.step, membership.id)
    if decided.step > state.committed:
        ctx.set(newest_vote=decided.newest_vote)
        ctx.commit(decided.step)
    if decided.roll_forward is not None:
        incident = replace(incident, rolled_forward=decided.roll_forward.step)
    if not incident.counted:
        incident = replace(incident, counted=True)
        if _is_crash_loop(ctx, incident, (incident.base or membership).mesh, decided.step):
            return
    base = incident.base or membership
    situation = policy.Situation(
        mesh=base.mesh,
        members=base.members,
        holders=decided.holders,
        empty=tuple(worker for worker in reports if worker not in decided.holders),
        spares=spares(ctx.state),
        node_of=node_of(ctx.state),
        target_dp=target_dp,
        min_dp=ctx.options.min_dp,
        draining=frozenset(w.worker for w in ctx.state.workers.values() if w.draining),
        hints=_hints(base, membership),
        gpus_on=gpus_on(ctx.state),
    )
    planned = policy.plan(situation)
    if isinstance(planned, policy.NoHolder):
        _nobody_holds(ctx, membership, incident, planned, decided.step)
    elif isinstance(planned, policy.NotEnoughWorkers):
        _wait(ctx, incident, planned)
    else:
        order_build(ctx, planned, incident, decided.step, decided.roll_forward, situation, fresh=False)


def _hints(base: Membership, membership: Membership) -> dict[str, int]:
    if membership is base or membership.mesh != base.mesh:
        return {}
    placed = set(base.members)
    return {worker: rank for rank, worker in enumerate(membership.members) if worker not in placed}


def _is_crash_loop(ctx: Transition, incident: Incident, mesh: Mesh, step: int) -> bool:
    """End the run and return True if one step's own work has likely killed members too often."""
    crash = crash_loop.crash_of(incident, mesh, step, ctx.options.total_steps)
    if crash is None:
        return False
    known = tuple(before for before in ctx.state.crashes if before.step == crash.step)
    ctx.set(crashes=(*known, crash))
    counted = crash_loop.counted(ctx.state.crashes)
    if len(counted) < ctx.options.crash_loop_limit:
        return False
    if crash.step < ctx.options.total_steps:
        what, look = f"step {crash.step}", f"the batch of step {crash.step} and at the memory it needs"
    else:
        what, look = "writing the weights", "the memory of ring 0's nodes: each rank holds one file of weights (4 GiB)"
    ctx.end(
        "CrashLoop",
        f"{what} killed members in {len(counted)} recoveries, so it is not run once more. Counted: "
        f"{crash_loop.told(counted)}. Look at {look}. The last death: {crash.deaths[0].detail}",
        step=crash.step,
        recoveries=len(counted),
    )
    return True


def _nobody_holds(
    ctx: Transition, membership: Membership, incident: Incident, no_holder: policy.NoHolder, step: int
) -> None:
    if step == 0 and ctx.state.committed == 0:
        _begin_again(ctx, membership, None, "no step was ever committed: a fresh start")
        return
    # Its result was voted, and applying it raised on every holder: in the step itself, or in the build after it.
    if incident.raised_step == step - 1 and not incident.lost:
        told = f"{ctx.state.user_detail}\nraised in the apply of step {step - 1}, on every holder"
        ctx.end("UserCodeFailed", told, step=step - 1)
        return
    ranks = ", ".join(str(rank) for rank in no_holder.cp_ranks)
    if ctx.state.checkpoints:
        newest = ctx.state.checkpoints[-1]
        why = f"cp_rank {ranks} has no holder: back to the checkpoint of step {newest.step}"
        _begin_again(ctx, membership, incident, why)
        return
    lost = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    ctx.end(
        "ShardLost",
        f"cp_rank {ranks} has no verified holder left after step {ctx.state.committed - 1} was committed, and "
        f"{_no_checkpoint(ctx)}. Lost: {lost or 'nobody'}. Run it again with more rings (dp) on more nodes, so that no "
        "single loss takes every holder of a shard, or with checkpoints more often.",
        cp_ranks=ranks,
        step=step,
    )


def _no_checkpoint(ctx: Transition) -> str:
    if ctx.state.damaged:
        return f"no checkpoint verifies (damaged: {', '.join(ctx.state.damaged)})"
    return "there is no checkpoint yet"


def _begin_again(ctx: Transition, membership: Membership, incident: Incident | None, why: str) -> None:
    """No live state is left: every member becomes a spare, and the next mesh begins from storage or from the seed."""
    for worker in ctx.ready_among(membership.everyone):
        ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))
    ctx.enter(Forming(ctx.now, incident=incident))
    ctx.explain(why)


def checkpoints_known(ctx: Transition, event: CheckpointsKnown) -> None:
    """Take over the list. While a build goes back to a checkpoint, later ones are of steps that it gave up."""
    found = tuple(checkpoint for checkpoint in event.checkpoints if checkpoint.folder not in ctx.state.damaged)
    if isinstance(ctx.phase, Building) and ctx.phase.order.restore is not None:
        found = tuple(checkpoint for checkpoint in found if checkpoint.step <= ctx.phase.order.step)
    ctx.set(checkpoints=found)
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


def _wait(ctx: Transition, incident: Incident, short: policy.NotEnoughWorkers) -> None:
    phase = ctx.phase
    assert isinstance(phase, Closing), "a boundary keeps all its members, so it cannot be short of them"
    reason = f"{short.num_missing} more worker(s) for {ctx.options.min_dp} ring(s) of {ctx.options.cp}"
    if short.num_crowded:
        reason += f", each with a GPU of its own: {short.num_crowded} are there whose nodes have none left"
    if phase.waiting != reason:
        ctx.edit_phase(waiting=reason, incident=incident)
        ctx.explain(f"every shard is held; waiting for {reason}")


def order_build(
    ctx: Transition,
    plan: policy.Plan,
    incident: Incident,
    step: int,
    roll_forward: Vote | None,
    situation: policy.Situation,
    fresh: bool,
    restore: Checkpoint | None = None,
) -> None:
    rounds = ctx.state.rounds.again(step)
    ctx.set(rounds=rounds)
    if rounds.count > ctx.options.round_limit:
        ctx.end("RunFailed", _why_no_commit(incident, rounds.count, step), step=step)
        return
    state = ctx.state
    donors = tuple((heal.donor, newcomer) for heal in plan.heals for newcomer in heal.newcomers)
    membership = Membership(state.term, state.generation, plan.mesh, plan.members, step, plan.leaving, donors)

    def order(worker: str) -> Build:  # thousands are made: `dataclasses.replace` looks at every field of each
        return Build(ctx.cause, worker, state.term, state.generation, plan.mesh, plan.members, step, roll_forward,
                     plan.heals, fresh, restore)  # fmt: skip

    _free_gpus(ctx, plan, situation)
    leaving_donors = {heal.donor for heal in plan.heals} & set(plan.leaving)
    for worker in (*plan.members, *(worker for worker in plan.leaving if worker in leaving_donors)):
        ctx.send(order(worker))
    base = incident.base
    draining = situation.draining
    newcomers = set(plan.newcomers)
    stayed = set(base.members) if base is not None and fresh else set(plan.members) - newcomers
    if restore is not None:
        incident = replace(incident, undone=incident.undone + max(0, state.committed - restore.step))
        ctx.set(committed=restore.step, newest_vote=None)
    rerun = base is not None and not incident.planned and incident.rolled_forward is None
    ctx.set(
        last_change=Change(
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
            drained=tuple(worker for worker in plan.leaving if worker in draining),
            newcomers=plan.newcomers,
            survivors=tuple(w for w in plan.members if w in stayed) if base else (),
            rolled_forward=incident.rolled_forward,
            step_rerun=step if rerun and step < state.options.total_steps else None,
            planned=bool(incident.planned) and not incident.lost,
            noticed_at=incident.noticed_at,
            closed_at=ctx.now,
            restored=restore,
            steps_undone=incident.undone,
        )
    )
    # What the user's code raised before this build says nothing about what follows it.
    incident = replace(incident, raised_step=None)
    limit_s = state.options.build_s + (state.options.restore_s if restore is not None else 0.0)
    ask_again_at = ctx.now + state.options.build_s / 2
    ctx.enter(Building(membership, order(""), incident, ctx.now + limit_s, ask_again_at))
    how = f"; roll forward step {roll_forward.step}" if roll_forward else ""
    ctx.explain(f"generation {state.generation} at step {step}: {plan.reason} ({plan.promise}){how}")


def _free_gpus(ctx: Transition, plan: policy.Plan, situation: policy.Situation) -> None:
    """After a failed build without a death, send `Standby` again to the spares on the newcomers' nodes.

    If a `Standby` was lost, or an older coordinator stopped before it sent it, a spare still uses a GPU that counts as
    free, and the newcomer would wait for that GPU in every attempt.
    """
    if not ctx.state.fruitless_builds:
        return
    placed = set(plan.members)
    crowded = {situation.node_of[worker] for worker in plan.newcomers} & set(situation.gpus_on)
    for worker in situation.spares:
        if worker not in placed and situation.node_of[worker] in crowded:
            ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))


def _why_no_commit(incident: Incident, num_builds: int, step: int) -> str:
    told = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    return (
        f"the ring was built {num_builds} times at step {step} and no step was committed. The last cause: "
        f"{incident.cause}. Lost: {told or 'nobody; look at the links between the nodes'}"
    )


def try_form(ctx: Transition) -> None:
    """Begin from the newest checkpoint, or from the seed, as soon as `dp` rings and the spares are ready.

    After `start_s`, `min_dp` rings suffice if no worker shows progress in starting; after an incident as soon as nobody
    is starting.
    """
    phase, options = ctx.phase, ctx.options
    assert isinstance(phase, Forming)
    ready = spares(ctx.state)
    dp = min(options.dp, len(able_to_form(ctx.state)) // options.cp)
    if dp == options.dp and phase.full_since is None:
        ctx.edit_phase(full_since=ctx.now)
    elif dp < options.dp and phase.full_since is not None:
        ctx.edit_phase(full_since=None)
    phase = ctx.phase
    assert isinstance(phase, Forming)
    if phase.full_since is not None:
        starting = any(worker.status == "starting" for worker in ctx.state.workers.values())
        complete = len(ready) >= options.dp * options.cp + options.spares or not starting
        if not complete and ctx.now < phase.full_since + options.spare_grace_s:
            return
    elif dp < options.min_dp or not _nobody_comes(ctx, phase):
        return
    situation = policy.Situation(
        mesh=Mesh(dp, options.cp),
        members=(),
        holders={},
        empty=(),
        spares=ready,
        node_of=node_of(ctx.state),
        target_dp=dp,
        min_dp=options.min_dp,
        fresh=True,
        gpus_on=gpus_on(ctx.state),
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
    order_build(ctx, plan, incident, step, None, situation, fresh=True, restore=restore)


def _nobody_comes(ctx: Transition, phase: Forming) -> bool:
    """Whether waiting for more workers has no point."""
    if phase.incident is not None and not any(w.status == "starting" for w in ctx.state.workers.values()):
        return ctx.now >= phase.since + ctx.options.spare_grace_s
    return ctx.now >= phase.since + ctx.options.start_s and not visibly_starting(ctx.state)


def _restoring(plan: policy.Plan, restore: Checkpoint) -> policy.Plan:
    """Bits are equal on the mesh that wrote the checkpoint only: another one sums in another order."""
    action = f"restored from the checkpoint of step {restore.step}"
    promise = "bit-exact" if plan.mesh == restore.mesh else "sample-exact"
    return replace(plan, action=action, promise=promise, reason=f"{action}: {plan.mesh}")
