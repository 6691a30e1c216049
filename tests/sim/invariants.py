"""Invariants of every decision of the control core, for the simulator, the tests and journals of real runs.

It reads only states, events and commands, and must not import the handlers that it checks. Samples and digests are
checked where they are known: in the simulator and in the run itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_ring.control.coordination import Decision
from elastic_ring.control.facts import Fact
from elastic_ring.control.messages import (
    Build,
    BuildFailed,
    Checkpoint,
    CorpusRecalled,
    EndRun,
    Event,
    Finalized,
    HeldCopy,
    KillWorker,
    MemberFailed,
    Report,
    Resumed,
    SnapshotId,
    StartWorker,
    Stop,
)
from elastic_ring.control.state import Building, Closing, Ended, Forming, Reconnecting, Running, State, spares

_FROM_MEMBERS = (MemberFailed, Report, Resumed, BuildFailed, Finalized)


class InvariantBroken(AssertionError):
    """An invariant is violated; the message begins with its number.

    1: agreement on term, generation and build. 2: stale messages have no effect. 3: committed steps are never lost
    while each shard has a holder, but on purpose; else no more of them than the best source that is left undoes, and
    all of them at most `rollback_limit` times. 4:
    each step and sequence counts once (the simulator checks it), except batches left out by going back on purpose. 5:
    only verified shards are used. 6: holders of a shard are spread over nodes, also over
    those with room that come later. 7: no node gets more members than it has
    GPUs. 8: manifests of a growing corpus hold for good, each from a step on that was never committed before (of
    earlier submissions the simulator knows). 9: of submissions of one run at most one commits, and each other one stops
    within a bound (checked by `tests/sim/sim_terms.py`).
    """


def check(before: State, event: Event | Fact, decision: Decision) -> None:
    """Raises: InvariantBroken naming the invariant by its number."""
    after = decision.state
    builds = [command for command in decision.commands if isinstance(command, Build)]
    _agreement(before, after, builds, decision)
    _stale(before, event, decision)
    _committed(before, event, after, builds)
    _best_source(before, event, after)
    _left_out(before, event, after, builds)
    _manifests(before, event, after, builds)
    if builds and builds[0].generation > (before.last_change.generation if before.last_change else 0):
        reports = _reports(before, event)
        _verified(builds[0], reports, before)
        holding = set() if builds[0].fresh else set(reports)  # a fresh start follows `Standby` to all
        _within_gpus(builds[0], after, holding)
        if len(after.nodes) > 1:
            _spread(builds[0], before, after, holding)


def require(condition: object, number: int, what: str) -> None:
    if not condition:
        raise InvariantBroken(f"invariant {number}: {what}")


def _agreement(before: State, after: State, builds: list[Build], decision: Decision) -> None:
    require(after.term >= before.term and after.generation >= before.generation, 1, "term or generation went back")
    for command in decision.commands:
        if isinstance(command, StartWorker | KillWorker | Stop | Build | EndRun):
            require(command.term == after.term, 1, f"a command of term {command.term} in term {after.term}")
    require(len({replace(build, worker="", cause="") for build in builds}) <= 1, 1, "members got different builds")
    if builds and isinstance(before.phase, Building) and isinstance(after.phase, Building):
        again = before.phase.membership == after.phase.membership
        require(again or builds[0].generation > before.generation, 1, "two builds in one generation")
    elif builds:
        built = before.last_change.generation if before.last_change else 0
        require(builds[0].generation > built, 1, "a build repeats a generation")
    for build in builds:
        require(len(set(build.members)) == build.mesh.size, 1, "a worker has two ranks or a rank has none")
        require(
            all(after.workers[w].status == "ready" for w in build.members), 1, "a rank for a worker that is not ready"
        )


def _stale(before: State, event: Event | Fact, decision: Decision) -> None:
    if not isinstance(event, _FROM_MEMBERS) or isinstance(before.phase, Reconnecting | Ended):
        return
    old = event.term < before.term or (event.term == before.term and event.generation < before.generation)
    if old:
        require(decision.state is before and not decision.commands, 2, f"stale {type(event).__name__} had effect")


def _committed(before: State, event: Event | Fact, after: State, builds: list[Build]) -> None:
    goes_back = bool(builds) and builds[0].goes_back
    require(goes_back or after.committed >= before.committed, 3, "the number of committed steps went down")
    for build in builds[:1]:
        if build.restore is not None:
            _restored(before, after, build, build.restore, _reports(before, event))
            continue
        if build.step_back is not None:
            _stepped_back(before, after, build, build.step_back, _reports(before, event))
            continue
        if build.goes_back:
            _began_again(before, after, build, _reports(before, event))
            continue
        known = max(before.committed, after.committed)
        require(build.step >= known, 3, f"step {build.step} is to run although {known} steps are committed")
        require(not build.fresh or known == 0, 3, "a fresh start although a step is committed")
        if build.roll_forward is not None:
            require(build.roll_forward.step == build.step - 1, 3, "a vote of another step travels")


def _began_again(before: State, after: State, build: Build, reports: Mapping[str, Report]) -> None:
    """Only without a holder, a snapshot and a checkpoint, and no more often than the settings allow."""
    if isinstance(before.phase, Building) and before.phase.order.goes_back:
        return
    require(build.fresh and build.step == 0 and after.committed == 0, 3, "begins again, but not at step 0")
    require(not after.checkpoints and not after.damaged, 3, "begins again although there are checkpoints")
    require(after.num_restarts <= after.options.run.rollback_limit, 3, "begins again more often than rollback_limit")
    _nobody_holds(before, after, reports, build.mesh.cp, "the beginning is")


def _stepped_back(before: State, after: State, build: Build, chosen: SnapshotId, reports: Mapping[str, Report]) -> None:
    """Only workers without state go back, at most to the newest snapshot with a holder of every shard, and never past a
    newer checkpoint. Each member gets its shard from someone who holds it. An order sent again is none."""
    if isinstance(before.phase, Building) and before.phase.order.step_back == chosen:
        return
    require(not build.fresh and build.roll_forward is None, 3, "a step back that also begins otherwise")
    require(build.step == chosen.step, 3, f"step {build.step} is to run on {chosen}")
    limit = _only_before(before)
    require(limit is None or chosen.step < limit, 3, f"back to {chosen}, which is not before step {limit}")
    require(build.keep is not None and build.keep <= chosen, 3, f"{build.keep} is to be kept, which {chosen} replaces")
    live, every = {name for name, worker in after.workers.items() if worker.status == "ready"}, reports
    reports = {name: report for name, report in reports.items() if name in live and report.healthy}
    if limit is None:
        _nobody_holds(before, after, reports, build.mesh.cp, "snapshots are")
    stored = max([c.step for c in after.checkpoints if limit is None or c.step < limit], default=-1)
    require(stored <= chosen.step, 3, f"back to step {chosen.step} although step {stored} is in a checkpoint")
    _undone_once(before, after, chosen, every)
    newest = _newest_held(reports, before, build.mesh.cp, limit)
    require(newest == chosen, 3, f"back to {chosen} although {newest} is held")
    held = {worker: [copy for copy in report.copies if copy.snapshot == chosen] for worker, report in reports.items()}
    healed = {worker: heal for heal in build.heals for worker in heal.newcomers}
    for rank, worker in enumerate(build.members):
        cp_rank, heal = rank % build.mesh.cp, healed.get(worker)
        if heal is None:
            require(_has(held, worker, cp_rank), 5, f"{worker} is to load cp_rank {cp_rank} and does not hold it")
        elif not heal.parity_from:
            require(heal.cp_rank == cp_rank and worker != heal.donor, 5, f"{worker} is healed of another shard")
            require(_has(held, heal.donor, cp_rank), 5, f"{heal.donor} is to send cp_rank {cp_rank}, not held")
        else:
            require(heal.newcomers == (worker,) and heal.cp_rank == cp_rank, 5, f"{worker}: several from one parity")
            supplied = any(_gives(copy, heal.parity_from, cp_rank) for copy in held.get(heal.donor, ()))
            own = all(any(copy.own for copy in held.get(other, ())) for other in heal.parity_from)
            require(supplied and own, 5, f"the parity of {heal.donor} does not give cp_rank {cp_rank}")


def _undone_once(before: State, after: State, chosen: SnapshotId, reports: Mapping[str, Report]) -> None:
    """The steps undone are those since the chosen snapshot, without any that were given up before. A step that a member
    reports which holds nothing healthy any more was committed, too."""
    if not isinstance(before.phase, Closing) or after.last_change is None:
        return
    counted = [report for report in reports.values() if not _is_given_up(report, before)]
    votes = [vote.step + 1 for report in counted for vote in (report.vote, report.last_vote) if vote is not None]
    newest = max([before.committed, *votes, *(report.applied for report in counted)])
    undone = after.last_change.steps_undone - before.phase.incident.undone
    require(undone <= max(0, newest - chosen.step), 3, f"{undone} steps undone from step {newest} to {chosen.step}")


def _gives(parity: HeldCopy, others: Sequence[str], cp_rank: int) -> bool:
    """Whether this parity and the snapshots of `others` leave exactly one shard, the `cp_rank`."""
    left = [place for place, name in enumerate(parity.parity_of) if name not in others]
    return len(parity.parity_of) == len(others) + 1 and [parity.cp_ranks[place] for place in left] == [cp_rank]


def _has(held: Mapping[str, list[HeldCopy]], worker: str, cp_rank: int) -> bool:
    return any(not copy.parity_of and copy.cp_ranks == (cp_rank,) for copy in held.get(worker, ()))


def _nobody_holds(before: State, after: State, reports: Mapping[str, Report], cp: int, what: str) -> None:
    """Some shard of the newest state that still counts has no healthy holder. A step that was voted counts: who has its
    gradient of the same mesh can follow."""
    counted = {name: report for name, report in reports.items() if not _is_given_up(report, before)}
    votes = [vote for report in counted.values() for vote in (report.vote, report.last_vote) if vote is not None]
    newest = max([before.committed, *(r.applied for r in counted.values()), *(vote.step + 1 for vote in votes)])
    voted = {vote.membership_id for vote in votes if vote.step + 1 == newest}
    live = {name for name, worker in after.workers.items() if worker.status == "ready"}
    held = {
        r.shard
        for name, r in counted.items()
        if name in live and r.healthy
        if r.applied == newest or (r.applied == newest - 1 and r.has_gradient and r.gradient_membership_id in voted)
    }
    require(len(held - {None}) < cp, 3, f"{what} taken although every shard has a holder")


def _is_given_up(report: Report, state: State) -> bool:
    given_up = state.given_up
    return given_up is not None and report.state_id != (0, 0) and report.state_id < given_up.membership_id


def _only_before(state: State) -> int | None:
    """The step before which everyone is to go back to on purpose; None where nobody is."""
    phase = state.phase.before if isinstance(state.phase, Reconnecting) else state.phase
    incident = phase.incident if isinstance(phase, Closing | Forming) else None
    return incident.back.first_step if incident is not None and incident.back is not None else None


def _newest_held(reports: Mapping[str, Report], state: State, cp: int, limit: int | None = None) -> SnapshotId | None:
    """The newest snapshot from before step `limit` whose shards these workers all hold, found by trying each."""
    found: list[SnapshotId] = []
    given_up = state.given_up
    for snapshot in {copy.snapshot for report in reports.values() for copy in report.copies}:
        if given_up and snapshot.step > given_up.step and snapshot.membership_id < given_up.membership_id:
            continue
        if limit is not None and snapshot.step >= limit:
            continue
        held = [(name, c) for name, report in reports.items() for c in report.copies if c.snapshot == snapshot]
        own = {name for name, copy in held if copy.own}
        shards = {copy.cp_ranks[0] for _, copy in held if not copy.parity_of}
        for _, copy in held:
            missing = [place for place, name in enumerate(copy.parity_of) if name not in own]
            if len(missing) <= 1:
                shards |= {copy.cp_ranks[place] for place in missing}
        if len(shards) == cp:
            found.append(snapshot)
    return max(found, default=None)


def _best_source(before: State, event: Event | Fact, after: State) -> None:
    """Nobody goes back to a checkpoint, or ends the run, while the members hold a snapshot that undoes less."""
    phase = before.phase
    begins_again = isinstance(after.phase, Forming) and after.phase.incident is not None
    lost = isinstance(after.phase, Ended) and after.phase.end.error == "ShardLost"
    if not isinstance(phase, Closing) or not (begins_again or lost):
        return
    # At the end all workers are released in the same decision.
    ready = {name for name, worker in (before if lost else after).workers.items() if worker.status == "ready"}
    known = _reports(before, event)
    reports = {name: r for name, r in known.items() if name in ready & set(after.workers) and r.healthy}
    limit = _only_before(before)
    newest = _newest_held(reports, before, phase.membership.mesh.cp, limit)
    stored = after.checkpoints[-1].step if after.checkpoints else -1
    require(newest is None or newest.step < stored, 3, f"{newest} is held, and not gone back to")


def _restored(before: State, after: State, build: Build, restore: Checkpoint, reports: Mapping[str, Report]) -> None:
    """Only who holds nothing goes back, and no further than to the newest checkpoint. An order sent again is none."""
    if isinstance(before.phase, Building) and before.phase.order.restore == restore:
        return
    require(build.fresh and build.step == restore.step, 3, "a checkpoint of another step than the one that is to run")
    limit = _only_before(before)
    require(limit is None or restore.step < limit, 3, f"back to step {restore.step}, which is not before step {limit}")
    known = [checkpoint.step for checkpoint in before.checkpoints if limit is not None and checkpoint.step < limit]
    require(not known or restore.step == known[-1], 3, f"back to step {restore.step} although {known[-1:]} is stored")
    if limit is None:
        _nobody_holds(before, after, reports, build.mesh.cp, "a checkpoint is")
    require(restore == after.checkpoints[-1], 3, f"the checkpoint of step {restore.step} is not the newest")
    require(restore.folder not in after.damaged, 5, f"{restore.folder} did not verify")


def _left_out(before: State, event: Event | Fact, after: State, builds: list[Build]) -> None:
    """What is left out changes only where steps are undone on purpose, and not for the steps that stay."""
    for build in builds:
        require(build.skips == after.skips, 4, "a build without the batches that are left out")
    limit, step = _only_before(before), builds[0].step if builds else None
    if limit is not None and builds and builds[0].goes_back:
        require(after.skips != before.skips, 4, "the batches that led to what is undone are used again")
    if after.skips == before.skips or isinstance(event, CorpusRecalled):
        return
    require(limit is not None and builds and builds[0].goes_back, 4, "batches are left out, and nobody goes back")
    new = after.skips[-1]
    require(new.first_step == step and new.num_batches > 0, 4, "other batches are left out than undone")
    kept = tuple(skip for skip in before.skips if skip.first_step < new.first_step)
    require(after.skips[:-1] == kept, 4, "the batches of a step that stays have changed")
    assert limit is not None
    used = limit + sum(skip.num_batches for skip in before.skips if skip.first_step <= limit)
    first = new.first_step + sum(skip.num_batches for skip in after.skips)
    require(first > used, 4, f"batch {first} is used from step {step} on, although {used} was used before")


def _manifests(before: State, event: Event | Fact, after: State, builds: list[Build]) -> None:
    require(after.corpus[: len(before.corpus)] == before.corpus, 8, "a manifest that holds was changed")
    for build in builds:
        require(build.corpus == after.corpus, 8, "a build without the manifests that hold")
    new = after.corpus[len(before.corpus) :]
    if not new or isinstance(event, CorpusRecalled):
        return
    last = before.corpus[-1].first_step if before.corpus else 0
    require([version.first_step for version in new] == [build.step for build in builds[:1]], 8, "one holds by itself")
    require(new[0].first_step > last, 8, f"a manifest from step {new[0].first_step} on follows one from {last} on")
    require(new[0].first_step >= before.committed, 8, "a manifest begins at a step that was committed before")


def sharing(state: State, now: float) -> str:
    """Two holders of one shard that share a node although another node has room for one; empty if there are none."""
    if not isinstance(state.phase, Running) or state.phase.boundary or state.pool.total.starting:
        return ""
    membership = state.phase.membership
    node_of = {name: worker.node for name, worker in state.workers.items()}
    holders = Counter((rank % membership.mesh.cp, node_of.get(w, "")) for rank, w in enumerate(membership.members))
    for node in state.nodes.values():
        workers = [worker for worker in state.workers.values() if worker.node == node.node]
        in_mesh = [worker for worker in workers if worker.worker in membership.members or worker.draining]
        ready = [worker for worker in workers if worker.status == "ready" and worker not in in_mesh]
        limit = node.num_slots if node.num_gpus is None else node.num_gpus
        has_room = limit > len(in_mesh) and (len(ready) > 0 or node.num_slots > len(workers))
        if node.draining or node.avoided or node.backoff_until > now or not has_room:
            continue
        for (cp_rank, shared), number in holders.items():
            if number > 1 and not holders[cp_rank, node.node]:
                return f"{number} holders of {cp_rank} stay on {shared} although {node.node} has room"
    return ""


def _reports(before: State, event: Event | Fact) -> Mapping[str, Report]:
    phase = before.phase
    known = dict(phase.reports) if isinstance(phase, Closing) else {}
    if isinstance(phase, Running | Building):
        known = dict(phase.paused)
    if isinstance(event, Report):
        known.setdefault(event.worker, event)
    return known


def _verified(build: Build, reports: Mapping[str, Report], before: State) -> None:
    if build.fresh or build.step_back is not None or not reports:
        return
    healed = {worker for heal in build.heals for worker in heal.newcomers}
    sources = [(heal.donor, heal.cp_rank) for heal in build.heals]
    sources += [(w, build.mesh.coordinate(rank).cp_rank) for rank, w in enumerate(build.members) if w not in healed]
    for worker, cp_rank in sources:
        report = reports.get(worker)
        holds = report is not None and report.healthy and report.shard == cp_rank
        require(holds, 5, f"{worker} stands for cp_rank {cp_rank} without a verified shard of it")
        assert report is not None
        require(not _is_given_up(report, before), 5, f"{worker} stands for cp_rank {cp_rank} with state given up")
        rolls = report.applied == build.step - 1 and report.has_gradient and build.roll_forward is not None
        require(report.applied == build.step or rolls, 5, f"{worker} is at {report.applied}, not {build.step}")


def _within_gpus(build: Build, after: State, holding: set[str]) -> None:
    """A newcomer needs a free GPU. Workers in `holding` use theirs until `Standby`, in the new mesh or not."""
    members, in_use = _on_nodes(after, set(build.members)), _on_nodes(after, holding | set(build.members))
    newcomers = _on_nodes(after, set(build.members) - holding)
    for node in after.nodes.values():
        if node.num_gpus is not None:
            told = f"on {node.node}, which has {node.num_gpus} GPU(s)"
            require(members[node.node] <= node.num_gpus, 7, f"{members[node.node]} members are to sit {told}")
            fits = not newcomers[node.node] or in_use[node.node] <= node.num_gpus
            require(fits, 7, f"{newcomers[node.node]} newcomer(s) and {in_use[node.node]} that need one in all {told}")


def _on_nodes(state: State, workers: Iterable[str]) -> Counter[str]:
    """Node → how many of these workers are ready on it."""
    known = state.workers
    return Counter(known[name].node for name in workers if name in known and known[name].status == "ready")


def _spread(build: Build, before: State, after: State, holding: set[str]) -> None:
    """No unused spare would have spread the holders of a shard over more nodes than the chosen one."""
    node_of = {name: worker.node for name, worker in after.workers.items()}
    holders = Counter((rank % build.mesh.cp, node_of[w]) for rank, w in enumerate(build.members))
    taken = _on_nodes(after, holding | set(build.members))
    full = {n.node for n in after.nodes.values() if n.num_gpus is not None and taken[n.node] >= n.num_gpus}
    idle = [worker for worker in spares(after) if worker not in build.members and node_of[worker] not in full]
    was_spare = set(spares(before))
    for rank, worker in enumerate(build.members):
        cp_rank = rank % build.mesh.cp
        if worker not in was_spare or holders[cp_rank, node_of[worker]] < 2:
            continue
        for other in idle:
            better = other in was_spare and holders[cp_rank, node_of[other]] < holders[cp_rank, node_of[worker]] - 1
            require(not better, 6, f"{other} on {node_of[other]} would stand further from the holders of {cp_rank}")
