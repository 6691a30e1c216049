"""Recovery, from an incident to the next `Build`: stop members, collect reports, decide the step, place workers.

The next state comes from the live holders of every shard, else from the newest snapshot that the members hold of every
shard, else from the newest checkpoint. Pure, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic_ring.control import forming
from elastic_ring.control.decisions import crash_loop, data_order, memory_ladder, quorum
from elastic_ring.control.forming import Beginning, order_build
from elastic_ring.control.messages import Report, Vote, WorkerLost
from elastic_ring.control.placement import policy
from elastic_ring.control.state import (
    Building,
    Closing,
    FirstCause,
    GoBack,
    Incident,
    LostWorker,
    Membership,
    State,
    expect,
    next_awaited,
)
from elastic_ring.control.transition import Transition


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


def first_cause(state: State) -> str:
    """The cause that first broke the next step off, as text for the end of the run; empty without one."""
    first = state.first_cause
    return f"The first cause: {first.text}. " if first.step == state.committed and first.text else ""


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
    ctx: Transition, membership: Membership, incident: Incident, reports: Mapping[str, Report], target_dp: int
) -> None:
    """All members have reported and none trains: decide the step, place the workers, order the next build."""
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
    situation = forming.situation_of(
        ctx.state,
        base.mesh,
        target_dp,
        members=base.members,
        holders=decided.holders,
        empty=tuple(worker for worker in reports if worker not in decided.holders),
        draining=ctx.state.pool.draining | ({incident.replaces} - {""}),
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
        forming.begin_again(ctx, membership, None, "no step was ever committed: a fresh start")
        return
    # Its result was voted, and applying it raised on every holder: in the step itself, or in the build after it.
    if incident.raised_step == step - 1 and not incident.lost:
        text = f"{ctx.state.user_detail}\nraised in the apply of step {step - 1}, on every holder"
        ctx.end("UserCodeFailed", text, step=step - 1)
        return
    ranks = ", ".join(str(rank) for rank in no_holder.cp_ranks)
    if _step_back(ctx, membership, incident, f"cp_rank {ranks} has no holder", situation, reports):
        return
    lost = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    no_copy = "no copies hold it" if ctx.options.copy_mode(membership.mesh) else "copies are off"
    no_checkpoint = "there is no checkpoint yet"
    if ctx.state.damaged:
        no_checkpoint = f"no checkpoint verifies (damaged: {', '.join(ctx.state.damaged)})"
    ctx.end(
        "ShardLost",
        f"cp_rank {ranks} has no verified holder left after step {ctx.state.committed - 1} was committed, "
        f"{no_copy} and {no_checkpoint}. Lost: {lost or 'nobody'}. Run it again with more "
        "rings (dp) on more nodes, so that no single loss takes every holder of a shard, with copies, or with more "
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
    older = data_order.with_copies_before(back, reports)
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
            forming.begin_again(ctx, membership, incident, why)
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
    phase, scaling = expect(ctx.state, Closing), ctx.options.scaling  # a boundary keeps all its members
    reason = f"{short.num_missing} more worker(s) for {scaling.min_dp} ring(s) of {scaling.cp}"
    if short.num_crowded:
        reason += f", each with a GPU of its own: {short.num_crowded} are there whose nodes have none left"
    if scaling.cp > 1 and scaling.min_dp == 1:  # else fewer rings would do
        reason += "; a ring keeps its cp: to go on without them, stop the run and submit it with a smaller --cp"
    if phase.waiting != reason:
        ctx.edit_phase(waiting=reason, incident=incident)
        ctx.explain(f"every shard is held; waiting for {reason}")
