"""The memory ladder: what follows when a step runs out of memory. Pure.

The step is a skipped attempt: it runs again on all members, with one relief more. The reliefs in force travel with each
`Build`, so that all members climb together. Each relief keeps the bits. After enough steps without a shortage the run
goes one relief down at a boundary, and waits twice as long the next time, because it may have to climb again.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.messages import MemberFailed
from elastic_ring.control.state import Incident, MemoryLadder, State
from elastic_ring.control.transition import Transition

RELIEFS_ON = {"cpu": ("caches", "recompute"), "cuda": ("caches", "recompute", "offload")}
"""Device type -> the reliefs from the cheapest on. `train.memory_relief` carries them out."""
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
    """Take the next relief for the build that follows. True if there is none left, which ends the run.

    Several members of one generation may lack memory in the same step: that is one relief.
    """
    ladder, reliefs = ctx.state.memory, ctx.options.memory_reliefs
    if event.generation <= ladder.generation:
        ctx.explain(f"generation {event.generation} is known to lack memory")
        return False
    told = f"{event.worker} ran out of memory in step {event.step}: {event.detail}"
    if ladder.num_reliefs >= len(reliefs):
        tried = "; ".join(f"{name}: {MEANING.get(name, name)}" for name in reliefs) or "nothing, there are no reliefs"
        ctx.end("OutOfMemory", f"{told}\nTried before: {tried}. {ADVICE}", step=event.step, worker=event.worker)
        return True
    climbed = replace(
        ladder, num_reliefs=ladder.num_reliefs + 1, generation=event.generation, since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1, why=told,
    )  # fmt: skip
    ctx.set(memory=climbed)
    name = reliefs[ladder.num_reliefs]
    ctx.explain(f"{told}; relief {climbed.num_reliefs} of {len(reliefs)}, {name}: {MEANING.get(name, name)}")
    return False


def climb_after_deaths(ctx: Transition, incident: Incident) -> None:
    """The same after members died because their node ran out of memory. A relief that takes more of it is left out, and
    after the last one the crash loop's limit decides."""
    short = [lost for lost in incident.lost if lost.reason == OUT_OF_MEMORY and lost.global_rank is not None]
    generation = incident.base.generation if incident.base is not None else -1
    ladder, reliefs = ctx.state.memory, ctx.options.memory_reliefs
    if not short or generation <= ladder.generation:
        return
    helps = ladder.num_reliefs < len(reliefs) and reliefs[ladder.num_reliefs] != "offload"
    climbed = replace(
        ladder, num_reliefs=ladder.num_reliefs + helps, generation=generation, since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1, why=f"{short[0].worker} was killed: {short[0].detail}".splitlines()[0],
    )  # fmt: skip
    ctx.set(memory=climbed)
    ctx.explain(f"{short[0].worker} died of its node's memory: relief {climbed.num_reliefs} of {len(reliefs)}")


def may_relax(state: State, committed: int) -> bool:
    """Whether one relief may go, with `committed` steps: enough of them passed since the last shortage or change."""
    ladder, steps = state.memory, state.options.memory_relax_steps
    if not ladder.num_reliefs or not steps:
        return False
    waits_steps: int = steps << min(ladder.num_relaxed, MAX_DOUBLINGS)
    return committed - ladder.since >= waits_steps


def relax(ctx: Transition) -> None:
    """One relief down, for the build that follows."""
    ladder = ctx.state.memory
    down: MemoryLadder = replace(
        ladder,
        num_reliefs=max(0, ladder.num_reliefs - 1),
        since=ctx.state.committed,
        num_relaxed=ladder.num_relaxed + 1,
    )
    ctx.set(memory=down)
    ctx.explain(f"memory sufficed for {ctx.state.committed - ladder.since} steps: relief {down.num_reliefs}")
