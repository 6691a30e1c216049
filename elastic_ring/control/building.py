"""The phase between `Build` and the last `Resumed`."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import phases, recovery
from elastic_ring.control.messages import BuildFailed, Published, Report, Resumed, Stand, Trouble
from elastic_ring.control.state import Building, Loss, Running
from elastic_ring.control.turn import Turn


def resumed(turn: Turn, event: Resumed) -> None:
    phase = turn.phase
    assert isinstance(phase, Building)
    if event.worker not in phase.crew.seats or event.worker in phase.resumed:
        turn.say(f"{event.worker} has no need to resume")
        return
    turn.edit_phase(resumed=phase.resumed | {event.worker})
    turn.say(f"{event.worker} resumed")
    complete_if_all(turn)


def parked_early(turn: Turn, event: Report) -> None:
    """A member that is at a boundary or at the end already has resumed; its news was overtaken."""
    phase = turn.phase
    assert isinstance(phase, Building)
    if event.kind == "aborted" or event.worker not in phase.crew.seats:
        turn.say(f"late answer of {event.worker} to the stop before this build")
        return
    turn.edit_phase(resumed=phase.resumed | {event.worker}, parked={**phase.parked, event.worker: event})
    turn.say(f"{event.worker} resumed and is parked again")
    complete_if_all(turn)


def published(turn: Turn, event: Published) -> None:
    """A vote of this generation completes only if every member entered it: all have resumed."""
    phase = turn.phase
    assert isinstance(phase, Building)
    if event.vote.cast != phase.crew.cast or event.vote.step < phase.crew.step:
        turn.say("stale: vote of an earlier generation")
        return
    recovery.learn_vote(turn, phase.crew, event.vote)
    turn.edit_phase(resumed=frozenset(phase.crew.seats))
    turn.say(f"step {event.vote.step} is committed, so everyone has resumed")
    complete_if_all(turn)


def complete_if_all(turn: Turn) -> None:
    phase = turn.phase
    assert isinstance(phase, Building)
    if len(phase.resumed) < len(phase.crew.seats):
        return
    change = turn.state.last_change
    assert change is not None
    assert change.generation == phase.crew.generation
    weaker = turn.state.promise if change.promise == "bit-exact" else change.promise
    turn.set(last_change=replace(change, resumed_at=turn.now), promise=weaker, fruitless_builds=0,
             pool_changed_at=turn.now)
    leaving = turn.live(phase.crew.leaving)
    draining = [worker for worker in leaving if turn.state.workers[worker].draining]
    turn.enter(Running(replace(phase.crew, leaving=(), donors=())))
    turn.say(f"generation {phase.crew.generation} runs")
    for worker in leaving:
        if worker not in draining:
            turn.send(Stand(turn.cause, worker, turn.state.term, turn.state.generation))
    if draining:
        turn.release(draining)
        turn.say(f"handed over and leaving: {', '.join(draining)}")
    for report in phase.parked.values():
        phases.park(turn, report)


def lost(turn: Turn, losses: tuple[Loss, ...]) -> None:
    """Anyone with a seat, or a donor that is not done, ends this attempt; others only shrink the pool."""
    phase = turn.phase
    assert isinstance(phase, Building)
    needed = set(phase.crew.seats)
    needed |= {donor for donor, newcomer in phase.crew.donors if newcomer not in phase.resumed}
    gone = tuple(loss for loss in losses if loss.worker in needed)
    if gone:
        turn.set(fruitless_builds=0)
        give_up(turn, f"lost {', '.join(loss.worker for loss in gone)}", gone)


def build_failed(turn: Turn, event: BuildFailed) -> None:
    phase = turn.phase
    assert isinstance(phase, Building)
    _again(turn, f"{event.worker} could not build: {event.detail}")


def trouble(turn: Turn, event: Trouble) -> None:
    phase = turn.phase
    assert isinstance(phase, Building)
    if phases.is_fatal(turn, event):
        return
    if event.kind == "device":
        lost(turn, phases.fence_broken(turn, event))
        return
    why = f"{event.worker} reports {event.kind} trouble in step {event.step}"
    if event.kind == "user":
        turn.edit_phase(incident=phases.noted(phase.incident, event))
        give_up(turn, why)
    else:
        _again(turn, why)


def expire(turn: Turn) -> None:
    """Ask again at half time. At the deadline kill only such as nobody's state depends on.

    A ring that does not close keeps everyone waiting, so silence alone accuses nobody. Whoever is really stuck
    does not answer the `Stop` that follows either, and that is when it is killed.
    """
    phase = turn.phase
    assert isinstance(phase, Building)
    silent = [worker for worker in phase.crew.seats if worker not in phase.resumed]
    if turn.now >= phase.deadline:
        answered = {rank % phase.crew.mesh.cp for rank, w in enumerate(phase.crew.seats) if w in phase.resumed}
        if len(answered) == phase.crew.mesh.cp:
            turn.fence(turn.live(silent), f"did not resume within {turn.options.build_s} s")
        _again(turn, f"{len(silent)} member(s) did not resume within {turn.options.build_s} s")
    elif turn.now >= phase.deadline - turn.options.build_s / 2 and not phase.asked_again:
        for worker in turn.live(silent):
            turn.send(replace(phase.order, worker=worker))
        turn.edit_phase(asked_again=True)
        turn.say(f"build ordered once more from {len(silent)} silent member(s)")


def _again(turn: Turn, why: str) -> None:
    fruitless = turn.state.fruitless_builds + 1
    turn.set(fruitless_builds=fruitless)
    if fruitless >= turn.options.build_failure_limit:
        turn.end("RunFailed", f"the ring could not be closed in {fruitless} attempts, though nobody died; last: {why}")
    else:
        give_up(turn, why)


def give_up(turn: Turn, why: str, losses: tuple[Loss, ...] = ()) -> None:
    phase = turn.phase
    assert isinstance(phase, Building)
    recovery.begin_closing(turn, phase.crew, recovery.add_losses(phase.incident, losses), why)
