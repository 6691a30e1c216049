"""Handlers of a coordinator restart: after the journal's replay, ask every worker for its status. Pure, no I/O."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import phases, recovery
from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.decisions import data_order, memory_ladder
from elastic_ring.control.messages import CoordinatorStarted, Hello, MemberFailed, Report, Status
from elastic_ring.control.pool import Versions
from elastic_ring.control.state import (
    Building,
    Closing,
    Ended,
    Forming,
    Idle,
    LostWorker,
    Reconnecting,
    Running,
    Transition,
    expect,
    membership_of,
    next_awaited,
)


def adopt(ctx: Transition, event: CoordinatorStarted) -> None:
    ctx.set(term=event.term, pool_changed_at=ctx.now)
    ctx.enter(Forming(ctx.now, gathers=True))
    ctx.explain(f"coordinator of term {event.term} forms the run")


def restart(ctx: Transition, event: CoordinatorStarted) -> None:
    phase = ctx.phase
    assert not isinstance(phase, Idle | Ended)
    ctx.set(term=event.term, num_lines=event.num_lines)
    _restart_clocks(ctx)
    deadline = ctx.now + ctx.options.timeouts.hello_s
    recipients = tuple(w.worker for w in ctx.state.workers.values() if w.status != "stopping")
    before = phase.before if isinstance(phase, Reconnecting) else phase
    anew = Reconnecting(before, deadline, recipients)
    if isinstance(phase, Reconnecting):
        anew = replace(anew, lost=phase.lost, disturbed=phase.disturbed, back=phase.back)
    ctx.enter(anew)
    for worker in recipients:
        ctx.send(Hello(ctx.cause, worker, event.term))
    ctx.explain(f"coordinator of term {event.term} asks {len(recipients)} worker(s)")


def restart_ended(ctx: Transition, event: CoordinatorStarted) -> None:
    """The run had ended. Whether the commands were carried out is unknown, so send them again."""
    phase = expect(ctx.state, Ended)
    end = replace(phase.end, cause=ctx.cause, term=event.term)
    ctx.set(term=event.term)
    ctx.release(ctx.state.workers)
    ctx.send(end)
    ctx.enter(Ended(end))
    ctx.explain("the run had ended; it ends again")


def _restart_clocks(ctx: Transition) -> None:
    """Restart all deadlines: those of the old coordinator do not fit the new one's clock."""
    options = ctx.options
    workers = {
        name: replace(
            w,
            deadline=ctx.now + (options.timeouts.start_s if w.status == "starting" else options.timeouts.report_s),
            start_deadline=ctx.now + options.timeouts.start_max_s,
        )
        for name, w in ctx.state.workers.items()
    }
    nodes = {
        name: replace(n, backoff_until=ctx.now + options.backoff_s if n.backoff_until else 0.0)
        for name, n in ctx.state.nodes.items()
    }
    change = ctx.state.last_change
    if change is not None and change.resumed_at is not None:
        # If the wall clock was set back meanwhile, `restart_delay_s` after this time must not come too late.
        change = replace(change, resumed_at=min(change.resumed_at, ctx.now))
    moved_at = None if ctx.state.moved_at is None else min(ctx.state.moved_at, ctx.now)
    ctx.state = replace(
        ctx.state, workers=workers, nodes=nodes, pool_changed_at=ctx.now, last_change=change, moved_at=moved_at
    )
    callbacks = ctx.state.callbacks
    if callbacks.awaited is not None:  # the driver has first to find this coordinator
        by = ctx.now + options.timeouts.hello_s + options.timeouts.callback_s
        ctx.set(callbacks=replace(callbacks, deadline=by))


def answered(ctx: Transition, event: Status) -> None:
    phase = expect(ctx.state, Reconnecting)
    if _contradicts(ctx, event):
        return
    if event.worker not in ctx.state.workers or event.worker in phase.answers:
        ctx.explain(f"nothing new from {event.worker}")
        return
    if ctx.state.workers[event.worker].status == "starting":
        late_ready(ctx, event)
    answers = phase.answers.having({event.worker: event})
    settled = next_awaited(ctx.state, phase.recipients, answers, phase.num_settled)
    ctx.edit_phase(answers=answers, num_settled=settled)
    ctx.explain(f"{event.worker} is {event.activity} in generation {event.generation}")


