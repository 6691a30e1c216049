"""Handlers of the phases Running, Closing and Finishing. Pure, no I/O."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import recovery
from elastic_ring.control.capacity import notices, scaling
from elastic_ring.control.decisions import callbacks, corpus, memory_ladder, rollback, stragglers, third_opinion
from elastic_ring.control.messages import (
    CheckpointDue,
    Finalize,
    Finalized,
    MemberFailed,
    Published,
    Report,
    Vote,
)
from elastic_ring.control.state import (
    Closing,
    Finishing,
    Incident,
    LostWorker,
    Membership,
    Running,
    State,
    end_step,
    membership_of,
    next_awaited,
    num_able_to_form,
    num_staying,
    spares,
)
from elastic_ring.control.transition import Transition

RELAX = "a relief of the memory ladder less"
CLIMB = "a relief of the memory ladder more"
GREW = "more of the corpus"
TOLD_CHARS = 300
WRONG = "computed wrongly"
"""Why a worker was lost whose results the others do not agree with."""

# ---------------------------------------------------------------- running


def running_lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running | Finishing)
    gone = tuple(loss for loss in losses if loss.worker in phase.membership.rank_of)
    if gone:
        names = ", ".join(loss.worker for loss in gone)
        incident = recovery.open_incident(ctx, phase.membership, f"{gone[0].reason}: {names}", gone)
        recovery.begin_closing(ctx, phase.membership, incident, f"lost {names}")


def running_member_failed(ctx: Transition, event: MemberFailed) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running | Finishing)
    if is_fatal(ctx, event):
        return
    if event.kind == "device":
        running_lost(ctx, kill_broken(ctx, event))
        return
    if event.accused:
        running_lost(ctx, quarantine(ctx, event))
        return
    if event.kind == "back":
        go_back(ctx, recovery.open_incident(ctx, phase.membership, event.detail), phase.membership, event)
        return
    why = failed_because(event)
    incident = recovery.open_incident(ctx, phase.membership, why, is_symptom=event.kind == "peer")
    if event.kind == "corrupt":
        differing = third_opinion.differs(ctx, phase.membership, incident, event)
        if differing is None:
            return
        incident = differing
    if event.kind == "user":
        incident = replace(incident, raised_step=event.step)
    recovery.begin_closing(ctx, phase.membership, incident, why)


def failed_because(event: MemberFailed) -> str:
    """One line: who failed, how, and the last line of what it said, which of a traceback is the exception."""
    lines = [line.strip() for line in event.detail.splitlines() if line.strip()]
    said = f": {lines[-1][:TOLD_CHARS]}" if lines else ""
    return f"{event.worker} reports a {event.kind} error in step {event.step}{said}"


def go_back(ctx: Transition, incident: Incident, membership: Membership, event: MemberFailed) -> None:
    """Close, to go back on purpose; or end the run where that has been done too often."""
    back = rollback.asked(ctx, event)
    if back is not None:
        why = f"to go back to before step {back.first_step}: {back.why}"
        recovery.begin_closing(ctx, membership, replace(incident, back=back), why)


def kill_broken(ctx: Transition, event: MemberFailed) -> tuple[LostWorker, ...]:
    """Kill a worker whose device failed and count it as lost at once: its state cannot be used."""
    if not ctx.ready_among([event.worker]):
        ctx.explain(f"{event.worker} is gone already")
        return ()
    ctx.kill([event.worker], "device error", written_off=True)
    ctx.explain(f"the device of {event.worker} erred in step {event.step}, so it is killed: {event.detail}")
    return (LostWorker(event.worker, ctx.state.workers[event.worker].node, None, "device error", event.detail),)


def quarantine(ctx: Transition, event: MemberFailed) -> tuple[LostWorker, ...]:
    """Kill the workers that computed wrongly; their nodes are the last to be hired on."""
    losses = []
    for worker in ctx.ready_among(event.accused):
        node = ctx.state.workers[worker].node
        stragglers.avoid(ctx, worker)
        ctx.kill([worker], WRONG, written_off=True)
        ctx.explain(f"{worker} on {node} computed wrongly, so it is killed: {event.detail}")
        losses.append(LostWorker(worker, node, None, WRONG, event.detail))
    return tuple(losses)


def is_fatal(ctx: Transition, event: MemberFailed) -> bool:
    """End the run and return True if the failure would repeat; count an error of the user's code, or climb the memory
    ladder."""
    if event.kind in ("skipped", "spike"):
        ctx.end(
            "TooManySkipped" if event.kind == "skipped" else "LossSpike",
            event.detail or f"too many steps skipped up to step {event.step}",
            step=event.step,
            worker=event.worker,
        )
        return True
    if event.kind == "check":
        ctx.end("RunFailed", event.detail, step=event.step, worker=event.worker, check="ValueError")
        return True
    if event.kind == "storage":
        ends_without_storage(ctx, event)
        return True
    if event.kind == "memory":
        return memory_ladder.climb(ctx, event)
    if event.kind == "user":
        membership = membership_of(ctx.state)
        assert membership is not None
        step = max(event.step, membership.step)  # no member trains, or is built for, an earlier step
        errors = ctx.state.user_errors.again(step)
        ctx.set(user_errors=errors, user_detail=event.detail)
        if errors.count >= ctx.options.run.user_error_limit:
            ctx.end(
                "UserCodeFailed",
                f"{event.detail}\nraised {errors.count} times in step {step}, last on {event.worker}",
                step=step,
                worker=event.worker,
            )
            return True
    return False


def ends_without_storage(ctx: Transition, event: MemberFailed) -> None:
    """The worker has waited in its place. Building the ring again would not bring the storage back."""
    way_out = "submit the run again once that works"
    if isinstance(ctx.phase, Finishing):
        told = (
            f"every step is committed, and the weights are not yet written: {event.detail}; {way_out}: it writes them"
        )
        ctx.end("StorageFailed", told, step=event.step, worker=event.worker, finished="weights not yet written")
    else:
        ctx.end("StorageFailed", f"{event.detail}; {way_out}", step=event.step, worker=event.worker)


def running_published(ctx: Transition, event: Published) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running | Closing | Finishing)
    if event.vote.membership_id != phase.membership.id:
        ctx.explain("stale: vote of an earlier generation")
    elif recovery.learn_vote(ctx, phase.membership, event.vote):
        ctx.explain(f"step {event.vote.step} is committed")
        if isinstance(phase, Running) and ctx.state.committed >= end_step(ctx.state) and not phase.deadline:
            # All members are about to report the end. If a report is lost, no other event would follow.
            ctx.edit_phase(deadline=ctx.now + ctx.options.timeouts.boundary_s)
    else:
        ctx.explain("vote known already")


def running_report(ctx: Transition, event: Report) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running)
    if event.kind == "aborted" or event.worker not in phase.membership.rank_of or event.worker in phase.paused:
        ctx.explain(f"nothing new from {event.worker}")
    else:
        pause(ctx, event)


def pause(ctx: Transition, report: Report) -> None:
    """Record a member that paused at a boundary or at the end; continue when all have."""
    phase = ctx.phase
    if not isinstance(phase, Running):
        return
    paused = phase.paused.having({report.worker: report})
    deadline = ctx.now + ctx.options.timeouts.boundary_s if phase.deadline is None else phase.deadline
    ctx.edit_phase(paused=paused, deadline=deadline)
    ctx.explain(f"{report.worker} is paused at step {report.applied}, {len(paused)} of {len(phase.membership.members)}")
    if len(paused) < len(phase.membership.members):
        return
    steps = {report.applied for report in paused.values()}
    if len(steps) > 1 or any(not r.healthy or r.shard is None for r in paused.values()):
        why = f"members paused at steps {sorted(steps)} or without a shard"
        recovery.begin_closing(ctx, phase.membership, recovery.open_incident(ctx, phase.membership, why), why)
        return
    ctx.commit(report.applied)
    for known in paused.values():
        recovery.learn_vote(ctx, phase.membership, known.last_vote)
    if report.applied >= end_step(ctx.state):
        finish(ctx, phase.membership)
    else:
        _at_boundary(ctx, replace(phase, paused=paused))


def _at_boundary(ctx: Transition, phase: Running) -> None:
    planned = phase.boundary or ("boundary",)
    incident = recovery.open_incident(ctx, phase.membership, " and ".join(planned), planned=planned)
    incident = replace(incident, counted=True)
    ctx.set(generation=ctx.state.generation + 1)
    reports = {worker: phase.paused[worker] for worker in phase.membership.members}
    if ctx.state.memory.wanted:
        memory_ladder.climb_early(ctx)
    elif RELAX in phase.boundary:
        memory_ladder.relax(ctx)
    target_dp = min(max(phase.membership.mesh.dp, possible_dp(ctx.state)), ctx.options.scaling.most_rings)
    recovery.rebuild(ctx, phase.membership, incident, reports, target_dp)


def possible_dp(state: State) -> int:
    """How many rings members and surplus spares could form; `options.scaling.spares` workers stay spares.

    Spares on nodes without a free GPU count, but cannot join a ring.
    """
    phase = state.phase
    assert isinstance(phase, Running)
    num_usable = min(num_staying(state) + len(spares(state)) - state.options.scaling.spares, num_able_to_form(state))
    return max(0, min(state.options.scaling.most_rings, num_usable // state.options.scaling.cp))


def boundary_reasons(state: State) -> tuple[tuple[str, ...], float | None]:
    """The reasons to stop at a boundary now, and the time at which growing becomes one (None: never)."""
    phase, options = state.phase, state.options
    assert isinstance(phase, Running)
    reasons = []
    if notices.leaving_members(state) and notices.can_hand_over(state):
        reasons.append("drain")
    if phase.membership.mesh.dp > options.scaling.most_rings:
        reasons.append("shrink")
    if memory_ladder.may_relax(state, state.committed):
        reasons.append(RELAX)
    if state.memory.wanted:
        reasons.append(CLIMB)
    if corpus.may_switch(state, state.committed):
        reasons.append(GREW)
    dp = possible_dp(state) if phase.membership.mesh.dp < options.scaling.most_rings else 0
    if dp > phase.membership.mesh.dp and scaling.is_worth_it(state, dp):
        return tuple(reasons), scaling.earliest(state)
    return tuple(reasons), None


def awaits_newest(state: State, newest: Vote, now: float) -> bool:
    """Whether a planned change is due that committed steps decide on: a growth, one memory relief less, more of the
    corpus, or giving a step up for a checkpoint. The core must know of the `newest` published step before it."""
    phase = state.phase
    if not isinstance(phase, Running):
        return False
    if state.suspects is not None and newest.step >= state.suspects.step:
        return True
    if phase.save_by is not None and now >= phase.save_by:
        return True
    if phase.boundary:
        return False
    if memory_ladder.may_relax(state, newest.step + 1) or corpus.may_switch(state, newest.step + 1):
        return True
    _, grow_at = boundary_reasons(state)
    return grow_at is not None and now >= grow_at


def settle_running(ctx: Transition) -> None:
    """Request a boundary when there is a reason; abort the step if the boundary is not reached in time."""
    phase = ctx.phase
    assert isinstance(phase, Running)
    if phase.deadline is not None and ctx.now >= phase.deadline:
        _force(ctx, phase)
        return
    third_opinion.settle(ctx)
    callbacks.expire(ctx)
    notices.save_if_alone(ctx)
    phase = ctx.phase
    if not isinstance(phase, Running):
        return
    assert isinstance(phase, Running)
    reasons, grow_at = boundary_reasons(ctx.state)
    if grow_at is not None and ctx.now >= grow_at:
        reasons = (*reasons, "grow")
    new = tuple(reason for reason in reasons if reason not in phase.boundary)
    if not new:
        return
    if not phase.boundary:
        ctx.stop(ctx.ready_among(phase.membership.members), "boundary")
    deadline = ctx.now + ctx.options.timeouts.boundary_s if phase.deadline is None else phase.deadline
    hand_over_by = notices.hand_over_by(ctx.state, ctx.now) if "drain" in new else None
    ctx.edit_phase(boundary=phase.boundary + new, deadline=min(deadline, hand_over_by or deadline))
    ctx.explain(f"requested a boundary: {', '.join(new)}")


def _force(ctx: Transition, phase: Running) -> None:
    why = f"{len(phase.paused)} of {len(phase.membership.members)} members paused in time"
    incident = recovery.open_incident(ctx, phase.membership, why, planned=phase.boundary)
    recovery.begin_closing(ctx, phase.membership, incident, why)


# ---------------------------------------------------------------- closing


def closing_lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    """Add losses to the incident. A dead member's report no longer counts, but the votes in it still do."""
    phase = ctx.phase
    assert isinstance(phase, Closing)
    gone = tuple(loss for loss in losses if loss.worker in phase.membership.part)
    if gone:
        ctx.edit_phase(incident=recovery.add_losses(phase.incident, gone))


