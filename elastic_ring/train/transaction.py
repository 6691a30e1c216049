"""The step as a transaction: compute, reduce, vote, update, apply, and what survives an interruption.

A `Transaction` outlives generations. Its shard is valid unless an apply was interrupted. Its reduced gradient is kept
until its own apply has ended: a rank that entered a vote can still apply it when a survivor delivers the result later
(roll forward). `update` exchanges Muon's matrices in between. No membership here and no messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.config import CpuOffload
from elastic_ring.control.decisions.corruption import Digests, Suspicion
from elastic_ring.control.decisions.loss_spikes import SpikeBallot, SpikeWatch
from elastic_ring.control.messages import Vote
from elastic_ring.data.loader import Loader
from elastic_ring.data.sampling.order import SampleOrder
from elastic_ring.experts.exchange import LoadMeter, expert_layers
from elastic_ring.state.checkpoints.checkpoint import Reader
from elastic_ring.state.device_sums import squared_norm
from elastic_ring.state.header import Counters
from elastic_ring.state.shard import Shard
from elastic_ring.train.generation import ExchangeWaits, Generation, ProcessGroups, Watch, connect_experts
from elastic_ring.train.gradient import Gradient
from elastic_ring.train.memory import MemoryGauge, MemoryRelief, keep_activations
from elastic_ring.train.muon import Muon, Update
from elastic_ring.train.optim import learning_rate, make_optimizer, make_own_optimizer
from elastic_ring.train.passes import DIGITS, BitFlips, Local, checksum, compute, has_check
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.update import divide, exchange_update, other_matrices, repeat_update
from elastic_ring.train.vote import (
    NOTHING,
    Ballot,
    ComputedWrongly,
    Flag,
    MustGoBack,
    Outcome,
    Tally,
    count,
    raise_for_skips,
    start_vote,
)
from elastic_ring.train.wrap import FrozenRows, ModuleMaker, largest_list, local_params, trained_shapes


@dataclass(frozen=True)
class TransactionOptions:
    """How a worker takes its steps.

    `kernel_cache`: the folder of kernels' tables. `spikes` judges losses, `gauge` measures the used share of memory;
    None: off. `corruption`: the response when ranks that must agree do not; in one step of `check_every_steps` (0: in
    none) digests are compared and one pass of each ring is computed by two rings. `cpu_offload`: the part of the shard
    in host memory between steps. `keeps_activations`: overrides the layers' choice to recompute.
    """

    kernel_cache: Path | None = None
    spikes: SpikeWatch | None = None
    gauge: MemoryGauge | None = None
    corruption: Literal["off", "log", "act"] = "off"
    check_every_steps: int = 0
    cpu_offload: CpuOffload = "none"
    keeps_activations: bool = False


@dataclass
class TrainingState:
    """A worker's shard, its gradient and its votes: made as a whole, dropped as a whole. Without a shard it is
    empty."""

    shard: Shard | None = None
    reduced: Gradient | None = None
    unapplied: Outcome | None = None  # the result of step `applied`, not applied yet
    update: Update | None = None  # this rank's rows of its orthogonalised matrices
    last: Vote | None = None  # the result of step `applied` - 1
    back: MustGoBack | None = None  # the request of the last applied step
    applying: bool = False
    filled: bool = False  # the shard has values, from the seed or from a donor
    id: tuple[int, int] = (0, 0)  # (term, generation) of the last build in which it became or stayed valid

    @property
    def gradient(self) -> Gradient:
        assert self.reduced is not None
        return self.reduced

    @property
    def applied(self) -> int:
        return self.shard.counters.applied if self.shard is not None else 0

    @property
    def valid(self) -> bool:
        """Whether the shard may be used: it has values, and no apply was interrupted."""
        return self.filled and not self.applying

    @property
    def has_gradient(self) -> bool:
        return self.reduced is not None and self.reduced.step == self.applied

    @property
    def gradient_membership_id(self) -> tuple[int, int]:
        return self.reduced.membership_id if self.reduced is not None else (0, 0)

    @property
    def valid_id(self) -> tuple[int, int]:
        """`id`, or (0, 0) if the shard is not valid."""
        return self.id if self.valid else (0, 0)


class Transaction:
    """One worker's part in each step: it computes, votes and applies, over any number of generations."""

    def __init__(
        self,
        task: TrainingTask,
        loader: Loader,
        order: SampleOrder,
        watch: Watch,
        options: TransactionOptions | None = None,
    ) -> None:
        self.task, self.options = task, options or TransactionOptions()
        self.loader, self.watch = loader, watch
        self._order, self._maker, self._frozen = order, ModuleMaker(task), FrozenRows()
        self.layouts = Layouts(task)
        self.held = TrainingState()
        self._now: Generation | None = None
        self.before_apply: Callable[[], None] = lambda: None
        """Called before the shard changes: a copy of it may be under way on its device."""
        self.relief = MemoryRelief()
        """The reliefs of the memory ladder; a new one counts from the next `enter` on."""
        self.waits, self.flips = ExchangeWaits(), BitFlips()
        self._suspicion: Suspicion | None = None

    @property
    def now(self) -> Generation:
        """Only between `enter` and `leave`."""
        assert self._now is not None
        return self._now

    @property
    def model(self) -> nn.Module | None:
        return self._now.model if self._now is not None else None

    @property
    def shard(self) -> Shard | None:
        return self.held.shard

    @property
    def applied(self) -> int:
        return self.held.applied

    @property
    def valid(self) -> bool:
        return self.held.valid

    @property
    def device(self) -> torch.device:
        return self._maker.device

    @property
    def layout(self) -> Layout:
        return self.layouts.choice(self.now.mesh.cp, self.device.type).layout

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shape of every parameter of the shard."""
        return trained_shapes(self.now.model, self.task.frozen)

    def sample_ids(self, step: int) -> Sequence[int]:
        """The sequences of a step, whatever the mesh."""
        return self._order.sample_ids(step)

    # ------------------------------------------------------------ between generations

    def use(self, device: torch.device) -> None:
        """Compute on `device` from the next generation on; only without state, which is not moved."""
        assert self.shard is None or device == self.device, "a shard does not change its device"
        self._maker.device = device

    def warm_up(self, cp: int, device_type: str) -> None:
        """Prepare what does not depend on the rank, for rings of `cp` ranks."""
        self._maker.keep_buffers()
        self.layouts.choice(cp, device_type)

    def read_from(self, loader: Loader, order: SampleOrder) -> None:
        """Take the sequences of the next steps from here; only between two generations."""
        self.loader.close()
        self.loader, self._order = loader, order

    def enter(
        self, groups: ProcessGroups, membership_id: tuple[int, int], *, keep: bool, nodes: tuple[str, ...] = ()
    ) -> None:
        """Begin generation `membership_id` (term, generation) with a fresh module, wrapped in the new groups.

        `keep` moves the shard's values into it; otherwise the shard is new, and invalid until it is filled. `nodes`:
        of each global rank, where known.
        """
        from elastic_ring.train.abortable_collectives import make_abortable

        maker, mesh, coordinate = self._maker, groups.mesh, groups.mesh.coordinate(groups.global_rank)
        maker.params_in_host = self.options.cpu_offload == "all"
        model = maker.wrap(groups.device_mesh, mesh.dp)
        units = (self.task.units or largest_list)(model)
        for unit in units if self.options.keeps_activations else ():
            keep_activations(unit)
        self.relief.change(model, units)
        make_abortable(model, groups.launching, self.waits)
        hosts = tuple(nodes[rank] for rank in mesh.ring(coordinate.dp_rank)) if nodes else None
        layers = list(expert_layers(model))
        loads = LoadMeter(layers, groups.ring if mesh.cp > 1 else None, self.device) if layers else None
        experts = connect_experts(maker.sent, groups, self.watch, self.waits, maker.most_rows)
        self._now = Generation(groups, membership_id, model, hosts, experts, loads)
        if self.task.frozen is not None:
            self._frozen.fill(maker, model, self.task.frozen, (coordinate.cp_rank, mesh.cp))
        rows = local_params(model)
        params = {name: rows[name] for name in trained_shapes(model, self.task.frozen)}
        self._now.division = division = divide(self.task, model, units, mesh.cp)
        if keep:
            assert self.shard is not None
            self.shard.rebind(params)
            self.held.id = membership_id
        else:
            self.held = TrainingState()  # before the new shard, which needs its memory
            trained = [name for name, param in model.named_parameters() if param.requires_grad]
            named, optimizer = [(name, params[name]) for name in trained], self.task.optimizer
            ndims = {name: len(shape) for name, shape in trained_shapes(model, None).items()}
            shard = Shard(
                coordinate.cp_rank,
                params,
                make_optimizer(named, self.task.optim, ndims, self.device, division.columns if division else ())
                if optimizer is None
                else make_own_optimizer(optimizer, named),
                cpu_offload=self.options.cpu_offload,
                computes_on=self.device,
            )
            self.held = TrainingState(shard, Gradient.like(params, self.device))
        self.held.gradient.attach(model, in_host=maker.params_in_host)

    def initialise(self) -> None:
        """First values from the seed, the same on every mesh."""
        now = self.now
        assert self.shard is not None
        with self.filling(), torch.no_grad():
            self._maker.first_values(now.model, now.coordinate.cp_rank, now.mesh.cp)
            self.shard.counters = Counters()

    def restore(self, reader: Reader) -> None:
        """First values from a checkpoint of any mesh. Raises CheckpointDamaged, StorageFailed, and ModelRefused if it
        has a parameter that the model has not, as the second name of a tied weight, or other matrices of Muon's."""
        assert self.shard is not None
        if more := reader.unknown(self.shard.params):
            raise ModelRefused(
                f"checkpoint {reader.manifest.folder} has {more[0]}, and the model has no parameter of that name: give "
                "the model with which it was written, or the run another name"
            )
        division = self.now.division
        if division is not None and (other := other_matrices(reader.manifest.meta, division)):
            raise ModelRefused(
                f"checkpoint {reader.manifest.folder} has {other[0]} trained by "
                f"{'AdamW, and it is Muon' if other[0] in division.columns else 'Muon, and it is AdamW'}'s now: give "
                "the units= with which it was written, or the run another name"
            )
        with self.filling():
            reader.fill(self.shard, self.now.mesh.cp)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A context for filling a new shard. The shard is valid once the context has ended without an error."""
        held = self.held
        held.applying = True  # a half filled shard is as invalid as a half applied one
        yield
        held.applying, held.filled, held.id = False, True, self.now.id

    def leave(self) -> None:
        """Drop the groups and the module that was wrapped in them; keep values and gradient."""
        if self.held.reduced is not None:
            self.held.reduced.detach()
        if self._now is not None and self._now.loads is not None:
            self._now.loads.leave()
        self._now = None

    def drop(self) -> None:
        """Drop all state, as for a spare."""
        self.leave()
        self._frozen.drop()
        self.held = TrainingState()

    # ------------------------------------------------------------ the step

    def run(
        self,
        step: int,
        *,
        boundary: bool,
        flags: Callable[[], Flag] = lambda: NOTHING,
        cut_off: Callable[[Outcome, Local], None] = lambda outcome, local: None,
    ) -> tuple[Outcome, Local]:
        """Run one step and apply it. Exceptions of exchanges and of the user's code pass through.

        `flags` gives the other flags of this rank. The vote calls it late, after the device has computed the step,
        because a writer that was busy at its start may be free by then. `cut_off` is called if the step is committed
        and ends before its apply.
        """
        assert step == self.applied, (step, self.applied)
        if (back := self.held.back) is not None and back.facts["step"] + 1 == step:
            raise copy(back)  # a member died in that step, and the generation that should have heard it had ended
        self.held.update = None
        local = compute(self, step)
        self.reduce(step)
        outcome = self.vote(step, local, boundary=boundary, flags=flags)
        try:
            exchange_update(self, outcome)
        except BaseException:
            cut_off(outcome, local)
            raise
        self.apply(outcome)
        return outcome, local

    def sum_bucket(self, bucket: Tensor) -> Any:
        """Begin to sum a part of the gradient over the rings; returns its work."""
        return self.now.groups.replica.allreduce([bucket])

    def reduce(self, step: int) -> None:
        """fp32 sum over the rings, once, in the pinned order of the replica group."""
        gradient = self.held.gradient
        gradient.end()
        self.watch("reduce", step)
        if self.now.mesh.dp > 1:
            gradient.finish(self.sum_bucket)
        self.flips.flip("reduce", lambda: [gradient.slopes])
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
        digests, shard = Digests(norm_sq=norm_sq + of_counts), self.shard
        if has_check(self, step) and shard is not None:
            state = int(shard.digest()[:DIGITS], 16) + 1.0
            digests = Digests(state, checksum([gradient.flat]), norm_sq + of_counts, local.own, local.again)
        # An abort ends NCCL's exchanges without an error: the numbers just read may be garbage.
        now.groups.check()
        local.arrived.check(step)
        spike = options.spikes.ballot(step) if options.spikes is not None else SpikeBallot()
        own_flags = flags() | (Flag.BOUNDARY if boundary else NOTHING)
        tally = Tally(norm_sq, num_nonfinite, loss_sum, int(num_tokens), local.samples, own_flags, spike)
        memory_share = options.gauge.share(self.device) if options.gauge is not None else 0.0
        # Digests of this step's attempt before, if ranks did not agree in it; on another mesh sums have other bits.
        first = self._suspicion
        if first is None or (first.step, first.mesh) != (step, now.mesh):
            ballot = Ballot(tally, local.work_s(), memory_share, digests, expert_load=expert_load)
        else:
            ballot = Ballot(tally, local.work_s(), memory_share, digests, first.quantity, first.digests, expert_load)
        work, rows = start_vote(now.groups.world, ballot)
        self.watch("vote", step)
        work.wait()
        try:
            self.held.unapplied = outcome = count(step, rows, now.mesh, now.id, options.corruption)
        except ComputedWrongly as error:
            self._suspicion = None if error.ranks else Suspicion(step, now.mesh, error.facts["what"], digests)
            raise
        return outcome

    def apply(self, outcome: Outcome) -> None:
        """Scale, clip and update the local shard; no exchange, never interrupted.

        Raises TooManySkipped, LossSpike and MustGoBack after the skip has been counted.
        """
        held, step, optim = self.held, outcome.vote.step, self.task.optim
        gradient, shard, spikes = held.gradient, held.shard, self.options.spikes
        assert shard is not None
        rate = learning_rate(step, optim, self.task.lr_schedule)  # may be the user's code: before anything changes
        assert step == self.applied == gradient.step, (step, self.applied, gradient.step)
        held.unapplied, held.applying = outcome, True
        self.before_apply()  # may wait: a thread that was abandoned there would go on to write
        self.watch("apply", step)
        if not outcome.skip:
            gradient.flat.mul_(outcome.scale(optim.clip_norm))
            if isinstance(shard.optimizer, Muon):
                assert held.update is not None
                shard.optimizer.take(held.update, shard.params)
            shard.apply(gradient.views, rate)
            self.flips.flip("apply", lambda: list(shard.params.values()))
        gradient.step, self._suspicion = None, None
        shard.advance(skipped=outcome.skip, in_a_row=outcome.skips_in_a_row(shard.counters.skipped_in_a_row))
        held.last, held.unapplied, held.update, held.applying = outcome.vote, None, None, False
        if spikes is not None:
            spikes.saw(step, outcome.loss, outcome.spike)
        held.back = None
        goes_back, in_a_row = spikes is not None and spikes.goes_back, shard.counters.skipped_in_a_row
        unapplied, ids = shard.counters.skipped == shard.counters.applied == self.task.step.steps, self.sample_ids
        try:
            raise_for_skips(outcome, in_a_row, optim.max_skipped, ids, never_applied=unapplied, goes_back=goes_back)
        except MustGoBack as back:
            held.back = copy(back)  # without a traceback, whose frames hold this very state
            raise

    def roll_forward(self, vote: Vote, *, holds: bool = True) -> None:
        """Apply a result that this rank missed and a survivor had. Idempotent. All ranks of the mesh call it, newcomers
        without `holds`. Raises as the exchanges of an update."""
        outcome, is_behind = Outcome(vote), holds and self.applied == vote.step
        repeat_update(self, outcome, is_behind=is_behind, in_mesh=self._now is not None)
        if is_behind:
            self.apply(outcome)