def _contradicts(ctx: Transition, event: Status | MemberFailed | Report) -> bool:
    """Whether a member has a newer generation than the journal, which ends the run: its order and its facts are lost.

    A store's copy of the journal lags. There a new recovery settles who is where, and equal bits are promised no more.
    """
    newest = ctx.state.generation
    if event.generation <= newest:
        return False
    if ctx.options.run.is_remote:
        ctx.set(generation=event.generation, promise="sample-exact")
        return False
    path, num_lines = ctx.options.run.folder / "journal.jsonl", ctx.state.num_lines
    ctx.end(
        "JournalDamaged",
        f"{path} ends after line {num_lines} and knows generation {newest} as the newest, but {event.worker} is "
        f"in generation {event.generation}: lines at its end are missing. Submit the run again: it goes on from its "
        "newest checkpoint",
        line=num_lines,
    )
    return True


def late_ready(ctx: Transition, event: Status) -> None:
    if _contradicts(ctx, event):
        return
    worker = ctx.state.workers.get(event.worker)
    if worker is not None and worker.status == "starting":
        worker_pool.mark_ready(ctx, worker)
    else:
        ctx.explain(f"late answer of {event.worker}")


def lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    phase = expect(ctx.state, Reconnecting)
    membership = membership_of(ctx.state)
    part = membership.part if membership else frozenset()
    ctx.edit_phase(lost=phase.lost + tuple(loss for loss in losses if loss.worker in part))


def disturbed(ctx: Transition, event: MemberFailed | Report) -> None:
    """A member stopped training: note it, so that the reconnect ends in a recovery, which collects new reports."""
    if _contradicts(ctx, event):
        return
    ctx.edit_phase(disturbed=f"{event.worker} sent {type(event).__name__} ({event.kind})")
    ctx.explain(f"{event.worker} does not train any more")
    if not isinstance(event, MemberFailed):
        return
    if event.kind == "device":
        lost(ctx, phases.kill_faulty(ctx, event))
    elif event.kind == "memory":
        memory_ladder.climb(ctx, event)
    elif event.kind == "back":  # the first member of the last build that wants to go back on purpose counts
        phase = expect(ctx.state, Reconnecting)
        before = phase.before
        is_theirs = isinstance(before, Running | Building) and event.generation == before.membership.generation
        if is_theirs and phase.back is None:
            back = data_order.plan_rollback(ctx, event)
            if back is not None:
                ctx.edit_phase(back=back)


def settle(ctx: Transition) -> None:
    phase = expect(ctx.state, Reconnecting)
    if next_awaited(ctx.state, phase.recipients, phase.answers, phase.num_settled) == len(phase.recipients):
        _conclude(ctx, phase)
        return
    if ctx.now < phase.deadline - ctx.options.timeouts.hello_s / 2:
        return
    silent = [worker for worker in ctx.ready_among(ctx.state.workers) if worker not in phase.answers]
    if ctx.now >= phase.deadline:
        ctx.kill(silent, f"did not answer the new coordinator within {ctx.options.timeouts.hello_s} s")
        ctx.explain(f"silent, so killed: {', '.join(silent)}")
        _conclude(ctx, phase)
    elif not phase.asked_again:
        for worker in silent:
            ctx.send(Hello(ctx.cause, worker, ctx.state.term))
        ctx.edit_phase(asked_again=True)
        ctx.explain(f"asked again: {', '.join(silent)}")


def _conclude(ctx: Transition, phase: Reconnecting) -> None:
    before = phase.before
    if isinstance(before, Forming):
        ctx.enter(Forming(ctx.now, incident=before.incident))
        ctx.explain("nothing had been built; forming goes on")
        return
    membership, live = before.membership, set(ctx.ready_among(before.membership.members))
    disturbance = phase.disturbed
    for worker in membership.members if not disturbance else ():
        status = phase.answers.get(worker)
        if worker not in live or status is None:
            disturbance = f"{worker} does not answer"
            break
        if status.activity != "running" or status.generation != membership.generation:
            disturbance = f"{worker} is {status.activity} in generation {status.generation}"
            break
    if isinstance(before, Running) and not disturbance and not phase.lost:
        deadline = ctx.now + ctx.options.timeouts.boundary_s if before.boundary else None
        ctx.enter(replace(before, paused=Versions(), deadline=deadline))
        if before.boundary:
            ctx.stop(membership.members, "boundary")
        ctx.explain(f"all members train on in generation {membership.generation}, undisturbed")
        return
    why = f"coordinator restarted; {disturbance or ', '.join(loss.worker for loss in phase.lost) or 'nothing trained'}"
    open_incident = before.incident if isinstance(before, Building | Closing) else None
    incident = open_incident or recovery.open_incident(ctx, membership, why)
    incident = replace(incident, back=phase.back or incident.back)
    recovery.begin_closing(ctx, membership, recovery.add_losses(incident, phase.lost), why)
