"""What a member does in a build, in which order, and what it says of the time: its parts are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Build, Heal
from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.worker import generation_build
from elastic_ring.runtime.worker.coordinator_client import CommandDetails
from elastic_ring.runtime.worker.member import Member
from elastic_ring.runtime.worker.member_parts import Generation, Warmed
from elastic_ring.train.startup.check import ModelRefused

SURVIVOR, NEWCOMER = "w", "v"
HEAL = Heal(0, SURVIVOR, (NEWCOMER,))


class Parts:
    """A clock that stands still but for what the parts say they take, and a note of each with `member.writing`."""

    aborted, device = False, None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: str, break_in: str = "") -> None:
        self.now, self.notes, self._break_in = 0.0, [], break_in
        self.timings = {"groups_s": 100.0}
        self.groups = SimpleNamespace(world=None, global_rank=0)
        self.state = SimpleNamespace(
            leave=lambda: None,
            task="task",
            valid=True,
            applied=7,
            held=SimpleNamespace(applying=False),
            use=lambda device: None,
            enter=lambda groups, cast, keep, nodes: self.take("enter" if keep else "enter empty", 10),
            roll_forward=lambda vote, holds: self.take("roll forward", 20) if holds else None,
            initialise=lambda: self.take("initialise", 5),
        )
        spec = SimpleNamespace(
            worker=worker,
            scaling=ScalingConfig(),
            run=RunConfig(),
            address="",
            task=SimpleNamespace(step=SimpleNamespace(check_model=False)),
        )
        stamps = SimpleNamespace(stamp=lambda step, phase: None, generation=0)
        self.member = Member(spec, stamps, None, lambda records: None)  # type: ignore[arg-type]
        data, kernels = SimpleNamespace(news=lambda versions, skips: None), SimpleNamespace(settle=self.settle)
        self.member.parts.warm = Warmed(data, kernels, self.state, 1, [], {})  # type: ignore[arg-type]
        monkeypatch.setattr(
            generation_build, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        )
        monkeypatch.setattr(generation_build, "forget_groups", lambda: None)
        monkeypatch.setattr(generation_build, "heal_over_link", lambda *args: self.take("heal", 1000) or 5)

    def take(self, what: str, seconds: float) -> None:
        self.notes.append((what, self.member.writing))
        self.now += seconds
        if what == self._break_in:
            raise GroupAborted(what)

    def settle(self, task: Any, world: Any, holds: bool) -> Any:
        self.take("settle", 2)
        return task

    def open(self, mesh: Mesh, rank: int) -> Any:
        self.take("open", 1)
        return self.groups

    def join(self, groups: Any) -> None:
        assert groups is self.groups
        self.take("join", 100)

    def raise_if_aborted(self) -> None:
        return None

    def build(self, fresh: bool = False) -> dict[str, Any]:
        heals = () if fresh else (HEAL,)
        vote: Any = None if fresh else SimpleNamespace(step=6)
        command = Build("c", "w", 1, 3, Mesh(2, 1), (SURVIVOR, NEWCOMER), 7, vote, heals, fresh)
        self.member.parts.generation = Generation(command, self, CommandDetails())  # type: ignore[arg-type]
        return self.member.build("c")[1]


def test_a_member_wraps_its_model_while_the_groups_connect_and_the_parts_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(monkeypatch, SURVIVOR)
    timings = parts.build()
    assert [what for what, _ in parts.notes] == ["open", "settle", "enter", "join", "roll forward", "heal"]
    assert (timings["connect_s"], timings["roll_s"], timings["heal_s"]) == (101, 32, 1000)
    assert timings["connect_s"] + timings["roll_s"] + timings["heal_s"] == parts.now


def test_so_does_a_newcomer_whose_shard_is_empty_and_a_member_of_a_fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = Parts(monkeypatch, NEWCOMER)
    newcomer.build()
    assert [what for what, _ in newcomer.notes] == ["open", "settle", "enter empty", "join", "heal"]
    member = Parts(monkeypatch, SURVIVOR)
    member.build(fresh=True)
    assert [what for what, _ in member.notes] == ["open", "settle", "enter empty", "initialise", "join"]


def test_a_thread_that_moves_its_shard_is_not_left_behind_and_one_that_waits_for_others_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(monkeypatch, SURVIVOR)
    parts.build(fresh=True)
    assert [what for what, writing in parts.notes if writing] == ["enter empty", "initialise"]
    assert not parts.member.writing


@pytest.mark.parametrize("break_in", ["settle", "enter", "join"])
def test_a_build_that_breaks_off_raises_and_writes_no_more(monkeypatch: pytest.MonkeyPatch, break_in: str) -> None:
    parts = Parts(monkeypatch, SURVIVOR, break_in)
    with pytest.raises(GroupAborted, match=break_in):
        parts.build()
    assert parts.notes[-1][0] == break_in
    assert not parts.member.writing
    assert parts.member.parts.generation.groups is parts.groups, (
        "a thread that is left behind in them must not free them"
    )


@pytest.mark.parametrize("error", [ValueError("no mask"), PeerFailed("gone"), torch.OutOfMemoryError("full")], ids=repr)
def test_errors_of_checked_passes_refuse_the_model_but_not_those_of_peers_and_devices(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def check(*_: Any) -> None:
        raise error

    parts = Parts(monkeypatch, SURVIVOR)
    parts.member.parts.spec.task.step.check_model = True
    monkeypatch.setattr(generation_build, "check_model", check)
    refused = isinstance(error, ValueError)
    with pytest.raises(ModelRefused if refused else type(error)) as caught:
        parts.build(fresh=True)
    if refused:
        assert caught.value.__cause__ is error
        assert "check raised ValueError: no mask; mend model" in str(caught.value)
