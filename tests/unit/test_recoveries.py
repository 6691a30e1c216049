"""The story of a recovery survives the death of the coordinator that began to write it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.state import Change, Loss
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.recoveries import Recoveries

RUN = RunConfig("story", "runs/story", faults="kill@step=3,rank=1")  # type: ignore[arg-type]


def change(step: int = 3, **more: Any) -> Change:
    fields: dict[str, Any] = {
        "term": 1, "generation": 2, "mesh": Mesh(2, 2), "previous_mesh": Mesh(2, 2), "seats": ("a", "e", "c", "d"),
        "step": step, "cause": "died: b", "action": "spare took its place", "promise": "bit-exact", "reason": "",
        "lost": (Loss("b", "node", 1, "died", "signal 9"),), "drained": (), "newcomers": ("e",),
        "survivors": ("a", "c", "d"), "rolled_forward": None, "step_rerun": step, "planned": False,
        "noticed_at": 10.2, "closed_at": 10.3, "resumed_at": 10.5, **more,
    }  # fmt: skip
    return Change(**fields)


@pytest.fixture
def notes() -> list[Any]:
    return []


def successor(notes: list[Any]) -> Recoveries:
    again = Recoveries(RUN, lambda note: None)
    for note in notes:
        again.recall(note)
    return again


def test_a_recovery_that_was_open_is_closed_by_the_successor(notes: list[Any]) -> None:
    first = Recoveries(RUN, notes.append)
    first.fault_fired(0, "b", 10.0)
    first.begin(change(), 3)
    again = successor(notes)
    again.committed(3, 11.0)
    (record,) = again.records
    assert record["faults"] == ["kill@step=3,phase=idle,rank=1"]
    assert record["detect_s"] == pytest.approx(0.2)
    assert record["total_s"] == pytest.approx(1.0)
    assert again.unfired() == []


def test_survivors_that_were_replaced_too_are_not_kept(notes: list[Any]) -> None:
    for survivors, kept in ((("a", "c", "d"), True), (("a", "c"), False), ((), False)):
        story = Recoveries(RUN, notes.append)
        story.begin(change(survivors=survivors), 3)
        story.committed(3, 11.0)
        assert story.records[0]["survivor_pids_kept"] is kept
    story = Recoveries(RUN, notes.append)
    story.worker_started("c", 7, {})
    story.resumed("c", {"pid": 8})
    story.begin(change(), 3)
    story.committed(3, 11.0)
    assert not story.records[0]["survivor_pids_kept"]


def test_a_coordinator_that_came_back_meanwhile_does_not_close_it(notes: list[Any]) -> None:
    first = Recoveries(RUN, notes.append)
    first.begin(change(), 3)
    first.coordinator_back(10.8, 3, 10.6)
    again = successor(notes)
    again.committed(3, 11.0)
    assert [record["action"] for record in again.records] == [
        "coordinator restarted from its journal", "spare took its place",
    ]  # fmt: skip
    assert len(again.lines) == 2


def test_an_unequal_machine_is_told_once_and_not_forgotten(notes: list[Any]) -> None:
    first = Recoveries(RUN, notes.append)
    for worker, version in (("a", "2.13"), ("b", "2.13"), ("e", "2.12")):
        first.worker_started(worker, 1, {"torch": version, "cpu": "AVX512"})
    first.compare_environments(("a", "b"))
    assert first.same_environment
    first.compare_environments(("a", "e"))
    first.compare_environments(("a", "e"))
    assert first.lines == [
        "e is another machine than the first member (torch 2.12 instead of 2.13): from here on the run promises the "
        "same samples, not the same bits"
    ]
    assert not successor(notes).same_environment


def test_a_mesh_that_was_replaced_as_a_whole_is_compared_with_the_first_one(notes: list[Any]) -> None:
    first = Recoveries(RUN, notes.append)
    first.worker_started("a", 1, {"cpu": "AVX512"})
    first.compare_environments(("a",))
    again = successor(notes)
    again.worker_started("z", 2, {"cpu": "AVX2"})
    again.compare_environments(("z",))
    assert not again.same_environment


def test_a_granted_fault_is_known_to_the_successor_with_who_asked(notes: list[Any]) -> None:
    Recoveries(RUN, notes.append).fault_fired(0, "b", 10.0)
    assert successor(notes).fired_by == {0: "b"}


def test_a_worker_that_was_killed_for_its_device_is_told_of_by_the_devices_words(notes: list[Any]) -> None:
    story = Recoveries(RUN, notes.append)
    story.deaths["b"] = {"phase": "backward", "step": 3, "how": "killed by SIGKILL"}
    lost = (Loss("b", "node", 1, "device error", "AcceleratorError: CUDA error: an ECC error"),)
    story.begin(change(lost=lost), 3)
    story.committed(3, 11.0)
    assert story.records[0]["cause"] == (
        "rank 1 device error in backward of step 3 (AcceleratorError: CUDA error: an ECC error)"
    )