def closing_report(ctx: Transition, event: Report) -> None:
    phase = ctx.phase
    assert isinstance(phase, Closing)
    is_part = event.worker in phase.membership.part
    if event.worker in phase.reports or not is_part or not ctx.ready_among((event.worker,)):
        ctx.explain(f"nothing new from {event.worker}")
        return
    reports = phase.reports.having({event.worker: event})
    settled = next_awaited(ctx.state, phase.membership.everyone, reports, phase.num_settled)
    ctx.edit_phase(reports=reports, num_settled=settled)
    ctx.explain(f"{event.worker} reports step {event.applied}, shard {event.shard}")
    for vote in (event.last_vote, event.vote):
        recovery.learn_vote(ctx, phase.membership, vote)
    if not event.healthy:
        node = ctx.state.workers[event.worker].node
        ctx.kill([event.worker], "poisoned device", written_off=True)
        closing_lost(
            ctx, (LostWorker(event.worker, node, None, "poisoned device", "the probe after the abort failed"),)
        )


def expire_closing(ctx: Transition) -> None:
    phase = ctx.phase
    assert isinstance(phase, Closing)
    if ctx.now < phase.deadline - ctx.options.timeouts.report_s / 2 or not recovery.is_any_silent(ctx.state):
        return
    silent = [name for name in ctx.ready_among(phase.membership.everyone) if name not in phase.reports]
    if ctx.now >= phase.deadline:
        ctx.kill(silent, f"did not report within {ctx.options.timeouts.report_s} s")
        ctx.explain(f"silent, so killed: {', '.join(silent)}")
    elif not phase.asked_again:
        ctx.stop(silent, "abort")
        ctx.edit_phase(asked_again=True)
        ctx.explain(f"asked again: {', '.join(silent)}")


