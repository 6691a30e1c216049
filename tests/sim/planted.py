"""Bugs for the tests to plant into the core or the simulated workers; each must be noticed by an invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.control import coordination, recovery
from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.decisions import data_order, quorum
from elastic_ring.control.messages import HeldCopy, Report
from elastic_ring.control.placement import copies, policy
from elastic_ring.control.pool import placeable
from tests.sim.simulator import corpus as simulated_corpus
from tests.sim.simulator.copies import SimCopies
from tests.sim.simulator.shard import Shard
from tests.sim.simulator.worker import SimWorker

Plant = Callable[[pytest.MonkeyPatch], None]


def _accept_stale(patch: pytest.MonkeyPatch) -> None:
    honest = coordination.stale_because

    def credulous(state: Any, event: Any) -> str:
        return "" if isinstance(event, Report) else honest(state, event)

    patch.setattr(coordination, "stale_because", credulous)


def _skip_roll_forward(patch: pytest.MonkeyPatch) -> None:
    honest = quorum.decide

    def forgetful(reports: Any, known: Any, committed: int, *rest: Any) -> quorum.Quorum:
        bare = {name: replace(report, vote=None, last_vote=None) for name, report in reports.items()}
        return honest(bare, None, 0, *rest)

    patch.setattr(quorum, "decide", forgetful)


def _step_back(patch: pytest.MonkeyPatch) -> None:
    honest = quorum.decide

    def timid(reports: Any, *rest: Any) -> quorum.Quorum:
        decided = honest(reports, *rest)
        lowest = min((report.applied for report in reports.values() if report.shard is not None), default=0)
        holders = {name: report.shard for name, report in reports.items() if report.shard is not None}
        return replace(decided, step=min(lowest, decided.step), roll_forward=None, holders=holders)

    patch.setattr(quorum, "decide", timid)


def _unverified_donor(patch: pytest.MonkeyPatch) -> None:
    honest = policy.plan

    def trusting(situation: policy.Situation) -> Any:
        ranks = {worker: rank % situation.mesh.cp for rank, worker in enumerate(situation.members)}
        claimed = {worker: ranks.get(worker, 0) for worker in situation.empty}
        return honest(replace(situation, holders={**claimed, **situation.holders}, empty=()))

    patch.setattr(policy, "plan", trusting)


def _same_generation(patch: pytest.MonkeyPatch) -> None:
    honest = recovery.begin_closing

    def lazy(ctx: Any, membership: Any, incident: Any, why: str) -> None:
        honest(ctx, membership, incident, why)
        ctx.set(generation=ctx.state.generation - 1)

    patch.setattr(recovery, "begin_closing", lazy)


def _crowd(patch: pytest.MonkeyPatch) -> None:
    def most_crowded(self: Any, rank: int, shelf: Any, *_: Any) -> str:
        return max(shelf, key=lambda node: self.holders_on[rank % self.mesh.cp, node])

    patch.setattr(policy._Placement, "_best_node", most_crowded)
    patch.setattr(policy._Placement, "_swap_apart", lambda self, gaps: None)


def _ignore_gpus(patch: pytest.MonkeyPatch) -> None:
    honest = policy.plan
    patch.setattr(policy, "plan", lambda situation: honest(replace(situation, gpus_on={})))


def _count_leavers_gpus_as_free(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: policy.Situation, workers: Any) -> list[str]:
        return placeable(workers, (), self.node_of, self.gpus_on)

    patch.setattr(policy.Situation, "able", hasty)


def _forget_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_pool, "expire", lambda ctx: ())
    patch.setattr(coordination.phases, "expire_closing", lambda ctx: None)
    patch.setattr(coordination, "next_deadline", lambda state: None)


def _heal_stale_state(patch: pytest.MonkeyPatch) -> None:
    honest = SimWorker._healing

    def hasty(self: SimWorker, group: Any) -> None:
        honest(self, group)
        if self.doing == "resuming" and self.shard is not None and self.shard.history:
            old = replace(self.shard.history[-1], values=(0.0,))
            self.shard = Shard(self.shard.cp_rank, (*self.shard.history[:-1], old))

    patch.setattr(SimWorker, "_healing", hasty)


def _apply_twice(patch: pytest.MonkeyPatch) -> None:
    honest = SimWorker._rolling

    def eager(self: SimWorker, group: Any) -> None:
        vote = group.order.roll_forward
        if vote is not None and self.shard is not None and self.applied == vote.step + 1:
            self.shard = Shard(self.shard.cp_rank, (*self.shard.history, vote))
        honest(self, group)

    patch.setattr(SimWorker, "_rolling", eager)


def _oldest_copies(patch: pytest.MonkeyPatch) -> None:
    honest = quorum.newest

    def oldest(reports: Any, cp: int, given_up: Any) -> Any:
        found = honest(reports, cp, given_up)
        while found is not None:
            before, bar = found, found.snapshot

            def older(report: Report, bar: Any = bar) -> Report:
                return replace(report, copies=tuple(copy for copy in report.copies if copy.snapshot < bar))

            reports = {worker: older(report) for worker, report in reports.items()}
            found = honest(reports, cp, given_up)
            if found is None:
                return before
        return None

    patch.setattr(quorum, "newest", oldest)


def _mix_generations(patch: pytest.MonkeyPatch) -> None:
    honest = quorum.newest

    def mixed(reports: Any, cp: int, given_up: Any) -> Any:
        ids = {copy.snapshot.step: copy.snapshot for report in reports.values() for copy in report.copies}
        same = {
            worker: replace(
                report, copies=tuple(replace(copy, snapshot=ids[copy.snapshot.step]) for copy in report.copies)
            )
            for worker, report in reports.items()
        }
        return honest(same, cp, given_up)

    patch.setattr(quorum, "newest", mixed)


def _never_step_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "newest", lambda reports, cp, given_up: None)


def _parity_without_its_members(patch: pytest.MonkeyPatch) -> None:
    honest = quorum._restorable

    def trusting(snapshot: Any, held: Any) -> Any:
        named = {name for _, copy in held for name in copy.parity_of}
        claimed = [(name, HeldCopy(snapshot, (0,), own=True)) for name in named]
        return replace(honest(snapshot, [*held, *claimed]), holders=honest(snapshot, held).holders)

    patch.setattr(quorum, "_restorable", trusting)


def _believe_given_up_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "living", lambda reports, given_up: dict(reports))


def _hold_ones_own_copy(patch: pytest.MonkeyPatch) -> None:
    def selfish(mesh: Any, nodes: Any, mode: Any) -> copies.CopyPlacement:
        return copies.CopyPlacement(tuple((rank,) for rank in range(mesh.size)))

    patch.setattr(copies, "place", selfish)


def _use_damaged_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimCopies, "_verifies", lambda self, kept: True)


def _skip_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimCopies, "_all_idle", lambda self, vote: not self.busy)


def _drop_copies_at_builds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimCopies, "obeyed", lambda self, order: self.forget())


def _new_manifest_among_old_steps(patch: pytest.MonkeyPatch) -> None:
    honest = data_order.may_switch
    patch.setattr(data_order, "may_switch", lambda state, step: honest(replace(state, reached=0), step))


def _use_the_same_batches_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_order, "leave_out", lambda ctx, back, step: None)


def _oldest_checkpoint(patch: pytest.MonkeyPatch) -> None:
    honest = data_order.checkpoints_before
    patch.setattr(data_order, "checkpoints_before", lambda back, checkpoints: honest(back, checkpoints)[:1])


def _end_at_a_spike_despite_copies(patch: pytest.MonkeyPatch) -> None:
    honest = recovery._go_back

    def hasty(ctx: Any, membership: Any, incident: Any, back: Any, *rest: Any) -> None:
        if ctx.state.checkpoints:
            honest(ctx, membership, incident, back, *rest)
        else:
            data_order.end_without_rollback(ctx, back.last_step, back.why, "no checkpoint is there")

    patch.setattr(recovery, "_go_back", hasty)


def _forget_later_manifests(patch: pytest.MonkeyPatch) -> None:
    honest = data_order.journalled
    patch.setattr(simulated_corpus, "journalled", lambda lines: ((), honest(lines)[1]))


PLANTED: dict[str, Plant] = {
    "stale reports are accepted": _accept_stale,
    "votes do not travel": _skip_roll_forward,
    "everyone steps back to the slowest": _step_back,
    "a donor without a verified shard": _unverified_donor,
    "reports are collected under the old generation": _same_generation,
    "replicas crowd on one node": _crowd,
    "a node's GPUs are not counted": _ignore_gpus,
    "the GPU of a member that is yet to leave counts as free": _count_leavers_gpus_as_free,
    "no deadline is ever looked at": _forget_deadlines,
    "a newcomer gets older state": _heal_stale_state,
    "a vote is applied twice": _apply_twice,
    "everyone goes back to the oldest copies": _oldest_copies,
    "snapshots of two generations are mixed": _mix_generations,
    "copies are held and nobody goes back to them": _never_step_back,
    "a parity is used without the others of its group": _parity_without_its_members,
    "steps that were given up come back": _believe_given_up_state,
    "a rank holds its own copy": _hold_ones_own_copy,
    "a damaged copy is used": _use_damaged_copies,
    "each rank decides alone which snapshots it skips": _skip_alone,
    "copies are dropped before new ones have arrived": _drop_copies_at_builds,
    "a longer manifest begins at a step that ran before": _new_manifest_among_old_steps,
    "the batches before a spike are used again": _use_the_same_batches_again,
    "everyone goes back past a newer checkpoint on purpose": _oldest_checkpoint,
    "a loss spike ends the run although copies from before it are held": _end_at_a_spike_despite_copies,
    "a new submission forgets the manifests after its checkpoint": _forget_later_manifests,
}

FIRST_SEEDS = {
    "snapshots of two generations are mixed": 520,
    "a damaged copy is used": 230,
    "steps that were given up come back": 265,
}
"""Where to begin with bugs that few schedules show: the earlier ones only take time."""
