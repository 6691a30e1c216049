"""The control core: the pure function `advance(state, event, now) -> Decision`, its transition table, and the journal
lines from which a restarted coordinator replays it: the same events must give the same commands again.

The coordinator actor, the simulator and the property tests run it. No clock, no I/O, no ray and no torch may enter.
`now` is in seconds, on any clock that does not go back within a term.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import shorten
from typing import Any, TypeVar

from elastic_ring.control import forming, messages, phases, reconnect, recovery, spreading
from elastic_ring.control.capacity import scaling, worker_pool
from elastic_ring.control.decisions import data_order, memory_ladder, replacements
from elastic_ring.control.facts import Fact, fact_of, line_of
from elastic_ring.control.messages import Command, Event, MemberEvent, from_json, to_json
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
    Transition,
    num_able_to_form,
)
from elastic_ring.errors import ElasticRingError, IllegalTransition, JournalDamaged

_STORY_LENGTH = 20
MAX_COMMAND_CHARS = 200
"""Characters of a command in an error."""
JournalLine = TypeVar("JournalLine", bound=Mapping[str, Any])
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
    details = {name: value for name, value in vars(event).items() if name != "cause"}
    _pass_on(ctx, worker_pool.lose(ctx, LostWorker(node="", global_rank=None, **details)))


def _pass_on(ctx: Transition, losses: tuple[LostWorker, ...]) -> None:
    handler = _LOSSES.get(type(ctx.phase))
    if losses and handler is not None:
        handler(ctx, losses)


def _ignore(ctx: Transition, event: Any) -> None:
    ctx.explain(f"late {type(event).__name__}, nothing to do")


_LOSSES: dict[type, Callable[[Transition, tuple[LostWorker, ...]], None]] = {
    Building: phases.building_lost,
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
    messages.CallbacksAnswered: phases.callbacks_answered,
    messages.CorpusRecalled: data_order.recall,
    messages.CorpusGrew: data_order.lengthen_corpus,
    messages.Tick: lambda ctx, event: None,  # `_settle` checks deadlines after every event
}

_BY_PHASE: dict[type, dict[type, Handler]] = {
    Idle: {messages.CoordinatorStarted: reconnect.adopt},
    Forming: {**_EVERYWHERE, messages.Report: _ignore, messages.Published: _ignore},
    Building: {
        **_EVERYWHERE,
        messages.Resumed: phases.resumed,
        messages.Report: phases.paused_early,
        messages.Published: phases.building_published,
        messages.BuildFailed: phases.build_failed,
        messages.MemberFailed: phases.building_member_failed,
        messages.CallbacksAwaited: phases.callbacks_awaited,
    },
    Running: {
        **_EVERYWHERE,
        messages.Report: phases.running_report,
        messages.Published: phases.running_published,
        messages.MemberFailed: phases.running_member_failed,
        messages.CallbacksAwaited: phases.callbacks_awaited,
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
        phases.expire_building(ctx)
    if isinstance(ctx.phase, Finishing):
        phases.expire_finishing(ctx)
    scaling.release_surplus(ctx)
    if isinstance(ctx.phase, Running):
        spreading.settle(ctx)
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
        spreading.start_newcomers(ctx)


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
    starts = worker_pool.start_deadlines(state)
    if (newcomers_at := spreading.starts_due_at(state)) is not None:
        starts.append(newcomers_at)
    due += [max(at, allowed_at) for at in starts] if allowed_at is not None else []
    phase, options = state.phase, state.options
    match phase:
        case Building():
            due.append(phase.deadline if phase.asked_again else phase.ask_again_at)
        case Reconnecting():
            due.append(phase.deadline if phase.asked_again else phase.deadline - options.timeouts.hello_s / 2)
        case Closing() if recovery.is_any_silent(state):
            due.append(phase.deadline if phase.asked_again else phase.deadline - options.timeouts.report_s / 2)
        case Finishing():
            due.append(phase.deadline)
        case Running():
            _, grow_at = phases.boundary_reasons(state)
            may_move = grow_at is None and not phase.boundary and spreading.is_ready(state)
            move_at = spreading.earliest(state) if may_move else None
            grow_at = grow_at if "grow" not in phase.boundary else None
            answer_by = state.callbacks.deadline if state.callbacks.awaited is not None else None
            due += [at for at in (phase.deadline, phase.save_by, grow_at, move_at, answer_by) if at is not None]
        case Forming() if phase.full_since is not None:
            due.append(phase.full_since + options.spare_grace_s)
        case Forming() if num_able_to_form(state) // options.scaling.cp >= options.scaling.min_dp:
            if not state.pool.total.visible:  # a worker that shows progress in starting has its own deadline
                is_soon = phase.incident is not None and not state.pool.total.starting
                due.append(phase.since + (options.spare_grace_s if is_soon else options.timeouts.start_s))
    return min(due, default=None)


# ---------------------------------------------------------------- the journal


def journal_line(event: Event | Fact, decision: Decision, now: float) -> dict[str, Any]:
    """The journal line of one event, written before its commands are sent. `term` is the writer's.

    An event that changed nothing (`decision.state` is the state before) need not be written; a fact must be.
    """
    if isinstance(event, Fact):
        return line_of(event)
    return {
        "now": now,
        "term": decision.state.term,
        "event": to_json(event),
        "commands": packed(decision.commands),
        "reason": decision.reason,
    }


def packed(commands: Iterable[Command]) -> list[dict[str, Any]]:
    """Commands as JSON. Equal commands to consecutive workers become one, with `workers` instead of `worker`.

    A `Build` lists all members, so n copies of it would have n * n names.
    """
    lines: list[dict[str, Any]] = []
    last: object = None
    for command in commands:
        fields = dict(vars(command))  # to JSON only once for thousands of equal commands
        worker = fields.pop("worker", None)
        if worker is not None and (type(command), fields) == last:
            lines[-1]["workers"].append(worker)
            continue
        line = to_json(command)
        if worker is not None:
            del line["worker"]
            line["workers"] = [worker]
        lines.append(line)
        last = (type(command), fields) if worker is not None else None
    return lines


def term_note(term: int, num_lines: int) -> dict[str, Any]:
    """The first line of a coordinator of `term`, with the number of lines that it has read. See `standing`."""
    return {"note": "term", "term": term, "num_lines": num_lines}


def standing(lines: Iterable[JournalLine]) -> list[JournalLine]:
    """The lines that count: lines that a replaced coordinator wrote after its successor had read the journal do not.

    It sent no commands for them, because it checks for a newer term before it sends.
    """
    kept: list[tuple[int, JournalLine]] = []
    term = 0
    for number, line in enumerate(lines):
        if line.get("note") == "term":
            kept = [(place, earlier) for place, earlier in kept if place < line["num_lines"]]
            term = line["term"]
        if line.get("term", term) >= term:
            kept.append((number, line))
    return [line for _, line in kept]


def replay(
    options: ControlOptions,
    lines: Iterable[str | Mapping[str, Any]],
    show: Callable[[Event | Fact, Sequence[Command]], None] = lambda event, commands: None,
) -> State:
    """The state after all lines, which are JSON texts or parsed mappings. `show` gets each event with its commands.

    Skipped, because no commands were sent for them: lines of an older term than one before them, which a replaced
    coordinator wrote, and an incomplete last line. Also notes that are no facts.

    Raises: JournalDamaged at the first other line that cannot be read or whose commands differ.
    """
    state, now = initial(options), 0.0
    entries = list(lines)
    for number, entry in enumerate(entries, 1):
        event: Any
        try:
            line = json.loads(entry) if isinstance(entry, str) else entry
            if "note" in line:
                event, recorded = fact_of(line), []
            else:
                event, now, recorded = from_json(line["event"]), float(line["now"]), line["commands"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(entries) and isinstance(error, ValueError):
                break
            raise JournalDamaged(f"line {number} cannot be read: {error}", line=number) from error
        if event is None or line.get("term", state.term) < state.term:
            continue
        try:
            decision = advance(state, event, now)
        except ElasticRingError as error:
            raise JournalDamaged(f"line {number} has no place here: {error}", line=number) from error
        commands = packed(decision.commands)
        # Compare texts: a NaN in a vote is unequal to itself.
        if json.dumps(commands, sort_keys=True) != json.dumps(recorded, sort_keys=True):
            wrong = next((pair for pair in zip_longest(recorded, commands) if pair[0] != pair[1]), (recorded, commands))
            texts = [shorten(str(command), MAX_COMMAND_CHARS, placeholder="...") for command in wrong]
            raise JournalDamaged(
                f"line {number} records other commands than its event gives: {texts[0]}, not {texts[1]}; was it "
                "written by another version?",
                line=number,
            )
        state = decision.state
        show(event, decision.commands)
    return state
