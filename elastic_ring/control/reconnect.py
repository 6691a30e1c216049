"""A coordinator that starts on a replayed journal: it asks round before it believes what it read."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import phases, recovery
from elastic_ring.control.messages import CoordinatorStarted, Hello, Report, Status, Trouble
from elastic_ring.control.state import Building, Closing, Ended, Forming, Idle, Loss, Reconnecting, Running, crew_of
from elastic_ring.control.turn import Turn


def adopt(turn: Turn, event: CoordinatorStarted) -> None:
    """The first coordinator of a run has nobody to ask."""
    turn.set(term=event.term, pool_changed_at=turn.now)
    turn.enter(Forming(turn.now))
    turn.say(f"coordinator of term {event.term} forms the run")


def restart(turn: Turn, event: CoordinatorStarted) -> None:
    phase = turn.phase
    assert not isinstance(phase, Idle | Ended)
    turn.set(term=event.term)
    _restart_clocks(turn)
    before = phase.before if isinstance(phase, Reconnecting) else phase
    lost, disturbed = (phase.lost, phase.disturbed) if isinstance(phase, Reconnecting) else ((), "")
    turn.enter(Reconnecting(before, turn.now + turn.options.hello_s, lost=lost, disturbed=disturbed))
    asked = [w.worker for w in turn.state.workers.values() if w.life != "dying"]
    for worker in asked:
        turn.send(Hello(turn.cause, worker, event.term))
    turn.say(f"coordinator of term {event.term} asks {len(asked)} worker(s)")


def restart_ended(turn: Turn, event: CoordinatorStarted) -> None:
    """The end was decided; whether it was carried out is unknown, so it is ordered again."""
    phase = turn.phase
    assert isinstance(phase, Ended)
    end = replace(phase.end, cause=turn.cause, term=event.term)
    turn.set(term=event.term)
    turn.release(turn.state.workers)
    turn.send(end)
    turn.enter(Ended(end))
    turn.say("the run had ended; it ends again")


def _restart_clocks(turn: Turn) -> None:
    """Deadlines of the old coordinator mean nothing on the new one's clock."""
    options = turn.options
    workers = {
        name: replace(w, deadline=turn.now + (options.start_s if w.life == "starting" else options.report_s))
        for name, w in turn.state.workers.items()
    }
    nodes = {
        name: replace(n, backoff_until=turn.now + options.backoff_s if n.backoff_until else 0.0)
        for name, n in turn.state.nodes.items()
    }
    change = turn.state.last_change
    if change is not None and change.resumed_at is not None:
        # A wall clock that was set back meanwhile must not put off what waits for a time after this.
        change = replace(change, resumed_at=min(change.resumed_at, turn.now))
    turn.set(workers=workers, nodes=nodes, pool_changed_at=turn.now, last_change=change)


def answered(turn: Turn, event: Status) -> None:
    phase = turn.phase
    assert isinstance(phase, Reconnecting)
    if event.worker not in turn.state.workers or event.worker in phase.answers:
        turn.say(f"nothing new from {event.worker}")
        return
    if turn.state.workers[event.worker].life == "starting":
        late_ready(turn, event)
    turn.set(generation=max(turn.state.generation, event.generation))
    turn.edit_phase(answers={**phase.answers, event.worker: event})
    turn.say(f"{event.worker} is {event.activity} in generation {event.generation}")


def late_ready(turn: Turn, event: Status) -> None:
    """A worker whose `WorkerReady` nobody heard says that it stands by."""
    worker = turn.state.workers.get(event.worker)
    if worker is not None and worker.life == "starting":
        turn.put(replace(worker, life="ready"))
        turn.set(pool_changed_at=turn.now)
        turn.say(f"{event.worker} is ready")
    else:
        turn.say(f"late answer of {event.worker}")


def lost(turn: Turn, losses: tuple[Loss, ...]) -> None:
    phase = turn.phase
    assert isinstance(phase, Reconnecting)
    crew = crew_of(turn.state)
    part = set(crew.everyone) if crew else set()
    turn.edit_phase(lost=phase.lost + tuple(loss for loss in losses if loss.worker in part))


def disturbed(turn: Turn, event: Trouble | Report) -> None:
    """Whatever a member says now is asked again under a new generation, after the round."""
    turn.set(generation=max(turn.state.generation, event.generation))
    turn.edit_phase(disturbed=f"{event.worker} sent {type(event).__name__} ({event.kind})")
    turn.say(f"{event.worker} does not train any more")
    if isinstance(event, Trouble) and event.kind == "device":
        lost(turn, phases.fence_broken(turn, event))


def settle(turn: Turn) -> None:
    phase = turn.phase
    assert isinstance(phase, Reconnecting)
    silent = [worker for worker in turn.live(turn.state.workers) if worker not in phase.answers]
    if silent and turn.now >= phase.deadline:
        turn.fence(silent, f"did not answer the new coordinator within {turn.options.hello_s} s")
        turn.say(f"silent, so killed: {', '.join(silent)}")
    elif silent:
        if turn.now >= phase.deadline - turn.options.hello_s / 2 and not phase.asked_again:
            for worker in silent:
                turn.send(Hello(turn.cause, worker, turn.state.term))
            turn.edit_phase(asked_again=True)
            turn.say(f"asked again: {', '.join(silent)}")
        return
    _conclude(turn, phase)


def _conclude(turn: Turn, phase: Reconnecting) -> None:
    before = phase.before
    if isinstance(before, Forming):
        turn.enter(Forming(turn.now))
        turn.say("nothing had been built; forming goes on")
        return
    crew = before.crew
    odd = phase.disturbed or _odd_one(turn, phase, crew.seats, crew.generation)
    if isinstance(before, Running) and not odd and not phase.lost:
        deadline = turn.now + turn.options.boundary_s if before.boundary else None
        turn.enter(replace(before, parked={}, deadline=deadline))
        if before.boundary:
            turn.stop(crew.seats, "boundary")
        turn.say(f"all members train on in generation {crew.generation}, undisturbed")
        return
    why = f"coordinator restarted; {odd or ', '.join(loss.worker for loss in phase.lost) or 'nothing trained'}"
    known = before.incident if isinstance(before, Building | Closing) else None
    incident = known or recovery.open_incident(turn, crew, why)
    recovery.begin_closing(turn, crew, recovery.add_losses(incident, phase.lost), why)


def _odd_one(turn: Turn, phase: Reconnecting, seats: tuple[str, ...], generation: int) -> str:
    live = set(turn.live(seats))
    for worker in seats:
        status = phase.answers.get(worker)
        if worker not in live or status is None:
            return f"{worker} does not answer"
        if status.activity != "running" or status.generation != generation:
            return f"{worker} is {status.activity} in generation {status.generation}"
    return ""
