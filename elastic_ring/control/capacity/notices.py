"""Keeping the deadline of nodes that leave: members hand over before it, or a checkpoint is taken before it. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control import recovery
from elastic_ring.control.capacity import scaling
from elastic_ring.control.state import Running, State, num_able_to_form
from elastic_ring.control.transition import Transition


def leaving_members(state: State) -> list[str]:
    """Members that are to hand over."""
    phase = state.phase
    assert isinstance(phase, Running)
    ranks = phase.membership.rank_of
    return sorted(state.pool.draining & ranks.keys(), key=ranks.__getitem__)


def can_hand_over(state: State) -> bool:
    """Whether `min_dp` rings can be formed without those that leave."""
    return num_able_to_form(state) // state.options.scaling.cp >= state.options.scaling.min_dp


def hand_over_by(state: State, now: float) -> float | None:
    """When a step that still runs is given up so that its members can hand over; None without a deadline.

    `handover_s` before the first member's node is gone, and not before half of what is left.
    """
    leaves_at = _first_to_leave(state)
    return None if leaves_at is None else max(now, leaves_at - min(state.options.handover_s, (leaves_at - now) / 2))


def save_if_alone(ctx: Transition) -> None:
    """If members leave whom nobody can replace, ask for a checkpoint after the step under way, once for each node; give
    that step up where it does not end in time."""
    phase = ctx.phase
    assert isinstance(phase, Running)
    nodes = frozenset(ctx.state.workers[name].node for name in leaving_members(ctx.state)) - phase.saved_for
    if nodes and not can_hand_over(ctx.state):
        ctx.stop(ctx.ready_among(phase.membership.members), "save")
        by = save_by(ctx.state, ctx.now) if ctx.options.run.checkpoint_config.is_on else None
        ctx.edit_phase(saved_for=phase.saved_for | nodes, save_by=by, save_after=ctx.state.committed)
        ctx.explain(f"too few workers without node {', '.join(sorted(nodes))}: requests a checkpoint")
    phase = ctx.phase
    assert isinstance(phase, Running)
    if phase.save_by is not None and ctx.state.committed > phase.save_after:
        ctx.edit_phase(save_by=None)  # the checkpoint is being written
    elif phase.save_by is not None and ctx.now >= phase.save_by:
        _save_at_once(ctx, phase)


def save_by(state: State, now: float) -> float | None:
    """When a step that still runs is given up for a checkpoint of the state before it; None without a deadline.

    At once if a step and the writing, by their times so far, would take longer than the time left. Else as long
    before the end as the writing and `handover_s`, and not before half of what is left.
    """
    leaves_at = _first_to_leave(state)
    if leaves_at is None:
        return None
    step_s, left_s = scaling.step_s(state), leaves_at - now
    if step_s is not None and left_s < step_s + state.write_s:
        return now
    return max(now, leaves_at - min(state.options.handover_s + state.write_s, left_s / 2))


def can_save(state: State, step_s: float, within_s: float) -> bool:
    """Whether a checkpoint that is asked for now is expected to be written in time: steps take `step_s`."""
    saves = isinstance(state.phase, Running) and state.options.run.checkpoint_config.is_on
    return saves and step_s + state.write_s <= within_s


def _save_at_once(ctx: Transition, phase: Running) -> None:
    why = f"the step under way does not end before node {', '.join(sorted(phase.saved_for))} leaves"
    incident = recovery.open_incident(ctx, phase.membership, why, planned=("save",))
    incident = replace(incident, counted=True, saves_for=phase.saved_for)
    recovery.begin_closing(ctx, phase.membership, incident, f"{why}: it is given up for a checkpoint")


def _first_to_leave(state: State) -> float | None:
    times = [
        state.nodes[state.workers[name].node].leaves_at
        for name in leaving_members(state)
        if state.workers[name].node in state.nodes
    ]
    return min((at for at in times if at), default=None)
