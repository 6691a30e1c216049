"""The corpus of a run that grows while it trains: from which step on a longer manifest holds. Pure, no I/O.

All members are between two steps when a mesh is built, so a build is where a manifest begins to hold: nobody has
computed that step with fewer shards, and what was read ahead is only a cache. The versions so far travel with each
`Build`, to newcomers as well. A run that goes back keeps them: the same steps use the same sequences again.
"""

from __future__ import annotations

from elastic_ring.control.messages import CorpusGrew, CorpusRecalled, CorpusVersion
from elastic_ring.control.state import State
from elastic_ring.control.transition import Transition


def recalled(ctx: Transition, event: CorpusRecalled) -> None:
    """The versions of the checkpoint at which this submission begins."""
    if ctx.state.corpus:
        ctx.explain("the corpus is known already")
        return
    ctx.set(corpus=event.versions)
    ctx.explain(f"{len(event.versions)} later manifest(s), from steps {[one.first_step for one in event.versions]} on")


def grew(ctx: Transition, event: CorpusGrew) -> None:
    """The longest manifest counts: one that was found before and holds nowhere yet is skipped."""
    ctx.set(grown=event)
    ctx.explain(f"{event.uri} is to hold from the next build on")


def may_switch(state: State, committed: int) -> bool:
    """Whether a manifest waits that may hold from a build after `committed` steps."""
    return state.grown is not None and _may_begin(state, committed)


def begin(ctx: Transition, step: int) -> None:
    """A build at `step` is about to be ordered: the manifest that waits holds from there on."""
    grown = ctx.state.grown
    if grown is None or not _may_begin(ctx.state, step):
        return
    ctx.set(corpus=(*ctx.state.corpus, CorpusVersion(step, grown.uri, grown.digest)), grown=None)
    ctx.explain(f"from step {step} on the corpus is {grown.uri}")


def _may_begin(state: State, step: int) -> bool:
    """Versions rise in their steps, also where a run went back behind the last one. Step 0 has the first manifest."""
    last = state.corpus[-1].first_step if state.corpus else 0
    return last < step < state.options.total_steps
