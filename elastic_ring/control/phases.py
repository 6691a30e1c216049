"""The phases in which something trains, parks, stops or ends: running, closing, finishing."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import recovery
from elastic_ring.control.messages import Finalize, Finalized, Published, Report, Trouble
from elastic_ring.control.state import (
    Closing,
    Crew,
    Finishing,
    Incident,
    Loss,
    Running,
    State,
    able_to_form,
    crew_of,
    spares,
)
from elastic_ring.control.turn import Turn

# ---------------------------------------------------------------- running


def running_lost(turn: Turn, losses: tuple[Loss, ...]) -> None:
    phase = turn.phase
    assert isinstance(phase, Running | Finishing)
    seats = set(phase.crew.seats)
    gone = tuple(loss for loss in losses if loss.worker in seats)
    if gone:
        names = ", ".join(loss.worker for loss in gone)
        incident = recovery.open_incident(turn, phase.crew, f"{gone[0].reason}: {names}", gone)
        recovery.begin_closing(turn, phase.crew, incident, f"lost {names}")


def running_trouble(turn: Turn, event: Trouble) -> None:
    phase = turn.phase
    assert isinstance(phase, Running | Finishing)
    if is_fatal(turn, event):
        return
    if event.kind == "device":
        running_lost(turn, fence_broken(turn, event))
        return
    why = f"{event.kind} trouble in step {event.step}, told by {event.worker}"
    incident = noted(recovery.open_incident(turn, phase.crew, why), event)
    recovery.begin_closing(turn, phase.crew, incident, why)


def noted(incident: Incident, event: Trouble) -> Incident:
    """With the step in which the user's code raised, if it was that."""
    return replace(incident, raised_step=event.step) if event.kind == "user" else incident


def fence_broken(turn: Turn, event: Trouble) -> tuple[Loss, ...]:
    """A worker whose device erred goes at once, as one that died: it holds nothing that can be used."""
    if not turn.live([event.worker]):
        turn.say(f"{event.worker} is gone already")
        return ()
    turn.fence([event.worker], "device error", written_off=True)
    turn.say(f"the device of {event.worker} erred in step {event.step}, so it is killed: {event.detail}")
    return (Loss(event.worker, turn.state.workers[event.worker].node, None, "device error", event.detail),)


def is_fatal(turn: Turn, event: Trouble) -> bool:
    """Ends the run for what would only happen again; otherwise counts it and says no."""
    if event.kind == "skipped":
        turn.end("TooManySkipped", event.detail or f"too many steps skipped in a row up to step {event.step}",
                 step=event.step, worker=event.worker)
        return True
    if event.kind == "check":
        turn.end("RunFailed", event.detail, step=event.step, worker=event.worker, check="ValueError")
        return True
    if event.kind == "user":
        crew = crew_of(turn.state)
        assert crew is not None
        step = max(event.step, crew.step)  # no member of it trains, or is built for, an earlier one
        errors = turn.state.user_errors.again(step)
        turn.set(user_errors=errors, user_detail=event.detail)
        if errors.count >= turn.options.user_error_limit:
            turn.end(
                "UserCodeFailed",
                f"{event.detail}\nraised {errors.count} times in step {step}, last on {event.worker}",
                step=step, worker=event.worker,
            )
            return True
    return False


def running_published(turn: Turn, event: Published) -> None:
    phase = turn.phase
    assert isinstance(phase, Running | Closing | Finishing)
    if event.vote.cast != phase.crew.cast:
        turn.say("stale: vote of an earlier generation")
    elif recovery.learn_vote(turn, phase.crew, event.vote):
        turn.say(f"step {event.vote.step} is committed")
        if isinstance(phase, Running) and turn.state.committed >= turn.options.total_steps and not phase.deadline:
            # Everyone is about to report the end; if that news is lost, nothing else would ever come.
            turn.edit_phase(deadline=turn.now + turn.options.boundary_s)
    else:
        turn.say("vote known already")


def running_report(turn: Turn, event: Report) -> None:
    phase = turn.phase
    assert isinstance(phase, Running)
    if event.kind == "aborted" or event.worker not in phase.crew.seats or event.worker in phase.parked:
        turn.say(f"nothing new from {event.worker}")
    else:
        park(turn, event)


