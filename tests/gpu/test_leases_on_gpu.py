"""What CUDA itself answers of a node's GPUs: names, memory, a probe, the libraries; one GPU is enough."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_ring.runtime.gpu import leases
from elastic_ring.runtime.gpu.device import DeviceLease, visible_gpus
from elastic_ring.runtime.gpu.leases import GpuLease, last_owner, verdicts_of
from elastic_ring.runtime.worker.env_fingerprint import gpu_environment


def nobody_aborts() -> None:
    pass


def test_every_gpu_has_a_name_of_its_own_that_the_driver_knows() -> None:
    seen = visible_gpus()
    assert len({gpu.name for gpu in seen}) == len(seen) == torch.cuda.device_count()
    assert all(gpu.name.startswith(("GPU-", "MIG-", "PCI-")) for gpu in seen)


def test_a_gpu_is_taken_probed_and_given_back_empty(tmp_path: Path) -> None:
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


def test_a_shard_that_cannot_fit_is_waited_for_briefly_and_not_for_ever(tmp_path: Path) -> None:
    lease = DeviceLease("cuda", "run", tmp_path)
    assert lease.take(0, 1 << 40, 10.0, nobody_aborts).type == "cuda"
    lease.give_back()
    assert leases.QUIET_S < 1.0


def test_what_bits_depend_on_is_found_on_this_machine() -> None:
    found = gpu_environment({"attention": "flash 1.0"})
    assert found["gpu"] == torch.cuda.get_device_name(0)
    assert found["driver"].count(".") >= 1
    assert found["nccl"].split(".")[0] == "2"
    assert found["attention"] == "flash 1.0"
