"""Which GPUs a member lets go of, when, and what it does if it is to stand by then. No GPU is asked."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Build, Standby
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu import device
from elastic_ring.runtime.gpu.cuda_contexts import ContextReleaser, CudaContexts, end_contexts, unused_others
from elastic_ring.runtime.worker import member
from elastic_ring.runtime.worker.actor import Worker
from elastic_ring.runtime.worker.coordinator_client import CommandDetails
from elastic_ring.runtime.worker.copies import Copies
from elastic_ring.runtime.worker.member import Member, StepLoop
from elastic_ring.runtime.worker.member_parts import Generation
from elastic_ring.runtime.worker.stall_watchdog import StepProgress
from elastic_ring.state.pinned import loaded_runtime

OWN = torch.device("cuda", 1)
LOG = "elastic_ring.runtime.gpu.cuda_contexts"


class Told:
    """What CUDA would say of a node with four GPUs, on the last of which this process has no context."""

    def __init__(self, pinned_bytes: int = 0) -> None:
        self.pinned_bytes = pinned_bytes
        self.in_use = dict.fromkeys(range(4), 0)
        self.codes: dict[int, int | Exception] = dict.fromkeys(range(4), 0)
        self.calls: list[Any] = []
        self.contexts = [0, 1, 2]
        self.staying: list[int] = []

    def having(self) -> list[int]:
        return list(self.contexts)

    def empty(self, others: list[int]) -> int:
        self.calls.append(("empty", *others))
        return self.pinned_bytes

    def reserved(self, index: int) -> int:
        return self.in_use[index]

    def reset(self, index: int) -> int:
        self.calls.append(index)
        code = self.codes[index]
        if isinstance(code, Exception):
            raise code
        if code == 0 and index not in self.staying:
            self.contexts.remove(index)
        return code


# ------------------------------------------------------------ which


def released(contexts: Any) -> int:
    return end_contexts(unused_others(OWN, contexts), contexts)


EMPTIED = ("empty", 0, 2)
KEPT_0 = "GPU 0 is kept: "


@pytest.mark.parametrize(
    ("cuda", "calls", "num_released", "line"),
    [
        pytest.param({}, [EMPTIED, 0, 2], 2, "", id="all, once caches are empty"),
        pytest.param({"contexts": [1]}, [], 0, "", id="alone on its GPU"),
        pytest.param({"in_use": {0: 512, 1: 9, 2: 0}}, [EMPTIED, 2], 1, f"{KEPT_0}512 bytes of this", id="used"),
        pytest.param({"pinned_bytes": 4096}, [EMPTIED], 0, "4096 bytes of pinned memory", id="pinned, of any GPU"),
        pytest.param({"codes": {0: 46, 2: 0}}, [EMPTIED, 0, 2], 1, f"{KEPT_0}cudaDeviceReset returned 46", id="code"),
        pytest.param({"staying": [0]}, [EMPTIED, 0, 2], 1, f"{KEPT_0}it still has a context after", id="still there"),
        pytest.param({"codes": {0: OSError("gone")}}, [EMPTIED, 0], 0, "are kept: OSError: gone", id="no runtime"),
        pytest.param({"codes": {0: RuntimeError("bad")}}, [EMPTIED, 0], 0, "are kept: RuntimeError: bad", id="CUDA"),
        pytest.param({"codes": {0: KeyError("bytes")}}, [EMPTIED, 0], 0, "are kept: KeyError: 'bytes'", id="torch"),
    ],
)
def test_gpus_whose_contexts_can_go_are_released_and_the_others_are_named(cuda, calls, num_released, line, caplog):
    caplog.set_level(logging.INFO, LOG)
    told: Any = Told()
    for name, value in cuda.items():
        setattr(told, name, value)
    assert end_contexts(unused_others(OWN, told), told) == num_released
    assert told.calls == calls
    assert line in caplog.text
    assert len(caplog.records) == (1 if line else 0)


def test_where_torch_has_loaded_no_runtime_none_is_loaded_for_this(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(OSError, match=r"libcudart\.so\.99"):
        loaded_runtime()


def test_a_cache_is_emptied_with_its_own_gpu_chosen(monkeypatch):
    """The control thread has chosen none, and would make a context on the first one again."""
    order: list[str] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        order.append(f"{device} chosen")
        yield
        order.append("as before")

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    device.empty_cache(OWN)
    device.empty_cache(torch.device("cpu"))
    assert order == ["cuda:1 chosen", "emptied", "as before"]


@pytest.mark.parametrize(("held", "emptied"), [(0, True), (1 << 28, True), ((1 << 28) + 1, False)])
def test_activations_that_wait_in_pinned_memory_are_not_pinned_anew(held, emptied, monkeypatch):
    pinned = [held]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": pinned[-1]})
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: pinned.append(0), raising=False)
    assert CudaContexts().empty([0, 2]) == (0 if emptied else held)
    assert (pinned[-1] == 0) == emptied


# ------------------------------------------------------------ when


@pytest.mark.parametrize("wanted", [True, False])
def test_after_the_second_step_of_a_member_and_once(wanted, caplog):
    """What may touch the other GPUs by the training thread, between its steps; their end beside the next ones."""
    caplog.set_level(logging.INFO, LOG)
    told, order, may_end = Told(), list[Any](), threading.Event()

    def empty(others: list[int]) -> int:
        order.append(("emptied", threading.current_thread()))
        return 0

    def reset(index: int) -> int:
        assert may_end.wait(10)
        order.append((index, threading.current_thread().name))
        told.contexts.remove(index)
        return 0

    told.empty, told.reset = empty, reset  # type: ignore[method-assign]
    context_releaser = ContextReleaser(wanted, told)
    context_releaser.committed(OWN, 1, 4, 2)
    context_releaser.left_mesh()
    context_releaser.committed(OWN, 2, 7, 2)
    assert (order, context_releaser.released) == ([], False), "the first step since it became a member again"
    for step in range(8, 20):
        context_releaser.committed(OWN, 2, step, 2)
        assert context_releaser.released is wanted
    emptied = [("emptied", threading.current_thread())]
    assert order == (emptied if wanted else []), "no step waits for the end of a context"
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "other contexts":
            thread.join(10)
    assert order == ([*emptied, (0, "other contexts"), (2, "other contexts")] if wanted else [])
    lines = [record.message.partition(" in ")[0] for record in caplog.records]
    assert lines == ["generation 2, step 8, rank 2: released 2 other GPUs"] * wanted


@pytest.mark.parametrize("kept", ["alone", "pinned", "in use"])
def test_a_process_that_released_nothing_can_become_a_spare(kept):
    told = Told(pinned_bytes=1 if kept == "pinned" else 0)
    told.contexts = [1] if kept == "alone" else [0, 1]
    told.in_use[0] = 1 if kept == "in use" else 0
    context_releaser = ContextReleaser(True, told)
    for step in range(5):
        context_releaser.committed(OWN, 1, step, 0)
    assert not context_releaser.released
    assert told.calls == ([] if kept == "alone" else [("empty", 0)]), "and it is not tried again"


@pytest.mark.parametrize(("device", "asked"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_only_members_on_gpus_that_are_asked_to_let_go_do(device, asked, monkeypatch):
    made: list[bool] = []
    monkeypatch.setattr(member, "ContextReleaser", made.append)
    scaling, run = ScalingConfig(device=device, release_contexts=asked), RunConfig(name="run")
    spec: Any = SimpleNamespace(scaling=scaling, run=run, task=None, worker="a")
    nothing: Any = None
    Member(spec, nothing, nothing, lambda records: None)
    assert made == [asked and device == "cuda"]


def test_a_member_tells_of_each_step_that_is_committed_and_done_here(monkeypatch):
    """In the loop itself: behind the commit and its record, not where it stops for a boundary, nor while memory is
    pinned."""
    order: list[str] = []
    saver = SimpleNamespace(pinning=SimpleNamespace(is_running=False))
    state = SimpleNamespace(applied=0, shard=SimpleNamespace(counters=SimpleNamespace(applied=0)))

    def run(step: int, *, boundary: bool, flags: Any, cut_off: Any) -> tuple[Any, Any]:
        state.applied = step + 1
        saver.pinning.is_running = step == 0
        order.append(f"run {step}")
        outcome = SimpleNamespace(boundary=step == 2, checkpoint=False, checkpoint_missed=False)
        return outcome, SimpleNamespace(data_wait_s=0.0)

    state.run = run
    command = Build("c", "a", 1, 5, Mesh(1, 2), ("a", "b"), 0, None, (), True)
    groups: Any = SimpleNamespace(global_rank=1)
    connector: Any = SimpleNamespace(aborted=False)
    step = SimpleNamespace(steps=9, validates_after=lambda step: False, deterministic=True)
    parts: Any = SimpleNamespace(
        now=Generation(command, connector, CommandDetails(), groups=groups),
        transaction=state,
        copies=Copies(RunConfig(name="run"), "a"),
        saver=saver,
        spec=SimpleNamespace(task=SimpleNamespace(step=step)),
        lease=SimpleNamespace(device=OWN, gpu=""),
        notices=SimpleNamespace(
            compilations=SimpleNamespace(before_steps=lambda: None), after_step=lambda step, deterministic: None
        ),
        watch=lambda phase, step: None,
        speaks=False,
        stamps=SimpleNamespace(waited_for_data=lambda waited_s: None),
        progress=StepProgress(),
    )
    releaser: Any = SimpleNamespace(committed=lambda *step: order.append(f"told {step}"))
    loop: Any = StepLoop(parts, None, releaser)  # type: ignore[arg-type]
    loop._prepare_host_memory = lambda: None
    loop._record = lambda begun, outcome, local: order.append("recorded")
    assert loop.run() == "boundary"
    assert order == ["run 0", "recorded", "run 1", "recorded", f"told {(OWN, 5, 1, 1)}", "run 2", "recorded"]


# ------------------------------------------------------------ what it may do then


def _become_spare(released: bool) -> None:
    """In a process of its own: the code that it ends with says how far it came."""
    worker: Any = Worker.__new__(Worker)
    worker._release_training = lambda: True
    worker._warm = SimpleNamespace(become_spare=lambda: None, context_releaser=SimpleNamespace(released=released))
    worker._seen, worker._built = (1, 1), (0, 0)
    worker._obey(Standby("c", "w", 1, 2), CommandDetails())
    sys.exit(7 if worker._activity == "spare" else 8)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(("released", "code"), [(True, 0), (False, 7)])
def test_a_process_with_one_gpu_left_exits_instead_of_becoming_a_spare(released, code):
    """At once, since until then it counts as a spare. One that has kept the other GPUs stays."""
    process = multiprocessing.get_context("spawn").Process(target=_become_spare, args=(released,))
    process.start()
    process.join(60)
    assert process.exitcode == code
