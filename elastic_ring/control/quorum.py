"""What the parked members' reports say together: which step comes next, who can be there, by which vote.

Pure; knows nothing of seats, nodes or spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ring.control.messages import Report, Vote


@dataclass(frozen=True)
class Quorum:
    """`step` runs next. `holders` maps each worker with a verified shard at `step` to its `cp_rank`.

    `roll_forward` is the vote that some of them apply first; None if nobody is behind.
    `newest_vote` is the newest result that anybody holds.
    """

    step: int
    roll_forward: Vote | None
    holders: Mapping[str, int]
    newest_vote: Vote | None


def decide(
    reports: Mapping[str, Report], known: Vote | None, committed: int, built_step: int, built_cast: tuple[int, int]
) -> Quorum:
    """`known` is the newest vote that the coordinator holds, `committed` the steps it knows to be committed.

    `built_step` and `built_cast` are those of the last `Build`. Its step was decided from all the votes there
    were, so a vote from there on counts only if that build's members cast it: any other belongs to a step
    that was given up and runs again.

    The vote of step k completes on one rank only if every rank entered it with its reduced gradient. So
    whoever is one step behind another of the same generation still has that gradient and needs only the vote.
    A gradient that other members reduced (`gradient_cast`) does not fit the vote: such a worker is no holder.
    """
    heard = [vote for report in reports.values() for vote in (report.vote, report.last_vote) if vote is not None]
    votes = [vote for vote in heard if vote.step < built_step or vote.cast == built_cast]
    if known is not None:
        votes.append(known)
    reached = [report.applied for report in reports.values() if report.shard is not None]
    step = max([committed, *reached, *(vote.step + 1 for vote in votes)])
    forward = next((vote for vote in votes if vote.step == step - 1), None)
    holders: dict[str, int] = {}
    behind = False
    for worker, report in reports.items():
        if report.shard is None:
            continue
        if report.applied == step:
            holders[worker] = report.shard
        elif report.applied == step - 1 and _can_follow(report, forward):
            holders[worker] = report.shard
            behind = True
    newest = max(votes, key=lambda vote: (vote.step, vote.cast), default=None)
    return Quorum(step, forward if behind else None, holders, newest)


def _can_follow(report: Report, forward: Vote | None) -> bool:
    return forward is not None and report.has_gradient and report.gradient_cast == forward.cast
