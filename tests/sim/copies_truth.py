"""Checks what is undone against what the simulated workers really hold: the second half of invariant 3. Read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ring.control.decisions.data_order import pending_rollback
from elastic_ring.control.messages import Build, SnapshotId
from elastic_ring.control.state import Closing, Ended, State
from tests.sim.invariants import require
from tests.sim.simulator.worker import Group, SimWorker

if TYPE_CHECKING:
    from tests.sim.simulator.simulate import World


def check_step_back(world: World, before: State, after: State, order: Build) -> None:
    """Everyone goes back to the newest snapshot that the survivors hold, and no further than the setting promises."""
    assert order.step_back is not None
    require(not _is_undone(world, order.step_back), 3, f"back to {order.step_back}, which was undone on purpose")
    newest = _newest_held(world, before, after)  # less than was reported if someone died, or lost copies, since
    require(newest is None or newest <= order.step_back, 3, f"back to {order.step_back}, and {newest} is held")
    promised = _promised(world, before, after)
    if promised is None or pending_rollback(before) is not None:
        return
    group, complete = promised
    require(
        order.step >= complete, 3, f"the loss is covered from step {complete} on, but everyone goes to {order.step}"
    )
    assert isinstance(before.phase, Closing)
    incident, change = before.phase.incident, after.last_change
    assert change is not None
    if incident.undone or incident.base is None or group.order.generation != incident.base.generation:
        return
    every = world.options.run.copy_every_steps
    num_skipped = sum(step > complete for step in group.skipped)
    under_way = num_skipped or any(step > complete for step in group.taken)
    limit = every * (2 + num_skipped) if under_way else every
    told = (
        f"{change.steps_undone} steps undone, every {every} a snapshot, {num_skipped} skipped, under way: {under_way}"
    )
    require(change.steps_undone <= limit, 3, told)


def check_no_copy(world: World, before: State, after: State) -> None:
    """Nobody goes to a checkpoint, or ends, while the survivors hold a snapshot that undoes less."""
    newest, back = _newest_held(world, before, after), pending_rollback(before)
    stored = max([c.step for c in after.checkpoints if back is None or c.step < back.first_step], default=-1)
    require(newest is None or newest.step < stored, 3, f"{newest} is held, and everyone goes elsewhere")
    ends = isinstance(after.phase, Ended)
    require(stored < 0 or not ends, 3, f"the run ended with a checkpoint of step {stored} to go back to")
    promised = _promised(world, before, after) if back is None else None
    require(promised is None or promised[1] < stored, 3, "the copies cover this loss, and everyone goes elsewhere")


def _survivors(world: World, before: State, after: State) -> list[SimWorker]:
    """Whoever reported; at the end of a run everyone is released in the same decision."""
    assert isinstance(before.phase, Closing)
    state = before if isinstance(after.phase, Ended) else after
    ready = {name for name, worker in state.workers.items() if worker.status == "ready"} & set(after.workers)
    workers = [world.workers[name] for name in before.phase.membership.everyone if name in ready]
    return [worker for worker in workers if worker.alive and not worker.poisoned]


def _newest_held(world: World, before: State, after: State) -> SnapshotId | None:
    shards: dict[SnapshotId, set[int]] = {}
    survivors = _survivors(world, before, after)
    for worker in survivors:
        copies = worker.copies
        for snapshot, kept in [*copies.own.items(), *((key[0], kept) for key, kept in copies.of_peers.items())]:
            shards.setdefault(snapshot, set()).add(kept.shard.cp_rank)
    for worker in survivors:
        for (snapshot, parity), inside in worker.copies.parities.items():
            gone = [
                owner for owner in inside if not any(w.name == owner and snapshot in w.copies.own for w in survivors)
            ]
            if len(inside) == len(parity.ranks) and len(gone) == 1:
                shards.setdefault(snapshot, set()).add(inside[gone[0]].shard.cp_rank)
    cp, back = world.options.scaling.cp, pending_rollback(before)
    complete = [at for at, held in shards.items() if len(held) == cp and not _is_undone(world, at)]
    return max((one for one in complete if back is None or one.step < back.first_step), default=None)


def _promised(world: World, before: State, after: State) -> tuple[Group, int] | None:
    """The newest mesh of the members that last ran whose copies had all arrived, and of which step; None if more died
    than they cover. Nothing is promised about memory that was damaged or lost since, or of steps undone on purpose."""
    assert isinstance(before.phase, Closing)
    base = before.phase.incident.base
    mode = world.options.copy_mode(before.phase.membership.mesh if base is None else base.mesh)
    attempt = world.groups.get(before.phase.membership.id)
    if base is None or not mode or (attempt is not None and attempt.order.fresh):
        return None  # whoever goes back to a checkpoint drops the copies, also if it then does not verify
    alive = {worker.name for worker in _survivors(world, before, after)}
    if sum(name not in alive for name in base.members) > max(1, mode.num_copies):
        return None
    for identity in sorted((known for known in world.groups if known <= base.id), reverse=True):
        group = world.groups[identity]
        if group.order.members != base.members or group.memory_faults != world.memory_faults:
            return None
        complete = complete_steps(group, mode.num_copies)
        complete = [step for step in complete if not _is_undone(world, SnapshotId(step, identity))]
        if complete:
            return group, max(complete)
    return None


def _is_undone(world: World, snapshot: SnapshotId) -> bool:
    """Whether a later build undid its step on purpose. A member that has not obeyed that build still holds it."""
    return any(
        snapshot.step > back.step and snapshot.membership_id < back.membership_id for back in world.undone_on_purpose
    )


def complete_steps(group: Group, num_copies: int) -> list[int]:
    """Steps of which every copy has arrived; none in a mesh that is too small for as many as are wanted."""
    order = group.order
    pairs = [(rank, holder) for rank, holders in enumerate(order.copy_holders) for holder in holders]
    pairs += [(rank, parity.holder) for parity in order.parity_groups for rank in parity.ranks]
    if not pairs or any(len(holders) < num_copies for holders in order.copy_holders):
        return []
    wanted = {(order.members[rank], order.members[holder]) for rank, holder in pairs}
    return [step for step, stored in group.stored.items() if wanted <= stored]
