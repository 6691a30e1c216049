"""The corpus of a run that grows while it trains: the first step of a longer manifest. Pure, no I/O.

All members are between two steps when a mesh is built, so a build is where a manifest begins to hold: nobody has
computed that step with fewer shards, and what was read ahead is only a cache. The versions so far travel with each
`Build`, to newcomers as well. A run that goes back keeps them, and so does one that is submitted again; none begins at
a step that was committed before: the same steps use the same sequences again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from elastic_ring.control.messages import CorpusGrew, CorpusRecalled, CorpusVersion
from elastic_ring.control.state import State, end_step
from elastic_ring.control.transition import Transition


def recalled(ctx: Transition, event: CorpusRecalled) -> None:
    """The versions of the earlier submissions that this one goes on from."""
    says_something = event.versions or event.skips or event.num_steps > ctx.state.reached
    if ctx.state.corpus or ctx.state.skips or not says_something:
        ctx.explain("the corpus is known already")
        return
    ctx.set(corpus=event.versions, skips=event.skips, reached=max(ctx.state.reached, event.num_steps))
    firsts = [one.first_step for one in event.versions]
    ctx.explain(f"{len(firsts)} later manifest(s), from steps {firsts} on; {event.num_steps} step(s) ran before")


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
    """Versions rise in their steps, and a step that runs again keeps its own. Step 0 has the first manifest."""
    last = state.corpus[-1].first_step if state.corpus else 0
    return last < step < end_step(state) and step >= state.reached


def version_at(versions: Iterable[CorpusVersion], step: int) -> CorpusVersion | None:
    """The version that holds at a step; None for the manifest with which the run began."""
    return max((one for one in versions if one.first_step <= step), key=lambda one: one.first_step, default=None)


def journalled(lines: Iterable[Mapping[str, Any]]) -> tuple[CorpusVersion, ...]:
    """The versions that the journal lines of one submission know in the end: those with which it began, or those of its
    last `Build`, which has all so far."""
    known: list[Mapping[str, Any]] = []
    for line in lines:
        if line.get("note") == "begin":
            known = line.get("corpus", [])
        for command in line.get("commands", ()):
            if command["type"] == "Build":
                known = command.get("corpus", [])
    return tuple(CorpusVersion(**version) for version in known)


def facts(state: State) -> dict[str, str]:
    """The versions as a fact of the run's end; none where the corpus has not grown."""
    return {"corpus": json.dumps([asdict(version) for version in state.corpus])} if state.corpus else {}


def take_fact(found: dict[str, Any]) -> tuple[CorpusVersion, ...]:
    """The versions out of an end's facts."""
    return tuple(CorpusVersion(**version) for version in json.loads(found.pop("corpus", "[]")))
