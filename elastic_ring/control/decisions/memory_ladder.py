"""The memory ladder: reliefs, taken one by one as steps run out of memory. Pure.

The step is a skipped attempt: it runs again on all members, with one relief more. Where memory is nearly full the next
relief is taken before, at a boundary (`tight`). The reliefs in force travel with each `Build`, so all members climb
together. Each relief keeps the bits. After enough steps without a shortage the run goes one relief down at a boundary,
and waits twice as long the next time, because it may have to climb again.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.messages import MemberFailed, MemoryTight
from elastic_ring.control.state import Incident, MemoryLadder, Running, State, Transition

RELIEFS_ON = {"cpu": ("caches", "recompute"), "cuda": ("caches", "recompute", "offload")}
"""Device type -> the reliefs that keep the bits, from the cheapest on. `train.memory` carries them out."""
CHANGING_BITS = ("passes", "chunks")
"""The last reliefs: sums are added up in another order. They are taken when a step fails, never before."""
MEANING = {
    "caches": "caches are freed before each step and one sequence is read ahead",
    "recompute": "layers keep only their input and compute the rest again in backward",
    "offload": "what backward needs waits in host memory",
    "passes": "each pass has one sequence; other bits",
    "chunks": "the loss is computed in chunks of an eighth; other bits",
}
ADVICE = (
    "Split sequences over more ranks (cp), train shorter ones (context_tokens) or fewer at once (sequences_per_pass), "
    "lower loss_chunk_tokens, keep fewer copies, or give each worker more memory"
)
MAX_DOUBLINGS = 6
MIN_STEPS = 8
"""Steps between two reliefs that are taken before memory runs out."""
OUT_OF_MEMORY = "out of memory"
"""Why a worker was lost that the node's agent, or the kernel, killed for the node's memory."""


def reliefs_on(device: str, sequences_per_pass: int) -> tuple[str, ...]:
    return (*RELIEFS_ON[device], *(name for name in CHANGING_BITS if name != "passes" or sequences_per_pass > 1))


def climb(ctx: Transition, event: MemberFailed) -> bool:
    """Take the next relief for the build that follows. True if there is none left, which ends the run.

    Several members of one generation may lack memory in the same step: that is one relief.
    """
    ladder, reliefs = ctx.state.memory, ctx.options.memory_reliefs
    if event.generation <= ladder.generation:
        ctx.explain(f"generation {event.generation} is known to lack memory")
        return False
    text = f"{event.worker} ran out of memory in step {event.step}: {event.detail}"
    if ladder.num_reliefs >= len(reliefs):
        tried = "; ".join(f"{name}: {MEANING.get(name, name)}" for name in reliefs) or "nothing, there are no reliefs"
        ctx.end("OutOfMemory", f"{text}\nTried before: {tried}. {ADVICE}", step=event.step, worker=event.worker)
        return True
    climbed = replace(
        ladder,
        num_reliefs=ladder.num_reliefs + 1,
        generation=event.generation,
        since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1,
        why=text,
        pressure="",
    )
    ctx.set(memory=climbed)
    name = reliefs[ladder.num_reliefs]
    ctx.explain(f"{text}; relief {climbed.num_reliefs} of {len(reliefs)}, {name}: {MEANING.get(name, name)}")
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
        ladder,
        num_reliefs=ladder.num_reliefs + helps,
        generation=generation,
        since=ctx.state.committed,
        num_shortages=ladder.num_shortages + 1,
        why=f"{short[0].worker} was killed: {short[0].detail}".splitlines()[0],
        pressure="",
    )
    ctx.set(memory=climbed)
    ctx.explain(f"{short[0].worker} died of its node's memory: relief {climbed.num_reliefs} of {len(reliefs)}")


def tight(ctx: Transition, event: MemoryTight) -> None:
    """Have the next relief taken at a boundary, before memory runs out."""
    ladder, reliefs = ctx.state.memory, ctx.options.memory_reliefs
    if not isinstance(ctx.phase, Running):
        ctx.explain("no step runs: memory is judged anew")
    elif ctx.options.run.memory_pressure != "act":
        ctx.explain(f"{event.text}; memory_pressure=log")
    elif ladder.pressure:
        ctx.explain("a relief is wanted already")
    elif ladder.num_reliefs >= len(reliefs):
        ctx.explain(f"{event.text}, and no relief is left. {ADVICE}")
    elif reliefs[ladder.num_reliefs] in CHANGING_BITS:
        ctx.explain(f"{event.text}, and the next relief changes bits: it waits until a step fails")
    elif event.place == "host" and reliefs[ladder.num_reliefs] == "offload":
        ctx.explain(f"{event.text}, and the next relief takes more of it")
    elif event.step + 1 - ladder.since < MIN_STEPS:
        ctx.explain(f"{event.text}, and the last change is {event.step + 1 - ladder.since} steps old")
    else:
        ctx.set(memory=replace(ladder, pressure=event.text))
        ctx.explain(f"{event.text}: relief {ladder.num_reliefs + 1} of {len(reliefs)} at the next boundary")


def climb_early(ctx: Transition) -> None:
    """Take the next relief for the build that follows, before memory runs out."""
    ladder = ctx.state.memory
    name = ctx.options.memory_reliefs[ladder.num_reliefs]
    climbed = replace(
        ladder,
        num_reliefs=ladder.num_reliefs + 1,
        since=ctx.state.committed,
        why=ladder.pressure,
        pressure="",
        num_early=ladder.num_early + 1,
    )
    ctx.set(memory=climbed)
    ctx.explain(f"{ladder.pressure}; relief {climbed.num_reliefs}, {name}: {MEANING.get(name, name)}")


def may_relax(state: State, committed: int) -> bool:
    """Whether enough of `committed` steps passed since the last shortage or change to give up one relief."""
    ladder, steps = state.memory, state.options.run.memory_relax_steps
    if not ladder.num_reliefs or not steps or ladder.pressure:
        return False
    waits_steps: int = steps << min(ladder.num_relaxed, MAX_DOUBLINGS)
    return committed - ladder.since >= waits_steps


def relax(ctx: Transition) -> None:
    """Give up one relief for the build that follows."""
    ladder = ctx.state.memory
    down: MemoryLadder = replace(
        ladder,
        num_reliefs=max(0, ladder.num_reliefs - 1),
        since=ctx.state.committed,
        num_relaxed=ladder.num_relaxed + 1,
    )
    ctx.set(memory=down)
    ctx.explain(f"memory sufficed for {ctx.state.committed - ladder.since} steps: relief {down.num_reliefs}")
