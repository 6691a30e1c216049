"""Invariants of every decision of the control core, for the simulator, the tests and journals of real runs.

It reads only states, events and commands, and must not import the handlers that it checks. Samples and digests are
checked where they are known: in the simulator and in the run itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic_ring.control.coordination import Decision
from elastic_ring.control.messages import (
    Build,
    BuildFailed,
    Checkpoint,
    EndRun,
    Event,
    Finalized,
    KillWorker,
    MemberFailed,
    Report,
    Resumed,
    StartWorker,
    Stop,
)
from elastic_ring.control.state import Building, Closing, Ended, Reconnecting, Running, State, spares

_FROM_MEMBERS = (MemberFailed, Report, Resumed, BuildFailed, Finalized)


class InvariantBroken(AssertionError):
    """An invariant is violated; the message begins with its number.

    1: agreement on term, generation and build. 2: stale messages have no effect. 3: committed steps are never lost.
    4: each step and sequence counts once (checked by the simulator). 5: only verified shards are used. 6: holders of a
    shard are spread over nodes. 7: no node gets more members than it has GPUs.
    """


def check(before: State, event: Event, decision: Decision) -> None:
    """Raises: InvariantBroken naming the invariant by its number."""
    after = decision.state
    builds = [command for command in decision.commands if isinstance(command, Build)]
    _agreement(before, after, builds, decision)
    _stale(before, event, decision)
    _committed(before, event, after, builds)
    if builds and builds[0].generation > (before.last_change.generation if before.last_change else 0):
        reports = _reports(before, event)
        _verified(builds[0], reports)
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
    require(len({replace(build, worker="", cause="") for build in builds}) <= 1, 1, "members are told different builds")
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


def _stale(before: State, event: Event, decision: Decision) -> None:
    if not isinstance(event, _FROM_MEMBERS) or isinstance(before.phase, Reconnecting | Ended):
        return
    old = event.term < before.term or (event.term == before.term and event.generation < before.generation)
    if old:
        require(decision.state is before and not decision.commands, 2, f"stale {type(event).__name__} had effect")


def _committed(before: State, event: Event, after: State, builds: list[Build]) -> None:
    restored = bool(builds) and builds[0].restore is not None
    require(restored or after.committed >= before.committed, 3, "the number of committed steps went down")
    for build in builds:
        if build.restore is not None:
            _restored(before, after, build, build.restore, _reports(before, event))
            continue
        known = max(before.committed, after.committed)
        require(build.step >= known, 3, f"step {build.step} is to run although {known} steps are committed")
        require(not build.fresh or known == 0, 3, "a fresh start although a step is committed")
        if build.roll_forward is not None:
            require(build.roll_forward.step == build.step - 1, 3, "a vote of another step travels")


def _restored(before: State, after: State, build: Build, restore: Checkpoint, reports: Mapping[str, Report]) -> None:
    """Only who holds nothing goes back, and no further than to the newest checkpoint. An order sent again is none."""
    if isinstance(before.phase, Building) and before.phase.order.restore == restore:
        return
    require(build.fresh and build.step == restore.step, 3, "a checkpoint of another step than the one that is to run")
    newest = max([before.committed, *(report.applied for report in reports.values())])
    live = {name for name, worker in after.workers.items() if worker.status == "ready"}
    held = {r.shard for name, r in reports.items() if name in live and r.healthy and r.applied == newest}
    require(len(held - {None}) < build.mesh.cp, 3, "a checkpoint is taken although every shard has a holder")
    require(restore == after.checkpoints[-1], 3, f"the checkpoint of step {restore.step} is not the newest")
    require(restore.folder not in after.damaged, 5, f"{restore.folder} did not verify")


def _reports(before: State, event: Event) -> Mapping[str, Report]:
    phase = before.phase
    known = dict(phase.reports) if isinstance(phase, Closing) else {}
    if isinstance(phase, Running | Building):
        known = dict(phase.paused)
    if isinstance(event, Report):
        known.setdefault(event.worker, event)
    return known


def _verified(build: Build, reports: Mapping[str, Report]) -> None:
    if build.fresh or not reports:
        return
    healed = {worker for heal in build.heals for worker in heal.newcomers}
    sources = [(heal.donor, heal.cp_rank) for heal in build.heals]
    sources += [(w, build.mesh.coordinate(rank).cp_rank) for rank, w in enumerate(build.members) if w not in healed]
    for worker, cp_rank in sources:
        report = reports.get(worker)
        holds = report is not None and report.healthy and report.shard == cp_rank
        require(holds, 5, f"{worker} stands for cp_rank {cp_rank} without a verified shard of it")
        assert report is not None
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