def park(turn: Turn, report: Report) -> None:
    """A member stands at the boundary or at the end; when all do, go on from there."""
    phase = turn.phase
    if not isinstance(phase, Running):
        return
    parked = {**phase.parked, report.worker: report}
    deadline = turn.now + turn.options.boundary_s if phase.deadline is None else phase.deadline
    turn.edit_phase(parked=parked, deadline=deadline)
    turn.say(f"{report.worker} is parked at step {report.applied}, {len(parked)} of {len(phase.crew.seats)}")
    if len(parked) < len(phase.crew.seats):
        return
    steps = {report.applied for report in parked.values()}
    if len(steps) > 1 or any(not r.healthy or r.shard is None for r in parked.values()):
        why = f"members parked at steps {sorted(steps)} or without a shard"
        recovery.begin_closing(turn, phase.crew, recovery.open_incident(turn, phase.crew, why), why)
        return
    turn.commit(report.applied)
    for known in parked.values():
        recovery.learn_vote(turn, phase.crew, known.last_vote)
    if report.applied >= turn.options.total_steps:
        finish(turn, phase.crew)
    elif turn.state.stop_reason:
        turn.end("", f"stopped: {turn.state.stop_reason}", stopped_at_step=report.applied)
    else:
        _at_boundary(turn, replace(phase, parked=parked))


def _at_boundary(turn: Turn, phase: Running) -> None:
    planned = phase.boundary or ("boundary",)
    incident = recovery.open_incident(turn, phase.crew, " and ".join(planned), planned=planned)
    incident = replace(incident, counted=True)
    turn.set(generation=turn.state.generation + 1)
    reports = {worker: phase.parked[worker] for worker in phase.crew.seats}
    recovery.rebuild(turn, phase.crew, incident, reports, max(phase.crew.mesh.dp, possible_dp(turn.state)))


