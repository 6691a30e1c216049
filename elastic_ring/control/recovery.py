"""Recovery, from an incident to the next `Build`: stop members, collect reports, decide the step, place workers.

The next state comes from the live holders of every shard, else from the newest snapshot that the members hold of every
shard, else from the newest checkpoint, else from the seed. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic_ring.control.decisions import crash_loop, data_order, memory_ladder, quorum, replacements
from elastic_ring.control.messages import Build, Checkpoint, Report, SnapshotId, Standby, Vote, WorkerLost, with_changes
from elastic_ring.control.placement import copies, policy
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    FirstCause,
    Forming,
    GoBack,
    Incident,
    LostWorker,
    Membership,
    Running,
    State,
    Transition,
    avoided,
    domains_of,
    end_step,
    expect,
    gpus_on,
    next_awaited,
    node_of,
    reserved,
    spares,
)
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
        return self.fresh or self.step_back is not None

    @property
    def source(self) -> str:
        if self.fresh:
            return "checkpoint" if self.restore is not None else "beginning"
        return "copy" if self.step_back is not None else "replica"


def open_incident(
    ctx: Transition,
    membership: Membership,
    cause: str,
    losses: tuple[LostWorker, ...] = (),
    planned: tuple[str, ...] = (),
    *,
    is_symptom: bool = False,
) -> Incident:
    """A new incident of running members, noticed now. `is_symptom`: an exchange failed, which has a cause elsewhere."""
    if not planned:
        text = "; ".join([cause, *(f"{loss.worker} on {loss.node}: {loss.detail}".strip() for loss in losses)])
        learn_first_cause(ctx, text, is_symptom=is_symptom)
    return add_losses(Incident(cause, ctx.now, membership, planned=planned), losses)


def learn_first_cause(ctx: Transition, text: str, *, is_symptom: bool = False) -> None:
    """Keep the first cause that broke the next step off; a symptom of it, like a peer's reset, never replaces it."""
    first = ctx.state.first_cause
    if first.step != ctx.state.committed or (first.is_symptom and not is_symptom):
        ctx.set(first_cause=FirstCause(ctx.state.committed, text, is_symptom))


def add_losses(incident: Incident, losses: tuple[LostWorker, ...]) -> Incident:
    ranks = incident.base.rank_of if incident.base and losses else {}
    ranked = tuple(replace(loss, global_rank=ranks.get(loss.worker)) for loss in losses)
    return replace(incident, lost=incident.lost + ranked)


