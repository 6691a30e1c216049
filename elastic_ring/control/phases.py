"""Handlers of the phases Building (`Build` until all members resumed), Running, Closing and Finishing. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import recovery, spreading
from elastic_ring.control.capacity import scaling
from elastic_ring.control.decisions import data_order, memory_ladder, replacements
from elastic_ring.control.messages import (
    Answer,
    BuildFailed,
    CallbacksAnswered,
    CallbacksAwaited,
    CheckpointDue,
    Finalize,
    Finalized,
    MemberFailed,
    Published,
    Report,
    Resumed,
    Standby,
    Vote,
)
from elastic_ring.control.pool import Versions
from elastic_ring.control.state import (
    Building,
    Closing,
    Finishing,
    Incident,
    LostWorker,
    Membership,
    Running,
    State,
    Transition,
    end_step,
    expect,
    membership_of,
    next_awaited,
    num_able_to_form,
    num_staying,
    spares,
)

RELAX, CLIMB, GREW = "a relief of the memory ladder less", "a relief of the memory ladder more", "more of the corpus"
MAX_REASON_CHARS = 300
WRONG = "computed wrongly"
"""Loss reason of a worker whose results differ from the majority's."""

# ---------------------------------------------------------------- building


def resumed(ctx: Transition, event: Resumed) -> None:
    phase = expect(ctx.state, Building)
    if event.worker not in phase.membership.rank_of or event.worker in phase.resumed:
        ctx.explain(f"{event.worker} has no need to resume")
        return
    ctx.edit_phase(resumed=phase.resumed.having({event.worker: True}))
    ctx.explain(f"{event.worker} resumed")
    complete_if_all(ctx)


def paused_early(ctx: Transition, event: Report) -> None:
    """A `Report` of a paused member implies that it resumed before; its `Resumed` is late or lost."""
    phase = expect(ctx.state, Building)
    if event.kind == "aborted" or event.worker not in phase.membership.rank_of:
        ctx.explain(f"late answer of {event.worker} to the stop before this build")
        return
    paused = phase.paused.having({event.worker: event})
    ctx.edit_phase(resumed=phase.resumed.having({event.worker: True}), paused=paused)
    ctx.explain(f"{event.worker} resumed and is paused again")
    complete_if_all(ctx)


def building_published(ctx: Transition, event: Published) -> None:
    """A committed vote of this generation implies that all members resumed, since each of them must take part."""
    phase = expect(ctx.state, Building)
    if event.vote.membership_id != phase.membership.id or event.vote.step < phase.membership.step:
        ctx.explain("stale: vote of an earlier generation")
        return
    recovery.learn_vote(ctx, phase.membership, event.vote)
    ctx.edit_phase(resumed=Versions(dict.fromkeys(phase.membership.members, True)))
    ctx.explain(f"step {event.vote.step} is committed, so everyone has resumed")
    complete_if_all(ctx)


def complete_if_all(ctx: Transition) -> None:
    phase = expect(ctx.state, Building)
    if len(phase.resumed) < len(phase.membership.members):
        return
    change = ctx.state.last_change
    assert change is not None
    assert change.generation == phase.membership.generation
    weaker = ctx.state.promise if change.promise == "bit-exact" else change.promise
    ctx.set(
        last_change=replace(change, resumed_at=ctx.now), promise=weaker, fruitless_builds=0, pool_changed_at=ctx.now
    )
    if change.previous_mesh is not None and change.previous_mesh != change.mesh:
        ctx.set(resized_at=ctx.now)
    leaving = ctx.ready_among(phase.membership.leaving)
    draining = [worker for worker in leaving if ctx.state.workers[worker].draining]
    membership = replace(phase.membership, leaving=(), donors=())
    ctx.enter(Running(membership, saved_for=phase.incident.saves_for))
    ctx.explain(f"generation {phase.membership.generation} runs")
    for worker in leaving:
        if worker not in draining and (ctx.state.suspects is None or worker != ctx.state.suspects.out):
            ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))
    if draining:
        ctx.release(draining)
        ctx.explain(f"handed over and leaving: {', '.join(draining)}")
    for report in phase.paused.values():
        pause(ctx, report)


def building_lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    """The loss of a member, or of a donor that still sends, ends this attempt; other losses only shrink the pool."""
    phase = expect(ctx.state, Building)
    donors = {donor for donor, newcomer in phase.membership.donors if newcomer not in phase.resumed}
    needed = tuple(loss for loss in losses if loss.worker in phase.membership.rank_of or loss.worker in donors)
    if needed:
        ctx.set(fruitless_builds=0)
        give_up_build(ctx, f"lost {', '.join(loss.worker for loss in needed)}", needed)


