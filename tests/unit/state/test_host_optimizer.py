"""Optimizer state that waits in host memory between steps: the bits of a run without, however the shard is moved."""

from __future__ import annotations

from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.config import CpuOffload, OptimConfig
from elastic_ring.control.messages import SnapshotId
from elastic_ring.state import host_optimizer, snapshot, transfer
from elastic_ring.state.checkpoints import checkpoint
from elastic_ring.state.checkpoints.manifest import attempt_folder
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers
from elastic_ring.state.storage.folder import Storage
from elastic_ring.state.transfer import Link, receive_shard, send_shard
from elastic_ring.train.optim import check_cpu_offload, make_optimizer
from tests.unit.attention.attention_rings import in_threads, one_thread

SHAPES = {"embed": (11, 7), "norm": (7,), "late": (0, 5), "middle": (3, 2, 2), "single": (1,), "head": (11, 7)}
AT = (1, 4)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The matrices, which decay, come first, and two of them exceed a bucket; the norm and the single one share one."""
    monkeypatch.setattr(host_optimizer, "BUCKET_ELEMENTS", 20)
    with one_thread():
        yield


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_shard(cpu_offload: CpuOffload, *, seed: int = 0, steps: int = 0) -> Shard:
    params = drawn(seed)
    optimizer = make_optimizer(
        [(name, param) for name, param in params.items() if name != "middle"],  # which is frozen
        OptimConfig(),
        {name: len(shape) for name, shape in SHAPES.items()},
    )
    shard = Shard(0, params, optimizer, cpu_offload=cpu_offload)
    for step in range(steps):
        take_step(shard, step)
    return shard


def take_step(shard: Shard, step: int) -> None:
    shard.apply(drawn(100 + step), 0.01 * (step + 1))
    shard.advance(skipped=False)


def assert_same_bits(shard: Shard, other: Shard) -> None:
    left, right = shard.tensors(), other.tensors()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert shard.counters == other.counters


@pytest.mark.parametrize("cpu_offload", ["optimizer", "all"])
def test_steps_in_buckets_have_the_bits_of_steps_on_the_whole(cpu_offload):
    offloaded, plain = make_shard(cpu_offload), make_shard("none")
    order = [[id(param) for param in group["params"]] for group in offloaded.optimizer.param_groups]
    seen: list[int] = []
    offloaded.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            sum(param.grad is not None for group in optimizer.param_groups for param in group["params"])
        )
    )
    for step in range(4):
        take_step(offloaded, step)
        take_step(plain, step)
        assert_same_bits(offloaded, plain)
    assert seen == [1, 1, 1, 2] * 4, "parameters in each bucket"
    assert order == [[id(param) for param in group["params"]] for group in offloaded.optimizer.param_groups]
    assert set(offloaded.optimizer.state) < set(offloaded.params.values()), "all but the frozen one"
    assert all(param.grad is None for param in offloaded.params.values())


@pytest.mark.parametrize("cpu_offload", ["optimizer", "all"])
@pytest.mark.parametrize("steps", [0, 3])
def test_it_moves_into_a_fresh_module_and_back_to_a_snapshot(steps, cpu_offload):
    shard, plain = make_shard(cpu_offload, steps=steps), make_shard("none", steps=steps)
    taken = snapshot.take(shard, AT, Buffers())
    taken.finish()
    take_step(shard, steps)
    shard.rebind({name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()})
    for healed in (shard, make_shard(cpu_offload, seed=1, steps=1)):
        snapshot.load(taken.data, SnapshotId(steps, AT), 0, healed, "it")
        assert_same_bits(healed, plain)
        take_step(healed, steps)
    take_step(plain, steps)
    assert_same_bits(shard, plain)
    assert_same_bits(healed, plain)


@pytest.mark.parametrize(("one", "other"), [("none", "all"), ("optimizer", "none"), ("all", "optimizer")])
def test_a_checkpoint_of_one_setting_goes_on_with_another(tmp_path, one, other):
    saved, storage = make_shard(one, steps=3), Storage(str(tmp_path)).open()
    described, attempt = checkpoint.describe(saved, SHAPES, 1), attempt_folder(3, 1, token_hex(8))
    taken = checkpoint.take(saved, described, 0)
    file = checkpoint.write_part(storage, attempt, taken)
    manifest = checkpoint.Manifest(3, 1, 1, "run", attempt, 1, 1, (file,), described, taken.meta)
    assert checkpoint.commit(storage, manifest)
    resumed = make_shard(other, seed=1)
    checkpoint.Reader(storage, manifest).fill(resumed, 1)
    for step in (3, 4):
        take_step(saved, step)
        take_step(resumed, step)
        assert_same_bits(resumed, saved)


class JoiningGroup:
    """A gloo group that also takes the calls by which a device's backend joins operations."""

    def __init__(self, group: Any) -> None:
        self.group, self.num_bytes, self.pending = group, 0, list[Any]()

    def _start_coalescing(self) -> None:
        self.pending = []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self.num_bytes += tensors[0].nbytes
        self.pending.append(self.group.send(tensors, rank, tag))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self.pending.append(self.group.recv(tensors, rank, tag))

    def _end_coalescing(self) -> JoiningGroup:
        return self

    def wait(self) -> None:
        for work in self.pending:
            work.wait()


@pytest.mark.parametrize("cpu_offload", ["optimizer", "all"])
def test_a_newcomer_gets_large_state_over_the_devices_link(rings, monkeypatch, cpu_offload):
    """The device is said to be one; the tensors are in host memory, where parameters would be on a GPU or not."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 64)
    monkeypatch.setattr(transfer, "BATCH_BYTES", 150)
    monkeypatch.setattr(transfer, "uses_device", lambda tensor, device: tensor.numel() > 1)
    donor, newcomer = make_shard(cpu_offload, steps=2), make_shard(cpu_offload, seed=1, steps=1)
    host, device = rings.groups(2), [JoiningGroup(group) for group in rings.groups(2, fresh=True)]

    def work(rank: int) -> int:
        link = Link(host[rank], device[rank])
        return send_shard(donor, link) if rank == 0 else receive_shard(newcomer, link)

    in_threads(2, work)
    assert_same_bits(newcomer, donor)
    assert device[0].num_bytes == sum(tensor.nbytes for tensor in donor.describe()[1] if tensor.numel() > 1)
    for shard in (donor, newcomer):
        take_step(shard, 2)
    assert_same_bits(newcomer, donor)


def test_an_optimizer_of_ones_own_is_refused_by_name():
    config = OptimConfig()
    check_cpu_offload("none", torch.optim.SGD, config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cpu_offload='optimizer': serves the built-in AdamW"):
        check_cpu_offload("optimizer", torch.optim.SGD, config)  # type: ignore[arg-type]
