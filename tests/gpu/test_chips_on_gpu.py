"""What CUDA itself answers of a node's GPUs: names, memory, a probe, the libraries; one GPU is enough."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_ring.runtime import chips
from elastic_ring.runtime.bits import gpu_environment
from elastic_ring.runtime.chips import Claim, last_holder, verdicts_of
from elastic_ring.runtime.devices import DeviceClaim, visible_chips


def nobody_aborts() -> None:
    pass


def test_every_gpu_has_a_name_of_its_own_that_the_driver_knows() -> None:
    seen = visible_chips()
    assert len({chip.name for chip in seen}) == len(seen) == torch.cuda.device_count()
    assert all(chip.name.startswith(("GPU-", "MIG-", "PCI-")) for chip in seen)


def test_a_gpu_is_taken_probed_and_given_back_empty(tmp_path: Path) -> None:
    claim = DeviceClaim("cuda", "run", tmp_path)
    device = claim.take(3, 1 << 20, 10.0, nobody_aborts)
    assert not Claim("run", tmp_path).lock(visible_chips()[device.index])
    assert last_holder(tmp_path, claim.chip).place == 3
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved(device) >= kept.nbytes
    assert claim.healthy()
    del kept
    name = claim.chip
    claim.give_back()
    assert torch.cuda.memory_reserved(device) < 1 << 30
    assert verdicts_of(tmp_path, [name]) == {name: "good"}
    assert last_holder(tmp_path, name).pid == 0


def test_a_shard_that_cannot_fit_is_waited_for_briefly_and_not_for_ever(tmp_path: Path) -> None:
    claim = DeviceClaim("cuda", "run", tmp_path)
    assert claim.take(0, 1 << 40, 10.0, nobody_aborts).type == "cuda"
    claim.give_back()
    assert chips.QUIET_S < 1.0


def test_what_bits_depend_on_is_found_on_this_machine() -> None:
    found = gpu_environment({"attention": "flash 1.0"})
    assert found["gpu"] == torch.cuda.get_device_name(0)
    assert found["driver"].count(".") >= 1
    assert found["nccl"].split(".")[0] == "2"
    assert found["attention"] == "flash 1.0"
