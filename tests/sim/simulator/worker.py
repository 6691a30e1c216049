"""A worker on the virtual clock: the step transaction with its phases, but hashes instead of tensors.

It obeys the same commands and sends the same events as the real one. A shard's content is the list of the
votes that were applied to it, so an update that is undone, doubled or stale can be seen. No clock, no ray.

Messages may be lost here, and a worker repeats what nobody has answered. The real one sends once: Ray delivers a
call to a restartable actor at least once, whatever happens to the actor in between, which comes to the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_ring.control.decisions.data_order import batch_of, version_at
from elastic_ring.control.messages import (
    Build,
    BuildFailed,
    Command,
    CorpusVersion,
    Finalize,
    Finalized,
    Hello,
    MemberFailed,
    Published,
    Release,
    Report,
    Resumed,
    Standby,
    Status,
    Stop,
    Vote,
    WorkerReady,
)
from tests.sim.invariants import require
from tests.sim.simulator.copies import SimCopies
from tests.sim.simulator.shard import Shard

if TYPE_CHECKING:
    from tests.sim.simulator.simulate import World

BATCH = 12
"""Sequences in the simulated global batch."""
SETTLED_STEPS = 2
"""As `runtime.gpu.cuda_contexts` has it."""


@dataclass
class Group:
    """The process groups of one `Build`. `left`: who tore them down or died; peers notice, sooner or later.

    `read_by`: by step the manifest by which its members read it.
    `entered`: by step who entered the vote, whether for a boundary, for a checkpoint, and with copies under way.
    `stored`: by step of a snapshot (owner, holder) of each copy that arrived. `taken`, `skipped`: steps of snapshots.
    """

    order: Build
    memory_faults: int = 0
    joined: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    healed: set[str] = field(default_factory=set)
    resumed: set[str] = field(default_factory=set)
    finalizing: set[str] = field(default_factory=set)
    reduced: dict[int, set[str]] = field(default_factory=dict)
    entered: dict[int, dict[str, tuple[bool, bool, bool]]] = field(default_factory=dict)
    stored: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    votes: dict[int, Vote] = field(default_factory=dict)
    read_by: dict[int, CorpusVersion | None] = field(default_factory=dict)
    base: tuple[Vote, ...] | None = None

    @property
    def needed(self) -> set[str]:
        """Members, and whoever sends to them."""
        return {*self.order.members, *(sender for heal in self.order.heals for sender in heal.senders)}


class SimWorker:
    """`doing`: spare, joining, rolling, healing, donating, compute, reduce, vote, apply, stopped, paused, gone."""

    def __init__(self, world: World, name: str, node: str) -> None:
        self.world, self.name, self.node = world, name, node
        self.alive, self.frozen, self.poisoned, self.breaks_apply, self.raises = True, False, False, False, False
        self.errs = False
        self.needs_reliefs = 0  # of the memory ladder
        self.term, self.generation = 0, 0
        self.doing, self.num_aborts = "spare", 0
        self.shard: Shard | None = None
        self.gradient: tuple[int, tuple[int, int]] | None = None
        self.vote: Vote | None = None
        self.last_vote: Vote | None = None
        self.group: Group | None = None
        self.wants_boundary = self.wants_save = False
        self.report_kind = "aborted"
        self.inbox: list[Command] = []
        self.holds_gpu, self.joins_until = False, 0.0
        self.placed_at: int | None = None  # the steps applied when it got its place
        self.copies = SimCopies(self)
        self.state_id = (0, 0)
        self.manifests: tuple[CorpusVersion, ...] = ()  # the later ones, as the last order has them

    # ------------------------------------------------------------ commands

    def obey(self, command: Command) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.inbox.append(command)
            return
        if isinstance(command, Hello):
            self._hello(command)
        elif isinstance(command, Release):
            if command.term >= self.term:
                self.world.die(self, "exited")
        elif isinstance(command, Stop | Build | Standby | Finalize):
            self._ordered(command)

    def _hello(self, command: Hello) -> None:
        if command.term < self.term:
            return
        self.term = command.term
        activity = {"spare": "spare", "stopped": "paused", "paused": "paused"}.get(self.doing)
        if activity is None:
            activity = "building" if self.doing in ("joining", "rolling", "healing", "donating") else "running"
        if self.doing == "paused" and self.report_kind == "finished":
            activity = "finished"
        self.world.tell(Status("w", self.name, self.term, self.generation, activity))

    def _ordered(self, command: Stop | Build | Standby | Finalize) -> None:
        if (command.term, command.generation) < (self.term, self.generation):
            return
        known = command.generation == self.generation
        self.term = command.term
        if isinstance(command, Stop) and command.mode == "save":
            self.wants_save = self.wants_save or known
            return
        if isinstance(command, Stop) and command.mode == "boundary":
            self.wants_boundary = self.wants_boundary or known
            return
        self.generation = command.generation
        if isinstance(command, Stop):
            if self.group is not None and self.group.order.generation == command.generation:
                return  # The build that this stop made room for is here already: it comes late.
            if not known or self.doing != "paused":
                self._abort("paused")
            self._report("aborted")
        elif isinstance(command, Build):
            group = self.world.group(command)
            if self.group is not group:
                self._abort("joining")
                self.copies.obeyed(command)
                self.group, self.manifests = group, command.corpus
                self.joins_until = self.world.now + self.world.options.timeouts.report_s
                self._soon()
        elif isinstance(command, Standby) and self._settled:
            self.world.die(self, "exited")
        elif isinstance(command, Standby):
            self.holds_gpu, self.placed_at = False, None
            if self.doing != "spare":
                self._abort("spare")
                self._forget()
                self.copies.forget()
        elif self.group is not None and self.doing == "paused" and known:
            self._finalize(self.group)

    @property
    def _settled(self) -> bool:
        """Whether it has let go of its node's other GPUs: it can stand by for one alone, and ends."""
        on_gpus = self.world.gpus.get(self.node) is not None
        return on_gpus and self.placed_at is not None and self.applied >= self.placed_at + SETTLED_STEPS

    def _abort(self, doing: str) -> None:
        if self.group is not None:
            self.group.left.add(self.name)
        self.group = None
        self.copies.broken_off()
        self.num_aborts += 1
        self.doing = doing
        self.wants_boundary = False

    def _forget(self) -> None:
        self.shard, self.gradient, self.vote, self.last_vote = None, None, None, None

    def _finalize(self, group: Group) -> None:
        group.finalizing.add(self.name)
        ring = [group.order.members[rank] for rank in group.order.mesh.ring(0)]
        if set(ring) <= group.finalizing and not group.left & set(ring):
            self.world.tell(Finalized("w", ring[0], self.term, self.generation, "weights"))

    # ------------------------------------------------------------ reports

    @property
    def applied(self) -> int:
        return len(self.shard.history) if self.shard else 0

    def _report(self, kind: str) -> None:
        self.report_kind = kind
        shard, gradient = self.shard, self.gradient
        fits = gradient is not None and shard is not None and gradient[0] == self.applied
        self.world.tell(
            Report(
                "w",
                self.name,
                self.term,
                self.generation,
                kind,
                self.applied,
                self.vote,
                shard.cp_rank if shard else None,
                fits,
                not self.poisoned,
                self.last_vote,
                gradient[1] if gradient is not None and fits else (0, 0),
                self.copies.held(),
                self.state_id,
            )
        )

    def report_error(self, kind: str = "peer", step: int | None = None) -> None:
        """Stop with an error; report it until a coordinator answers."""
        step = self.applied if step is None else step
        if kind != "back" and self.doing in ("rolling", "healing") and self.group is not None:
            step = self.group.order.step
        if kind == "user":
            self.world.raised[step] += 1
        self._abort("stopped")
        self._complain(kind, step, self.num_aborts)

    def _complain(self, kind: str, step: int, aborts: int) -> None:
        if self.alive and self.num_aborts == aborts:
            if not self.frozen:
                first = step if kind == "back" else -1
                identity = (self.name, self.term, self.generation)
                self.world.tell(MemberFailed("w", *identity, kind, step, "trace", first_step=first))
            self.world.later(1.0, lambda: self._complain(kind, step, aborts))

    def _own_error(self) -> bool:
        """Whether this worker's own code or device stops it here."""
        if self.errs:
            self.errs, self.poisoned = False, True
            self.report_error("device")
        elif self.raises:
            self.raises = False
            self.report_error("user")
        elif self.group is not None and len(self.group.order.memory_reliefs) < self.needs_reliefs:
            self.report_error("memory")
        return self.doing == "stopped"

    def _announce(self, kind: str, aborts: int) -> None:
        if self.alive and self.num_aborts == aborts:
            if not self.frozen:
                self._report(kind)
            self.world.later(2.0, lambda: self._announce(kind, aborts))

    # ------------------------------------------------------------ the training thread

    def ready(self) -> None:
        if self.alive:
            self.world.tell(WorkerReady("w", self.name, self.node, 1))

    def _soon(self) -> None:
        aborts = self.num_aborts
        self.world.later(self.world.random.uniform(0.005, 0.06), lambda: self._work(aborts))

    def thaw(self) -> None:
        self.frozen = False
        inbox, self.inbox = self.inbox, []
        for command in inbox:
            self.obey(command)
        if self.alive and self.group is not None:
            self._soon()

    def _work(self, aborts: int) -> None:
        if not self.alive or self.frozen or aborts != self.num_aborts:
            return
        if self.group is None or self.doing == "paused":
            return
        getattr(self, "_" + self.doing)(self.group)
        if self.doing not in ("spare", "paused", "stopped"):
            self._soon()

    def _broken(self, group: Group) -> bool:
        return bool(group.left & group.needed)

    def _fail_build(self, detail: str) -> None:
        self._abort("paused")
        self.world.tell(BuildFailed("w", self.name, self.term, self.generation, detail))

    def _joining(self, group: Group) -> None:
        if self.name in group.order.members and not self._take_gpu():
            return
        group.joined.add(self.name)
        if self._broken(group):
            self._fail_build("a peer vanished")
        elif group.needed <= group.joined:
            self.doing = "rolling"

    def _take_gpu(self) -> bool:
        """Hold one from here to the next `Standby`. Whoever finds none free looks again for a while, then gives up."""
        if not self.holds_gpu and not self.world.has_free_gpu(self.node):
            if self.world.now >= self.joins_until:
                self._fail_build("none of the GPUs got free")
            return False
        self.holds_gpu = True
        return True

    def _rolling(self, group: Group) -> None:
        if self._own_error():
            return
        order = group.order
        newcomers = {worker for heal in order.heals for worker in heal.newcomers}
        if not self._begin(order, self.name in newcomers):
            return
        self.gradient, self.vote, self.state_id = None, None, (order.term, order.generation)
        self.world.inject("kill-in-build", group, self.name)
        donates = any(self.name in heal.senders for heal in order.heals)
        self.doing = "healing" if self.name in newcomers else "donating" if donates else "resuming"

    def _begin(self, order: Build, is_newcomer: bool) -> bool:
        """Get the state that this build begins with, except by a heal; False if that ended the attempt."""
        if order.fresh:
            self._forget()
            history = self.world.storage.history(order.restore) if order.restore is not None else ()
            if history is None:
                self.report_error("checkpoint")
                return False
            self.shard = Shard(order.members.index(self.name) % order.mesh.cp, history)
        elif is_newcomer:
            self._forget()
        elif order.step_back is not None:
            self._forget()
            if self.name in order.members:
                self.shard = self.copies.load(order.step_back, order.members.index(self.name) % order.mesh.cp)
                if self.shard is None:
                    self._fail_build("no snapshot that verifies")
                    return False
        else:
            vote, gradient = order.roll_forward, self.gradient
            if self.shard and vote and self.applied == vote.step and gradient == (vote.step, vote.membership_id):
                self._apply_vote(vote)
                if vote.values[5]:
                    self.report_error("back", vote.step)
                    return False
            if self.shard is None or self.applied != order.step:
                self._fail_build("no shard at this step")
                return False
        return True

    def _healing(self, group: Group) -> None:
        if self._own_error():
            return
        heal = next(heal for heal in group.order.heals if self.name in heal.newcomers)
        if self._broken(group):
            self._fail_build("donor or peer vanished")
            return
        senders = [self.world.workers[name] for name in heal.senders]
        if group.order.step_back is not None:
            if not all(sender.group is group for sender in senders):
                return
            shard = senders[0].copies.given(group.order.step_back, heal)
        else:
            ready = senders[0].group is group and senders[0].applied == group.order.step
            shard = senders[0].shard
            if not ready or shard is None:
                return
        if shard is None or self.world.take_fault("corrupt"):
            self._fail_build("digest differs")
            return
        require(shard.cp_rank == heal.cp_rank, 5, f"{heal.donor} donates another shard")
        self.shard, self.state_id = shard, (group.order.term, group.order.generation)
        self.copies.healed(group.order.step_back, shard)
        self.world.inject("kill-in-heal", group, self.name)
        group.healed.add(self.name)
        donates = any(self.name in other.senders for other in group.order.heals)
        self.doing = "donating" if donates else "resuming"

    def _donating(self, group: Group) -> None:
        mine = {worker for heal in group.order.heals if self.name in heal.senders for worker in heal.newcomers}
        if mine <= group.healed:
            self.doing = "resuming" if self.name in group.order.members else "paused"
        elif self._broken(group):
            self._fail_build("a newcomer vanished")

    def _resuming(self, group: Group) -> None:
        assert self.shard is not None
        rank = group.order.members.index(self.name)
        require(self.shard.cp_rank == rank % group.order.mesh.cp, 1, f"{self.name} trains at a rank of another shard")
        require([vote.step for vote in self.shard.history] == list(range(self.applied)), 4, "a step twice or never")
        if group.base is None:
            group.base = self.shard.history
        require(self.shard.history == group.base, 5, f"{self.name} resumes with other state than its peers")
        self.placed_at = self.applied if self.placed_at is None else self.placed_at
        self.copies.built(group)
        self.world.tell(Resumed("w", self.name, self.term, self.generation, self.applied))
        if group.order.saves:
            self._save(group, at_once=True)
        self._next_step(boundary=False)

    def _next_step(self, boundary: bool) -> None:
        if self.applied >= self.world.options.total_steps or boundary:
            self.doing = "paused"
            kind = "finished" if self.applied >= self.world.options.total_steps else "boundary"
            self._announce(kind, self.num_aborts)
        else:
            self.doing = "compute"

    def _compute(self, group: Group) -> None:
        if self._own_error():
            return
        if self._broken(group) and self.world.random.random() < 0.5:
            self.report_error()
        else:
            self.world.corpus.read(group, self.applied, version_at(self.manifests, self.applied))
            group.reduced.setdefault(self.applied, set()).add(self.name)
            self.doing = "reduce"

    def _reduce(self, group: Group) -> None:
        cp_rank = group.order.members.index(self.name) % group.order.mesh.cp
        twins = {group.order.members[rank] for rank in group.order.mesh.replicas(cp_rank)}
        if twins <= group.reduced[self.applied]:
            self.gradient = (self.applied, (group.order.term, group.order.generation))
            group.entered.setdefault(self.applied, {})[self.name] = (
                self.wants_boundary,
                self.wants_save,
                self.copies.busy,
            )
            self.doing = "vote"
        elif self._broken(group):
            self.report_error()

    def _vote(self, group: Group) -> None:
        step, order = self.applied, group.order
        entered = group.entered[step]
        broken = self._broken(group)
        if set(order.members) <= set(entered) and not (broken and self.world.random.random() < 0.5):
            num_sequences = sum(len(range(dp_rank, BATCH, order.mesh.dp)) for dp_rank in range(order.mesh.dp))
            require(num_sequences == BATCH, 4, "not every sequence of the batch was used once")
            boundary, save = (any(each[asked] for each in entered.values()) for asked in (0, 1))
            num_busy = sum(busy for *_, busy in entered.values())
            batch = batch_of(step, order.skips)
            values = (
                *(float(step), float(num_sequences), float(order.mesh.dp), float(boundary), float(num_busy)),
                *(float(batch in self.world.poisoned_batches), float(batch), float(save)),
            )
            self.vote = group.votes.setdefault(step, Vote(step, values, (order.term, order.generation)))
            self.doing = "apply"
            self.world.inject("kill-in-vote", group, self.name)
        elif broken:
            self.report_error()

    def _apply(self, group: Group) -> None:
        vote = self.vote
        assert vote is not None
        if self.breaks_apply:
            self.breaks_apply, self.shard, self.gradient = False, None, None
            self.report_error()
            return
        self._apply_vote(vote)
        if group.order.members[0] == self.name:
            self.world.tell(Published("w", vote))
        if vote.values[5]:
            self.report_error("back", vote.step)
            return
        self.wants_save = self.wants_save and not vote.values[7]
        self._save(group, at_once=bool(vote.values[7]))
        self.copies.applied(group, vote)
        self._next_step(boundary=bool(vote.values[3]))

    def _save(self, group: Group, at_once: bool = False) -> None:
        """Write a part of a checkpoint beside the next steps. Whoever dies meanwhile leaves it incomplete."""
        every, shard = self.world.schedule.save_every, self.shard
        if not every or (self.applied % every and not at_once):
            return

        def written() -> None:
            if self.alive and shard is not None:
                self.world.storage.written(group.order, self.name, shard.history)

        self.world.later(self.world.random.uniform(0.01, 1.0), written)

    def _apply_vote(self, vote: Vote) -> None:
        assert self.shard is not None
        require(vote.step == self.applied, 4, f"{self.name} applies step {vote.step} at {self.applied}")
        self.shard = Shard(self.shard.cp_rank, (*self.shard.history, vote))
        self.last_vote, self.vote, self.gradient = vote, None, None
