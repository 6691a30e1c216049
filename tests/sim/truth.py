"""Checks the core's decisions against the actual state of simulated workers: invariants 3 to 5, and 8. Read-only."""

from __future__ import annotations

from elastic_ring.control.decisions.data_order import batch_of, pending_rollback
from elastic_ring.control.messages import Build, Checkpoint, Command, EndRun
from elastic_ring.control.state import Closing, Ended, Forming, State, membership_of
from tests.sim.copies_truth import check_no_copy, check_step_back
from tests.sim.invariants import require, sharing
from tests.sim.simulator import simulate as simulator
from tests.sim.simulator.faults import Schedule, schedule_with_edges
from tests.sim.simulator.simulate import Listener, Outcome
from tests.sim.simulator.worker import SimWorker

MOVED_S, MOVED_AGAIN_S = 15.0, 75.0  # new room has lasted, newcomers have started, an earlier move is long enough ago
HEARD_S = 8.0  # the slowest way of a reliable message past dead coordinators


class World(simulator.World):
    """A simulated run whose decisions are checked."""

    shared = "", (0, 0), 0.0
    """What the holders of a shard share, in which generation, and since when."""

    def judge(self, before: State, after: State, commands: tuple[Command, ...]) -> None:
        check_decision(self, before, after, commands)
        shared, membership = sharing(after, self.clock), (after.term, after.generation)
        if (shared, membership) != self.shared[:2]:
            self.shared = shared, membership, self.now
        limit_s = MOVED_AGAIN_S if after.moved_at is not None else MOVED_S
        require(not shared or self.now <= self.shared[2] + limit_s, 6, shared)

    def judge_end(self, end: EndRun) -> None:
        check_end(self, end)


def simulate(
    seed: int, schedule: Schedule | None = None, limit_s: float = 600.0, listen: Listener | None = None
) -> Outcome:
    """Simulate one run. `listen` is called with (now, term, event, decision) of every coordinator.

    Raises: InvariantBroken, NotFinished, and whatever the control core raises.
    """
    world = World(seed, schedule or schedule_with_edges(seed), listen)
    world.begin()
    return world.finish(limit_s)


def check_decision(world: simulator.World, before: State, after: State, commands: tuple[Command, ...]) -> None:
    """No survivor holds more steps than are ordered, no donor less; a step is committed by one vote only."""
    vote = after.newest_vote
    if vote is not None and vote is not before.newest_vote:
        known = world.published.setdefault(vote.step, vote)
        require(known == vote, 3, f"step {vote.step} was committed twice, by different votes")
        world.corpus.committed(vote)
    if isinstance(before.phase, Closing):
        world.healthy_reports = {name for name, report in before.phase.reports.items() if report.healthy}
    elif isinstance(after.phase, Ended):
        world.healthy_reports = set()  # the run ended without asking anyone
    order = next((command for command in commands if isinstance(command, Build)), None)
    is_new = order is not None and (order.term, order.generation) not in world.groups
    if isinstance(before.phase, Closing):
        forms = isinstance(after.phase, Forming) and after.phase.incident is not None
        lost = isinstance(after.phase, Ended) and after.phase.end.error in ("ShardLost", "LossSpike")
        if pending_rollback(before) is None and (forms or (is_new and order is not None and order.goes_back)):
            _check_nobody_holds(world, before)
        if forms or lost or (is_new and order is not None and order.restore is not None):
            check_no_copy(world, before, after)
        if is_new and order is not None and order.step_back is not None:
            check_step_back(world, before, after, order)
    if order is None or not is_new:
        return
    if order.goes_back:
        if order.restore is not None:
            _check_restore(world, before, after, order.restore)
        world.published = {step: vote for step, vote in world.published.items() if step < order.step}
        return
    membership = membership_of(before)
    for name in membership.everyone if membership is not None else ():
        record = after.workers.get(name)
        if membership is not None and record is not None and record.status == "ready":
            reached = _reached(world, world.workers[name], membership.id)
            require(reached <= order.step, 3, f"{name} has {reached} steps, but step {order.step} is ordered")
    for heal in order.heals:
        donor = world.workers[heal.donor]
        if donor.alive:
            holds = donor.shard is not None and donor.shard.cp_rank == heal.cp_rank
            require(holds, 5, f"{heal.donor} shall donate cp_rank {heal.cp_rank} and has no such shard")
            can_follow = donor.gradient is not None and donor.gradient[0] == order.step - 1
            require(donor.applied == order.step or can_follow, 5, f"{donor.name} shall donate an older shard")


def _check_nobody_holds(world: simulator.World, before: State) -> None:
    """A run goes back only where a shard of the newest step has no healthy holder. A step of which a survivor has the
    vote counts; who has its gradient of the same mesh holds it."""
    counted = [world.workers[name] for name in sorted(world.workers.keys() & before.workers.keys())]
    counted = [worker for worker in counted if worker.alive and worker.state_id >= world.given_up]
    votes = [worker.vote for worker in counted if worker.vote is not None]
    sound = [w for w in counted if w.name in world.healthy_reports and not w.poisoned and w.shard is not None]
    newest = max([before.committed, *(worker.applied for worker in sound), *(vote.step + 1 for vote in votes)])
    voted = {vote.membership_id for vote in votes if vote.step + 1 == newest}
    held = {
        worker.shard.cp_rank
        for worker in sound
        if worker.shard is not None
        if worker.applied == newest
        or (worker.gradient is not None and worker.gradient in {(newest - 1, i) for i in voted})
    }
    require(
        len(held) < world.options.scaling.cp, 3, "every shard has a holder, but a checkpoint or copies replace them"
    )