def learn_cause(ctx: Transition, event: WorkerLost) -> None:
    """Learn the cause of a death that was reported before its cause was known.

    On GPU nodes the agent reports a death when the exit begins; the signal or exit code follows once the kernel has
    freed the GPU's memory. The crash may already be counted.
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
            if incident.counted:  # else the rebuild looks
                memory_ladder.climb_after_deaths(ctx, incident)
    crashes = tuple(replace(crash, deaths=learned(crash.deaths)) for crash in ctx.state.crashes)
    if crashes != ctx.state.crashes:
        ctx.set(crashes=crashes)


def begin_closing(ctx: Transition, membership: Membership, incident: Incident, why: str) -> None:
    """Stop all workers that may hold state; a new generation collects their reports."""
    ctx.set(generation=ctx.state.generation + 1)
    live = ctx.ready_among(membership.everyone)
    ctx.stop(live, "abort")
    ctx.enter(Closing(membership, incident, ctx.now + ctx.options.timeouts.report_s))
    ctx.explain(f"closing generation {membership.generation} as {ctx.state.generation}, {len(live)} to report: {why}")


def learn_vote(ctx: Transition, membership: Membership, vote: Vote | None) -> bool:
    """Record a vote that counts (as in `quorum.decide`), and its step as committed; True if it was new."""
    if vote is None or (vote.step >= membership.step and vote.membership_id != membership.id):
        return False
    newest = ctx.state.newest_vote
    if newest is not None and newest.step >= vote.step:
        return False
    ctx.set(newest_vote=vote)
    ctx.commit(vote.step + 1)
    return True


def is_any_silent(state: State) -> bool:
    phase = expect(state, Closing)
    everyone = phase.membership.everyone
    return next_awaited(state, everyone, phase.reports, phase.num_settled) < len(everyone)


def try_close(ctx: Transition) -> None:
    phase = expect(ctx.state, Closing)
    if is_any_silent(ctx.state) or not phase.membership.part.isdisjoint(ctx.state.pool.dying):
        return
    live = ctx.ready_among(phase.membership.everyone)
    reports = {worker: phase.reports[worker] for worker in live}
    base = phase.incident.base or phase.membership
    rebuild(ctx, phase.membership, phase.incident, reports, base.mesh.dp)


def rebuild(
    ctx: Transition,
    membership: Membership,
    incident: Incident,
    reports: Mapping[str, Report],
    target_dp: int,
    moving: frozenset[str] = frozenset(),
) -> None:
    """All members have reported and none trains: decide the step, place the workers, order the next build. `moving`:
    members that hand over to newcomers in this build, though they do not drain."""
    state = ctx.state
    living = quorum.living(reports, state.given_up)
    decided = quorum.decide(living, state.newest_vote, state.committed, membership.step, membership.id)
    if decided.step > state.committed:
        ctx.set(newest_vote=decided.newest_vote)
        ctx.commit(decided.step)
    if decided.roll_forward is not None:
        incident = replace(incident, rolled_forward=decided.roll_forward.step)
    if not incident.counted:
        incident = replace(incident, counted=True)
        if crash_loop.end_if_crash_loop(ctx, incident, (incident.base or membership).mesh, decided.step):
            return
        memory_ladder.climb_after_deaths(ctx, incident)
    base = incident.base or membership
    is_later = membership is not base and membership.mesh == base.mesh
    situation = situation_of(
        ctx.state,
        base.mesh,
        target_dp,
        members=base.members,
        holders=decided.holders,
        empty=tuple(worker for worker in reports if worker not in decided.holders),
        draining=ctx.state.pool.draining | ({incident.replaces} - {""}) | moving,
        hints={w: rank for w, rank in membership.rank_of.items() if w not in base.rank_of} if is_later else {},
    )
    if incident.back is not None:
        _go_back(ctx, membership, incident, incident.back, situation, reports)
        return
    planned = policy.plan(situation)
    if isinstance(planned, policy.NoHolder):
        _nobody_holds(ctx, membership, incident, planned, decided.step, situation, reports)
    elif isinstance(planned, policy.NotEnoughWorkers):
        _wait(ctx, incident, planned)
    else:
        keep = quorum.safest(reports, base.mesh.cp, state.given_up)
        order_build(ctx, planned, incident, Beginning(decided.step, decided.roll_forward, keep=keep), situation)


def _nobody_holds(
    ctx: Transition,
    membership: Membership,
    incident: Incident,
    no_holder: policy.NoHolder,
    step: int,
    situation: policy.Situation,
    reports: Mapping[str, Report],
) -> None:
    """A shard has no live holder: begin from snapshots, a checkpoint or the seed, or end the run."""
    if step == 0 and ctx.state.committed == 0 and not incident.undone:
        begin_again(ctx, membership, None, "no step was ever committed: a fresh start")
        return
    # Its result was voted, and applying it raised on every holder: in the step itself, or in the build after it.
    if incident.raised_step == step - 1 and not incident.lost:
        text = f"{ctx.state.user_detail}\nraised in the apply of step {step - 1}, on every holder"
        ctx.end("UserCodeFailed", text, step=step - 1)
        return
    ranks = ", ".join(str(rank) for rank in no_holder.cp_ranks)
    why = f"cp_rank {ranks} has no holder"
    if _step_back(ctx, membership, incident, why, situation, reports):
        return
    limit, num_restarts = ctx.options.run.rollback_limit, ctx.state.num_restarts
    if not ctx.state.damaged and (step == 0 or num_restarts < limit):
        if step > 0:  # else it has begun again already, and that build failed
            ctx.set(num_restarts=num_restarts + 1)
            why += f", no copy and no checkpoint: from the beginning, {ctx.state.committed} step(s) undone"
        begin_again(ctx, membership, incident, why)
        return
    lost = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    no_copy = "no copies hold it" if ctx.options.copy_mode(membership.mesh) else "copies are off"
    no_checkpoint = f"there is no checkpoint yet, and the run has begun again {num_restarts} times (rollback_limit)"
    if ctx.state.damaged:
        no_checkpoint = f"no checkpoint verifies (damaged: {', '.join(ctx.state.damaged)})"
    ctx.end(
        "ShardLost",
        f"cp_rank {ranks} has no verified holder left after step {ctx.state.committed - 1} was committed, "
        f"{no_copy} and {no_checkpoint}. Lost: {lost or 'nobody'}. Run it again with more "
        "rings (dp) on more nodes, so that no single failure takes every holder of a shard, with copies, or with more "
        "checkpoints.",
        cp_ranks=ranks,
        step=step,
    )


def _go_back(
    ctx: Transition,
    membership: Membership,
    incident: Incident,
    back: GoBack,
    situation: policy.Situation,
    reports: Mapping[str, Report],
) -> None:
    """Go back on purpose, although every shard may be held: to the newest copies or checkpoint before `back`."""
    ctx.set(checkpoints=data_order.checkpoints_before(back, ctx.state.checkpoints))
    older = {
        worker: replace(report, copies=tuple(copy for copy in report.copies if copy.snapshot.step < back.first_step))
        for worker, report in reports.items()
    }
    if not _step_back(ctx, membership, incident, back.why, situation, older):
        reason = f"no copies and no checkpoint are from before step {back.first_step}"
        data_order.end_without_rollback(ctx, back.last_step, back.why, reason)


def _step_back(
    ctx: Transition,
    membership: Membership,
    incident: Incident,
    why: str,
    situation: policy.Situation,
    reports: Mapping[str, Report],
) -> bool:
    """Give up all live state: begin from the snapshots in `reports`, or from a newer checkpoint. False without both."""
    checkpoint = ctx.state.checkpoints[-1] if ctx.state.checkpoints else None
    snapshots = quorum.newest(reports, membership.mesh.cp, ctx.state.given_up)
    if snapshots is None or (checkpoint is not None and snapshots.snapshot.step < checkpoint.step):
        if checkpoint is not None:
            why = f"{why}: back to the checkpoint of step {checkpoint.step}"
            begin_again(ctx, membership, incident, why)
        return checkpoint is not None
    situation = replace(
        situation,
        holders=snapshots.holders,
        empty=tuple(worker for worker in reports if worker not in snapshots.holders),
        sources=snapshots.sources,
    )
    planned = policy.plan(situation)
    assert not isinstance(planned, policy.NoHolder), "every shard of a restorable snapshot has a holder or a source"
    if isinstance(planned, policy.NotEnoughWorkers):
        _wait(ctx, incident, planned)
    else:
        at = snapshots.snapshot
        keep = quorum.safest(reports, situation.mesh.cp, ctx.state.given_up, up_to=at)
        order_build(ctx, planned, incident, Beginning(at.step, step_back=at, keep=keep), situation)
    return True


def _wait(ctx: Transition, incident: Incident, short: policy.NotEnoughWorkers) -> None:
    phase, scaling = ctx.phase, ctx.options.scaling
    reason = f"{short.num_missing} more worker(s) for {scaling.min_dp} ring(s) of {scaling.cp}"
    if short.num_crowded:
        reason += f", each with a GPU of its own: {short.num_crowded} are there whose nodes have none left"
    if scaling.cp > 1 and scaling.min_dp == 1:  # else fewer rings would do
        reason += "; a ring keeps its cp: to go on without them, stop the run and submit it with a smaller --cp"
    if isinstance(phase, Running):  # a node has fewer GPUs than at the last build
        begin_closing(ctx, phase.membership, incident, f"no mesh at the boundary: {reason}")
        return
    phase = expect(ctx.state, Closing)
    if phase.waiting != reason:
        ctx.edit_phase(waiting=reason, incident=incident)
        ctx.explain(f"every shard is held; waiting for {reason}")


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


# ---------------------------------------------------------------- the next build


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
    if beginning.goes_back:
        differs = incident.back is not None or plan.promise != "bit-exact"
        ctx.set(callbacks=ctx.state.callbacks.gone_back(step, differs=differs))
    if incident.back is not None and beginning.goes_back:
        data_order.leave_out(ctx, incident.back, step)
        incident = replace(incident, back=None)
    if beginning.goes_back:
        incident = replace(incident, undone=incident.undone + max(0, ctx.state.committed - step))
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
        incident.undone,
    )
    if state.fruitless_builds:
        _free_gpus(ctx, plan, situation)
    senders = {sender for heal in plan.heals for sender in heal.senders}
    for worker in (*plan.members, *(worker for worker in plan.leaving if worker in senders)):
        ctx.send(with_changes(order, worker=worker))  # thousands: `dataclasses.replace` would look at each field
    if beginning.goes_back:
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
        f"the ring was built {num_builds} times at step {step} and no new step was committed. "
        f"{f'The first cause: {first.text}. ' if is_known else ''}The last cause: {incident.cause}. "
        f"Lost: {lost or nobody}"
    )
