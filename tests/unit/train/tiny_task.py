"""A training task small enough for a unit test, its jobs for a membership, and the same training without any of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.config import CpuOffload, StepConfig
from elastic_ring.control.messages import Vote
from elastic_ring.data.loader import Loader, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.sampling.order import Order
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.loss import IGNORE, language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.groups.groups import Rendezvous
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.state.checkpoints.weight_files import MAX_FILE_BYTES
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train import gradient, wrap
from elastic_ring.train.optim import OptimConfig, is_balance, learning_rate, make_optimizer
from elastic_ring.train.task import Batch, TrainingTask
from elastic_ring.train.transaction import Transaction, TransactionOptions
from elastic_ring.train.vote import NOTHING, Flag
from elastic_ring.train.weights import gather_weights
from tests.unit.groups.processes import Membership, connect

# Two layers; rows that 2 ranks share unevenly; a head that both share.
MODEL = ModelConfig(17, 2, 16, 2, 1, 8, 23)
# Three experts that 2 ranks share unevenly, beside one for every token; the first layer has none.
EXPERTS = replace(MODEL, num_experts=3, experts_per_token=2, expert_width=8, shared_width=8, num_dense_layers=1)


def in_parts() -> Transformer:
    """MODEL as a much larger one is built: gathered in parts, with slices of the feed-forward part and of the head."""
    with patch.multiple("elastic_ring.model.config", UNIT_PARAMETERS=200, _TILE=4):
        return Transformer(MODEL)


CONTEXT = 26
BUCKET_ELEMENTS = 300  # several buckets, a layer has some
STEP = StepConfig(steps=8, global_batch=3, context_tokens=CONTEXT)
# Adam divides by the gradient's size: without this eps it would blow differences of rounding up.
OPTIM = OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=2, total_steps=8, eps=1e-4, clip_norm=0.5)


@dataclass(frozen=True)
class RandomText:
    """Random tokens, each sequence two documents; equal for equal ids."""

    context_tokens: int = CONTEXT
    vocab_size: int = 17
    num_sequences: int = 20
    fingerprint: str = "random"

    def open(self) -> RandomText:
        return self

    def read(self, sample_id: int) -> Sample:
        tokens = np.random.default_rng(sample_id).integers(0, self.vocab_size, self.context_tokens + 1)
        return Sample(tokens=tokens.astype(np.int64), document_starts=(0, 11), ends_document=sample_id % 2 == 0)


@dataclass(frozen=True)
class MaskedText(RandomText):
    """The same text, of which little counts in the loss: of every third sequence nothing, of others one token or some.

    `counts` False: of none anything.
    """

    counts: bool = True

    def read(self, sample_id: int) -> Sample:
        shares = (0.0, 0.05, 0.6) if self.counts else (0.0, 0.0, 0.0)
        chosen = np.random.default_rng(1000 + sample_id).random(self.context_tokens + 1) < shares[sample_id % 3]
        return replace(super().read(sample_id), counted=chosen)


class WithUnused(Transformer):
    """A decoder with a parameter that no forward pass uses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(6))


@dataclass
class Poison:
    """Makes the loss of this process NaN while it is on, or leaves it without a target that counts."""

    on: bool = False
    ignores_targets: bool = False


POISON = Poison()


def poisonable_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    if POISON.ignores_targets:
        batch = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    loss, num_targets = language_model_loss(model, batch)
    return (loss * math.nan if POISON.on else loss), num_targets


def momentum(named: list[tuple[str, Tensor]], weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.1, momentum=0.9, weight_decay=weight_decay)


def make_task(model: type[Transformer] = Transformer, **settings: Any) -> TrainingTask:
    plain = TrainingTask(
        partial(model, MODEL),
        RandomText(),
        STEP,
        OPTIM,
        loss=poisonable_loss,
        initial=Initialiser(0, MODEL.num_layers),
    )
    return replace(plain, **settings)


# ------------------------------------------------------------ jobs: me.state is the process's Transaction


class Broken(RuntimeError):
    """The planned break of a step."""


def begin(me: Any, where: Rendezvous, mesh: Mesh, task: TrainingTask, cpu_offload: CpuOffload = "none") -> None:
    """A fresh Transaction in a fresh generation, parameters from the seed."""
    POISON.on = POISON.ignores_targets = False
    gradient.BUCKET_ELEMENTS = BUCKET_ELEMENTS
    me.break_at, me.num_calls_before, me.paused = None, 0, threading.Event()

    def watch(phase: str, step: int, hop: int | None = None) -> None:
        if me.break_at == (phase, step) and (phase not in ("forward", "backward") or hop == 0):
            me.num_calls_before -= 1
            if me.num_calls_before < 0:
                me.break_at = None
                raise Broken(f"{phase} of step {step}")

    if getattr(me, "state", None) is not None:
        me.state.leave()
        me.state.loader.close()
    source = task.data.open()
    order = Order(task.step.seed, task.step.global_batch, source.num_sequences)
    options = TransactionOptions(cpu_offload=cpu_offload)
    me.state = Transaction(task, Loader(source, num_ahead=task.step.micro_batch), order, watch, options)
    me.membership_id = (1, 0)
    connect(me, where, mesh)
    me.state.enter(me.groups, me.membership_id, keep=False)
    me.state.initialise()


