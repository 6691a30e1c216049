"""Going back on purpose: to before a loss spike or a streak of steps that were not finite, and on with other data.

The run restores the newest copies or checkpoint from before that step. The order of samples then leaves out the batches
used since, up to that step's own. So each step's batch follows from the seed and the batches left out: another run with
the same `BatchSkip`s uses the same batches. Each batch is used once or named as left out. Pure, no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from elastic_ring.control.messages import BatchSkip, Checkpoint, MemberFailed, Report
from elastic_ring.control.state import Closing, Counted, Forming, GoBack, Reconnecting, State
from elastic_ring.control.transition import Transition

NEAR_STEPS = 64
"""A place within so many steps after the last one counts as the same."""


def batch_of(step: int, skips: Iterable[BatchSkip]) -> int:
    """Which batch of the undisturbed order a step uses."""
    return step + sum(skip.num_batches for skip in skips if skip.first_step <= step)


def asked(ctx: Transition, event: MemberFailed) -> GoBack | None:
    """Where to go back to; None once one place has been gone back from too often, which ends the run."""
    known = ctx.state.rollbacks
    is_same = known.count > 0 and event.first_step <= known.step + NEAR_STEPS
    count = known.count + 1 if is_same else 1
    ctx.set(rollbacks=Counted(max(event.step, known.step) if is_same else event.step, count))
    if count > ctx.options.run.rollback_limit:
        end(ctx, event.step, event.detail, f"the run has gone back from there {count - 1} time(s) (rollback_limit)")
        return None
    return GoBack(event.first_step, event.step, event.detail)


def end(ctx: Transition, step: int, why: str, but: str) -> None:
    ctx.end(
        "LossSpike",
        f"{why}. Going back does not help: {but}. Lower the learning rate, look at the data of these steps, or keep "
        "checkpoints from further back",
        step=step,
    )


def pending(state: State) -> GoBack | None:
    """The steps to undo on purpose, until a build has been ordered that does so."""
    if isinstance(state.phase, Reconnecting) and state.phase.back is not None:
        return state.phase.back
    phase = state.phase.before if isinstance(state.phase, Reconnecting) else state.phase
    incident = phase.incident if isinstance(phase, Closing | Forming) else None
    return incident.back if incident is not None else None


def from_before(back: GoBack, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(checkpoint for checkpoint in checkpoints if checkpoint.step < back.first_step)


def with_copies_from_before(back: GoBack, reports: Mapping[str, Report]) -> dict[str, Report]:
    """The reports with the snapshots that may be gone back to."""
    return {
        worker: replace(report, copies=tuple(copy for copy in report.copies if copy.snapshot.step < back.first_step))
        for worker, report in reports.items()
    }


def leave_out(ctx: Transition, back: GoBack, step: int) -> None:
    """A build at `step` is about to be ordered: from there on the order leaves out what was used up to the place. What
    was to be left out later on is forgotten with the steps that are undone."""
    kept = tuple(skip for skip in ctx.state.skips if skip.first_step < step)
    num_batches = batch_of(back.last_step, ctx.state.skips) + 1 - batch_of(step, kept)
    ctx.set(skips=(*kept, BatchSkip(step, num_batches)))
    ctx.explain(f"from step {step} on {num_batches} batch(es) of the order are left out")


def facts(state: State) -> dict[str, str]:
    """What is left out, as a fact of the run's end; nothing where all batches are used."""
    return {"skips": json.dumps([asdict(skip) for skip in state.skips])} if state.skips else {}


def take_fact(found: dict[str, Any]) -> tuple[BatchSkip, ...]:
    """What is left out, out of an end's facts."""
    return tuple(BatchSkip(**skip) for skip in json.loads(found.pop("skips", "[]")))


def journalled(lines: Iterable[Mapping[str, Any]]) -> tuple[BatchSkip, ...]:
    """What the journal lines of one submission leave out in the end: as it began, or as its last `Build` says."""
    known: list[Mapping[str, Any]] = []
    for line in lines:
        if line.get("note") == "begin":
            known = line.get("skips", [])
        for command in line.get("commands", ()):
            if command["type"] == "Build":
                known = command.get("skips", [])
    return tuple(BatchSkip(**skip) for skip in known)
