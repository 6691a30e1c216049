"""Requests of the driver's callbacks: to stop the run, or a checkpoint. They take effect at a validation. Pure.

After a validation the members wait, `callback_s` at most, until the driver has delivered all earlier events to its
callbacks. The core journals the answer before any member gets it. So a step that runs again, after a lost worker or
coordinator, gets the same answer.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.messages import Answer, CallbacksAnswered, CallbacksAwaited
from elastic_ring.control.state import State, Transition, membership_of


def awaited(ctx: Transition, event: CallbacksAwaited) -> None:
    """The members wait after `event.step` steps; each build makes them ask again."""
    callbacks = ctx.state.callbacks
    if callbacks.answered is not None and event.step <= callbacks.answered.step:
        _send(ctx, event.step)
    elif callbacks.awaited == event.step:
        ctx.explain(f"the answer of step {event.step} is waited for already")
    else:
        ctx.set(callbacks=replace(callbacks, awaited=event.step, deadline=ctx.now + ctx.options.timeouts.callback_s))
        ctx.explain(f"the members wait at step {event.step} for callbacks")


def answered(ctx: Transition, event: CallbacksAnswered) -> None:
    callbacks = ctx.state.callbacks
    if callbacks.awaited != event.step or callbacks.stop:
        ctx.explain(f"nobody waits for an answer at step {event.step}")
        return
    kept = event.step if event.keeps else callbacks.kept
    ctx.set(callbacks=replace(callbacks, awaited=None, answered=event, kept=kept))
    ctx.explain(f"callbacks at step {event.step}: {f'stop, {event.stop}' if event.stop else 'go on'}")
    _send(ctx, event.step)


def is_taken(state: State, event: CallbacksAnswered) -> bool:
    """Whether the event, or an equal one, is the newest answer: Ray repeats a call whose coordinator died
    after it had journalled it."""
    answer = state.callbacks.answered
    return answer is not None and replace(answer, cause=event.cause) == event


def expire(ctx: Transition) -> None:
    """At the deadline training goes on without an answer; a late one takes effect at the next validation."""
    callbacks = ctx.state.callbacks
    if callbacks.awaited is not None and ctx.now >= callbacks.deadline:
        answered(ctx, CallbacksAnswered(ctx.cause, callbacks.awaited))
        ctx.explain(f"no answer within {ctx.options.timeouts.callback_s:g} s")


def _send(ctx: Transition, step: int) -> None:
    membership, answer = membership_of(ctx.state), ctx.state.callbacks.answered
    assert answer is not None
    is_newest = step == answer.step
    stops, saves = is_newest and bool(answer.stop), (is_newest and answer.saves) or step == ctx.state.callbacks.kept
    for worker in ctx.ready_among(membership.members) if membership is not None else ():
        ctx.send(Answer(ctx.cause, worker, ctx.state.term, ctx.state.generation, step, stops=stops, saves=saves))
