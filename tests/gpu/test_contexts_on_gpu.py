"""What CUDA answers of a host's GPUs: to a member that lets go of all but one, to a lease, of a killed process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.monitor.exits import ExitWatch
from elastic_ring.runtime.gpu import leases
from elastic_ring.runtime.gpu.cuda_contexts import REPINNED_BYTES, CudaContexts, end_contexts, unused_others
from elastic_ring.runtime.gpu.device import DeviceLease, empty_cache, visible_gpus
from elastic_ring.runtime.gpu.leases import GpuLease, last_owner, verdicts_of
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.worker.env_fingerprint import gpu_environment
from elastic_ring.runtime.worker.stall_watchdog import DeviceMarks
from elastic_ring.state import pinned
from elastic_ring.state.device_sums import eager_squared_norm, squared_norm
from elastic_ring.train.startup.warm import _one_step

PATIENCE_S = 120.0
CONTEXT_BYTES = 100 << 20  # at least: on an H200 it is some 0.5 GiB


def use(device: torch.device) -> None:
    """What a standby and a member do on a GPU, in small."""
    torch.cuda.set_device(device)
    x = torch.ones(256, 256, device=device, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(512.0).all().item()
    sent = torch.arange(1 << 20).pin_memory()
    back = torch.empty(1 << 20, dtype=torch.int64, pin_memory=True).copy_(sent.to(device, non_blocking=True))
    assert torch.equal(sent, back)
    flat = torch.randn(100_000, device=device)
    assert float(squared_norm(flat)) == pytest.approx(float(eager_squared_norm(flat.cpu())), rel=1e-9)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        _one_step(DeviceMesh("cuda", [0]), device)
        torch.cuda.synchronize(device)
    finally:
        dist.destroy_process_group()


def use_beside(device: torch.device) -> None:
    """What threads that have chosen no GPU do for a member, each call in one of its own."""
    backend = nccl.create_backend(PrefixStore("after", HashStore()), 0, 1, device, 60.0)
    nccl.connect_now(backend, device, lambda: False)
    backend.allreduce([torch.ones(8, device=device)]).wait()
    marks = DeviceMarks()
    marks.move_to(device)
    marks.leave()
    torch.cuda.synchronize(device)
    failed: list[BaseException] = []

    def look() -> None:
        marks.set_device()
        marks.look()

    def alone(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    for call in (
        look,
        partial(nccl.link_error, backend),
        partial(nccl.end, backend),
        partial(empty_cache, device),
        partial(nccl.probe, device),
    ):
        thread = threading.Thread(target=alone, args=(call,))
        thread.start()
        thread.join()
        assert CudaContexts().having() == [device.index], call
    assert failed == []
    assert marks.num_passed == 1


def let_go(device: torch.device, beside: bool) -> int:
    """`beside`: the contexts end in a thread that has chosen no GPU, as a member's do."""
    contexts, ended = CudaContexts(), list[int]()
    unused = unused_others(device, contexts)
    if not beside:
        return end_contexts(unused, contexts)
    thread = threading.Thread(target=lambda: ended.append(end_contexts(unused, contexts)))
    thread.start()
    use(device)  # steps go on meanwhile
    thread.join()
    return ended[0]


def child(end: Connection, own: int, beside: bool) -> None:
    device, contexts = torch.device("cuda", own), CudaContexts()
    for index in range(torch.cuda.device_count()):
        use(torch.device("cuda", index))
    use(device)
    kept, there = pinned.empty(REPINNED_BYTES + 3), torch.arange(64, dtype=torch.uint8, device=device)
    end.send(contexts.having())
    end.recv()
    end.send((let_go(device, beside), contexts.having()))
    end.recv()
    for _ in range(3):
        use(device)
    use_beside(device)
    kept[-64:].copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    assert kept.is_pinned()
    assert torch.equal(kept[-64:], there.cpu()), "pinned memory of a snapshot went with another GPU's context"
    del kept
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    visible_gpus()
    stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    reserved = [index for index, told in enumerate(stats) if told.get("reserved_bytes.all.current", 0)]
    end.send((contexts.having(), reserved))


