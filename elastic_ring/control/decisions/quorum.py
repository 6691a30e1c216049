"""Decides from the reports of paused members which step runs next, who holds its state, and which vote to apply.

Pure; knows no mesh, nodes or spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ring.control.messages import Report, Vote


@dataclass(frozen=True)
class Quorum:
    """`step` runs next. `holders`: worker with a verified shard at `step` → its `cp_rank`.

    `roll_forward`: the vote that holders one step behind apply first; None if there are none. `newest_vote`: the newest
    vote that any member or the coordinator has.
    """

    step: int
    roll_forward: Vote | None
    holders: Mapping[str, int]
    newest_vote: Vote | None


def decide(
    reports: Mapping[str, Report], known: Vote | None, committed: int, built_step: int, built_id: tuple[int, int]
) -> Quorum:
    """Decide the next step. `known`: newest vote of the coordinator. `committed`: number of steps known as committed.

    `built_step` and `built_id` are those of the last `Build`. Its step followed from all votes known then, so a vote
    for this step or a later one counts only if that build's members cast it; any other belongs to a step that runs
    again.

    The vote of step k completes on one rank only if every rank entered it with its reduced gradient. So a member one
    step behind another of its generation still has that gradient and needs only the vote. A gradient reduced by other
    members (`gradient_membership_id`) does not fit the vote, so its owner is no holder.
    """
    heard = [vote for report in reports.values() for vote in (report.vote, report.last_vote) if vote is not None]
    votes = [vote for vote in heard if vote.step < built_step or vote.membership_id == built_id]
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
    newest = max(votes, key=lambda vote: (vote.step, vote.membership_id), default=None)
    return Quorum(step, forward if behind else None, holders, newest)


def _can_follow(report: Report, forward: Vote | None) -> bool:
    return forward is not None and report.has_gradient and report.gradient_membership_id == forward.membership_id