def build_failed(ctx: Transition, event: BuildFailed) -> None:
    why = f"{event.worker} could not build: {event.detail}"
    recovery.learn_first_cause(ctx, why, is_symptom=True)
    _retry(ctx, why)


def building_member_failed(ctx: Transition, event: MemberFailed) -> None:
    phase = expect(ctx.state, Building)
    if end_if_fatal(ctx, event):
        return
    if event.kind == "device" or event.accused:
        building_lost(ctx, kill_faulty(ctx, event))
        return
    if event.kind == "back":
        go_back(ctx, phase.incident, phase.membership, event)
        return
    if event.kind == "checkpoint" and phase.order.restore is not None:
        folder = phase.order.restore.folder  # it did not verify: the checkpoint before it is the newest now
        checkpoints = tuple(checkpoint for checkpoint in ctx.state.checkpoints if checkpoint.folder != folder)
        ctx.set(checkpoints=checkpoints, damaged=tuple(dict.fromkeys([*ctx.state.damaged, folder])))
        ctx.explain(f"{folder} cannot be used: {event.detail}")
        give_up_build(ctx, f"{event.worker} cannot use the checkpoint of step {event.step}")
        return
    why = failure_line(event)
    recovery.learn_first_cause(ctx, why, is_symptom=event.kind == "peer")
    if event.kind == "user":
        forward = phase.order.roll_forward
        if forward is not None:  # this build applies it, which may have raised
            ctx.edit_phase(incident=replace(phase.incident, raised_step=forward.step))
    if event.kind in ("user", "memory"):  # both have limits of their own
        give_up_build(ctx, why)
    else:
        _retry(ctx, why)


def expire_building(ctx: Transition) -> None:
    """Send the order again at `ask_again_at`. At the deadline give up this attempt.

    One stuck member blocks all others in the rendezvous, so a missing answer does not show which one is stuck. A silent
    member is killed here only if every shard has another member that resumed. A stuck member does not answer the
    `Stop` that follows, and is killed then.
    """
    phase = expect(ctx.state, Building)
    if ctx.now < min(phase.deadline, phase.ask_again_at):
        return
    silent = [worker for worker in phase.membership.members if worker not in phase.resumed]
    if ctx.now >= phase.deadline:
        answered = {
            rank % phase.membership.mesh.cp for rank, w in enumerate(phase.membership.members) if w in phase.resumed
        }
        limit_s = ctx.options.building_s(restores=phase.order.restore is not None)
        if len(answered) == phase.membership.mesh.cp:
            ctx.kill(ctx.ready_among(silent), f"did not resume within {limit_s} s")
        _retry(ctx, f"{len(silent)} member(s) did not resume within {limit_s} s")
    elif not phase.asked_again:
        for worker in ctx.ready_among(silent):
            ctx.send(replace(phase.order, worker=worker))
        ctx.edit_phase(asked_again=True)
        ctx.explain(f"build ordered once more from {len(silent)} silent member(s)")


def _retry(ctx: Transition, why: str) -> None:
    fruitless = ctx.state.fruitless_builds + 1
    ctx.set(fruitless_builds=fruitless)
    if fruitless >= ctx.options.build_failure_limit:
        first = ctx.state.first_cause
        begun = f"The first cause: {first.text}. " if first.step == ctx.state.committed and first.text else ""
        attempts = f"the ring could not be closed in {fruitless} attempts, though nobody died"
        ctx.end("RunFailed", f"{attempts}. {begun}The last: {why}")
    else:
        give_up_build(ctx, why)


def give_up_build(ctx: Transition, why: str, losses: tuple[LostWorker, ...] = ()) -> None:
    phase = expect(ctx.state, Building)
    recovery.begin_closing(ctx, phase.membership, recovery.add_losses(phase.incident, losses), why)


# ---------------------------------------------------------------- running


def running_lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running | Finishing)
    members = tuple(loss for loss in losses if loss.worker in phase.membership.rank_of)
    if members:
        names = ", ".join(loss.worker for loss in members)
        incident = recovery.open_incident(ctx, phase.membership, f"{members[0].reason}: {names}", members)
        recovery.begin_closing(ctx, phase.membership, incident, f"lost {names}")


