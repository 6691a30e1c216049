"""The reliefs of the memory ladder on real processes and groups: each keeps the bits, and saves what it says."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Block, Transformer
from elastic_ring.train.memory import MemoryGauge, MemoryRelief, keep_activations
from elastic_ring.train.passes import compute
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.transaction import TransactionOptions
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import MODEL, STEP, begin, facts, make_task, rebuild, run_steps

RING = Mesh(1, 2)


class OwnLayer(nn.Module):
    """A layer of somebody's own, with random numbers in it and without a setting for recomputation."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.dropout = block, nn.Dropout(0.1)

    def forward(self, x: Tensor, rotation: Any, attention: Any) -> Tensor:
        out: Tensor = self.dropout(self.block(x, rotation, attention))
        return out


class KeepingAll(Transformer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, checkpoint_activations=False))


class OwnModel(KeepingAll):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(OwnLayer(block) for block in self.blocks)  # type: ignore[arg-type]


def relieve(me: Any, reliefs: tuple[str, ...]) -> None:
    me.state.relief = MemoryRelief(reliefs)


def kept_bytes(me: Any) -> int:
    """What autograd keeps between the forward and the backward passes of a step, which is not applied."""
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute(me.state, me.state.applied)
    return sum(sizes)


@pytest.fixture(scope="module")
def two() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    "task",
    [make_task(KeepingAll), make_task(OwnModel, initial=None)],
    ids=["with a setting", "without"],
)
def test_a_relief_that_is_taken_between_two_steps_saves_memory_and_changes_no_bit(
    two: Membership, task: TrainingTask
) -> None:
    two.all(begin, two.meeting(), RING, task)
    undisturbed = two.all(run_steps, 3)
    reference = [known["digest"] for known in two.all(facts)]

    two.all(begin, two.meeting(), RING, task)
    losses = two.all(run_steps, 1)
    (before, _) = two.all(kept_bytes)
    two.all(relieve, ("caches", "recompute"))
    two.all(rebuild, two.meeting(), RING)
    (after, _) = two.all(kept_bytes)
    assert after < 0.5 * before
    two.all(rebuild, two.meeting(), RING)
    losses = [first + later for first, later in zip(losses, two.all(run_steps, 1), strict=True)]
    two.all(relieve, ())  # and down again
    two.all(rebuild, two.meeting(), RING)
    losses = [first + later for first, later in zip(losses, two.all(run_steps, 1), strict=True)]
    assert losses == undisturbed
    assert [known["digest"] for known in two.all(facts)] == reference


def keep(me: Any) -> None:
    me.state.options = TransactionOptions(keeps_activations=True)


def test_a_ring_that_keeps_what_its_layers_would_recompute_changes_no_bit(two: Membership) -> None:
    two.all(begin, two.meeting(), RING, make_task())
    undisturbed = two.all(run_steps, 2)
    two.all(begin, two.meeting(), RING, make_task())
    losses = two.all(run_steps, 1)
    (before, _) = two.all(kept_bytes)
    two.all(keep)
    two.all(rebuild, two.meeting(), RING)
    (after, _) = two.all(kept_bytes)
    assert after > 1.5 * before
    two.all(rebuild, two.meeting(), RING)
    assert [first + later for first, later in zip(losses, two.all(run_steps, 1), strict=True)] == undisturbed


@pytest.mark.slow
def test_passes_of_one_sequence_are_those_of_a_run_that_never_had_more(two: Membership) -> None:
    together = make_task(step=replace(STEP, sequences_per_pass=3))
    two.all(begin, two.meeting(), RING, make_task())
    one_by_one = two.all(run_steps, 2)
    two.all(begin, two.meeting(), RING, together)
    two.all(relieve, ("caches", "recompute", "passes"))
    two.all(rebuild, two.meeting(), RING)
    assert two.all(run_steps, 2) == one_by_one


def test_smaller_chunks_of_the_loss_give_the_same_sums_and_other_bits() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 257, (1, 512))
    found = []
    for reliefs in ((), ("chunks",)):
        torch.manual_seed(1)
        model = Transformer(ModelConfig(257, 1, 64, 2, 1, 32, 64, loss_chunk_tokens=256))
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.1) if param.dim() > 1 else torch.nn.init.ones_(param)
        MemoryRelief(reliefs).change(model, model.blocks)
        loss, _ = model(tokens, positions=tokens, document_ids=tokens, attention=lambda q, k, v: q, targets=tokens)
        loss.backward()
        found.append((model.loss_chunk_tokens, loss.detach(), model.head.weight.grad))
    (whole, loss, grad), (eighth, other_loss, other_grad) = found
    assert (whole, eighth) == (256, 32)
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_grad, grad)
    assert not torch.equal(other_grad, grad), "it would belong to the reliefs that keep the bits"


def test_layers_that_keep_their_activations_have_the_bits_of_those_that_recompute_and_a_relief_wins() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 257, (1, 64))
    found, seen = [], []
    for keeps, reliefs in ((False, ()), (True, ()), (True, ("recompute",))):
        torch.manual_seed(1)
        model = Transformer(ModelConfig(257, 2, 64, 2, 1, 32, 64))
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.1) if param.dim() > 1 else torch.nn.init.ones_(param)
        for block in model.blocks if keeps else ():
            keep_activations(block)
        MemoryRelief(reliefs).change(model, model.blocks)
        seen.append([block.checkpoint_activations for block in model.blocks])
        loss, _ = model(tokens, positions=tokens, document_ids=tokens, attention=lambda q, k, v: q, targets=tokens)
        loss.backward()
        found.append([loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)])
    assert seen == [[True] * 2, [False] * 2, [True] * 2]
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))
    offloading = Transformer(ModelConfig(257, 1, 64, 2, 1, 32, 64, offload_activations=True)).blocks[0]
    keep_activations(offloading)
    assert offloading.checkpoint_activations


def test_one_sequence_is_read_ahead_under_pressure_and_caches_are_freed_before_each_step() -> None:
    assert MemoryRelief().read_ahead is None
    assert MemoryRelief(("caches",)).read_ahead == 1
    kept: list[Any] = []
    kept.append(kept)
    torch.manual_seed(0)
    MemoryRelief(("caches",)).before_step(torch.device("cpu"))  # malloc_trim is found on this platform or left out


def test_offload_tells_the_layers_that_can_and_is_no_relief_of_a_cpu() -> None:
    model = Transformer(MODEL)
    MemoryRelief(("caches", "recompute", "offload")).change(model, model.blocks)
    assert all(block.offload_activations for block in model.blocks)
    keeps_all = KeepingAll(MODEL)
    MemoryRelief(("offload",)).change(keeps_all, keeps_all.blocks)
    assert not any(block.offload_activations for block in keeps_all.blocks)  # they keep nothing that could leave


def test_the_gauge_says_what_share_of_its_limit_a_process_has_in_use_behind_a_forward_pass() -> None:
    gauge, cpu = MemoryGauge(), torch.device("cpu")
    gauge.begin(cpu)
    gauge.look(cpu)
    assert gauge.share(cpu) == 0.0, "nothing limits it"
    status = Path("/proc/self/status").read_text()
    (data_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * data_kib << 10, before[1]))
        gauge.look(cpu)
        held = torch.empty((data_kib << 8) * 9 // 10)  # nearly as much again
        gauge.look(cpu)
        del held
        gauge.look(cpu)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert 0.9 < gauge.share(cpu) <= 1.0
    gauge.begin(cpu)
    assert gauge.share(cpu) == 0.0
