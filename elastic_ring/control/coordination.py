"""The control core: `advance(state, event, now) -> Decision`, a pure function, and its one transition table.

The coordinator actor, the simulator and the property tests all run this. No clock, no I/O, no ray, no torch
may enter. `now` is seconds on any clock that does not run backwards within one term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elastic_ring.control import building, phases, pool, reconnect, recovery
from elastic_ring.control.messages import (
    BuildFailed,
    Command,
    CoordinatorStarted,
    DrainRequested,
    Event,
    Finalized,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Published,
    Report,
    Resumed,
    Status,
    StopRequested,
    Tick,
    Trouble,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import (
    Building,
    Closing,
    Ended,
    Finishing,
    Forming,
    Idle,
    Loss,
    Phase,
    Reconnecting,
    Running,
    State,
    able_to_form,
)
from elastic_ring.control.turn import Turn
from elastic_ring.errors import IllegalTransition

_STORY_LENGTH = 20
Handler = Callable[[Turn, Any], None]


@dataclass(frozen=True)
class Decision:
    """`state` is the same object as before exactly if the event changed nothing; then there are no commands,
    or only a fence for an unknown worker."""

    state: State
    commands: tuple[Command, ...]
    reason: str


def initial(options: ControlOptions) -> State:
    return State(options)


def advance(state: State, event: Event, now: float) -> Decision:
    """What follows from one event.

    Raises: IllegalTransition with the recent story if the phase has no row for the event. Stale, duplicate and
    late messages are not errors: they change nothing and the reason says so.
    """
    stale = stale_because(state, event)
    if stale:
        return Decision(state, (), f"stale: {stale}")
    handler = TABLE.get((type(state.phase), type(event)))
    if handler is None:
        told = "\n".join(f"  {name}: {reason}" for name, reason in state.story)
        raise IllegalTransition(
            f"{type(event).__name__} while {type(state.phase).__name__} (term {state.term}, generation "
            f"{state.generation}): {event}\nThe story so far:\n{told}",
            event=type(event).__name__, phase=type(state.phase).__name__,
        )
    turn = Turn(state, event, now)
    handler(turn, event)
    _settle(turn)
    reason = "; ".join(turn.reasons) or "nothing to do"
    if turn.state is state or turn.state == state:
        return Decision(state, tuple(turn.commands), reason)
    story = (*state.story, (type(event).__name__, reason[:400]))[-_STORY_LENGTH:]
    return Decision(replace(turn.state, story=story), tuple(turn.commands), reason)


def stale_because(state: State, event: Event) -> str:
    """Why a message no longer, or not yet, speaks to this coordinator; empty if it does."""
    if isinstance(event, CoordinatorStarted):
        return "" if event.term > state.term else f"term {event.term} began before"
    if not isinstance(event, Trouble | Report | Resumed | BuildFailed | Finalized | Status):
        return ""
    if event.term != state.term:
        return f"term {event.term}, not {state.term}"
    if isinstance(event, Status) or isinstance(state.phase, Reconnecting | Ended):
        return ""
    if event.generation != state.generation:
        return f"generation {event.generation}, not {state.generation}"
    known = state.workers.get(event.worker)
    return "" if known is not None and known.life != "dying" else f"{event.worker} counts as lost"


# ---------------------------------------------------------------- rows that several phases share


def _worker_ready(turn: Turn, event: WorkerReady) -> None:
    if pool.worker_ready(turn, event) and isinstance(turn.phase, Reconnecting):
        said = Status(event.cause, event.worker, turn.state.term, 0, "spare")
        turn.edit_phase(answers={**turn.phase.answers, event.worker: said})


def _worker_lost(turn: Turn, event: WorkerLost) -> None:
    _pass_on(turn, pool.lose(turn, [event.worker], event.reason, event.detail))


def _node_lost(turn: Turn, event: NodeLost) -> None:
    _pass_on(turn, pool.lose_node(turn, event.node))


def _pass_on(turn: Turn, losses: tuple[Loss, ...]) -> None:
    handler = _LOSSES.get(type(turn.phase))
    if losses and handler is not None:
        handler(turn, losses)


def _drain(turn: Turn, event: DrainRequested) -> None:
    pool.drain(turn, [event.worker])


def _stop_requested(turn: Turn, event: StopRequested) -> None:
    turn.set(stop_reason=turn.state.stop_reason or event.reason or "asked to")
    turn.say("stop asked for")


def _tick(turn: Turn, event: Tick) -> None:
    """Deadlines are looked at after every event."""


def _ignore(turn: Turn, event: Any) -> None:
    turn.say(f"late {type(event).__name__}, nothing to do")


_LOSSES: dict[type, Callable[[Turn, tuple[Loss, ...]], None]] = {
    Building: building.lost,
    Running: phases.running_lost,
    Closing: phases.closing_lost,
    Finishing: phases.running_lost,
    Reconnecting: reconnect.lost,
}

_EVERYWHERE: dict[type, Handler] = {
    CoordinatorStarted: reconnect.restart,
    NodeJoined: pool.node_joined,
    NodeLost: _node_lost,
    NodeDraining: pool.node_draining,
    WorkerReady: _worker_ready,
    WorkerLost: _worker_lost,
    DrainRequested: _drain,
    StopRequested: _stop_requested,
    Status: reconnect.late_ready,
    Tick: _tick,
}

_BY_PHASE: dict[type, dict[type, Handler]] = {
    Idle: {CoordinatorStarted: reconnect.adopt},
    Forming: {**_EVERYWHERE, Report: _ignore, Published: _ignore},
    Building: {
        **_EVERYWHERE,
        Resumed: building.resumed,
        Report: building.parked_early,
        Published: building.published,
        BuildFailed: building.build_failed,
        Trouble: building.trouble,
    },
    Running: {
        **_EVERYWHERE,
        Report: phases.running_report,
        Published: phases.running_published,
        Trouble: phases.running_trouble,
        Resumed: _ignore,
        BuildFailed: _ignore,  # of a donor without a seat, which was told to stand by
    },
    Closing: {**_EVERYWHERE, Report: phases.closing_report, Published: phases.running_published},
    Finishing: {
        **_EVERYWHERE,
        Finalized: phases.finalized,
        Published: phases.running_published,
        Trouble: phases.finishing_trouble,
        Report: _ignore,
        Resumed: _ignore,
        BuildFailed: _ignore,  # as above
    },
    Reconnecting: {
        **_EVERYWHERE,
        Status: reconnect.answered,
        Trouble: reconnect.disturbed,
        Report: reconnect.disturbed,
        Published: _ignore,
        Resumed: _ignore,
        BuildFailed: _ignore,
        Finalized: _ignore,
    },
    Ended: {
        **dict.fromkeys(_EVERYWHERE, _ignore),
        **dict.fromkeys((Trouble, Report, Published, Resumed, BuildFailed, Finalized), _ignore),
        CoordinatorStarted: reconnect.restart_ended,
    },
}

TABLE: dict[tuple[type[Phase], type[Event]], Handler] = {
    (phase, event): handler for phase, rows in _BY_PHASE.items() for event, handler in rows.items()
}

# ---------------------------------------------------------------- what follows after every event


def _settle(turn: Turn) -> None:
    """Deadlines first, then whatever the new state allows; each step may change the phase for the next."""
    if isinstance(turn.phase, Idle | Ended):
        return
    _pass_on(turn, pool.expire(turn))
    if isinstance(turn.phase, Reconnecting):
        reconnect.settle(turn)
    if turn.state.stop_reason and isinstance(turn.phase, Forming | Building | Closing | Finishing):
        turn.end("", f"stopped: {turn.state.stop_reason}")
        return
    if isinstance(turn.phase, Building):
        building.expire(turn)
    if isinstance(turn.phase, Finishing):
        phases.expire_finishing(turn)
    if isinstance(turn.phase, Running):
        phases.settle_running(turn)
    if isinstance(turn.phase, Closing):
        phases.expire_closing(turn)
        recovery.try_close(turn)
    if isinstance(turn.phase, Forming):
        recovery.try_form(turn)
    if isinstance(turn.phase, Forming) and turn.state.last_change is None:
        pool.refuse_if_nobody_starts(turn)
    if _may_start_workers(turn):
        pool.fill_slots(turn)


def _may_start_workers(turn: Turn) -> bool:
    """Not while the ring closes nor in the first moments after: a process that starts takes CPU and disk
    from the recovery that it follows."""
    phase, change = turn.phase, turn.state.last_change
    if isinstance(phase, Closing):
        return bool(phase.waiting)
    if isinstance(phase, Running) and change is not None and change.resumed_at is not None:
        return turn.now >= change.resumed_at + turn.options.restart_delay_s
    return not isinstance(phase, Ended | Building)


def next_deadline(state: State) -> float | None:
    """When a `Tick` is due at the latest; None if only an event can change anything."""
    if isinstance(state.phase, Idle | Ended):
        return None
    due = [worker.deadline for worker in state.workers.values() if worker.life != "ready"]
    due += pool.start_deadlines(state)
    due += _phase_deadlines(state)
    return min(due, default=None)


def _phase_deadlines(state: State) -> list[float]:
    phase, options = state.phase, state.options
    match phase:
        case Building():
            return [phase.deadline if phase.asked_again else phase.deadline - options.build_s / 2]
        case Reconnecting():
            return [phase.deadline if phase.asked_again else phase.deadline - options.hello_s / 2]
        case Closing() if phases.silent_members(state):
            return [phase.deadline if phase.asked_again else phase.deadline - options.report_s / 2]
        case Finishing():
            return [phase.deadline]
        case Running():
            _, grow_at = phases.boundary_reasons(state)
            wants_growth = grow_at is not None and "grow" not in phase.boundary
            return [at for at in (phase.deadline, grow_at if wants_growth else None) if at is not None]
        case Forming():
            if phase.full_since is not None:
                return [phase.full_since + options.spare_grace_s]
            return [phase.since + options.start_s] if len(able_to_form(state)) // options.cp >= options.min_dp else []
    return []
