"""Which data a step uses: the manifest of a corpus that grows while the run trains, and the batches left out. Pure.

A longer manifest begins to hold at a build: all members are between two steps then, nobody has computed that step with
fewer shards, and data read ahead is only a cache. No manifest begins at a step that was committed before.

A run goes back on purpose to before a loss spike or a streak of steps that were not finite: it restores the newest
copies or checkpoint from before that step, and the order of samples leaves out the batches used since, up to that
step's own. So each batch is used once or named as left out, and another run with the same `BatchSkip`s uses the same
batches.

Manifests and skips travel with each `Build`, and from one submission to the next: the same steps use the same sequences
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastic_ring.control.messages import (
    BatchSkip,
    Checkpoint,
    CorpusGrew,
    CorpusRecalled,
    CorpusVersion,
    MemberFailed,
)
from elastic_ring.control.state import Closing, Counted, Forming, GoBack, Reconnecting, State, Transition, end_step

NEAR_STEPS = 64
"""A place within so many steps after the last one counts as the same."""
# ---------------------------------------------------------------- a corpus that grows


def recall(ctx: Transition, event: CorpusRecalled) -> None:
    """Take over the order of data of the earlier submissions that this one continues."""
    is_new = event.versions or event.skips or event.num_steps > ctx.state.reached
    if ctx.state.corpus or ctx.state.skips or not is_new:
        ctx.explain("the corpus is known already")
        return
    ctx.set(corpus=event.versions, skips=event.skips, reached=max(ctx.state.reached, event.num_steps))
    firsts = [version.first_step for version in event.versions]
    ctx.explain(f"{len(firsts)} later manifest(s), from steps {firsts} on; {event.num_steps} step(s) ran before")


def lengthen_corpus(ctx: Transition, event: CorpusGrew) -> None:
    """Keep the longest manifest for the next build: it replaces one that waits."""
    ctx.set(grown=event)
    ctx.explain(f"{event.uri} is to hold from the next build on")


def may_switch(state: State, step: int) -> bool:
    """Whether a manifest waits that may hold from a build at `step` on.

    Versions rise in their steps, and a step that runs again keeps its own. Step 0 has the first manifest.
    """
    last = state.corpus[-1].first_step if state.corpus else 0
    return state.grown is not None and last < step < end_step(state) and step >= state.reached


def switch_manifest(ctx: Transition, step: int) -> None:
    """Before a build at `step` is ordered: the waiting manifest holds from there on."""
    grown = ctx.state.grown
    if grown is not None and may_switch(ctx.state, step):
        ctx.set(corpus=(*ctx.state.corpus, CorpusVersion(step, grown.uri, grown.digest)), grown=None)
        ctx.explain(f"from step {step} on the corpus is {grown.uri}")


def version_at(versions: Iterable[CorpusVersion], step: int) -> CorpusVersion | None:
    """The version that holds at a step; None for the manifest with which the run began."""
    begun = (version for version in versions if version.first_step <= step)
    return max(begun, key=lambda version: version.first_step, default=None)


# ---------------------------------------------------------------- going back on purpose


def batch_of(step: int, skips: Iterable[BatchSkip]) -> int:
    """Which batch of the undisturbed order a step uses."""
    return step + sum(skip.num_batches for skip in skips if skip.first_step <= step)


def plan_rollback(ctx: Transition, event: MemberFailed) -> GoBack | None:
    """The steps to undo; None once the run went back too often from one place, which ends it."""
    last = ctx.state.rollbacks
    is_same = last.count > 0 and event.first_step <= last.step + NEAR_STEPS
    count = last.count + 1 if is_same else 1
    ctx.set(rollbacks=Counted(max(event.step, last.step) if is_same else event.step, count))
    if count > ctx.options.run.rollback_limit:
        reason = f"the run has gone back from there {count - 1} time(s) (rollback_limit)"
        end_without_rollback(ctx, event.step, event.detail, reason)
        return None
    return GoBack(event.first_step, event.step, event.detail)


def end_without_rollback(ctx: Transition, step: int, why: str, reason: str) -> None:
    ctx.end(
        "LossSpike",
        f"{why}. Going back does not help: {reason}. Lower the learning rate, look at the data of these steps, or keep "
        "checkpoints from further back",
        step=step,
    )


def pending_rollback(state: State) -> GoBack | None:
    """The steps to undo on purpose, until a build has been ordered that does so."""
    phase = state.phase
    if isinstance(phase, Reconnecting):
        if phase.back is not None:
            return phase.back
        phase = phase.before
    return phase.incident.back if isinstance(phase, Closing | Forming) and phase.incident is not None else None


def checkpoints_before(back: GoBack, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(checkpoint for checkpoint in checkpoints if checkpoint.step < back.first_step)


def leave_out(ctx: Transition, back: GoBack, step: int) -> None:
    """Before a build at `step` is ordered: from there on leave out the batches used up to the last step to undo. Later
    skips are forgotten with the steps that are undone."""
    kept = tuple(skip for skip in ctx.state.skips if skip.first_step < step)
    num_batches = batch_of(back.last_step, ctx.state.skips) + 1 - batch_of(step, kept)
    ctx.set(skips=(*kept, BatchSkip(step, num_batches)))
    ctx.explain(f"from step {step} on {num_batches} batch(es) of the order are left out")


# ---------------------------------------------------------------- from one submission to the next


def facts(state: State) -> dict[str, str]:
    versions, skips = [asdict(version) for version in state.corpus], [asdict(skip) for skip in state.skips]
    return {key: json.dumps(records) for key, records in (("corpus", versions), ("skips", skips)) if records}


def take_facts(facts: dict[str, str]) -> tuple[tuple[CorpusVersion, ...], tuple[BatchSkip, ...]]:
    return _decoded({key: json.loads(facts.pop(key, "[]")) for key in ("corpus", "skips")})


def journalled(lines: Iterable[Mapping[str, Any]]) -> tuple[tuple[CorpusVersion, ...], tuple[BatchSkip, ...]]:
    """Manifests and skips in force after the journal lines of one submission: those with which it began, or of its last
    `Build`, which has all so far."""
    newest: Mapping[str, Any] = {}
    for line in lines:
        newest = line if line.get("note") == "begin" else newest
        newest = next((command for command in line.get("commands", ()) if command["type"] == "Build"), newest)
    return _decoded(newest)


def _decoded(records: Mapping[str, Any]) -> tuple[tuple[CorpusVersion, ...], tuple[BatchSkip, ...]]:
    versions = tuple(CorpusVersion(**version) for version in records.get("corpus", ()))
    return versions, tuple(BatchSkip(**skip) for skip in records.get("skips", ()))
