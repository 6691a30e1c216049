"""Crash loops: decides whether a step's own work kills its members or unrelated losses hit the same step. Pure.

Preemptible machines may lose any number of workers in one step. Only deaths during the step's own work count: not
while idle or rebuilding, not after a drain notice, not with the node, not by a failed GPU. Signals from outside
(SIGKILL and SIGTERM) say little about the step, unless the node's agent says that memory was the cause. Such deaths
count together only if the same ring, which has the same sequences, died in the same phase.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ring.control.decisions import data_order
from elastic_ring.control.decisions.memory_ladder import OUT_OF_MEMORY
from elastic_ring.control.state import Crash, Incident, Transition, end_step
from elastic_ring.mesh import Mesh

OF_ONE_DEVICE = ("poisoned device", "device error", "computed wrongly")
"""Loss reasons that mean a failed GPU; they say nothing about the step."""
STEP_PHASES = ("forward", "backward", "compile", "update", "apply")
FINALIZE = "finalize"
OWN_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
"""Signals that a process causes by its own computation."""


def end_if_crash_loop(ctx: Transition, incident: Incident, mesh: Mesh, step: int) -> bool:
    """End the run and return True if one step's own work has likely killed members too often."""
    crash = crash_of(incident, mesh, step, end_step(ctx.state))
    if crash is None:
        return False
    earlier = tuple(before for before in ctx.state.crashes if before.step == crash.step)
    ctx.set(crashes=(*earlier, crash))
    # The largest set of these crashes that one cause can explain, in order. All are of one step.
    crashes = ctx.state.crashes
    own = [crash for crash in crashes if _is_own(crash)]
    causes = {key for crash in crashes if not _is_own(crash) for key in _keys(crash)}
    agreeing = [[crash for crash in crashes if crash in own or key in _keys(crash)] for key in sorted(causes, key=str)]
    counted = max([own, *agreeing], key=len)
    if len(counted) < ctx.options.run.crash_loop_limit:
        return False
    if crash.step < end_step(ctx.state):
        work, look = f"step {crash.step}", f"the batch of step {crash.step} and at the memory it needs"
    else:
        work, look = "writing the weights", "the memory of ring 0's nodes: each rank holds one file of weights (4 GiB)"
    ctx.end(
        "CrashLoop",
        f"{work} killed members in {len(counted)} recoveries, so it is not run once more. Counted: "
        f"{describe(counted)}. Look at {look}. The last death: {crash.deaths[0].detail}",
        step=crash.step,
        recoveries=len(counted),
        **data_order.facts(ctx.state),
    )
    return True


def crash_of(incident: Incident, mesh: Mesh, step: int, total_steps: int) -> Crash | None:
    """The deaths of this incident that a step's own work may have caused; None if there are none.

    `mesh` is the mesh of the dead workers, `step` the step that runs next.
    """
    if incident.planned or any(lost.reason == "node lost" for lost in incident.lost):
        return None
    deaths = []
    for lost in incident.lost:
        if lost.global_rank is None or lost.draining or lost.reason in OF_ONE_DEVICE:
            continue
        # If step k kills in update or apply, its vote may be known already; then the step that runs next is k + 1.
        is_of_step = lost.step == step or (lost.phase in ("update", "apply") and lost.step == step - 1)
        is_finalizing = step >= total_steps and lost.phase == FINALIZE
        if is_finalizing or (is_of_step and lost.phase in STEP_PHASES):
            deaths.append(lost)
    if not deaths:
        return None
    blamed = min(lost.step for lost in deaths)
    return Crash(blamed, mesh, tuple(lost for lost in deaths if lost.step == blamed))


def describe(crashes: Iterable[Crash]) -> str:
    """The crashes as text: worker, rank, node, phase and signal of each death."""
    texts = []
    for number, crash in enumerate(crashes, 1):
        deaths = []
        for lost in crash.deaths:
            how = lost.reason if lost.reason == OUT_OF_MEMORY else lost.signal or lost.reason
            deaths.append(f"{lost.worker} (rank {lost.global_rank} on {lost.node}) in {lost.phase}: {how}")
        texts.append(f"({number}) {', '.join(deaths)}")
    return "; ".join(texts)


def _is_own(crash: Crash) -> bool:
    """Whether the step itself likely caused all deaths. A peer of a killed process may crash when its links break."""
    return all(lost.signal in OWN_SIGNALS or lost.reason in ("exited", OUT_OF_MEMORY) for lost in crash.deaths)


def _keys(crash: Crash) -> set[tuple[Mesh, int, str]]:
    ranked = [(lost, lost.global_rank) for lost in crash.deaths if lost.global_rank is not None]
    return {(crash.mesh, crash.mesh.coordinate(rank).dp_rank, lost.phase) for lost, rank in ranked}
