"""Whether and when a mesh that could have more rings grows. Pure, no I/O.

A growth stops every member once, and the first step after it is slow: near the end of a run that costs more than it
saves, and a cluster whose nodes come and go would have it pay again and again.
"""

from __future__ import annotations

from elastic_ring.control.state import State, end_step

PACE_STEPS = 3
"""Fewer steps say nothing about how long one takes."""


def cost_s(state: State) -> float:
    """What a growth costs: the setting, else what the last build took, the first one if there is no other, and what the
    last new worker took from its start until it was warm."""
    if state.options.run.grow_cost_s is not None:
        return state.options.run.grow_cost_s
    change = state.last_change
    if change is None or change.resumed_at is None:
        return 0.0
    return change.resumed_at - change.noticed_at + state.warm_up_s


def saved_s(state: State, dp: int) -> float | None:
    """What `dp` rings save until the end of the run, if a ring more is worth as much as each before; None: not known.

    By the pace since the last change: `committed` steps at `committed_at`.
    """
    pace_s, change = step_s(state), state.last_change
    if pace_s is None or change is None:
        return None
    return (end_step(state) - state.committed) * pace_s * (1 - change.mesh.dp / dp)


def step_s(state: State) -> float | None:
    """How long a step takes, by the pace since the last change; None: not known."""
    change = state.last_change
    if change is None or change.resumed_at is None or state.committed < change.step + PACE_STEPS:
        return None
    return (state.committed_at - change.resumed_at) / (state.committed - change.step)


def is_worth_it(state: State, dp: int) -> bool:
    saved = saved_s(state, dp)
    return saved is None or saved >= cost_s(state)


def earliest(state: State) -> float:
    """From when on the mesh may grow: new capacity has lasted, and the last change of its size is long enough ago."""
    run, lasted_at = state.options.run, state.pool_changed_at + state.options.run.grow_delay_s
    return lasted_at if state.resized_at is None else max(lasted_at, state.resized_at + run.grow_interval_s)