def running_member_failed(ctx: Transition, event: MemberFailed) -> None:
    phase = ctx.phase
    assert isinstance(phase, Running | Finishing)
    if end_if_fatal(ctx, event):
        return
    if event.kind == "device" or event.accused:
        running_lost(ctx, kill_faulty(ctx, event))
        return
    if event.kind == "back":
        go_back(ctx, recovery.open_incident(ctx, phase.membership, event.detail), phase.membership, event)
        return
    why = failure_line(event)
    incident = recovery.open_incident(ctx, phase.membership, why, is_symptom=event.kind == "peer")
    if event.kind == "corrupt":
        next_attempt = replacements.narrow_suspects(ctx, phase.membership, incident, event)
        if next_attempt is None:
            return
        incident = next_attempt
    if event.kind == "user":
        incident = replace(incident, raised_step=event.step)
    recovery.begin_closing(ctx, phase.membership, incident, why)


def failure_line(event: MemberFailed) -> str:
    """One line: worker, kind of error, and the last line of its detail, which of a traceback is the exception."""
    lines = [line.strip() for line in event.detail.splitlines() if line.strip()]
    detail = f": {lines[-1][:MAX_REASON_CHARS]}" if lines else ""
    return f"{event.worker} reports a {event.kind} error in step {event.step}{detail}"


def go_back(ctx: Transition, incident: Incident, membership: Membership, event: MemberFailed) -> None:
    back = data_order.plan_rollback(ctx, event)
    if back is not None:
        why = f"to go back to before step {back.first_step}: {back.why}"
        recovery.begin_closing(ctx, membership, replace(incident, back=back), why)


def kill_faulty(ctx: Transition, event: MemberFailed) -> tuple[LostWorker, ...]:
    """Kill workers whose state cannot be used, and count them as lost at once: the accused, whose nodes are avoided
    from now on, or the sender, whose device failed."""
    losses = []
    for worker in ctx.ready_among(event.accused or [event.worker]):
        node = ctx.state.workers[worker].node
        if event.accused:
            replacements.avoid_node(ctx, worker)
            why, text = WRONG, f"{worker} on {node} computed wrongly, so it is killed: {event.detail}"
        else:
            why = "device error"
            text = f"the device of {worker} erred in step {event.step}, so it is killed: {event.detail}"
        ctx.kill([worker], why, written_off=True)
        ctx.explain(text)
        losses.append(LostWorker(worker, node, None, why, event.detail))
    if not losses:
        ctx.explain(f"{', '.join(event.accused) or event.worker} is gone already")
    return tuple(losses)


def end_if_fatal(ctx: Transition, event: MemberFailed) -> bool:
    """End the run and return True if the failure would repeat; count an error of the user's code, or climb the memory
    ladder."""
    place = {"step": event.step, "worker": event.worker}
    match event.kind:
        case "skipped" | "spike":
            error = "TooManySkipped" if event.kind == "skipped" else "LossSpike"
            ctx.end(error, event.detail or f"too many steps skipped up to step {event.step}", **place)
        case "check":
            ctx.end("RunFailed", event.detail, **place, check="ValueError")
        case "storage":  # the worker has waited in its place: building the ring again would not bring the storage back
            way_out = f"{event.detail}; submit the run again once that works"
            if isinstance(ctx.phase, Finishing):
                text = f"every step is committed, and the weights are not yet written: {way_out}: it writes them"
                ctx.end("StorageFailed", text, **place, finished="weights not yet written")
            else:
                ctx.end("StorageFailed", way_out, **place)
        case "memory":
            return memory_ladder.climb(ctx, event)
        case "user":
            membership = membership_of(ctx.state)
            assert membership is not None
            step = max(event.step, membership.step)  # no member trains, or is built for, an earlier step
            errors = ctx.state.user_errors.again(step)
            ctx.set(user_errors=errors, user_detail=event.detail)
            if errors.count < ctx.options.run.user_error_limit:
                return False
            raised = f"raised {errors.count} times in step {step}, last on {event.worker}"
            ctx.end("UserCodeFailed", f"{event.detail}\n{raised}", step=step, worker=event.worker)
        case _:
            return False
    return True


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
    phase = expect(ctx.state, Running)
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
    for paused_report in paused.values():
        recovery.learn_vote(ctx, phase.membership, paused_report.last_vote)
    if report.applied >= end_step(ctx.state):
        membership = phase.membership
        for rank in membership.mesh.ring(0):
            ctx.send(Finalize(ctx.cause, membership.members[rank], ctx.state.term, membership.generation))
        ctx.enter(Finishing(membership, ctx.now + ctx.options.timeouts.finalize_s))
        ctx.explain(f"{_all_committed(ctx.state)}; ring 0 writes the weights")
        return
    planned = phase.boundary or ("boundary",)
    incident = recovery.open_incident(ctx, phase.membership, " and ".join(planned), planned=planned)
    ctx.set(generation=ctx.state.generation + 1)
    reports = {worker: paused[worker] for worker in phase.membership.members}
    if ctx.state.memory.pressure:
        memory_ladder.climb_early(ctx)
    elif RELAX in phase.boundary:
        memory_ladder.relax(ctx)
    moving = spreading.begin_move(ctx, phase.membership) if spreading.SPREAD in phase.boundary else frozenset[str]()
    target_dp = min(max(phase.membership.mesh.dp, possible_dp(ctx.state)), ctx.options.scaling.most_rings)
    recovery.rebuild(ctx, phase.membership, replace(incident, counted=True), reports, target_dp, moving)