# ---------------------------------------------------------------- finishing


def finish(ctx: Transition, membership: Membership) -> None:
    for rank in membership.mesh.ring(0):
        ctx.send(Finalize(ctx.cause, membership.members[rank], ctx.state.term, membership.generation))
    ctx.enter(Finishing(membership, ctx.now + ctx.options.timeouts.finalize_s))
    ctx.explain(f"{_all_committed(ctx.state)}; ring 0 writes the weights")


def finalized(ctx: Transition, event: Finalized) -> None:
    phase = ctx.phase
    assert isinstance(phase, Finishing)
    if event.worker != phase.membership.members[0]:
        ctx.explain(f"{event.worker} is done; global rank 0 has the last word")
        return
    ctx.end("", _all_committed(ctx.state), weights_sha256=event.weights_sha256)


def _all_committed(state: State) -> str:
    stop = state.callbacks.stop
    return f"stopped after {end_step(state)} steps: {stop}" if stop else "all steps committed"


def finishing_member_failed(ctx: Transition, event: MemberFailed) -> None:
    """Retry a failed write of the weights after `backoff_s`: the storage may recover, and the steps are done."""
    if event.kind != "check":
        running_member_failed(ctx, event)
        return
    ctx.edit_phase(error=event.detail, deadline=ctx.now + ctx.options.backoff_s)
    ctx.explain(f"{event.worker} could not write the weights, tried again in {ctx.options.backoff_s:g} s")


def expire_finishing(ctx: Transition) -> None:
    phase = ctx.phase
    assert isinstance(phase, Finishing)
    if ctx.now < phase.deadline:
        return
    failures = ctx.state.finalize_failures + 1
    ctx.set(finalize_failures=failures)
    late = f"the weights were not written within {ctx.options.timeouts.finalize_s} s"
    why = f"the weights could not be written: {phase.error}" if phase.error else late
    if failures >= ctx.options.finalize_limit:
        ctx.end("RunFailed", f"{why}, {failures} times; every step is committed, look at the run folder's storage")
    else:
        recovery.begin_closing(ctx, phase.membership, recovery.open_incident(ctx, phase.membership, why), why)


# ---------------------------------------------------------------- any phase


def checkpoint_due(ctx: Transition, event: CheckpointDue) -> None:
    """Rank 0 agrees with the others on the step."""
    if isinstance(ctx.phase, Running):
        ctx.stop(ctx.phase.membership.members[:1], "save")
    else:
        ctx.explain("no checkpoint outside of steps")
