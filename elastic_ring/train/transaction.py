"""The step as a transaction: compute, reduce, vote, apply, and what survives an interruption.

A `Transaction` outlives generations. Its shard is valid unless an apply was interrupted. Its reduced gradient is kept
until its own apply has ended: a rank that entered a vote can still apply it when a survivor delivers the result later
(roll forward). No membership here and no messages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.comm.ledger import HopTally
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering.ring_plans import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from elastic_ring.config import CpuOffload
from elastic_ring.control.decisions.corruption import Digests, Suspicion, is_checked
from elastic_ring.control.decisions.loss_spikes import SpikeBallot, SpikeWatch
from elastic_ring.control.messages import Vote
from elastic_ring.data.loader import ArrivedCopies, Loader, Slice, consumed_digest, joined
from elastic_ring.data.sampling.order import SampleOrder, passes, share
from elastic_ring.data.sampling.validation import LOSS, ValidationSource
from elastic_ring.experts.balance import LoadMeter
from elastic_ring.experts.exchange import ExpertExchange, expert_layers
from elastic_ring.mesh import Coordinate, Mesh
from elastic_ring.state.checkpoints.checkpoint import Reader
from elastic_ring.state.device_sums import squared_norm
from elastic_ring.state.header import Counters
from elastic_ring.state.shard import Shard, digest_of
from elastic_ring.train.attention_context import attention_of, batch_of
from elastic_ring.train.frozen import FrozenRows, trained_params, trained_shapes
from elastic_ring.train.gradient import Gradient
from elastic_ring.train.guards import raise_for_skips
from elastic_ring.train.memory_gauge import MemoryGauge
from elastic_ring.train.memory_relief import MemoryRelief, keep_activations
from elastic_ring.train.optim import learning_rate, make_optimizer, make_own_optimizer
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import Batch, TrainingTask
from elastic_ring.train.vote import (
    NOTHING,
    Ballot,
    ComputedWrongly,
    Flag,
    MustGoBack,
    Outcome,
    Tally,
    count,
    start_vote,
)
from elastic_ring.train.work_clock import ExchangeWaits, WorkClock
from elastic_ring.train.wrap import ModuleMaker, copy_masters, full_shapes, largest_list

DIGITS = 12  # hexadecimal, of a digest in the vote
READ_AHEAD = 16  # sequences of this step and the next, while one pass is computed; at least those of the next pass


Pairs = Sequence[tuple[int, int]]
"""(index_in_batch, sample_id) of sequences, as `share` gives them."""


class ProcessGroups(Protocol):
    """The process groups of one generation (`runtime.groups.groups.Groups`)."""

    mesh: Mesh
    global_rank: int
    world: Any
    ring: Any
    replica: Any
    device_mesh: DeviceMesh

    def check(self) -> None:
        """Raises GroupAborted once the groups have been aborted."""

    def launching(self) -> AbstractContextManager[None]:
        """A context for each launch of a collective, which an abort waits for. Raises as `check`."""


class Watch(Protocol):
    """Called at each phase of a step; stamps progress and fires planned faults."""

    def __call__(self, phase: str, step: int, hop: int | None = None) -> None: ...


@dataclass(frozen=True)
class Local:
    """Results of one rank's forward and backward passes of a step. `loss_sum` and `num_tokens`, scalars, stay on their
    device: a read synchronises, so the vote reads them together with the gradient's norm. `data_wait_s`: how long it
    waited for data. `work_s`: how long it worked itself for each of its sequences, once the device is synchronised; 0:
    not measured. `own` and `again` as in `Digests`. `expert_parts`: passes of layers whose rows for experts came in
    parts, in this ring."""

    loss_sum: Tensor
    num_tokens: Tensor
    samples: tuple[float, ...]
    hops: HopTally
    arrived: ArrivedCopies
    data_wait_s: float = 0.0
    work_s: Callable[[], float] = lambda: 0.0
    own: float = 0.0
    again: float = 0.0
    expert_parts: int = 0


@dataclass(frozen=True)
class TransactionOptions:
    """How a worker takes its steps. `kernel_cache`: the folder of kernels' tables. `spikes` judges losses, and `gauge`
    measures how near each step came to the end of memory; None: nobody does. `corruption`: what follows when ranks that
    must agree do not; in one step of `check_every_steps` digests are compared and one pass of each ring is computed by
    two, 0: in none. `cpu_offload`: what of the shard is in host memory between steps. `keeps_activations`: whatever the
    model's layers choose."""

    kernel_cache: Path | None = None
    spikes: SpikeWatch | None = None
    gauge: MemoryGauge | None = None
    corruption: Literal["off", "log", "act"] = "off"
    check_every_steps: int = 0
    cpu_offload: CpuOffload = "none"
    keeps_activations: bool = False


