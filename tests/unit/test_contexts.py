"""Which GPUs a member lets go of, when, and what it may take afterwards. The answers are given; no GPU is asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import ScalingConfig
from elastic_ring.control.messages import Build
from elastic_ring.errors import PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime import chips, devices, member
from elastic_ring.runtime.chips import Chip, Claim, is_lost
from elastic_ring.runtime.contexts import Settling, let_go_of_others, loaded_runtime
from elastic_ring.runtime.devices import DeviceClaim
from elastic_ring.runtime.member import Member
from tests.unit.chip_holders import fail_elsewhere, go_on, holder

OWN = torch.device("cuda", 1)
THREE = tuple(Chip(index, f"GPU-{index}") for index in range(3))
LOG = "elastic_ring.runtime.contexts"


class Told:
    """What CUDA would say of a node with four GPUs, on the last of which this process has no context."""

    def __init__(self, pinned_bytes: int = 0) -> None:
        self.pinned_bytes = pinned_bytes
        self.in_use = dict.fromkeys(range(4), 0)
        self.codes: dict[int, int | Exception] = dict.fromkeys(range(4), 0)
        self.calls: list[Any] = []

    def having(self) -> list[int]:
        return [0, 1, 2]

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
        return code


# ------------------------------------------------------------ which


def test_every_other_gpu_with_a_context_is_let_go_of_once_caches_are_empty() -> None:
    told = Told()
    assert let_go_of_others(OWN, told) == 2
    assert told.calls == [("empty", 0, 2), 0, 2]


def test_alone_on_a_gpu_nothing_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(told, "having", lambda: [1])
    assert (let_go_of_others(OWN, told), told.calls) == (0, [])


def test_a_gpu_with_memory_in_use_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.in_use |= {0: 512, 1: 1 << 30}
    assert (let_go_of_others(OWN, told), told.calls[1:]) == (1, [2])
    assert "GPU 0 is not let go of: 512 bytes of this process" in caplog.text


def test_pinned_memory_in_use_keeps_all_since_nobody_can_tell_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(pinned_bytes=4096)
    assert (let_go_of_others(OWN, told), told.calls) == (0, [("empty", 0, 2)])
    assert "4096 bytes of pinned memory" in caplog.text


def test_a_gpu_that_is_not_let_go_of_is_told_and_the_next_one_is(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.codes[0] = 46
    assert (let_go_of_others(OWN, told), told.calls[1:]) == (1, [0, 2])
    assert "GPU 0 is not let go of: cudaDeviceReset answers 46" in caplog.text


@pytest.mark.parametrize("error", [OSError("not loaded"), RuntimeError("CUDA error"), KeyError("bytes")])
def test_what_is_raised_ends_no_training(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.codes[0] = error
    assert (let_go_of_others(OWN, told), told.calls[1:]) == (0, [0])
    assert [record.message for record in caplog.records] == [
        f"other GPUs are not let go of: {type(error).__name__}: {error}"
    ]


def test_where_torch_has_loaded_no_runtime_none_is_loaded_for_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(OSError, match=r"libcudart\.so\.99"):
        loaded_runtime()


def test_a_cache_is_emptied_with_its_own_gpu_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread has chosen none, and would make a context on the first one again."""
    order: list[str] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        order.append(f"{device} chosen")
        yield
        order.append("as before")

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    devices.let_go_of_cache(OWN)
    devices.let_go_of_cache(torch.device("cpu"))
    assert order == ["cuda:1 chosen", "emptied", "as before"]


# ------------------------------------------------------------ when