def possible_dp(state: State) -> int:
    """How many rings members and surplus spares could form; `options.scaling.spares` workers stay spares.

    Spares on nodes without a free GPU count, but cannot join a ring.
    """
    num_usable = min(num_staying(state) + len(spares(state)) - state.options.scaling.spares, num_able_to_form(state))
    return max(0, min(state.options.scaling.most_rings, num_usable // state.options.scaling.cp))


def boundary_reasons(state: State) -> tuple[tuple[str, ...], float | None]:
    """The reasons to stop at a boundary now, and the time at which growing becomes one (None: never)."""
    phase, options = expect(state, Running), state.options
    reasons = []
    if scaling.leaving_members(state) and scaling.can_hand_over(state):
        reasons.append("drain")
    if phase.membership.mesh.dp > options.scaling.most_rings:
        reasons.append("shrink")
    if memory_ladder.may_relax(state, state.committed):
        reasons.append(RELAX)
    if state.memory.pressure:
        reasons.append(CLIMB)
    if data_order.may_switch(state, state.committed):
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
    if memory_ladder.may_relax(state, newest.step + 1) or data_order.may_switch(state, newest.step + 1):
        return True
    _, grow_at = boundary_reasons(state)
    return grow_at is not None and now >= grow_at


def settle_running(ctx: Transition) -> None:
    """Request a boundary when there is a reason; abort the step if the boundary is not reached in time."""
    phase = expect(ctx.state, Running)
    if phase.deadline is not None and ctx.now >= phase.deadline:
        why = f"{len(phase.paused)} of {len(phase.membership.members)} members paused in time"
        if spreading.SPREAD in phase.boundary:
            spreading.give_up(ctx)
        incident = recovery.open_incident(ctx, phase.membership, why, planned=phase.boundary)
        recovery.begin_closing(ctx, phase.membership, incident, why)
        return
    replacements.settle_suspects(ctx)
    expire_callbacks(ctx)
    save_if_alone(ctx)
    if not isinstance(ctx.phase, Running):
        return
    phase = ctx.phase
    reasons, grow_at = boundary_reasons(ctx.state)
    if grow_at is not None and ctx.now >= grow_at:
        reasons = (*reasons, "grow")
    elif grow_at is None and not reasons and not phase.boundary and spreading.may_move(ctx):
        reasons = (spreading.SPREAD,)
    new = tuple(reason for reason in reasons if reason not in phase.boundary)
    if not new:
        return
    if not phase.boundary:
        ctx.stop(ctx.ready_among(phase.membership.members), "boundary")
    deadline = ctx.now + ctx.options.timeouts.boundary_s if phase.deadline is None else phase.deadline
    hand_over_by = scaling.hand_over_by(ctx.state, ctx.now) if "drain" in new else None
    ctx.edit_phase(boundary=phase.boundary + new, deadline=min(deadline, hand_over_by or deadline))
    ctx.explain(f"requested a boundary: {', '.join(new)}")


def save_if_alone(ctx: Transition) -> None:
    """If members leave that nobody can replace, request a checkpoint after the step under way, once for each node; give
    that step up where it does not end in time."""
    phase = expect(ctx.state, Running)
    nodes = frozenset(ctx.state.workers[name].node for name in scaling.leaving_members(ctx.state)) - phase.saved_for
    if nodes and not scaling.can_hand_over(ctx.state):
        ctx.stop(ctx.ready_among(phase.membership.members), "save")
        by = scaling.save_by(ctx.state, ctx.now) if ctx.options.run.checkpoint_config.is_on else None
        ctx.edit_phase(saved_for=phase.saved_for | nodes, save_by=by, save_after=ctx.state.committed)
        ctx.explain(f"too few workers without node {', '.join(sorted(nodes))}: requests a checkpoint")
    phase = expect(ctx.state, Running)
    if phase.save_by is not None and ctx.state.committed > phase.save_after:
        ctx.edit_phase(save_by=None)  # the checkpoint is being written
    elif phase.save_by is not None and ctx.now >= phase.save_by:
        why = f"the step under way does not end before node {', '.join(sorted(phase.saved_for))} leaves"
        incident = recovery.open_incident(ctx, phase.membership, why, planned=("save",))
        incident = replace(incident, counted=True, saves_for=phase.saved_for)
        recovery.begin_closing(ctx, phase.membership, incident, f"{why}: it is given up for a checkpoint")


# ---------------------------------------------------------------- the driver's callbacks
# They ask to stop the run or for a checkpoint, which takes effect at a validation. After it the members wait,
# `callback_s` at most, until the driver has delivered all earlier events to its callbacks. The core journals the answer
# before any member gets it: a step that runs again, after a lost worker or coordinator, gets the same answer.


def callbacks_awaited(ctx: Transition, event: CallbacksAwaited) -> None:
    """The members wait after `event.step` steps; each build makes them ask again."""
    callbacks = ctx.state.callbacks
    if callbacks.answered is not None and event.step <= callbacks.answered.step:
        _send_answer(ctx, event.step)
    elif callbacks.awaited == event.step:
        ctx.explain(f"the answer of step {event.step} is waited for already")
    else:
        ctx.set(callbacks=replace(callbacks, awaited=event.step, deadline=ctx.now + ctx.options.timeouts.callback_s))
        ctx.explain(f"the members wait at step {event.step} for callbacks")


def callbacks_answered(ctx: Transition, event: CallbacksAnswered) -> None:
    callbacks = ctx.state.callbacks
    if callbacks.awaited != event.step or callbacks.stop:
        ctx.explain(f"nobody waits for an answer at step {event.step}")
        return
    kept = event.step if event.keeps else callbacks.kept
    ctx.set(callbacks=replace(callbacks, awaited=None, answered=event, kept=kept))
    ctx.explain(f"callbacks at step {event.step}: {f'stop, {event.stop}' if event.stop else 'go on'}")
    _send_answer(ctx, event.step)


def is_newest_answer(state: State, event: CallbacksAnswered) -> bool:
    """Whether the event, or an equal one, is the newest answer: Ray repeats a call whose coordinator died
    after it had journalled it."""
    answer = state.callbacks.answered
    return answer is not None and replace(answer, cause=event.cause) == event


def expire_callbacks(ctx: Transition) -> None:
    """At the deadline training goes on without an answer; a late one takes effect at the next validation."""
    callbacks = ctx.state.callbacks
    if callbacks.awaited is not None and ctx.now >= callbacks.deadline:
        callbacks_answered(ctx, CallbacksAnswered(ctx.cause, callbacks.awaited))
        ctx.explain(f"no answer within {ctx.options.timeouts.callback_s:g} s")


def _send_answer(ctx: Transition, step: int) -> None:
    membership, answer = membership_of(ctx.state), ctx.state.callbacks.answered
    assert answer is not None
    is_newest = step == answer.step
    stops, saves = is_newest and bool(answer.stop), (is_newest and answer.saves) or step == ctx.state.callbacks.kept
    for worker in ctx.ready_among(membership.members) if membership is not None else ():
        ctx.send(Answer(ctx.cause, worker, ctx.state.term, ctx.state.generation, step, stops=stops, saves=saves))


# ---------------------------------------------------------------- closing


def closing_lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    """Add losses to the incident. A dead member's report no longer counts, but the votes in it still do."""
    phase = expect(ctx.state, Closing)
    members = tuple(loss for loss in losses if loss.worker in phase.membership.part)
    if members:
        ctx.edit_phase(incident=recovery.add_losses(phase.incident, members))


def closing_report(ctx: Transition, event: Report) -> None:
    phase = expect(ctx.state, Closing)
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
    phase = expect(ctx.state, Closing)
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


def finalized(ctx: Transition, event: Finalized) -> None:
    phase = expect(ctx.state, Finishing)
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
    phase = expect(ctx.state, Finishing)
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
    """Request a checkpoint of rank 0, which agrees with the others on the step; or give the step under way up."""
    if isinstance(ctx.phase, Running) and event.at_once:
        why = "the step under way does not end before the run is to be over"
        incident = recovery.open_incident(ctx, ctx.phase.membership, why, planned=("save",))
        incident = replace(incident, counted=True, saves_for=frozenset(("the run's end",)))
        recovery.begin_closing(ctx, ctx.phase.membership, incident, f"{why}: it is given up for a checkpoint")
    elif isinstance(ctx.phase, Running):
        ctx.stop(ctx.phase.membership.members[:1], "save")
    else:
        ctx.explain("no checkpoint outside of steps")
