"""The memory ladder: what follows when a step runs out of memory. Pure.

The step is a skipped attempt: it runs again on all members, with one rung more. The rungs in force travel with each
`Build`, so that all members climb together. Each rung keeps the bits. After enough steps without a shortage the run
goes one rung down at a boundary, and waits twice as long the next time, because it may have to climb again.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.messages import MemberFailed
from elastic_ring.control.state import Incident, MemoryLadder, State
from elastic_ring.control.transition import Transition

RUNGS_ON = {"cpu": ("caches", "recompute"), "cuda": ("caches", "recompute", "offload")}
"""Device type -> the rungs from the cheapest on. `train.memory_relief` carries them out."""
MEANING = {
    "caches": "caches are freed before each step and one sequence is read ahead",
    "recompute": "layers keep only their input and compute the rest again in backward",
    "offload": "what backward needs waits in host memory",
}
ADVICE = (
    "Split sequences over more ranks (cp), train shorter ones (context_tokens), lower loss_chunk_tokens, keep fewer "
    "copies, or give each worker more memory"
)
MAX_DOUBLINGS = 6
OUT_OF_MEMORY = "out of memory"
"""Why a worker was lost that the node's agent, or the kernel, killed for the node's memory."""


def climb(ctx: Transition, event: MemberFailed) -> bool:
    """Take the next rung for the build that follows. True if there is none left, which ends the run.

    Several members of one generation may lack memory in the same step: that is one rung.
    """
    ladder, rungs = ctx.state.memory, ctx.options.memory_rungs
    if event.generation <= ladder.generation:
        ctx.explain(f"generation {event.generation} is known to lack memory")
        return False
    told = f"{event.worker} ran out of memory in step {event.step}: {event.detail}"
    if ladder.rung >= len(rungs):
        tried = "; ".join(f"{name}: {MEANING.get(name, name)}" for name in rungs) or "nothing, there are no rungs"
        ctx.end("OutOfMemory", f"{told}\nTried before: {tried}. {ADVICE}", step=event.step, worker=event.worker)
        return True
    climbed = replace(
        ladder, rung=ladder.rung + 1, generation=event.generation, since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1, why=told,
    )  # fmt: skip
    ctx.set(memory=climbed)
    name = rungs[ladder.rung]
    ctx.explain(f"{told}; rung {climbed.rung} of {len(rungs)}, {name}: {MEANING.get(name, name)}")
    return False


def climb_after_deaths(ctx: Transition, incident: Incident) -> None:
    """The same after members died because their node ran out of memory. A rung that takes more of it is left out, and
    after the last one the crash loop's limit decides."""
    short = [lost for lost in incident.lost if lost.reason == OUT_OF_MEMORY and lost.global_rank is not None]
    generation = incident.base.generation if incident.base is not None else -1
    ladder, rungs = ctx.state.memory, ctx.options.memory_rungs
    if not short or generation <= ladder.generation:
        return
    helps = ladder.rung < len(rungs) and rungs[ladder.rung] != "offload"
    climbed = replace(
        ladder, rung=ladder.rung + helps, generation=generation, since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1, why=f"{short[0].worker} was killed: {short[0].detail}".splitlines()[0],
    )  # fmt: skip
    ctx.set(memory=climbed)
    ctx.explain(f"{short[0].worker} died of its node's memory: rung {climbed.rung} of {len(rungs)}")


def may_relax(state: State, committed: int) -> bool:
    """Whether one rung may go, with `committed` steps: enough of them passed since the last shortage or change."""
    ladder, steps = state.memory, state.options.memory_relax_steps
    if not ladder.rung or not steps:
        return False
    waits_steps: int = steps << min(ladder.num_relaxed, MAX_DOUBLINGS)
    return committed - ladder.since >= waits_steps


def relax(ctx: Transition) -> None:
    """One rung down, for the build that follows."""
    ladder = ctx.state.memory
    down: MemoryLadder = replace(
        ladder, rung=max(0, ladder.rung - 1), since=ctx.state.committed, num_relaxed=ladder.num_relaxed + 1
    )
    ctx.set(memory=down)
    ctx.explain(f"memory sufficed for {ctx.state.committed - ladder.since} steps: rung {down.rung}")
