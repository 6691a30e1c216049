"""The control core: the pure function `advance(state, event, now) -> Decision` and its transition table.

The coordinator actor, the simulator and the property tests run it. No clock, no I/O, no ray and no torch may enter.
`now` is in seconds, on any clock that does not go back within a term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ring.control import building, forming, messages, phases, reconnect, recovery
from elastic_ring.control.capacity import scaling, worker_pool
from elastic_ring.control.decisions import callbacks, data_order, memory_ladder, replacements
from elastic_ring.control.facts import Fact
from elastic_ring.control.messages import Command, Event, MemberEvent
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import (
    Building,
    Closing,
    Ended,
    Finishing,
    Forming,
    Idle,
    LostWorker,
    Phase,
    Reconnecting,
    Running,
    State,
    num_able_to_form,
)
from elastic_ring.control.transition import Transition
from elastic_ring.errors import IllegalTransition

_STORY_LENGTH = 20
Handler = Callable[[Transition, Any], None]
# Unions take longer to make than to check, and these are checked in every event.
_UNSETTLED = Reconnecting | Ended
_WITHOUT_RUN = Idle | Ended
_WITHOUT_STARTS = Ended | Building


@dataclass(frozen=True)
class Decision:
    """The result of `advance`.

    `state` is the same object as before if and only if the event changed nothing. Then `commands` is empty or only
    kills an unknown worker.
    """

    state: State
    commands: tuple[Command, ...]
    reason: str


def initial(options: ControlOptions) -> State:
    return State(options)


def advance(state: State, event: Event | Fact, now: float) -> Decision:
    """Apply one event. `now` is in seconds.

    Stale, duplicate and late messages are no errors: they change nothing, and the reason says so. Facts change nothing
    in any phase.

    Raises: IllegalTransition, with the recent events, if the table has no row for this event in this phase.
    """
    if isinstance(event, Fact):
        return Decision(state, (), "noted")
    stale = stale_because(state, event)
    if stale:
        return Decision(state, (), f"stale: {stale}")
    handler = TABLE.get((type(state.phase), type(event)))
    if handler is None:
        recent = "\n".join(f"  {name}: {reason}" for name, reason in state.story)
        raise IllegalTransition(
            f"{type(event).__name__} while {type(state.phase).__name__} (term {state.term}, generation "
            f"{state.generation}): {event}\nThe story so far:\n{recent}",
            event=type(event).__name__,
            phase=type(state.phase).__name__,
        )
    ctx = Transition(state, event, now)
    handler(ctx, event)
    _settle(ctx)
    reason = "; ".join(ctx.reasons) or "nothing to do"
    if ctx.state is state or (ctx.phase == state.phase and ctx.state == state):
        return Decision(state, tuple(ctx.commands), reason)
    story = (*state.story, (type(event).__name__, reason[:400]))[-_STORY_LENGTH:]
    vars(ctx.state)["story"] = story  # this new state has not left the call
    return Decision(ctx.state, tuple(ctx.commands), reason)


def stale_because(state: State, event: Event) -> str:
    """Why the event is ignored: another term or generation, or a lost sender. Empty if it counts."""
    if isinstance(event, messages.CoordinatorStarted):
        return "" if event.term > state.term else f"term {event.term} began before"
    if not isinstance(event, MemberEvent):
        return ""
    if event.term != state.term:
        return f"term {event.term}, not {state.term}"
    if isinstance(event, messages.Status) or isinstance(state.phase, _UNSETTLED):
        return ""
    if event.generation != state.generation:
        return f"generation {event.generation}, not {state.generation}"
    worker = state.workers.get(event.worker)
    return "" if worker is not None and worker.status != "stopping" else f"{event.worker} counts as lost"


# ---------------------------------------------------------------- rows that several phases share


def _worker_ready(ctx: Transition, event: messages.WorkerReady) -> None:
    if worker_pool.worker_ready(ctx, event) and isinstance(ctx.phase, Reconnecting):
        status = messages.Status(event.cause, event.worker, ctx.state.term, 0, "spare")
        ctx.edit_phase(answers=ctx.phase.answers.having({event.worker: status}))


def _worker_lost(ctx: Transition, event: messages.WorkerLost) -> None:
    if event.worker not in ctx.state.workers:
        recovery.learn_cause(ctx, event)
    _pass_on(ctx, worker_pool.worker_lost(ctx, event))


def _pass_on(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    handler = _LOSSES.get(type(ctx.phase))
    if losses and handler is not None:
        handler(ctx, losses)


def _ignore(ctx: Transition, event: Any) -> None:
    ctx.explain(f"late {type(event).__name__}, nothing to do")


_LOSSES: dict[type, Callable[[Transition, tuple[LostWorker, ...]], None]] = {
    Building: building.lost,
    Running: phases.running_lost,
    Closing: phases.closing_lost,
    Finishing: phases.running_lost,
    Reconnecting: reconnect.lost,
}

_EVERYWHERE: dict[type, Handler] = {
    messages.CoordinatorStarted: reconnect.restart,
    messages.NodeJoined: worker_pool.node_joined,
    messages.NodeLost: lambda ctx, event: _pass_on(ctx, worker_pool.lose_node(ctx, event.node)),
    messages.NodesListed: forming.nodes_listed,
    messages.NodeDraining: worker_pool.node_draining,
    messages.WorkerStarting: worker_pool.worker_starting,
    messages.WorkerReady: _worker_ready,
    messages.WorkerLost: _worker_lost,
    messages.DrainRequested: lambda ctx, event: worker_pool.drain(ctx, [event.worker]),
    messages.ScaleRequested: scaling.scale,
    messages.StragglerFound: replacements.replace_straggler,
    messages.MemoryTight: memory_ladder.tight,
    messages.Status: reconnect.late_ready,
    messages.CheckpointsKnown: forming.checkpoints_known,
    messages.CheckpointDue: phases.checkpoint_due,
    messages.CallbacksAwaited: _ignore,
    messages.CallbacksAnswered: callbacks.answered,
    messages.CorpusRecalled: data_order.recall,
    messages.CorpusGrew: data_order.lengthen_corpus,
    messages.Tick: lambda ctx, event: None,  # `_settle` checks deadlines after every event
}

_BY_PHASE: dict[type, dict[type, Handler]] = {
    Idle: {messages.CoordinatorStarted: reconnect.adopt},
    Forming: {**_EVERYWHERE, messages.Report: _ignore, messages.Published: _ignore},
    Building: {
        **_EVERYWHERE,
        messages.Resumed: building.resumed,
        messages.Report: building.paused_early,
        messages.Published: building.published,
        messages.BuildFailed: building.build_failed,
        messages.MemberFailed: building.member_failed,
        messages.CallbacksAwaited: callbacks.awaited,
    },
    Running: {
        **_EVERYWHERE,
        messages.Report: phases.running_report,
        messages.Published: phases.running_published,
        messages.MemberFailed: phases.running_member_failed,
        messages.CallbacksAwaited: callbacks.awaited,
        messages.Resumed: _ignore,
        messages.BuildFailed: _ignore,  # from a donor outside the mesh, which was ordered to become a spare
    },
    Closing: {**_EVERYWHERE, messages.Report: phases.closing_report, messages.Published: phases.running_published},
    Finishing: {
        **_EVERYWHERE,
        messages.Finalized: phases.finalized,
        messages.Published: phases.running_published,
        messages.MemberFailed: phases.finishing_member_failed,
        messages.Report: _ignore,
        messages.Resumed: _ignore,
        messages.BuildFailed: _ignore,  # as above
    },
    Reconnecting: {
        **_EVERYWHERE,
        messages.Status: reconnect.answered,
        messages.MemberFailed: reconnect.disturbed,
        messages.Report: reconnect.disturbed,
        messages.Published: _ignore,
        messages.Resumed: _ignore,
        messages.BuildFailed: _ignore,
        messages.Finalized: _ignore,
    },
    Ended: {
        **dict.fromkeys([*_EVERYWHERE, messages.Published, *MemberEvent.__subclasses__()], _ignore),
        messages.CoordinatorStarted: reconnect.restart_ended,
    },
}

TABLE: dict[tuple[type[Phase], type[Event]], Handler] = {
    (phase, event): handler for phase, rows in _BY_PHASE.items() for event, handler in rows.items()
}

# ---------------------------------------------------------------- after every event


def _settle(ctx: Transition) -> None:
    """Check deadlines, then do what the new state allows. The order matters: a call may change the phase."""
    if isinstance(ctx.phase, _WITHOUT_RUN):
        return
    _pass_on(ctx, worker_pool.expire(ctx))
    if isinstance(ctx.phase, Reconnecting):
        reconnect.settle(ctx)
    if isinstance(ctx.phase, Building):
        building.expire(ctx)
    if isinstance(ctx.phase, Finishing):
        phases.expire_finishing(ctx)
    scaling.release_surplus(ctx)
    if isinstance(ctx.phase, Running):
        phases.settle_running(ctx)
    if isinstance(ctx.phase, Closing):
        phases.expire_closing(ctx)
        recovery.try_close(ctx)
    if isinstance(ctx.phase, Forming):
        forming.gather(ctx)
        forming.try_form(ctx)
    if isinstance(ctx.phase, Forming) and ctx.state.last_change is None:
        worker_pool.refuse_if_nobody_starts(ctx)
    allowed_at = _may_start_workers_at(ctx.state)
    if allowed_at is not None and ctx.now >= allowed_at:
        worker_pool.fill_slots(ctx)


def _may_start_workers_at(state: State) -> float | None:
    """The time from which workers may start; None during a recovery: a starting process takes CPU and disk from it."""
    phase, change = state.phase, state.last_change
    if isinstance(phase, _WITHOUT_STARTS) or (isinstance(phase, Closing) and not phase.waiting):
        return None
    if isinstance(phase, Running) and change is not None and change.resumed_at is not None:
        return change.resumed_at + state.options.restart_delay_s
    return forming.gathers_until(state) or 0.0


def next_deadline(state: State) -> float | None:
    """The latest time for the next `Tick`, in seconds on the clock of `now`; None if there is no deadline."""
    if isinstance(state.phase, _WITHOUT_RUN):
        return None
    due = [at for at in (state.pool.earliest, forming.gathers_until(state)) if at is not None]
    # Where no worker may be started, an expired backoff must not tick without end.
    allowed_at = _may_start_workers_at(state)
    due += [max(at, allowed_at) for at in worker_pool.start_deadlines(state)] if allowed_at is not None else []
    due += _phase_deadlines(state)
    return min(due, default=None)


def _phase_deadlines(state: State) -> list[float]:
    phase, options = state.phase, state.options
    match phase:
        case Building():
            return [phase.deadline if phase.asked_again else phase.ask_again_at]
        case Reconnecting():
            return [phase.deadline if phase.asked_again else phase.deadline - options.timeouts.hello_s / 2]
        case Closing() if recovery.is_any_silent(state):
            return [phase.deadline if phase.asked_again else phase.deadline - options.timeouts.report_s / 2]
        case Finishing():
            return [phase.deadline]
        case Running():
            _, grow_at = phases.boundary_reasons(state)
            wants_growth = grow_at is not None and "grow" not in phase.boundary
            due = phase.deadline, phase.save_by, grow_at if wants_growth else None, callbacks.deadline(state)
            return [at for at in due if at is not None]
        case Forming():
            if phase.full_since is not None:
                return [phase.full_since + options.spare_grace_s]
            if num_able_to_form(state) // options.scaling.cp < options.scaling.min_dp:
                return []
            # A worker that shows progress in starting has its own deadline.
            if state.pool.total.visible:
                return []
            soon = phase.incident is not None and not state.pool.total.starting
            return [phase.since + (options.spare_grace_s if soon else options.timeouts.start_s)]
    return []