def answer(end: Connection) -> Any:
    assert end.poll(PATIENCE_S), "no answer"
    return end.recv()


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("beside", [False, True])
def test_a_process_lets_go_of_every_gpu_but_its_own_and_goes_on_there(own, beside):
    """Also where the other is the first, which threads without a choice mean."""
    num_gpus, other = torch.cuda.device_count(), 1 - own
    if num_gpus < 2:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, own, beside), daemon=True)
    torch.cuda.mem_get_info(other)  # this process's own context
    process.start()
    there.close()
    try:
        assert answer(here) == list(range(num_gpus))
        free_before = torch.cuda.mem_get_info(other)[0]
        here.send("let go")
        assert answer(here) == (num_gpus - 1, [own])
        assert torch.cuda.mem_get_info(other)[0] - free_before > CONTEXT_BYTES
        here.send("go on")
        having, reserved = answer(here)
        assert (having, [index for index in reserved if index != own]) == ([own], [])
        process.join(PATIENCE_S)
        assert process.exitcode == 0, "its end goes through what the others had"
    finally:
        process.kill()


# ------------------------------------------------------------------------------------------------------------- a lease


def nobody_aborts() -> None:
    pass


def test_every_gpu_has_a_name_of_its_own_that_the_driver_knows():
    seen = visible_gpus()
    assert len({gpu.name for gpu in seen}) == len(seen) == torch.cuda.device_count()
    assert all(gpu.name.startswith(("GPU-", "MIG-", "PCI-")) for gpu in seen)


def test_a_gpu_is_taken_probed_and_given_back_empty(tmp_path):
    lease = DeviceLease("cuda", "run", tmp_path)
    device = lease.take(3, 1 << 20, 10.0, nobody_aborts)
    assert not GpuLease("run", tmp_path).lock(visible_gpus()[device.index])
    assert last_owner(tmp_path, lease.gpu).place == 3
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved(device) >= kept.nbytes
    assert lease.healthy()
    del kept
    name = lease.gpu
    lease.give_back()
    assert torch.cuda.memory_reserved(device) < 1 << 30
    assert verdicts_of(tmp_path, [name]) == {name: "good"}
    assert last_owner(tmp_path, name).pid == 0


def test_a_shard_that_cannot_fit_is_waited_for_briefly_and_not_for_ever(tmp_path):
    lease = DeviceLease("cuda", "run", tmp_path)
    assert lease.take(0, 1 << 40, 10.0, nobody_aborts).type == "cuda"
    lease.give_back()
    assert leases.QUIET_S < 1.0


def test_what_bits_depend_on_is_found_on_this_machine():
    found = gpu_environment({"attention": "flash 1.0"})
    assert found["gpu"] == torch.cuda.get_device_name(0)
    assert found["driver"].count(".") >= 1
    assert found["nccl"].split(".")[0] == "2"
    assert found["attention"] == "flash 1.0"


# -------------------------------------------------------------------------- a killed process that holds a GPU's memory


HOLDER = """
import torch
free_bytes, _ = torch.cuda.mem_get_info()
held = torch.ones(free_bytes // 2, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
input()
"""
NUM_KILLS, LIMIT_S = 3, 60.0


def killed() -> tuple[float, float]:
    """Seconds from SIGKILL until the death is seen, and until the process has ended."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, ExitWatch() as watch:
        assert process.stdout.readline() == b"held\n"
        watch.watch(process.pid, "holder")
        assert watch.ending() == []
        os.kill(process.pid, signal.SIGKILL)
        begun = time.monotonic()
        while not (seen := watch.ending()):
            assert time.monotonic() < begun + LIMIT_S
        seen_s = time.monotonic() - begun
        assert seen == ["holder"]
        (notice,) = watch.wait(LIMIT_S)
        assert notice.signal == signal.SIGKILL
        return seen_s, notice.monotonic_s - begun


def test_a_death_is_seen_before_the_gpus_memory_is_free():
    free_bytes, _ = torch.cuda.mem_get_info()
    found = [killed() for _ in range(NUM_KILLS)]
    print("seen after, ended after (s):", found)
    assert all(seen_s < ended_s for seen_s, ended_s in found)
    assert min(seen_s for seen_s, _ in found) < 0.1
    assert torch.cuda.mem_get_info()[0] > 0.9 * free_bytes