@dataclass
class HeldState:
    """A shard and what is true of it alone: made whole, dropped whole."""

    shard: Shard
    gradient: Gradient
    unapplied: Outcome | None = None  # the result of step `applied`, not applied yet
    last: Vote | None = None  # the result of step `applied` - 1
    back: MustGoBack | None = None  # what the last applied step asked for
    applying: bool = False
    filled: bool = False  # the shard has values, from the seed or from a donor
    id: tuple[int, int] = (0, 0)  # (term, generation) of the last build in which it became or stayed valid

    @property
    def valid(self) -> bool:
        return self.filled and not self.applying


@dataclass
class Wrapping:
    """The module as it is wrapped in the groups of one generation, with what belongs to these: made whole, dropped
    whole, as an aborted exchange may still write to its buffers. `id`: (term, generation). `hosts`: of the ring's
    ranks, where they are known. `experts`: the exchange of the layers whose tokens travel to their experts."""

    groups: ProcessGroups
    id: tuple[int, int]
    model: nn.Module
    hosts: tuple[str, ...] | None
    experts: ExpertExchange | None
    loads: LoadMeter | None
    buffers: HopBuffers = field(default_factory=HopBuffers)
    plans: PlanCache = field(default_factory=PlanCache)

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    @property
    def coordinate(self) -> Coordinate:
        return self.mesh.coordinate(self.groups.global_rank)


