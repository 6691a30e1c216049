"""State in host memory: equal bits, and less memory on the GPU, 8 bytes a parameter where it is AdamW's moments.

`tests/unit/state/test_host_optimizer.py` makes the first claim on a CPU, where the copies cannot overtake each other.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore
from torch.optim import AdamW

from benchmarks.harness.gpu_runs import GpuRun
from benchmarks.probes.gpu_steps import build, connected, one_step
from benchmarks.probes.probe_steps_gpu import warm
from elastic_ring.config import CpuOffload
from elastic_ring.control.messages import SnapshotId
from elastic_ring.runtime.groups import nccl
from elastic_ring.state import host_optimizer
from elastic_ring.state.device_sums import device_digests
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, load, take
from elastic_ring.train.transaction import Transaction

AT = (1, 4)
ROWS, NUM_LAYERS = 2048, 12
BUCKET_ELEMENTS = 2 * ROWS * ROWS
RUN = GpuRun("100m", context=8192, batch=2, cp=1, dp=1, spares=0, kernel="aten-flash")
STEPS = 4


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_ELEMENTS", BUCKET_ELEMENTS)


def make_shard(cpu_offload: CpuOffload, seed: int = 0) -> Shard:
    device, generator = torch.device("cuda", torch.cuda.current_device()), torch.Generator("cuda").manual_seed(seed)
    params = {f"layer{i}": torch.randn(ROWS, ROWS, device="cuda", generator=generator) for i in range(NUM_LAYERS)}
    params["gain"] = torch.ones(ROWS, device="cuda")
    if cpu_offload == "all":
        params = {name: param.cpu().pin_memory() for name, param in params.items()}
    return Shard(0, params, AdamW(params.values(), fused=True), cpu_offload=cpu_offload, computes_on=device)


def gradients_of(shard: Shard, number: int) -> dict[str, torch.Tensor]:
    return {name: (param.to(shard.device) * (number + 1)).sin() for name, param in shard.params.items()}


def step(shard: Shard, number: int) -> None:
    shard.apply(gradients_of(shard, number), 0.01)
    shard.advance(skipped=False)


def bits(shard: Shard) -> dict[str, str]:
    """The digest of each tensor, wherever it lies."""
    found = shard.tensors()
    digests = device_digests(list(found.values()), shard.device)
    return {name: digest.hex() for name, digest in zip(found, digests, strict=True)}


@pytest.mark.parametrize(("cpu_offload", "visiting_bytes"), [("optimizer", 8), ("all", 12)])
def test_steps_in_buckets_have_the_bits_of_steps_on_the_gpu_and_at_most_two_buckets_of_state_there(
    cpu_offload, visiting_bytes
):
    plain, offloaded = make_shard("none"), make_shard(cpu_offload)
    for number in range(10):
        step(plain, number)
        step(offloaded, number)
        assert bits(offloaded) == bits(plain)
    moments = [state[key] for state in offloaded.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * (NUM_LAYERS + 1)
    assert all(moment.is_pinned() for moment in moments)
    assert all(param.is_cuda == (cpu_offload == "optimizer") for param in offloaded.params.values())
    gradients = gradients_of(offloaded, 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    offloaded.apply(gradients, 0.01)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * visiting_bytes * BUCKET_ELEMENTS


@pytest.mark.parametrize("cpu_offload", ["optimizer", "all"])
def test_a_snapshot_of_offloaded_state_is_loaded_without_a_visit_to_the_gpu_and_trains_on_alike(cpu_offload):
    shard, stream = make_shard(cpu_offload), torch.cuda.Stream()
    for number in range(2):
        step(shard, number)
    before, taken = shard.digest(), take(shard, AT, Buffers(is_pinned=True), stream)
    taken.wait()
    step(shard, 2)
    taken.finish()
    other = make_shard(cpu_offload, seed=1)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    load(taken.data, SnapshotId(2, AT), 0, other, "it")
    params_bytes = 4 * (NUM_LAYERS * ROWS * ROWS + ROWS)
    assert torch.cuda.max_memory_allocated() - allocated < 1.1 * params_bytes
    assert other.digest() == before
    step(other, 2)
    assert bits(other) == bits(shard)
    assert other.digest() == shard.digest() != before


def test_training_steps_have_equal_bits_and_8_bytes_a_parameter_less_at_their_peak(tmp_path, monkeypatch):
    """With all of the state in host memory 8 for the moments, 4 for the masters, and most of the gradients' 4."""
    for name, value in nccl.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    mp.spawn(train_each_way, args=(str(tmp_path / "found.json"),), nprocs=1)
    found = json.loads((tmp_path / "found.json").read_text())
    plain = found["none"]
    for cpu_offload, (least, most) in {"optimizer": (7.5, 8.5), "all": (11.5, 16.5)}.items():
        offloaded = found[cpu_offload]
        assert offloaded["losses"] == plain["losses"]
        assert offloaded["bits"] == plain["bits"]
        saved_bytes = plain["peak_bytes"] - offloaded["peak_bytes"]
        print(f"{cpu_offload}: {saved_bytes / plain['num_parameters']:.2f} bytes a parameter less")
        assert least < saved_bytes / plain["num_parameters"] < most
    assert [one["on_gpu"] for one in found.values()] == [[True, True], [True, False], [False, False]]


def train_each_way(rank: int, file: str) -> None:
    """In a process of its own, with the environment of a worker."""
    host_optimizer.BUCKET_ELEMENTS = BUCKET_ELEMENTS
    device, found = torch.device("cuda", rank), {}
    warm(RUN, device, all_devices=False)
    for number, cpu_offload in enumerate(get_args(CpuOffload)):
        torch._C._cuda_clearCublasWorkspaces()  # else the first run's would count for it alone
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = torch.cuda.memory_allocated(device)
        run = replace(RUN, cpu_offload=cpu_offload)
        state = build(run, connected(run, rank, store.port, f"{number}/1", device), device)
        found[cpu_offload] = {**trained(state), "peak_bytes": torch.cuda.max_memory_allocated(device) - before}
        del state
        gc.collect()
        torch.cuda.empty_cache()
    Path(file).write_text(json.dumps(found), encoding="utf-8")


def trained(state: Transaction) -> dict[str, Any]:
    losses: list[float] = []
    for number in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        one_step(state, number, losses=losses)
    assert state.shard is not None
    params = list(state.shard.params.values())
    moments = [entry["exp_avg"] for entry in state.shard.optimizer.state.values()]
    return {
        "losses": [loss.hex() for loss in losses],
        "bits": bits(state.shard),
        "on_gpu": [params[0].is_cuda, moments[0].is_cuda],
        "num_parameters": sum(param.numel() for param in params),
    }