@pytest.mark.parametrize("wanted", [True, False])
def test_after_the_second_step_in_a_seat_and_once(wanted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What may touch the other GPUs by the training thread, between its steps; their end beside the next ones."""
    caplog.set_level(logging.INFO, LOG)
    told, order, may_end = Told(), list[Any](), threading.Event()

    def empty(others: list[int]) -> int:
        order.append(("emptied", threading.current_thread()))
        return 0

    def reset(index: int) -> int:
        assert may_end.wait(10)
        order.append((index, threading.current_thread().name))
        return 0

    told.empty, told.reset = empty, reset  # type: ignore[method-assign]
    claim: Any = SimpleNamespace(device=OWN, bind=lambda: order.append("bound"))
    settling = Settling(wanted, told)
    settling.committed(claim, 1, 4, 2)
    settling.stood()
    settling.committed(claim, 2, 7, 2)
    assert order == [], "the first step since it took its seat anew"
    for step in range(8, 20):
        settling.committed(claim, 2, step, 2)
    emptied = ["bound", ("emptied", threading.current_thread())]
    assert order == (emptied if wanted else []), "no step waits for the end of a context"
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "other contexts":
            thread.join(10)
    assert order == ([*emptied, (0, "other contexts"), (2, "other contexts")] if wanted else [])
    lines = [record.message.partition(" in ")[0] for record in caplog.records]
    assert lines == ["generation 2, step 8, rank 2: let go of 2 other GPUs"] * wanted


@pytest.mark.parametrize(("device", "asked"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_only_members_on_gpus_that_are_asked_to_let_go_do(
    device: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(member, "Settling", made.append)
    scaling, run = ScalingConfig(device=device, release_contexts=asked), SimpleNamespace(name="run")
    card: Any = SimpleNamespace(scaling=scaling, run=run, task=None)
    nothing: Any = None
    Member(card, nothing, nothing, lambda records: None)
    assert made == [asked and device == "cuda"]


def test_a_member_tells_of_each_step_that_is_committed_and_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop itself: behind the commit and its record, not where it stops for a boundary."""
    order: list[str] = []
    state = SimpleNamespace(applied=0)

    def run(step: int, *, boundary: bool) -> tuple[Any, Any]:
        state.applied = step + 1
        order.append(f"run {step}")
        return SimpleNamespace(boundary=step == 2), None

    state.run = run
    training: Any = Member.__new__(Member)
    training._command = Build("c", "a", 1, 5, Mesh(1, 2), ("a", "b"), 0, None, (), True)
    training._groups, training._connector = SimpleNamespace(global_rank=1), SimpleNamespace(aborted=False)
    training._transaction, training.boundary_requested = state, False
    training._card = SimpleNamespace(task=SimpleNamespace(step=SimpleNamespace(steps=9, val_every_steps=0)))
    training._claim = "the claim"
    for name in ("_watch", "_validate_if_due", "_send", "_tell_oddities"):
        setattr(training, name, lambda *given, **named: None)
    training._record = lambda outcome, local, seconds: order.append("recorded")
    training._settling = SimpleNamespace(committed=lambda *given: order.append(f"told {given}"))
    monkeypatch.setattr(member, "report_compiled", lambda *given: None)
    assert training.train() == "boundary"
    assert order == [
        "run 0", "recorded", "told ('the claim', 5, 0, 1)", "run 1", "recorded", "told ('the claim', 5, 1, 1)",
        "run 2", "recorded",
    ]  # fmt: skip


# ------------------------------------------------------------ what it may take then


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DeviceClaim:
    """A claim that held GPU 1 when its process let go of the others, and has given it back."""
    monkeypatch.setattr(devices, "visible_chips", lambda: THREE)
    monkeypatch.setattr(devices, "probe", lambda device: True)
    monkeypatch.setattr(devices, "_free_bytes", lambda index: 1 << 40)
    monkeypatch.setattr(devices, "let_go_of_cache", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    claim = DeviceClaim("cuda", "run", tmp_path)
    claim.avoided = frozenset(["GPU-0"])
    assert claim.take(1, 1, 0.0, go_on).index == 1
    claim.avoided = frozenset()
    claim.bind()
    claim.give_back()
    return claim


def test_who_has_let_go_of_the_others_takes_its_own_again_though_another_comes_first(bound: DeviceClaim) -> None:
    """For another place, which would begin with GPU 0, and leaves that of a place for a while."""
    assert bound.take(0, 1, 60.0, go_on).index == 1


def test_held_by_a_live_process_it_fails_at_once_and_asks_to_be_replaced(bound: DeviceClaim, tmp_path: Path) -> None:
    with holder(tmp_path, THREE[1], 0) as process:
        with pytest.raises(PeerFailed, match=rf"let go of every other GPU: GPU 1 is held by pid {process.pid}"):
            bound.take(1, 1, 600.0, pytest.fail)
        assert not bound.healthy(), "its report says so: it is killed, and another process stands by"
    assert chips.strikes_of(tmp_path, "GPU-1") == [], "nothing is wrong with that GPU"


def test_bad_it_fails_at_once(bound: DeviceClaim, tmp_path: Path) -> None:
    for _ in range(2):
        fail_elsewhere(tmp_path, THREE[1], "dead")
    with pytest.raises(PeerFailed, match=r"let go of every other GPU: GPU 1 failed \(dead"):
        bound.take(1, 1, 600.0, pytest.fail)


def test_a_gpu_is_not_lost_to_who_is_just_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(tmp_path, THREE[0], 0) as process:
        assert is_lost(tmp_path, THREE[0])
        monkeypatch.setattr(chips, "is_ending", lambda pid: pid == process.pid)
        assert not is_lost(tmp_path, THREE[0])
    assert not is_lost(tmp_path, THREE[0])
    assert not is_lost(tmp_path, THREE[1]), "never held"
    assert Claim("run", tmp_path).lock(THREE[0])