class Transaction:
    """One worker's training state and its part in each step."""

    def __init__(
        self,
        task: TrainingTask,
        loader: Loader,
        order: SampleOrder,
        watch: Watch,
        options: TransactionOptions | None = None,
    ) -> None:
        self.task, self.options = task, options or TransactionOptions()
        self.loader = loader
        self._order, self._watch = order, watch
        self._maker, self._frozen = ModuleMaker(task), FrozenRows()
        self._layouts = Layouts(task)
        self._held: HeldState | None = None
        self._now: Wrapping | None = None
        self.before_apply: Callable[[], None] = lambda: None
        """Called before the shard changes: a copy of it may be under way on its device."""
        self.relief = MemoryRelief()
        """The reliefs of the memory ladder; a new one counts from the next `enter` on."""
        self._waits = ExchangeWaits()
        self._suspicion: Suspicion | None = None
        self._flips: dict[str, bool] = {}  # planned faults: phases after which one bit is wrong; True: each time

    # ------------------------------------------------------------ what a report says

    @property
    def held(self) -> HeldState:
        """Only for one that has entered a generation, and has not dropped its state since."""
        assert self._held is not None
        return self._held

    @property
    def now(self) -> Wrapping:
        """Only between `enter` and `leave`."""
        assert self._now is not None
        return self._now

    @property
    def shard(self) -> Shard | None:
        return self._held.shard if self._held is not None else None

    @property
    def model(self) -> nn.Module | None:
        return self._now.model if self._now is not None else None

    @property
    def applied(self) -> int:
        return self._held.shard.counters.applied if self._held is not None else 0

    @property
    def applying(self) -> bool:
        return self._held is not None and self._held.applying

    @property
    def valid(self) -> bool:
        """Whether the shard may be used: there is one, it has values, and no apply was left half done."""
        return self._held is not None and self._held.valid

    @property
    def unapplied(self) -> Outcome | None:
        return self._held.unapplied if self._held is not None else None

    @property
    def last(self) -> Vote | None:
        return self._held.last if self._held is not None else None

    @property
    def has_gradient(self) -> bool:
        return self._held is not None and self._held.gradient.step == self.applied

    @property
    def state_id(self) -> tuple[int, int]:
        """(term, generation) of the last build in which the shard became or stayed valid; (0, 0) if it is not."""
        return self._held.id if self._held is not None and self._held.valid else (0, 0)

    @property
    def gradient_membership_id(self) -> tuple[int, int]:
        return self._held.gradient.membership_id if self._held is not None else (0, 0)

    def use(self, device: torch.device) -> None:
        """Compute on `device` from the next generation on; only without state, which is not moved."""
        assert self._held is None or device == self._maker.device, "a shard does not change its device"
        self._maker.device = device

    @property
    def device(self) -> torch.device:
        return self._maker.device

    def warm_up(self, cp: int, device_type: str) -> None:
        """Prepare what does not depend on the rank, for rings of `cp` ranks."""
        self._maker.keep_buffers()
        self._layouts.choice(cp, device_type)

    def read_from(self, loader: Loader, order: SampleOrder) -> None:
        """Take the sequences of the next steps from here; only between two generations."""
        self.loader.close()
        self.loader, self._order = loader, order

    # ------------------------------------------------------------ a generation begins

    def enter(
        self, groups: ProcessGroups, membership_id: tuple[int, int], *, keep: bool, nodes: tuple[str, ...] = ()
    ) -> None:
        """Begin generation `membership_id` (term, generation) with a fresh module, wrapped in the new groups.

        `keep` moves the shard's values into it; otherwise the shard is new, and invalid until it is filled. `nodes`:
        of each global rank, where they are known.
        """
        mesh, coordinate = groups.mesh, groups.mesh.coordinate(groups.global_rank)
        self._maker.params_in_host = self.options.cpu_offload == "all"
        model = self._maker.wrap(groups.device_mesh, mesh.dp)
        units = (self.task.units or largest_list)(model)
        for unit in units if self.options.keeps_activations else ():
            keep_activations(unit)
        self.relief.change(model, units)
        from elastic_ring.train.abortable_collectives import make_abortable

        make_abortable(model, groups.launching, self._waits)
        hosts = tuple(nodes[rank] for rank in mesh.ring(coordinate.dp_rank)) if nodes else None
        layers = list(expert_layers(model))
        loads = LoadMeter(layers, groups.ring if mesh.cp > 1 else None, self.device) if layers else None
        experts = self._exchange_of(groups, self._maker.sent)
        self._now = Wrapping(groups, membership_id, model, hosts, experts, loads)
        if self.task.frozen is not None:
            self._frozen.fill(self._maker, model, self.task.frozen, (coordinate.cp_rank, mesh.cp))
        params = trained_params(model, self.task.frozen)
        if keep:
            self.held.shard.rebind(params)
            self.held.id = membership_id
        else:
            self._hold(coordinate.cp_rank, model, params)
        self.held.gradient.attach(model, in_host=self._maker.params_in_host)

    def _hold(self, cp_rank: int, model: nn.Module, params: dict[str, Tensor]) -> None:
        """A new shard takes the place of the old one, whose memory it needs."""
        self._held = None
        offload, optimizer = self.options.cpu_offload, self._make_optimizer(model, params)
        shard = Shard(cp_rank, params, optimizer, cpu_offload=offload, computes_on=self.device)
        self._held = HeldState(shard, Gradient.like(params, self.device))

    def initialise(self) -> None:
        """First values from the seed, the same on every mesh."""
        now = self.now
        with self.filling(), torch.no_grad():
            self._maker.first_values(now.model, now.coordinate.cp_rank, now.mesh.cp)
            self.held.shard.counters = Counters()

    def restore(self, reader: Reader) -> None:
        """First values from a checkpoint of any mesh. Raises CheckpointDamaged, StorageFailed, and ModelRefused where
        it has a parameter that the model has not: one of a tied weight's two, in a run of before they stayed one."""
        shard = self.held.shard
        if more := reader.unknown(shard.params):
            raise ModelRefused(
                f"checkpoint {reader.manifest.folder} has {more[0]}, and the model has no parameter of that name: give "
                "the model with which it was written, or the run another name"
            )
        with self.filling():
            reader.fill(shard, self.now.mesh.cp)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shape of every parameter of the shard."""
        return trained_shapes(self.now.model, self.task.frozen)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A context for filling a new shard. The shard is valid once the context has ended without an error."""
        held = self.held
        held.applying = True  # a shard that is half filled is as invalid as one half applied
        yield
        held.applying, held.filled, held.id = False, True, self.now.id

    def leave(self) -> None:
        """Drop the groups and the module that was wrapped in them; keep values and gradient."""
        if self._held is not None:
            self._held.gradient.detach()
        if self._now is not None and self._now.loads is not None:
            self._now.loads.leave()
        self._now = None

    def drop(self) -> None:
        """Drop all state, as for a spare."""
        self.leave()
        self._frozen.drop()
        self._held = None

    # ------------------------------------------------------------ the step

    def run(self, step: int, *, boundary: bool, flags: Callable[[], Flag] = lambda: NOTHING) -> tuple[Outcome, Local]:
        """Run one step and apply it. Exceptions of exchanges and of the user's code pass through.

        `flags` gives the other flags of this rank. The vote calls it late, after the device has computed the step,
        because a writer that was busy at its start may be free by then.
        """
        assert step == self.applied, (step, self.applied)
        if (back := self.held.back) is not None and back.facts["step"] + 1 == step:
            raise copy(back)  # a member died in that step, and the generation that should have heard it had ended
        local = self.compute(step)
        self.reduce(step)
        outcome = self.vote(step, local, boundary=boundary, flags=flags)
        self.apply(outcome)
        return outcome, local

    def compute(self, step: int) -> Local:
        """Forward and backward of this ring's share, in passes of one or more sequences; adds up the gradient, and in
        the last pass begins to sum it over the rings."""
        now, gradient, gauge = self.now, self.held.gradient, self.options.gauge
        gradient.begin()
        copy_masters(now.model)
        if now.experts is not None:
            now.experts.begin(step)
        self.relief.before_step(self.device)
        if gauge is not None:
            gauge.begin(self.device)
        again = self._compute_again(step) if self._is_recomputed(step) else 0.0
        if now.experts is not None:
            now.experts.num_parted = 0
        if now.loads is not None:
            now.loads.begin()
        mine, following = (
            share(self._order.sample_ids(of), now.coordinate.dp_rank, now.mesh.dp) for of in (step, step + 1)
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        num_tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        slices, hops, own = [], HopTally(self.device.type == "cuda", step), 0.0
        arrived = ArrivedCopies(hops.is_watched)
        waited_s, clock = self.loader.waited_s, WorkClock(self.device, self._waits, self.loader, hops.is_watched)
        groups = list(passes(len(mine), self.relief.together(self.task.step.micro_batch)))
        for group in groups:
            gradient.begin_pass(self._sum_bucket if group is groups[-1] and self._sums_beside(step) else None)
            pieces = [self._load(mine[i:], following) for i in group]
            slices += pieces
            piece = joined(pieces, self.task.step.context_tokens)
            self._seed(piece, step)
            attention = self._attention(piece, step)
            hops.watch(attention.ledger)
            batch = self._batch(piece, attention)
            arrived.keep(piece, batch)
            with self.relief.offloading(self.device):
                loss, num_targets = self.task.loss(now.model, batch)
            self._watch("backward", step)
            if gauge is not None:
                gauge.look(self.device)
            loss.backward()
            self._flip("backward", gradient.found)
            if group.start == 0 and self._is_recomputed(step):
                own = checksum(gradient.found())
            loss_sum += loss.detach()
            num_tokens += num_targets
            hops.add(attention.ledger)
            if now.experts is not None:
                hops.num_bytes += now.experts.sent_bytes()
        samples, waited_s = consumed_digest(step, slices), self.loader.waited_s - waited_s
        clock.stop(hops)
        work_s = partial(clock.per_sequence_s, len(mine))
        parts = now.experts.num_parted if now.experts is not None else 0
        return Local(loss_sum, num_tokens, samples, hops, arrived, waited_s, work_s, own, again, parts)

    def _seed(self, piece: Slice, step: int) -> None:
        """Of the generators that a pass may draw from. `torch.manual_seed` gives the same seed to every kind of device,
        and for each that is not in use formats the stack, which reads the files' states."""
        seed = sequence_seed(self.task.step.seed, step, piece.sample_id, self.now.coordinate.cp_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def _load(self, mine: Pairs, following: Pairs) -> Slice:
        """This rank's slice of the first sequence of `mine`. Starts to read the others, and the next step's, ahead."""
        (index, sample_id), *later = mine
        ahead = self.relief.read_ahead or max(READ_AHEAD, self.task.step.micro_batch)
        upcoming = [each for _, each in (*later, *following)][:ahead]
        return self.loader.load(sample_id, index, self.layout, self.now.coordinate.cp_rank, upcoming=upcoming)

    def _is_recomputed(self, step: int) -> bool:
        """Whether each ring also computes a pass of the ring before it: only where equal bits are promised."""
        repeatable = self.device.type == "cpu" or self.task.step.deterministic
        return self._is_checked(step) and self.now.mesh.dp > 1 and repeatable

    def _is_checked(self, step: int) -> bool:
        return self.options.corruption != "off" and is_checked(step, self.options.check_every_steps)

    def _compute_again(self, step: int) -> float:
        """The digest of the gradient of the first pass of the ring before this one; leaves no gradients."""
        now, gradient = self.now, self.held.gradient
        gradient.begin_pass()
        before = (now.coordinate.dp_rank - 1) % now.mesh.dp
        first = share(self._order.sample_ids(step), before, now.mesh.dp)
        first = first[: self.relief.together(self.task.step.micro_batch)]
        pieces = [self.loader.load(id_, index, self.layout, now.coordinate.cp_rank) for index, id_ in first]
        piece = joined(pieces, self.task.step.context_tokens)
        self._seed(piece, step)
        with self.relief.offloading(self.device):
            loss, _ = self.task.loss(now.model, self._batch(piece, self._attention(piece, step)))
        self._watch("backward", step)
        loss.backward()
        found = checksum(gradient.found())
        gradient.begin()
        return found

    def _sums_beside(self, step: int) -> bool:
        """Whether the last pass may already sum over the rings: not where this ring's own gradient is looked at, nor
        with FSDP2, whose root unit holds the first and the last parameters and hands them over at the end."""
        alone = self.now.mesh.cp == 1 and self.now.mesh.dp > 1
        return alone and not self._is_recomputed(step) and "backward" not in self._flips

    def _sum_bucket(self, bucket: Tensor) -> Any:
        return self.now.groups.replica.allreduce([bucket])

    def reduce(self, step: int) -> None:
        """fp32 sum over the rings, once, in the pinned order of the replica group."""
        gradient = self.held.gradient
        gradient.end()
        self._watch("reduce", step)
        if self.now.mesh.dp > 1:
            gradient.finish(self._sum_bucket)
        self._flip("reduce", lambda: [gradient.slopes])
        gradient.step, gradient.membership_id = step, self.now.id

    def vote(self, step: int, local: Local, *, boundary: bool, flags: Callable[[], Flag] = lambda: NOTHING) -> Outcome:
        """Agree on the step's result. Once this returns on any rank, the step is committed."""
        now, options, gradient = self.now, self.options, self.held.gradient
        nothing = torch.zeros_like(local.loss_sum)
        counted = squared_norm(gradient.counts) if gradient.num_counts else nothing
        load = now.loads.largest() if now.loads is not None else nothing
        sums = [squared_norm(gradient.slopes), local.loss_sum, local.num_tokens, counted, load]
        norm_sq, loss_sum, num_tokens, of_counts, expert_load = torch.stack(sums).tolist()
        # Squares of finite fp32 numbers cannot overflow fp64: only a norm that is not finite is worth a count.
        num_nonfinite = (
            0 if math.isfinite(norm_sq) else int(gradient.flat.numel() - torch.isfinite(gradient.flat).sum())
        )
        digests = self._digests(step, norm_sq + of_counts, local)
        # An abort ends NCCL's exchanges without an error: the numbers just read may be garbage.
        now.groups.check()
        local.arrived.check(step)
        spike = options.spikes.ballot(step) if options.spikes is not None else SpikeBallot()
        said = flags() | (Flag.BOUNDARY if boundary else NOTHING)
        tally = Tally(norm_sq, num_nonfinite, loss_sum, int(num_tokens), local.samples, said, spike)
        memory_share = options.gauge.share(self.device) if options.gauge is not None else 0.0
        ballot = Ballot(tally, local.work_s(), memory_share, digests, *self._first_attempt(step), expert_load)
        work, rows = start_vote(now.groups.world, ballot)
        self._watch("vote", step)
        work.wait()
        try:
            self.held.unapplied = outcome = count(step, rows, now.mesh, now.id, options.corruption)
        except ComputedWrongly as error:
            self._suspicion = None if error.ranks else Suspicion(step, now.mesh, error.facts["what"], digests)
            raise
        return outcome

    def _digests(self, step: int, norm_sq: float, local: Local) -> Digests:
        """This rank's digests for the vote of this step; without a check only the gradient's norm."""
        if not self._is_checked(step):
            return Digests(norm_sq=norm_sq)
        state = int(self.held.shard.digest()[:DIGITS], 16) + 1.0
        return Digests(state, checksum([self.held.gradient.flat]), norm_sq, local.own, local.again)

    def _first_attempt(self, step: int) -> tuple[str, Digests]:
        """What differed in the attempt at this step before, and this rank's digests then, if ranks did not agree; on
        another mesh sums have other bits."""
        known = self._suspicion
        same = known is not None and (known.step, known.mesh) == (step, self.now.mesh)
        return (known.what, known.told) if known is not None and same else ("", Digests())

    def apply(self, outcome: Outcome) -> None:
        """Scale, clip and update the local shard; no exchange, never interrupted.

        Raises TooManySkipped, LossSpike and MustGoBack after the skip has been counted.
        """
        held, step, optim = self.held, outcome.vote.step, self.task.optim
        gradient, shard, spikes = held.gradient, held.shard, self.options.spikes
        rate = learning_rate(step, optim, self.task.lr_schedule)  # may be the user's code: before anything changes
        assert step == self.applied == gradient.step, (step, self.applied, gradient.step)
        held.unapplied, held.applying = outcome, True
        self.before_apply()  # may wait: a thread that was abandoned there would go on to write
        self._watch("apply", step)
        if not outcome.skip:
            gradient.flat.mul_(outcome.scale(optim.clip_norm))
            shard.apply(gradient.views, rate)
            self._flip("apply", lambda: list(shard.params.values()))
        gradient.step, self._suspicion = None, None
        shard.advance(skipped=outcome.skip)
        held.last, held.unapplied, held.applying = outcome.vote, None, False
        if spikes is not None:
            spikes.saw(step, outcome.loss, outcome.spike)
        held.back = None
        goes_back, in_a_row = spikes is not None and spikes.goes_back, shard.counters.skipped_in_a_row
        try:
            raise_for_skips(outcome, in_a_row, optim.max_skipped, self.sample_ids, goes_back=goes_back)
        except MustGoBack as back:
            held.back = copy(back)  # without a traceback, whose frames hold this very state
            raise

    def roll_forward(self, vote: Vote) -> None:
        """Apply a result that this rank missed and a survivor had. Idempotent."""
        if self.applied == vote.step:
            self.apply(Outcome(vote))

    def sample_ids(self, step: int) -> Sequence[int]:
        """The sequences of a step, whatever the mesh."""
        return self._order.sample_ids(step)

    # ------------------------------------------------------------ validation

    @torch.no_grad()
    def validate(self, loader: Loader, source: ValidationSource) -> dict[str, float]:
        """The means of `source` for the loss and each metric, each ring computing its share of the sequences.

        All ranks return the same bits, and rings of one size the same on any number of them.
        """
        now = self.now
        measures = {LOSS: self.task.loss, **self.task.metrics}
        mine = share(range(source.num_sequences), now.coordinate.dp_rank, now.mesh.dp)
        sums = torch.zeros(-(-source.num_sequences // now.mesh.dp), len(measures), 2, dtype=torch.float64)
        copy_masters(now.model)
        if now.experts is not None:
            now.experts.begin(self.applied)
        now.model.eval()
        for row, (index, _) in enumerate(mine):
            now.groups.check()
            piece = loader.load(
                index,
                index,
                self.layout,
                now.coordinate.cp_rank,
                upcoming=[ahead for ahead, _ in mine[row + 1 : row + 2]],
            )
            for column, measure in enumerate(measures.values()):
                total, number = measure(now.model, self._batch(piece, self._attention(piece, self.applied)))
                sums[row, column] = torch.tensor([float(total), float(number)], dtype=torch.float64)
        now.model.train()
        parts = [torch.zeros_like(sums) for _ in range(now.mesh.size)]
        now.groups.world.allgather([parts], [sums]).wait()
        cp = now.mesh.cp
        rings = [reduce(torch.add, parts[first : first + cp]) for first in range(0, now.mesh.size, cp)]
        in_order = torch.stack(rings, dim=1).flatten(0, 1)[: source.num_sequences]  # as `share` has dealt them
        return source.means(list(measures), in_order.tolist())

    # ------------------------------------------------------------ parts

    @property
    def layout(self) -> Layout:
        return self._layouts.choice(self.now.mesh.cp, self.device.type).layout

    def _attention(self, piece: Slice, step: int) -> RingAttention | PatternedAttention:
        now = self.now

        def observe(direction: str, call_index: int, hop: int) -> None:
            # Forward hops during backward are recomputation by activation checkpointing.
            self._watch(direction, step, hop if call_index == 0 or direction == "backward" else None)

        return attention_of(
            self.task,
            piece,
            self._layouts.of_pass(now.mesh.cp, self.device.type, piece.num_sequences),
            now.coordinate.cp_rank,
            now.groups.ring if now.mesh.cp > 1 else None,
            RingOptions(
                observer=observe,
                cache_dir=self.options.kernel_cache,
                buffers=now.buffers,
                check=now.groups.check,
                hosts=now.hosts,
            ),
            plans=now.plans,
        )

    def _exchange_of(self, groups: ProcessGroups, layers: Sequence[Any]) -> ExpertExchange | None:
        """The exchange of the layers whose tokens travel to their experts; None without such."""
        if not layers:
            return None
        made = ExpertExchange(
            groups.ring,
            groups.mesh.cp,
            groups.mesh.coordinate(groups.global_rank).cp_rank,
            check=groups.check,
            observe=self._watch,
            waiting=self._waits.waiting,
            most_rows=self._maker.most_rows,
        )
        for layer in layers:
            layer.exchange = made
        return made

    def _batch(self, piece: Slice, attention: RingAttention | PatternedAttention) -> Batch:
        return batch_of(piece, attention, self.device)

    def plan_flip(self, phase: str, stays: bool = False) -> None:
        """A planned fault: flip one bit in the result of the next `phase` (backward, reduce, apply), or of every one
        from now on."""
        self._flips[phase] = stays

    def _flip(self, phase: str, tensors: Callable[[], Sequence[Tensor]]) -> None:
        if phase in self._flips:
            if not self._flips[phase]:
                del self._flips[phase]
            largest = max(tensors(), key=Tensor.numel).detach().view(-1)
            place = int(largest.abs().argmax())
            with torch.no_grad():
                largest[place : place + 1].view(torch.int32).bitwise_xor_(1 << 18)

    def _make_optimizer(self, model: nn.Module, params: dict[str, Tensor]) -> torch.optim.Optimizer:
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        named = [(name, tensor) for name, tensor in params.items() if name in trained]
        if self.task.optimizer is not None:
            return make_own_optimizer(self.task.optimizer, named)
        ndims = {name: len(shape) for name, shape in full_shapes(model).items()}
        return make_optimizer(named, self.task.optim, ndims, self.device)


def checksum(tensors: Sequence[Tensor]) -> float:
    """A number of the tensors' bits that float64 holds exactly; never 0."""
    return int(digest_of(Counters(), tensors)[:DIGITS], 16) + 1.0


def sequence_seed(seed: int, step: int, sample_id: int, cp_rank: int) -> int:
    """The seed of one rank's random numbers for the pass that begins with a sequence; a re-run draws the same ones."""
    key = f"{seed}/{step}/{sample_id}/{cp_rank}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
