"""Keeping the deadline of nodes that leave: members hand over before it, or a checkpoint is taken before it. Pure."""

from __future__ import annotations

from elastic_ring.control.state import Running, State, able_to_form
from elastic_ring.control.transition import Transition


def leaving_members(state: State) -> list[str]:
    """Members that are to hand over."""
    phase = state.phase
    assert isinstance(phase, Running)
    return [name for name in phase.membership.members if name in state.workers and state.workers[name].draining]


def can_hand_over(state: State) -> bool:
    """Whether `min_dp` rings can be formed without those that leave."""
    return len(able_to_form(state)) // state.options.cp >= state.options.min_dp


def hand_over_by(state: State, now: float) -> float | None:
    """When a step that still runs is given up so that its members can hand over; None without a deadline.

    `handover_s` before the first member's node is gone, and not before half of what is left.
    """
    times = [state.nodes[state.workers[name].node].leaves_at for name in leaving_members(state)
             if state.workers[name].node in state.nodes]  # fmt: skip
    leaves_at = min((at for at in times if at), default=None)
    return None if leaves_at is None else max(now, leaves_at - min(state.options.handover_s, (leaves_at - now) / 2))


def save_if_alone(ctx: Transition) -> None:
    """Ask for a checkpoint, once for each node, if members leave whom nobody can replace."""
    phase = ctx.phase
    assert isinstance(phase, Running)
    nodes = frozenset(ctx.state.workers[name].node for name in leaving_members(ctx.state)) - phase.saved_for
    if not nodes or can_hand_over(ctx.state):
        return
    ctx.stop(ctx.ready_among(phase.membership.members), "save")
    ctx.edit_phase(saved_for=phase.saved_for | nodes)
    ctx.explain(f"too few workers without node {', '.join(sorted(nodes))}: a checkpoint is asked for")
