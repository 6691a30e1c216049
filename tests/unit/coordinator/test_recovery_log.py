"""The story of a recovery survives the death of the coordinator that began to write it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.facts import fact_of, line_of
from elastic_ring.control.state import LostWorker
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.report import recovery_line
from elastic_ring.runtime.agent.messages import Death
from elastic_ring.runtime.coordinator.folds.recovery_log import LinesHeard, RecoveryLog
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_spec import Clock, boot_id
from tests.unit.coordinator.builders import change, opened_recorder, training

RUN = RunConfig("story", run_dir="runs/story", faults="kill@step=3,rank=1")  # type: ignore[arg-type]


def in_folder(folder: Path) -> RunConfig:
    return RunConfig("story", run_dir=str(folder))


@pytest.fixture
def notes() -> list[Any]:
    return []


def successor(notes: list[Any]) -> RecoveryLog:
    again = RecoveryLog(RUN, lambda note: None)
    for note in notes:
        fact = fact_of(line_of(note))
        assert fact is not None
        again.saw(fact)
    return again


def test_a_recovery_that_was_open_is_closed_by_the_successor(notes):
    first = RecoveryLog(RUN, notes.append)
    first.fault_fired(0, "b", 10.0)
    first.begin(change(), 3)
    again = successor(notes)
    assert {index: fault.worker for index, fault in again.fired.items()} == {0: "b"}, "who asked"
    again.committed(3, 11.0)
    (record,) = again.records
    assert record.faults == ["kill@step=3,phase=idle,rank=1"]
    assert record.detect_s == pytest.approx(0.2)
    assert record.total_s == pytest.approx(1.0)
    assert again.unfired() == []


def test_a_fault_before_the_step_at_which_a_run_resumes_need_not_fire_again(notes):
    log = RecoveryLog(RUN, notes.append)
    assert log.unfired() == log.unfired(3) == list(RUN.faults)
    assert log.unfired(4) == []


def test_survivors_that_were_replaced_too_are_not_kept(notes):
    for survivors, kept in ((("a", "c", "d"), True), (("a", "c"), False), ((), False)):
        story = RecoveryLog(RUN, notes.append)
        story.begin(change(survivors=survivors), 3)
        story.committed(3, 11.0)
        assert story.records[0].survivor_pids_kept is kept
    story = RecoveryLog(RUN, notes.append)
    story.worker_started("c", 7, {})
    story.resumed("c", {"pid": 8})
    story.begin(change(), 3)
    story.committed(3, 11.0)
    assert not story.records[0].survivor_pids_kept


def test_a_coordinator_that_came_back_meanwhile_does_not_close_it(notes):
    first = RecoveryLog(RUN, notes.append)
    first.begin(change(), 3)
    first.coordinator_back(10.8, 3, 10.6)
    again = successor(notes)
    again.committed(3, 11.0)
    assert [record.action for record in again.records] == [
        "coordinator restarted from its journal",
        "spare took its place",
    ]
    assert len(again.lines) == 2


def test_a_clock_that_is_set_back_changes_no_duration_and_on_another_host_none_is_known(tmp_path, monkeypatch, notes):
    first = Clock(lambda: 7.0, 1000.0)
    lines = [{"note": "term", **first.origin()}, {"now": first()}]
    monkeypatch.setattr(time, "time", lambda: -2600.0)
    for boot, now, goodput in ((boot_id(), 1009.0, 0.0), ("another", 1007.0, None)):
        clock = Clock(lambda: 9.0)
        clock.go_on([{**lines[0], "boot": boot}, lines[1]])
        assert (clock(), clock.whole()) == (now, now)
        recorder = RunRecorder(in_folder(tmp_path), lambda note: None, clock)
        recorder.open(Begin(1000.0))
        assert recorder.goodput.ratio(clock.whole()) == goodput
        recorder.coordinator_back()
        assert recorder.recoveries.records[-1].total_s is None, "nobody has written when the first was last alive"


def test_an_open_recovery_that_began_on_another_host_has_no_length(notes):
    RecoveryLog(RUN, notes.append).begin(change(), 3)
    again = successor(notes)
    again.forget_times()
    again.committed(3, 2000.0)
    (record,) = again.records
    assert (record.rerun_s, record.total_s, record.detect_s) == (None, None, 0.0)
    assert again.lines == [recovery_line(record)]
    assert " in ? s: detect 0, close 0.3" in again.lines[0]


def test_a_coordinator_killed_with_a_member_does_not_know_when_the_step_had_begun(tmp_path):
    recorder = opened_recorder(tmp_path, now=lambda: 1e9)
    recorder.look(replace(training(), last_change=change(noticed_at=1e9 - 2.0, resumed_at=1e9 - 1.0, step_rerun=3)))
    recorder.recoveries.finish(1e9)
    (record,) = recorder.recoveries.records
    assert (record.broken_off_s, record.total_s) == (0.0, 2.0)


def test_the_wait_for_a_full_disk_is_part_of_a_recovery_and_of_the_runs_time(tmp_path):
    now = [10.2]
    clock = Clock(lambda: now[0], 0.0)
    recorder = RunRecorder(in_folder(tmp_path), lambda note: None, clock)
    recorder.open(Begin(10.0))
    now[0] = 22.2
    clock.hold(12.0)  # in the write of the line that noticed the loss
    assert (clock(), clock.whole()) == (pytest.approx(10.2), 22.2)
    now[0] = 22.5
    recorder.look(replace(training(), last_change=change(noticed_at=10.2, resumed_at=clock())))
    recorder.recoveries.finish(clock.whole())
    (record,) = recorder.recoveries.records
    assert (record.close_s, record.total_s) == (pytest.approx(12.3), pytest.approx(12.3))
    assert recorder.goodput.total_s(clock.whole()) == pytest.approx(12.5)


def test_an_unequal_machine_is_told_once_and_not_forgotten(notes):
    first = RecoveryLog(RUN, notes.append)
    for worker in ("a", "b"):
        first.worker_started(worker, 1, {"torch": "2.13", "cpu": "AVX512"})
    first.worker_started("e", 2, {"torch": "2.12", "cpu": "AVX512", "NCCL_ALGO": "Tree"})
    first.bits.compare_environments(("a", "b"))
    assert first.bits.are_promised
    first.bits.compare_environments(("a", "e"))
    first.bits.compare_environments(("a", "e"))
    assert first.lines == [
        "e is another machine than the first member (torch 2.12 instead of 2.13, NCCL_ALGO Tree instead of None): from "
        "here on the run promises the same samples, not the same bits"
    ]
    assert not successor(notes).bits.are_promised


def test_a_mesh_that_was_replaced_as_a_whole_is_compared_with_the_first_one(notes):
    first = RecoveryLog(RUN, notes.append)
    first.worker_started("a", 1, {"cpu": "AVX512"})
    first.bits.compare_environments(("a",))
    again = successor(notes)
    again.worker_started("z", 2, {"cpu": "AVX2"})
    again.bits.compare_environments(("z",))
    assert not again.bits.are_promised


def told_places(story: RecoveryLog, mesh: Mesh, **gpus: str) -> None:
    for worker, gpu in gpus.items():
        story.resumed(worker, {"gpu": gpu})
    story.compare_members(mesh, tuple(gpus))


def test_a_rank_that_moves_to_another_gpu_ends_the_promise_where_three_or_more_are_summed(notes):
    for mesh, kept in ((Mesh(2, 2), True), (Mesh(1, 4), False), (Mesh(4, 1), False)):
        notes.clear()
        story = RecoveryLog(RUN, notes.append)
        told_places(story, mesh, a="g0", b="g1", c="g2", d="g3")
        told_places(story, mesh, a="g0", e="g1", c="g2", d="g3")
        assert story.bits.are_promised, "a newcomer on the GPU of the place"
        again = successor(notes)
        told_places(again, mesh, a="g0", e="g3", c="g2", f="g1")
        assert again.bits.are_promised is kept
        assert again.lines == (
            []
            if kept
            else [
                "rank 1 computes on GPU g3 and did on g1: from here on the run promises the same samples, not the same "
                "bits"
            ]
        )


def test_places_on_cpus_and_of_another_mesh_promise_nothing_and_break_nothing(notes):
    story = RecoveryLog(RUN, notes.append)
    told_places(story, Mesh(3, 1), a="", b="", c="")
    assert notes == []
    told_places(story, Mesh(3, 1), a="g0", b="g1", c="g2")
    told_places(story, Mesh(2, 1), b="g1", c="g2")
    assert story.bits.are_promised


def test_a_rank_that_told_its_gpu_to_the_coordinator_before_has_not_moved(notes):
    first = RecoveryLog(RUN, notes.append)
    told_places(first, Mesh(1, 4), a="g0", b="g1", c="g2", d="g3")
    again = successor(notes)
    told_places(again, Mesh(1, 4), a="", b="g1", c="", d="g3")
    assert again.bits.are_promised
    told_places(again, Mesh(1, 4), a="g1", b="g0", c="g2", d="g3")
    assert not again.bits.are_promised


def test_what_is_not_repeatable_is_told_once_and_no_later_recovery_is_exact(notes):
    story = RecoveryLog(RUN, notes.append)
    story.bits.not_repeatable(2, "put_ does not have a deterministic implementation")
    story.bits.not_repeatable(2, "deterministic=False")
    story.begin(change(), 3)
    story.committed(3, 11.0)
    assert not story.records[0].exact
    assert story.lines[0] == (
        "what is computed is not repeatable (put_ does not have a deterministic implementation; first seen in step 2): "
        "from here on the run promises the same samples, not the same bits"
    )
    assert sum("promises the same samples" in line for line in story.lines) == 1
    assert not successor(notes).bits.are_promised


def test_a_worker_that_was_killed_for_its_device_is_told_of_by_the_devices_words(notes):
    story = RecoveryLog(RUN, notes.append)
    story.deaths["b"] = Death("b", 1, "died", "killed by SIGKILL", 0.0, 3, "backward")
    lost = (LostWorker("b", "node", 1, "device error", "AcceleratorError: CUDA error: an ECC error"),)
    story.begin(change(lost=lost), 3)
    story.committed(3, 11.0)
    assert story.records[0].cause == (
        "rank 1 device error in backward of step 3 (AcceleratorError: CUDA error: an ECC error)"
    )


@pytest.mark.parametrize("reason", ["hung", "node lost"])
@pytest.mark.parametrize(("fired", "detect_s", "total_s"), [(False, 4.3, 5.1), (True, 0.2, 1.0)])
def test_a_recovery_from_a_hang_begins_with_the_last_sign_of_life(notes, reason, fired, detect_s, total_s):
    story = RecoveryLog(RUN, notes.append)
    if fired:
        story.fault_fired(0, "b", 10.0)
    if reason == "hung":
        story.died(Death("b", 1, "hung", "made no progress for 4.21 s", 0.0, 3, "backward", still_s=4.3))
    else:
        story.still_s["node"] = 4.3
    story.begin(change(lost=(LostWorker("b", "node", 1, reason, ""),)), 3, attempt_began_at=5.0)
    story.committed(3, 11.0)
    (record,) = story.records
    assert (record.detect_s, record.total_s) == pytest.approx((detect_s, total_s))
    assert record.broken_off_s == pytest.approx(10.0 - 5.0 if fired else 0.9)
    assert f"detect {detect_s:g}, " in story.lines[-1]


def test_a_driver_gets_each_line_once_though_the_coordinator_starts_again(notes):
    first = RecoveryLog(RUN, notes.append, term=1)
    first.say("before")
    lines, heard = first.news(LinesHeard())
    assert lines == ["before"]
    first.say("slow rank")
    first.begin(change(), 3)
    first.committed(3, 11.0)
    recovery = first.lines[-1]
    late = first.news(heard)
    assert late[0] == ["slow rank", recovery]
    again = RecoveryLog(RUN, notes.append, term=2)
    for fact in list(notes):
        again.saw(fact)
    again.say("the storage waits")
    assert again.news(late[1])[0] == ["the storage waits"], "what it heard before does not hide what is new"
    assert again.news(heard)[0] == [recovery, "the storage waits"], "a recovery that it had not heard of"
    lines, heard = again.news(LinesHeard())
    assert lines == again.lines == [recovery, "the storage waits"]
    assert again.news(heard) == ([], heard)