def rebuild(me: Any, where: Rendezvous, mesh: Mesh, *, keep: bool = True) -> None:
    """The next generation; the shard's values are kept, or this rank comes as an empty newcomer."""
    me.state.leave()
    connect(me, where, mesh)
    me.membership_id = (1, me.membership_id[1] + 1)
    me.state.enter(me.groups, me.membership_id, keep=keep)


@contextmanager
def training(me: Any) -> Iterator[None]:
    """Whatever ends it, the training thread is paused after."""
    me.paused.clear()
    try:
        with translated(me.connector):
            yield
    finally:
        me.paused.set()


def run_steps(me: Any, num_steps: int) -> list[tuple[str, tuple[float, ...]]]:
    """(loss, digest of the samples) of each step."""
    results = []
    with training(me):
        for _ in range(num_steps):
            outcome, _ = me.state.run(me.state.applied, boundary=False)
            results.append((outcome.loss.hex(), outcome.samples))
    return results


def limit_rows(me: Any, shares: float) -> None:
    """How many times its fair share of experts' rows a rank gets at a time, from the next `begin` on."""
    wrap.MOST_SHARES = shares


def parted(me: Any, num_steps: int) -> list[int]:
    """In each of some steps, the passes of layers whose rows came in parts."""
    return [run_steps(me, 1) and me.state.now.experts.num_parted for _ in range(num_steps)]


def loads_of_a_step(me: Any) -> tuple[float, float]:
    """The largest load of an expert that one step's vote has, and the most tokens too many that a bias was told of."""
    with training(me):
        outcome, _ = me.state.run(me.state.applied, boundary=False)
    excess = me.state.held.gradient.counts / outcome.scale(me.state.task.optim.clip_norm)
    return outcome.expert_load, float(excess.max()) if excess.numel() else 0.0


def applying_when_waiting(me: Any) -> list[bool]:
    """Whether an apply counts as begun while it waits for those who read the shard."""
    found: list[bool] = []
    me.state.before_apply = lambda: found.append(me.state.held.applying)
    run_steps(me, 1)
    return found


def ask_late(me: Any) -> tuple[bool, bool]:
    """(copying, checkpoint missed) of a step in which both are busy until its gradients are summed."""
    step = me.state.applied

    def flags() -> Flag:
        is_busy = me.state.held.gradient.step != step
        return Flag.DUE | (Flag.BUSY | Flag.COPYING if is_busy else NOTHING)

    with training(me):
        outcome, _ = me.state.run(step, boundary=False, flags=flags)
    return outcome.copying, outcome.checkpoint_missed


def break_off(me: Any, num_steps: int) -> str:
    """How some steps end here: the error's name, or "completed"."""
    try:
        run_steps(me, num_steps)
    except Exception as error:
        return type(error).__name__
    return "completed"


def plan_break(me: Any, phase: str, step: int, num_calls_before: int = 0) -> None:
    """`num_calls_before`: calls of attention in that phase that still end well."""
    me.break_at, me.num_calls_before = (phase, step), num_calls_before


def sums_under_way(me: Any) -> tuple[int, int]:
    """Buckets whose sum over the rings has begun, and all."""
    return len(me.state.held.gradient._works), len(me.state.held.gradient.buckets)


def by_its_forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The usual loss of a user who calls a module's method, so that no hook of the module runs."""
    found: tuple[Tensor, Tensor] = model.forward(
        batch.tokens,
        positions=batch.positions,
        document_ids=batch.document_ids,
        attention=batch.attention,
        targets=batch.targets,
    )
    return found


def abort_until_paused(me: Any) -> bool:
    return me.connector.abort_until(me.paused, 20.0)


def roll_forward(me: Any, vote: Vote, *, holds: bool = True) -> None:
    me.state.roll_forward(vote, holds=holds)


def last_vote(me: Any) -> Vote | None:
    return me.state.held.last


def facts(me: Any) -> dict[str, Any]:
    state = me.state
    return {
        "applied": state.applied,
        "valid": state.valid,
        "has_gradient": state.held.has_gradient,
        "gradient_membership_id": state.held.gradient_membership_id,
        "unapplied": state.held.unapplied is not None,
        "counters": state.shard.counters,
        "digest": state.shard.digest(),
    }


