"""Handlers of the phase Building: from the `Build` command until every member has sent `Resumed`. Pure, no I/O."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import forming, phases, recovery
from elastic_ring.control.messages import BuildFailed, MemberFailed, Published, Report, Resumed, Standby
from elastic_ring.control.pool import Versions
from elastic_ring.control.state import Building, LostWorker, Running, expect
from elastic_ring.control.transition import Transition


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


def published(ctx: Transition, event: Published) -> None:
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
        phases.pause(ctx, report)


def lost(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    """The loss of a member, or of a donor that still sends, ends this attempt; other losses only shrink the pool."""
    phase = expect(ctx.state, Building)
    donors = {donor for donor, newcomer in phase.membership.donors if newcomer not in phase.resumed}
    needed = tuple(loss for loss in losses if loss.worker in phase.membership.rank_of or loss.worker in donors)
    if needed:
        ctx.set(fruitless_builds=0)
        give_up(ctx, f"lost {', '.join(loss.worker for loss in needed)}", needed)


def build_failed(ctx: Transition, event: BuildFailed) -> None:
    why = f"{event.worker} could not build: {event.detail}"
    recovery.learn_first_cause(ctx, why, is_symptom=True)
    _retry(ctx, why)


def member_failed(ctx: Transition, event: MemberFailed) -> None:
    phase = expect(ctx.state, Building)
    if phases.end_if_fatal(ctx, event):
        return
    if event.kind == "device" or event.accused:
        lost(ctx, phases.kill_faulty(ctx, event))
        return
    if event.kind == "back":
        phases.go_back(ctx, phase.incident, phase.membership, event)
        return
    if event.kind == "checkpoint" and phase.order.restore is not None:
        forming.drop_checkpoint(ctx, phase.order, event)
        give_up(ctx, f"{event.worker} cannot use the checkpoint of step {event.step}")
        return
    why = phases.failure_line(event)
    recovery.learn_first_cause(ctx, why, is_symptom=event.kind == "peer")
    if event.kind == "user":
        forward = phase.order.roll_forward
        if forward is not None:  # this build applies it, which may have raised
            ctx.edit_phase(incident=replace(phase.incident, raised_step=forward.step))
    if event.kind in ("user", "memory"):  # both have limits of their own
        give_up(ctx, why)
    else:
        _retry(ctx, why)


def expire(ctx: Transition) -> None:
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
        ctx.end(
            "RunFailed",
            f"the ring could not be closed in {fruitless} attempts, though nobody died. "
            f"{recovery.first_cause(ctx.state)}The last: {why}",
        )
    else:
        give_up(ctx, why)


def give_up(ctx: Transition, why: str, losses: tuple[LostWorker, ...] = ()) -> None:
    phase = expect(ctx.state, Building)
    recovery.begin_closing(ctx, phase.membership, recovery.add_losses(phase.incident, losses), why)