def possible_dp(state: State) -> int:
    """How many rings there could be with the spares that are there beyond the wanted ones.

    Spares for whom their node has no seat left are as good as others for standing by, but make no ring larger.
    """
    phase = state.phase
    assert isinstance(phase, Running)
    staying = sum(
        1 for name in phase.crew.seats if name in state.workers and not state.workers[name].draining
    )
    num_usable = min(staying + len(spares(state)) - state.options.spares, len(able_to_form(state)))
    return max(0, min(state.options.dp_limit, num_usable // state.options.cp))


def boundary_reasons(state: State) -> tuple[tuple[str, ...], float | None]:
    """Why the running mesh should stop at a boundary, and when a growth that waits for quiet is due."""
    phase, options = state.phase, state.options
    assert isinstance(phase, Running)
    reasons = ["stop"] if state.stop_reason else []
    leaving = [name for name in phase.crew.seats if name in state.workers and state.workers[name].draining]
    if leaving and len(able_to_form(state)) // options.cp >= options.min_dp:
        reasons.append("drain")
    if phase.crew.mesh.dp < options.dp_limit and possible_dp(state) > phase.crew.mesh.dp:
        return tuple(reasons), state.pool_changed_at + options.grow_delay_s
    return tuple(reasons), None


def settle_running(turn: Turn) -> None:
    """Ask for a boundary when there is a reason; by force when it does not come."""
    phase = turn.phase
    assert isinstance(phase, Running)
    if phase.deadline is not None and turn.now >= phase.deadline:
        _force(turn, phase)
        return
    reasons, grow_at = boundary_reasons(turn.state)
    if grow_at is not None and turn.now >= grow_at:
        reasons = (*reasons, "grow")
    new = tuple(reason for reason in reasons if reason not in phase.boundary)
    if not new:
        return
    if not phase.boundary:
        turn.stop(turn.live(phase.crew.seats), "boundary")
    deadline = turn.now + turn.options.boundary_s if phase.deadline is None else phase.deadline
    turn.edit_phase(boundary=phase.boundary + new, deadline=deadline)
    turn.say(f"boundary asked for: {', '.join(new)}")


def _force(turn: Turn, phase: Running) -> None:
    if turn.state.stop_reason:
        turn.end("", f"stopped: {turn.state.stop_reason} (no boundary within {turn.options.boundary_s} s)")
        return
    why = f"{len(phase.parked)} of {len(phase.crew.seats)} members parked within {turn.options.boundary_s} s"
    incident = recovery.open_incident(turn, phase.crew, why, planned=phase.boundary)
    recovery.begin_closing(turn, phase.crew, incident, why)


# ---------------------------------------------------------------- closing


def closing_lost(turn: Turn, losses: tuple[Loss, ...]) -> None:
    """Losses meanwhile are folded in; a report of the dead is no longer of use, the vote in it still is."""
    phase = turn.phase
    assert isinstance(phase, Closing)
    part = set(phase.crew.everyone)
    gone = tuple(loss for loss in losses if loss.worker in part)
    if gone:
        turn.edit_phase(incident=recovery.add_losses(phase.incident, gone))


def closing_report(turn: Turn, event: Report) -> None:
    phase = turn.phase
    assert isinstance(phase, Closing)
    if event.worker in phase.reports or event.worker not in turn.live(phase.crew.everyone):
        turn.say(f"nothing new from {event.worker}")
        return
    turn.edit_phase(reports={**phase.reports, event.worker: event})
    turn.say(f"{event.worker} reports step {event.applied}, shard {event.shard}")
    for vote in (event.last_vote, event.vote):
        recovery.learn_vote(turn, phase.crew, vote)
    if not event.healthy:
        node = turn.state.workers[event.worker].node
        turn.fence([event.worker], "poisoned device", written_off=True)
        closing_lost(turn, (Loss(event.worker, node, None, "poisoned device", "the probe after the abort failed"),))


def silent_members(state: State) -> list[str]:
    """Ready members of the closing crew that have not reported; those told to go are not asked."""
    phase, workers = state.phase, state.workers
    assert isinstance(phase, Closing)
    return [
        name for name in phase.crew.everyone
        if name not in phase.reports and name in workers and workers[name].life == "ready"
    ]


def expire_closing(turn: Turn) -> None:
    phase = turn.phase
    assert isinstance(phase, Closing)
    silent = silent_members(turn.state)
    if not silent:
        return
    if turn.now >= phase.deadline:
        turn.fence(silent, f"did not report within {turn.options.report_s} s")
        turn.say(f"silent, so killed: {', '.join(silent)}")
    elif turn.now >= phase.deadline - turn.options.report_s / 2 and not phase.asked_again:
        turn.stop(silent, "abort")
        turn.edit_phase(asked_again=True)
        turn.say(f"asked again: {', '.join(silent)}")


# ---------------------------------------------------------------- finishing


def finish(turn: Turn, crew: Crew) -> None:
    for rank in crew.mesh.ring(0):
        turn.send(Finalize(turn.cause, crew.seats[rank], turn.state.term, crew.generation))
    turn.enter(Finishing(crew, turn.now + turn.options.finalize_s))
    turn.say("all steps are committed; ring 0 writes the weights")


def finalized(turn: Turn, event: Finalized) -> None:
    phase = turn.phase
    assert isinstance(phase, Finishing)
    if event.worker != phase.crew.seats[0]:
        turn.say(f"{event.worker} is done; global rank 0 has the last word")
        return
    turn.end("", "all steps committed", weights_sha256=event.weights_sha256)


def finishing_trouble(turn: Turn, event: Trouble) -> None:
    """A write that fails is tried again after a while: storage comes back, and the steps are worth waiting for."""
    if event.kind != "check":
        running_trouble(turn, event)
        return
    turn.edit_phase(trouble=event.detail, deadline=turn.now + turn.options.backoff_s)
    turn.say(f"{event.worker} could not write the weights, tried again in {turn.options.backoff_s:g} s")


def expire_finishing(turn: Turn) -> None:
    phase = turn.phase
    assert isinstance(phase, Finishing)
    if turn.now < phase.deadline:
        return
    failures = turn.state.finalize_failures + 1
    turn.set(finalize_failures=failures)
    late = f"the weights were not written within {turn.options.finalize_s} s"
    why = f"the weights could not be written: {phase.trouble}" if phase.trouble else late
    if failures >= turn.options.finalize_limit:
        turn.end("RunFailed", f"{why}, {failures} times; every step is committed, look at the run folder's storage")
    else:
        recovery.begin_closing(turn, phase.crew, recovery.open_incident(turn, phase.crew, why), why)
