"""Forward and backward passes of a ring's share of a step, and of the held-out sequences.

Gradients are added up in the transaction's `Gradient`. Votes, optimizers and membership must not enter this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elastic_ring.attention.comm.ledger import HopTally
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from elastic_ring.control.decisions.corruption import is_checked
from elastic_ring.data.loader import ArrivedCopies, Loader, Slice, consumed_digest, joined
from elastic_ring.data.sampling.order import passes, share
from elastic_ring.data.sampling.validation import LOSS, ValidationSource
from elastic_ring.state.header import Counters
from elastic_ring.state.shard import digest_of
from elastic_ring.train.generation import WorkClock
from elastic_ring.train.task import Batch, attention_of, batch_of
from elastic_ring.train.wrap import copy_masters

if TYPE_CHECKING:
    from elastic_ring.train.transaction import Transaction

DIGITS = 12  # hexadecimal, of a digest in the vote
READ_AHEAD = 16  # sequences of this step and the next, while one pass is computed; at least those of the next pass


@dataclass(frozen=True)
class Local:
    """One rank's results of a step's forward and backward passes.

    `loss_sum` and `num_tokens`, scalars, stay on their device: a read synchronises, so the vote reads them together
    with the gradient's norm. `data_wait_s`: waits for data. `work_s`: own work per sequence, once the device is
    synchronised; 0 if not measured. `own` and `again` as in `Digests`. `expert_parts`: passes of layers whose rows for
    experts came in parts, in this ring.
    """

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


class BitFlips:
    """Planned faults: one wrong bit in the result of a phase (backward, reduce, apply)."""

    def __init__(self) -> None:
        self._planned: dict[str, bool] = {}

    def __contains__(self, phase: str) -> bool:
        return phase in self._planned

    def plan(self, phase: str, stays: bool = False) -> None:
        """Flip one bit in the result of the next `phase`; with `stays` in every one from now on."""
        self._planned[phase] = stays

    def flip(self, phase: str, tensors: Callable[[], Sequence[Tensor]]) -> None:
        if phase in self._planned:
            if not self._planned[phase]:
                del self._planned[phase]
            largest = max(tensors(), key=Tensor.numel).detach().view(-1)
            place = int(largest.abs().argmax())
            with torch.no_grad():
                largest[place : place + 1].view(torch.int32).bitwise_xor_(1 << 18)


def compute(transaction: Transaction, step: int) -> Local:
    """Run forward and backward of this ring's share, in passes of one or more sequences; adds up the gradient, and in
    the last pass begins to sum it over the rings."""
    now, gradient, gauge = transaction.now, transaction.held.gradient, transaction.options.gauge
    task, loader, relief, device = transaction.task, transaction.loader, transaction.relief, transaction.device
    gradient.begin()
    copy_masters(now.model)
    if now.experts is not None:
        now.experts.begin(step)
    relief.before_step(device)
    if gauge is not None:
        gauge.begin(device)
    # Each ring also computes a pass of the ring before it: only where equal bits are promised.
    repeatable = device.type == "cpu" or task.step.deterministic
    recomputes = has_check(transaction, step) and now.mesh.dp > 1 and repeatable
    again = _compute_again(transaction, step) if recomputes else 0.0
    if now.experts is not None:
        now.experts.num_parted = 0
    if now.loads is not None:
        now.loads.begin()
    mine, following = (
        share(transaction.sample_ids(of), now.coordinate.dp_rank, now.mesh.dp) for of in (step, step + 1)
    )
    loss_sum, num_tokens = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    slices, hops, own = [], HopTally(device.type == "cuda", step), 0.0
    arrived = ArrivedCopies(hops.is_watched)
    waited_s, clock = loader.waited_s, WorkClock(device, transaction.waits, loader, hops.is_watched)
    # Not where this ring's own gradient is looked at, nor with FSDP2, whose root unit hands over the first and the last
    # parameters at the end.
    sums_early = now.mesh.cp == 1 and now.mesh.dp > 1 and not recomputes and "backward" not in transaction.flips
    ahead = relief.read_ahead or max(READ_AHEAD, task.step.micro_batch)
    groups = list(passes(len(mine), relief.together(task.step.micro_batch)))
    for group in groups:
        gradient.begin_pass(transaction.sum_bucket if group is groups[-1] and sums_early else None)
        pieces = []
        for place in group:
            (index, sample_id), *later = mine[place:]
            upcoming = [id_ for _, id_ in (*later, *following)][:ahead]
            pieces.append(loader.load(sample_id, index, transaction.layout, now.coordinate.cp_rank, upcoming=upcoming))
        slices += pieces
        piece = joined(pieces, transaction.layout.seq_len)
        _seed(transaction, piece, step)
        batch, attention = _batch(transaction, piece, step)
        hops.watch(attention.ledger)
        arrived.keep(piece, batch)
        with relief.offloading(device):
            loss, num_targets = task.loss(now.model, batch)
        transaction.watch("backward", step)
        if gauge is not None:
            gauge.look(device)
        loss.backward()
        transaction.flips.flip("backward", gradient.shares)
        if group.start == 0 and recomputes:
            own = checksum(gradient.shares())
        loss_sum += loss.detach()
        num_tokens += num_targets
        hops.add(attention.ledger)
        if now.experts is not None:
            hops.num_bytes += now.experts.sent_bytes()
    samples, waited_s = consumed_digest(step, slices), loader.waited_s - waited_s
    clock.stop(hops)
    work_s = partial(clock.per_sequence_s, len(mine))
    parts = now.experts.num_parted if now.experts is not None else 0
    return Local(loss_sum, num_tokens, samples, hops, arrived, waited_s, work_s, own, again, parts)


def has_check(transaction: Transaction, step: int) -> bool:
    """Whether the ranks compare digests in this step."""
    options = transaction.options
    return options.corruption != "off" and is_checked(step, options.check_every_steps)


def _compute_again(transaction: Transaction, step: int) -> float:
    """The digest of the gradient of the first pass of the ring before this one; leaves no gradients."""
    now, gradient, task = transaction.now, transaction.held.gradient, transaction.task
    gradient.begin_pass()
    before = (now.coordinate.dp_rank - 1) % now.mesh.dp
    first = share(transaction.sample_ids(step), before, now.mesh.dp)
    first = first[: transaction.relief.together(task.step.micro_batch)]
    cp_rank = now.coordinate.cp_rank
    pieces = [transaction.loader.load(id_, index, transaction.layout, cp_rank) for index, id_ in first]
    piece = joined(pieces, transaction.layout.seq_len)
    _seed(transaction, piece, step)
    with transaction.relief.offloading(transaction.device):
        loss, _ = task.loss(now.model, _batch(transaction, piece, step)[0])
    transaction.watch("backward", step)
    loss.backward()
    digest = checksum(gradient.shares())
    gradient.begin()
    return digest


@torch.no_grad()
def validate(transaction: Transaction, loader: Loader, source: ValidationSource) -> dict[str, float]:
    """The means of `source` for the loss and each metric, each ring computing its share of the sequences.

    All ranks return the same bits, and rings of one size the same on any number of them.
    """
    now, task, step = transaction.now, transaction.task, transaction.applied
    measures = {LOSS: task.loss, **task.metrics}
    mine = share(range(source.num_sequences), now.coordinate.dp_rank, now.mesh.dp)
    sums = torch.zeros(-(-source.num_sequences // now.mesh.dp), len(measures), 2, dtype=torch.float64)
    copy_masters(now.model)
    if now.experts is not None:
        now.experts.begin(step)
    now.model.eval()
    for row, (index, _) in enumerate(mine):
        now.groups.check()
        upcoming = [ahead for ahead, _ in mine[row + 1 : row + 2]]
        piece = loader.load(index, index, transaction.layout, now.coordinate.cp_rank, upcoming=upcoming)
        for column, measure in enumerate(measures.values()):
            total, number = measure(now.model, _batch(transaction, piece, step)[0])
            sums[row, column] = torch.tensor([float(total), float(number)], dtype=torch.float64)
    now.model.train()
    parts = [torch.zeros_like(sums) for _ in range(now.mesh.size)]
    now.groups.world.allgather([parts], [sums]).wait()
    cp = now.mesh.cp
    rings = [reduce(torch.add, parts[first : first + cp]) for first in range(0, now.mesh.size, cp)]
    in_order = torch.stack(rings, dim=1).flatten(0, 1)[: source.num_sequences]  # as `share` has dealt them
    return source.means(list(measures), in_order.tolist())


def _batch(transaction: Transaction, piece: Slice, step: int) -> tuple[Batch, RingAttention | PatternedAttention]:
    """The batch of one pass, and its attention."""
    now = transaction.now

    def observe(direction: str, call_index: int, hop: int) -> None:
        # Forward hops during backward are recomputation by activation checkpointing.
        transaction.watch(direction, step, hop if call_index == 0 or direction == "backward" else None)

    attention = attention_of(
        transaction.task,
        piece,
        transaction.layouts.of_pass(now.mesh.cp, transaction.device.type, piece.num_sequences),
        now.coordinate.cp_rank,
        now.groups.ring if now.mesh.cp > 1 else None,
        RingOptions(
            observer=observe,
            cache_dir=transaction.options.kernel_cache,
            buffers=now.buffers,
            check=now.groups.check,
            hosts=now.hosts,
        ),
        plans=now.plans,
        step=step,
    )
    return batch_of(piece, attention, transaction.device), attention


def _seed(transaction: Transaction, piece: Slice, step: int) -> None:
    """Seed the generators that a pass may draw from. `torch.manual_seed` seeds every kind of device, and for each that
    is not in use formats the stack, which reads files."""
    seed = sequence_seed(transaction.task.step.seed, step, piece.sample_id, transaction.now.coordinate.cp_rank)
    torch.default_generator.manual_seed(seed)
    if transaction.device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def checksum(tensors: Sequence[Tensor]) -> float:
    """A digest of the tensors' bits that float64 holds exactly; never 0."""
    return int(digest_of(Counters(), tensors)[:DIGITS], 16) + 1.0


def sequence_seed(seed: int, step: int, sample_id: int, cp_rank: int) -> int:
    """The seed of one rank's random numbers for the pass that begins with a sequence; a re-run draws the same ones."""
    key = f"{seed}/{step}/{sample_id}/{cp_rank}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