def _check_restore(world: simulator.World, before: State, after: State, restore: Checkpoint) -> None:
    """No more is undone than since the newest checkpoint that verifies, that the coordinator has heard of, and that is
    from before what is undone on purpose."""
    heard, back = world.now - HEARD_S, pending_rollback(before)
    for stored in world.storage.stored:
        if back is not None and stored.checkpoint.step >= back.first_step:
            continue
        newer = stored.checkpoint.step > restore.step and stored.checkpoint.folder not in after.damaged
        require(not (newer and stored.since_s < heard), 3, f"step {stored.checkpoint.step} is stored, not restored")


def _reached(world: simulator.World, worker: SimWorker, membership_id: tuple[int, int]) -> int:
    """Steps whose result this survivor holds, as far as they were not given up before the last build."""
    if not worker.alive or worker.state_id < world.given_up:
        return 0
    held = worker.vote
    voted = held.step + 1 if held is not None and held.membership_id == membership_id else 0
    return max(voted, worker.applied)


def check_end(world: simulator.World, end: EndRun) -> None:
    """A run ends with every step committed once, or for a reason that is true."""
    state = world.coordinators[-1].state
    require(isinstance(state.phase, Ended), 1, "the run ended, but not for its coordinator")
    if end.error == "" and end.message == "all steps committed":
        _check_committed(world)
    elif end.error == "ShardLost":
        _check_lost(world, end, state)
    elif end.error == "CrashLoop":
        step = int(dict(end.facts)["step"])
        in_work = [phase for at, phase in world.deaths if at == step and phase in ("forward", "apply")]
        require(
            len(in_work) >= world.options.run.crash_loop_limit, 3, f"only {len(in_work)} deaths in the work of {step}"
        )
    elif end.error == "UserCodeFailed":
        step = int(dict(end.facts)["step"])
        told = f"user code raised {world.raised[step]} times in step {step}"
        require(world.raised[step] >= world.options.run.user_error_limit, 3, told)
    elif end.error == "OutOfMemory":
        told = f"no worker needed more than {world.most_reliefs_needed} reliefs of the memory ladder"
        require(world.most_reliefs_needed > len(world.options.memory_reliefs), 3, told)
    elif end.error == "LossSpike":
        step = int(dict(end.facts)["step"])
        require(batch_of(step, state.skips) in world.poisoned_batches, 3, f"the batch of step {step} is a good one")
    elif end.error == "RunFailed" and end.message.startswith("no worker starts"):
        _check_nobody_starts(world, state)
    else:
        require(False, 3, f"{end.error}: {end.message}")


def _check_committed(world: simulator.World) -> None:
    last = world.groups[max(world.groups)].order
    total = world.options.total_steps
    histories = set()
    for name in last.members:
        shard = world.workers[name].shard
        if shard is not None:
            histories.add(shard.history)
    require(len(histories) == 1, 3, f"the members end with {len(histories)} different histories")
    (history,) = histories
    require([vote.step for vote in history] == list(range(total)), 4, "a step twice or never")
    world.corpus.check_end(history, world.coordinators[-1].state)
    skips = world.coordinators[-1].state.skips
    require(
        [vote.values[6] for vote in history] == [batch_of(step, skips) for step in range(total)],
        4,
        "other batches were used than the seed and what is left out say",
    )
    for step, vote in world.published.items():
        require(history[step] == vote, 3, f"step {step} was published and is not in the weights")


def _check_nobody_starts(world: simulator.World, state: State) -> None:
    """True only before the first ring, after enough starts with an error of their own on each node that counts."""
    formed = any(term >= world.first_term for term, _ in world.groups)
    require(not formed, 3, "a run that had formed ended because no worker starts")
    limit = world.options.start_failure_limit
    for node in state.nodes.values():
        if node.num_slots and node.num_gpus != 0 and not node.draining:
            errors = world.start_errors[node.node]
            require(errors >= limit, 3, f"only {errors} starts on {node.node} failed with an error of their own")


def _check_lost(world: simulator.World, end: EndRun, state: State) -> None:
    require(not state.checkpoints, 3, "the run ended with a checkpoint to go back to")
    has_begun = state.num_restarts >= world.options.run.rollback_limit
    require(has_begun or state.damaged, 3, "the run ended although it may begin again")
    facts = dict(end.facts)
    lost, step = {int(rank) for rank in facts["cp_ranks"].split(",")}, int(facts["step"])
    for name in world.healthy_reports & set(state.workers):
        worker = world.workers[name]
        counts = worker.alive and not worker.poisoned and worker.state_id >= world.given_up
        if counts and worker.shard is not None and worker.shard.cp_rank in lost:
            require(worker.applied != step, 3, f"{name} holds the shard that was given up")