def own_slices(me: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in me.state.shard.params.items()}


def weights_sha256(me: Any, folder: str, max_file_bytes: int = MAX_FILE_BYTES) -> str | None:
    return gather_weights(me.state, me.groups, Storage(folder), max_file_bytes)


# ------------------------------------------------------------ steps that break off, on all processes of a mesh


def facts_of_steps(members: Membership, mesh: Mesh, task: TrainingTask, num_steps: int = 3) -> list[dict[str, Any]]:
    """What each rank holds after some steps without a fault."""
    ranks = range(mesh.size)
    members.all(begin, members.meeting(), mesh, task, ranks=ranks)
    members.all(run_steps, num_steps, ranks=ranks)
    return members.all(facts, ranks=ranks)


def abort_at_a_break(members: Membership, mesh: Mesh, rank: int) -> None:
    """Two steps, of which one breaks off on `rank` as planned; all others end with the abort."""
    ranks = range(mesh.size)
    for each in ranks:
        members.start(each, break_off, 2)
    ends = {rank: members.result(rank)}
    assert all(members.now(each, abort_until_paused) for each in ranks)
    ends |= {each: members.result(each) for each in ranks if each != rank}
    assert ends.pop(rank) == "Broken"
    assert set(ends.values()) == {"GroupAborted"}
    assert all(
        fact["applied"] == 1 and fact["valid"] and not fact["unapplied"] for fact in members.all(facts, ranks=ranks)
    )


def facts_after_a_rebuild(members: Membership, mesh: Mesh, num_steps: int = 2) -> list[dict[str, Any]]:
    """What each rank holds after the steps that are left, run in the next generation; the last gradient was reduced in
    it, which is left out of what is compared."""
    ranks = range(mesh.size)
    members.all(rebuild, members.meeting(), mesh, ranks=ranks)
    members.all(run_steps, num_steps, ranks=ranks)
    found = members.all(facts, ranks=ranks)
    assert all(fact["gradient_membership_id"] == (1, 1) for fact in found)
    return [{**fact, "gradient_membership_id": (1, 0)} for fact in found]


def facts_after_a_break(
    members: Membership,
    mesh: Mesh,
    task: TrainingTask,
    rank: int,
    phase: str,
    num_calls_before: int = 0,
    cpu_offload: CpuOffload = "none",
) -> list[dict[str, Any]]:
    """What each rank holds after three steps, of which the second breaks off on `rank` and runs again."""
    members.all(begin, members.meeting(), mesh, task, cpu_offload, ranks=range(mesh.size))
    members.call(rank, plan_break, phase, 1, num_calls_before)
    abort_at_a_break(members, mesh, rank)
    return facts_after_a_rebuild(members, mesh)


# ------------------------------------------------------------ the same training in plain PyTorch


def plain_training(task: TrainingTask, num_steps: int, make: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights): one process, the unsharded model, dense attention, the whole batch at once. `make`: of the
    optimizer; by default the task's."""
    model = task.model()
    assert isinstance(task.initial, Initialiser)
    initialise_module(model, task.initial)
    named = [(name, param.detach()) for name, param in model.named_parameters()]
    make = (
        make
        or task.optimizer
        or partial(make_optimizer, config=task.optim, full_ndims={name: tensor.dim() for name, tensor in named})
    )
    optimizer = make([(name, param) for name, param in model.named_parameters()])
    source, losses = task.data.open(), []
    order = Order(task.step.seed, task.step.global_batch, source.num_sequences)
    for step in range(num_steps):
        optimizer.zero_grad()
        total, num_targets = torch.zeros(()), 0
        for sample_id in order.sample_ids(step):
            loss, count = task.loss(model, dense_batch(source.read(sample_id)))
            total, num_targets = total + loss, num_targets + int(count)
        (total / num_targets).backward()
        if task.optim.clip_norm is not None:
            slopes = [param for name, param in model.named_parameters() if not is_balance(name)]
            torch.nn.utils.clip_grad_norm_(slopes, task.optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, task.optim) * group.get("lr_scale", 1.0)
        optimizer.step()
        losses.append(float(total.detach()) / num_targets)
    return losses, dict(named)


def dense_batch(sample: Sample) -> Batch:
    piece = slice_sample(sample, make_layout("contiguous", CONTEXT, 1), 0, sample_id=0, index_in_batch=0)
    same = piece.document_ids[0][:, None] == piece.document_ids[0][None, :]
    mask = same & torch.ones_like(same).tril()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return Batch(piece.tokens, piece.targets, piece.positions, piece.document_ids, attend)
