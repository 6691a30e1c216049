"""Decides from the reports of paused members which step runs next, its holders, and which vote to apply; and, where the
live state is lost, the snapshot to go back to. Pure; knows no mesh, nodes or spares.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_ring.control.messages import HeldCopy, Report, SnapshotId, Vote
from elastic_ring.control.options import MAX_COPIES
from elastic_ring.control.placement.policy import Source


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
    reports: Mapping[str, Report], newest_vote: Vote | None, committed: int, built_step: int, built_id: tuple[int, int]
) -> Quorum:
    """Decide the next step. `newest_vote`: of the coordinator. `committed`: number of steps known as committed.

    `built_step` and `built_id` are those of the last `Build`. Its step followed from all votes known then, so a vote
    for this step or a later one counts only if that build's members cast it; any other belongs to a step that runs
    again.

    The vote of step k completes on one rank only if every rank entered it with its reduced gradient. So a member one
    step behind another of its generation still has that gradient and needs only the vote. A gradient reduced by other
    members (`gradient_membership_id`) does not fit the vote, so its owner is no holder.
    """
    reported = [vote for report in reports.values() for vote in (report.vote, report.last_vote) if vote is not None]
    votes = [vote for vote in reported if vote.step < built_step or vote.membership_id == built_id]
    if newest_vote is not None:
        votes.append(newest_vote)
    reached = [report.applied for report in reports.values() if report.shard is not None]
    step = max([committed, *reached, *(vote.step + 1 for vote in votes)])
    forward = next((vote for vote in votes if vote.step == step - 1), None)
    reduced_by = forward.membership_id if forward is not None else None
    holders: dict[str, int] = {}
    behind = False
    for worker, report in reports.items():
        follows = report.applied == step - 1 and report.has_gradient and report.gradient_membership_id == reduced_by
        if report.shard is not None and (report.applied == step or follows):
            holders[worker] = report.shard
            behind = behind or follows
    newest = max(votes, key=lambda vote: (vote.step, vote.membership_id), default=None)
    return Quorum(step, forward if behind else None, holders, newest)


@dataclass(frozen=True)
class Restorable:
    """A snapshot with a holder of every shard. `holders`: worker with its own snapshot → its `cp_rank`. `sources`:
    `cp_rank` → other ways to it, copies before parities."""

    snapshot: SnapshotId
    holders: Mapping[str, int]
    sources: Mapping[int, tuple[Source, ...]]

    @property
    def num_held(self) -> int:
        """The number of its shards in all memories; of one shard at most 1 + `MAX_COPIES` count."""
        counts = Counter(self.holders.values())
        counts.update({cp_rank: len(sources) for cp_rank, sources in self.sources.items()})
        return sum(min(count, 1 + MAX_COPIES) for count in counts.values())


def newest(reports: Mapping[str, Report], cp: int, given_up: SnapshotId | None) -> Restorable | None:
    """The newest snapshot of which the reporting workers hold all `cp` shards; None if there is none."""
    return max(_all(reports, cp, given_up), key=lambda restorable: restorable.snapshot, default=None)


def safest(
    reports: Mapping[str, Report], cp: int, given_up: SnapshotId | None, up_to: SnapshotId | None = None
) -> SnapshotId | None:
    """The snapshot to keep until the next one is complete: the newest of the snapshots with most holders.

    Not simply the newest: in a round that is under way every owner may hold its own snapshot, and no worker any copy.
    """
    usable = [each for each in _all(reports, cp, given_up) if up_to is None or each.snapshot <= up_to]
    best = max(usable, key=lambda restorable: (restorable.num_held, restorable.snapshot), default=None)
    return best.snapshot if best is not None else None


def _all(reports: Mapping[str, Report], cp: int, given_up: SnapshotId | None) -> list[Restorable]:
    held: dict[SnapshotId, list[tuple[str, HeldCopy]]] = defaultdict(list)
    for worker, report in reports.items():
        for copy in report.copies:
            snapshot = copy.snapshot
            is_older = given_up is not None and snapshot.membership_id < given_up.membership_id
            if given_up is None or not is_older or snapshot.step <= given_up.step:
                held[snapshot].append((worker, copy))
    every = [_restorable(snapshot, copies) for snapshot, copies in held.items()]
    return [each for each in every if len({*each.holders.values(), *each.sources}) == cp]


def living(reports: Mapping[str, Report], given_up: SnapshotId | None) -> dict[str, Report]:
    """The reports without the live state of steps that were given up.

    A member that missed the `Build` that went back still has state that is older, and must not bring these steps back.
    """
    if given_up is None:
        return dict(reports)
    bare = {"applied": 0, "shard": None, "vote": None, "last_vote": None, "has_gradient": False}
    return {
        worker: replace(report, **bare) if (0, 0) != report.state_id < given_up.membership_id else report  # type: ignore[arg-type]
        for worker, report in reports.items()
    }


def _restorable(snapshot: SnapshotId, held: list[tuple[str, HeldCopy]]) -> Restorable:
    own = {worker: copy.cp_ranks[0] for worker, copy in held if copy.own}
    copies: dict[int, list[Source]] = defaultdict(list)
    parities: dict[int, list[Source]] = defaultdict(list)
    for worker, copy in held:
        if copy.parity_of:
            for member, cp_rank in zip(copy.parity_of, copy.cp_ranks, strict=True):
                peers = tuple(peer for peer in copy.parity_of if peer != member)
                if all(peer in own for peer in peers):
                    parities[cp_rank].append(Source(worker, peers))
        elif not copy.own:
            copies[copy.cp_ranks[0]].append(Source(worker))
    sources = {cp_rank: (*copies[cp_rank], *parities[cp_rank]) for cp_rank in sorted({*copies, *parities})}
    return Restorable(snapshot, own, sources)
