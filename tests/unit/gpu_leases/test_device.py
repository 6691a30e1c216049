"""What follows from what GPUs answer: taken, warmed, struck, given back. The answers are given; no GPU is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import StepConfig
from elastic_ring.control.messages import NodeJoined
from elastic_ring.data.source import StdlibText
from elastic_ring.errors import PeerFailed, RunFailed
from elastic_ring.model import liger
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.coordinator.node_monitor import without
from elastic_ring.runtime.driver.cluster import NodeInfo
from elastic_ring.runtime.gpu import device
from elastic_ring.runtime.gpu.device import DeviceLease, name_of, warm_devices
from elastic_ring.runtime.gpu.leases import Gpu, GpuLease, Owner, bad_ones, failures_of, last_owner, verdicts_of
from elastic_ring.runtime.groups.nccl import Aborter
from elastic_ring.runtime.worker import member
from elastic_ring.runtime.worker.member import Member
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.vote import ComputedWrongly
from tests.unit.gpu_leases.lease_owners import fail_elsewhere, go_on

THREE = tuple(Gpu(index, f"GPU-{index}") for index in range(3))
TASK = TrainingTask(partial(Transformer, preset("laptop")), StdlibText(64), StepConfig(), OptimConfig())
BROKEN = RuntimeError("CUDA error: uncorrectable ECC error encountered")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """What CUDA would say: three GPUs that compute, with 100 bytes free each."""
    told = SimpleNamespace(broken=set[int](), free=[100] * 3, emptied=list[torch.device](), folder=tmp_path)
    monkeypatch.setattr(device, "visible_gpus", lambda: THREE)
    monkeypatch.setattr(device, "probe", lambda device: device.index not in told.broken)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (told.free[index], 0))
    monkeypatch.setattr(device, "empty_cache", told.emptied.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(device, "SHARED_MEMORY", tmp_path)
    return told


def lease_in(answers: SimpleNamespace) -> DeviceLease:
    return DeviceLease("cuda", "run", answers.folder)


# ------------------------------------------------------------ names


def test_a_gpu_is_named_by_its_uuid_else_by_its_place():
    uuid = "8f2d6e2c-0000-4b6e-9d3c-2f5a3c1b7a90"
    assert name_of(SimpleNamespace(uuid=uuid, pci_bus_id=4), 0) == f"GPU-{uuid}"
    unnamed = SimpleNamespace(
        uuid="00000000-0000-0000-0000-000000000000", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0
    )
    assert name_of(unnamed, 5) == "PCI-00-3b-00"
    assert name_of(SimpleNamespace(), 5) == "index-5"


# ------------------------------------------------------------ taken


def test_on_a_cpu_there_is_nothing_to_lease(tmp_path):
    lease = DeviceLease("cpu", "run", tmp_path / "gpus")
    assert lease.take(0, 1 << 40, 0.0, go_on) == torch.device("cpu")
    assert lease.healthy()
    lease.give_back()
    assert not (tmp_path / "gpus").exists()


def test_a_gpu_that_computes_is_taken_and_kept_over_generations(answers):
    lease = lease_in(answers)
    assert lease.take(2, 1, 0.0, go_on) == torch.device("cuda", 0)
    assert lease.take(1, 1 << 40, 0.0, go_on) == torch.device("cuda", 0), "its own shard is in there: no wait"
    assert (lease.gpu, last_owner(answers.folder, "GPU-0").place) == ("GPU-0", 1)


def test_a_gpu_that_fails_when_it_is_taken_costs_that_process_and_then_no_other_one(answers):
    fail_elsewhere(answers.folder, THREE[0], "illegal address")  # a member died of it, and its standby looks for itself
    answers.broken.add(0)
    for gpu in THREE[1:]:
        assert GpuLease("run", answers.folder).lock(gpu)
    second = lease_in(answers)
    with pytest.raises(PeerFailed, match=r"GPU 0 \(GPU-0\) failed its probe"):
        second.take(0, 1, 0.0, go_on)
    assert not second.healthy(), "it reports that, and is replaced"
    assert bad_ones(answers.folder, ["GPU-0", "GPU-1"]) == ["GPU-0"]
    second._lease.release()
    with pytest.raises(PeerFailed, match=r"none of 3 GPUs got free .*GPU 0 failed \(it failed its probe when"):
        lease_in(answers).take(0, 1, 0.0, go_on)


def test_a_gpu_that_fails_after_an_abort_is_recorded_as_failed_once_from_its_process(answers):
    lease = lease_in(answers)
    lease.take(0, 1, 0.0, go_on)
    assert lease.healthy()
    answers.broken.add(0)
    assert [lease.healthy() for _ in range(3)] == [False] * 3
    assert [found.why for found in failures_of(answers.folder, "GPU-0")] == ["it failed its probe after an abort"]
    answers.broken.clear()
    assert not lease.healthy(), "once broken, always"


def test_a_gpu_that_failed_in_this_process_before_is_not_taken_by_it(answers):
    lease = lease_in(answers)
    lease.avoided = frozenset(["GPU-0"])
    assert lease.take(0, 1, 0.0, go_on) == torch.device("cuda", 1)


def test_a_newcomer_waits_for_the_memory_of_the_process_before_it(answers):
    answers.free[0] = 15

    def freed() -> None:
        answers.free[0] = 16

    assert lease_in(answers).take(0, 1, 60.0, freed).index == 0
    assert answers.free[0] == 16


def test_given_back_only_once_the_cache_is_empty(answers, monkeypatch):
    lease = lease_in(answers)
    lease.take(0, 1, 0.0, go_on)
    locked_then = []

    def empty(device: torch.device) -> None:
        locked_then.append(not GpuLease("run", answers.folder).lock(THREE[device.index]))

    monkeypatch.setattr(device, "empty_cache", empty)
    lease.give_back()
    assert locked_then == [True]
    assert GpuLease("run", answers.folder).lock(THREE[0])


def test_a_gpu_that_fails_when_it_is_given_back_is_recorded_as_failed_and_is_given_back(answers, monkeypatch):
    def dead(device: torch.device) -> None:
        raise BROKEN

    lease = lease_in(answers)
    lease.take(0, 1, 0.0, go_on)
    monkeypatch.setattr(device, "empty_cache", dead)
    lease.give_back()
    assert verdicts_of(answers.folder, ["GPU-0"]) == {"GPU-0": "doubtful"}
    assert GpuLease("run", answers.folder).lock(THREE[0])
    with pytest.raises(PeerFailed, match="has failed in this process before"):
        lease.take(0, 1, 0.0, go_on)


def test_a_gpu_whose_wrong_result_was_proven_is_bad_at_once(answers):
    lease = lease_in(answers)
    lease.take(0, 1, 0.0, go_on)
    lease.erred(ComputedWrongly("step 7: wrong is rank 0", step=7, ranks=(0,), what="local gradient"))
    assert verdicts_of(answers.folder, ["GPU-0"]) == {"GPU-0": "bad"}
    assert "step 7: wrong is rank 0" in failures_of(answers.folder, "GPU-0")[0].why


def test_who_stands_by_waits_for_its_groups_before_it_empties_the_cache():
    """The order in `Member.stand`, with a real aborter whose backend takes its time."""
    done, order = threading.Event(), list[str]()

    class Backend:
        def abort(self) -> None:
            assert done.wait(60)
            order.append("aborted")

    aborter = Aborter()

    class Connector:
        def close(self) -> None:
            aborter.abort([Backend()])
            order.append("closed")
            assert not aborter.wait(0.0)
            done.set()

        def wait_closed(self, timeout_s: float) -> bool:
            return aborter.wait(timeout_s)

    standing: Any = Member.__new__(Member)
    standing.context_releaser = SimpleNamespace(left_mesh=lambda: None)
    cleared = SimpleNamespace(clear=lambda: order.append("cleared"))
    standing.parts = SimpleNamespace(
        generation=SimpleNamespace(connector=Connector()),
        transaction=SimpleNamespace(drop=lambda: order.append("dropped")),
        copies=cleared,
        saver=cleared,
        lease=SimpleNamespace(give_back=lambda: order.append("given back")),
    )
    standing.become_spare()
    assert order == ["cleared", "cleared", "dropped", "closed", "aborted", "given back"]
    assert standing.parts.generation is None
    assert member.BECOME_SPARE_S > 1.0


# ------------------------------------------------------------ warmed

Told = Callable[[TrainingTask, torch.device, Sequence[tuple[int, int, int]], int, Path | None, dict[str, str]], str]


def told(**by_index: Any) -> tuple[Told, list[int]]:
    """A warm-up that tells or raises what is given for a GPU, and the GPUs that it was asked to warm."""
    warmed: list[int] = []

    def warm(task: Any, device: torch.device, shapes: Any, cp: int, cache: Path | None, kernels: dict[str, str]) -> str:
        assert shapes
        assert cache is not None
        warmed.append(device.index)
        kernels.setdefault("attention", "flash 1.0")
        answer = by_index.get(f"gpu{device.index}", "")
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    return warm, warmed


def warm_with(answers: SimpleNamespace, warm: Told) -> device.Warmed:
    return warm_devices(TASK, THREE, 2, answers.folder, warm, device.probe)


def test_a_first_step_imports_no_fused_kernels_because_the_warm_up_has(answers):
    liger.kernels.cache_clear()
    warm_with(answers, told()[0])
    assert liger.kernels.cache_info().currsize == 1


def test_one_dead_gpu_stops_no_process_and_the_second_leaves_it_alone(answers):
    answers.broken.add(1)
    warm, warmed = told()
    found = warm_with(answers, warm)
    assert (warmed, found.failed, found.kernels) == ([0, 2], {"GPU-1"}, {"attention": "flash 1.0"})
    assert verdicts_of(answers.folder, ["GPU-0", "GPU-1", "GPU-2"]) == {
        "GPU-0": "good",
        "GPU-1": "doubtful",
        "GPU-2": "good",
    }
    fail_elsewhere(answers.folder, THREE[1], "dead")
    assert warm_with(answers, warm).failed == frozenset()
    assert warmed == [0, 2, 0, 2]


def test_a_gpu_that_dies_of_its_warm_up_or_computes_wrongly_is_recorded_as_failed(answers):
    def dies(task: Any, device: torch.device, *rest: Any) -> str:
        if device.index == 0:
            answers.broken.add(0)
            raise BROKEN
        return ""

    assert warm_with(answers, dies).failed == {"GPU-0"}
    assert failures_of(answers.folder, "GPU-0")[0].why == f"RuntimeError: {BROKEN}"
    answers.broken.clear()
    assert warm_with(answers, told(gpu2="dq differs")[0]).failed == {"GPU-2"}
    assert failures_of(answers.folder, "GPU-2")[0].why == "dq differs"


@pytest.mark.parametrize(
    ("broken", "gpu0", "error"),
    [
        ((), RuntimeError("no such kernel"), "no such kernel"),
        ((0, 1, 2), "", r"more than one GPU fails in this process: GPU 0 .*GPU 1 "),
    ],
    ids=["a kernel that fails on a well GPU", "every GPU fails"],
)
def test_a_process_or_software_at_fault_is_raised_and_no_gpu_is_recorded(answers, broken, gpu0, error):
    answers.broken |= set(broken)
    with pytest.raises((RuntimeError, RunFailed), match=error):
        warm_with(answers, told(gpu0=gpu0)[0])
    assert set(verdicts_of(answers.folder, [gpu.name for gpu in THREE]).values()) == {"good"}


def test_beside_another_process_no_length_is_warmed_up(answers):
    asked: dict[int | None, int] = {}

    def warm(task: Any, device: torch.device, shapes: Any, cp: int, *rest: Any) -> str:
        asked[device.index] = cp
        return ""

    assert GpuLease("other", answers.folder).lock(THREE[1])
    warm_with(answers, warm)
    assert asked == {0: 2, 1: 0, 2: 2}


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: out of memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_full_gpu_is_taken_cold_and_is_not_recorded_as_failed(answers, error):
    warm, warmed = told(gpu1=error)
    outcome = warm_with(answers, warm)
    assert (warmed, outcome.failed, outcome.kernels) == ([0, 1, 2], frozenset(), {"attention": "flash 1.0"})
    assert verdicts_of(answers.folder, ["GPU-1"]) == {"GPU-1": "good"}


def test_a_gpu_that_is_anothers_alone_is_skipped_without_a_record(answers):
    assert GpuLease("other", answers.folder).lock(THREE[0])
    answers.broken.add(0)
    assert warm_with(answers, told()[0]).failed == {"GPU-0"}
    assert verdicts_of(answers.folder, ["GPU-0"]) == {"GPU-0": "good"}
    assert last_owner(answers.folder, "GPU-0") == Owner()


# ------------------------------------------------------------ counted


def test_a_node_has_room_for_one_member_less_for_each_bad_gpu():
    node = NodeInfo("n", "10.0.0.1", 9, False, 4)
    assert without(node, []) == node
    assert without(node, ["GPU-1"]).num_gpus == 3
    assert without(node, [str(index) for index in range(9)]).num_gpus == 0
    assert without(NodeInfo("n", "10.0.0.1", 9, False, None), ["GPU-1"]).num_gpus is None
    assert NodeJoined("c", "n", 9, 3) != NodeJoined("c", "n", 9, 4)
