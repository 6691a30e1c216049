"""The measuring hand of the peer benchmarks: what it calls a recovery, on records written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers import common
from benchmarks.peers.common import Event, Kill, Record

OLD, NEW, ALL, FEWER = (10, 11, 12, 13), (20, 21, 22, 23), 4, 3


def steps(pids: tuple[int, ...], step: int, at_s: float, num_members: int = ALL) -> list[Event]:
    return [Event("step", worker, pid, step, num_members, at_s) for worker, pid in enumerate(pids)]


def test_a_record_gives_back_what_its_writers_added(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert record.events() == []
    record.add("enter", 3)
    record.add("step", 3, 7, FEWER)
    kinds = [(event.kind, event.worker, event.step, event.num_members) for event in record.events()]
    assert kinds == [("enter", 3, -1, ALL), ("step", 3, 7, FEWER)]
    assert record.events()[0].at_s <= record.events()[1].at_s


def test_all_workers_stop_before_the_same_step(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert not record.must_stop(10**9)
    record.stop_after(5)
    assert [record.must_stop(step) for step in (4, 5, 6)] == [False, True, True]


def test_a_step_under_way_that_still_commits_is_no_recovery() -> None:
    events = [
        *steps(OLD, 8, 99.9),
        *steps(OLD[:3], 9, 100.01),
        *[Event("skip", worker, OLD[worker], 9, ALL, 100.05) for worker in range(3)],
        Event("enter", 3, NEW[3], -1, ALL, 102.0),
        Event("ready", 3, NEW[3], -1, ALL, 102.5),
        *steps((*OLD[:3], NEW[3]), 10, 103.0),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert found == pytest.approx(
        {
            "noticed_s": 0.05,
            "entered_s": 2.0,
            "ready_s": 2.5,
            "first_step_s": 3.0,
            "next_step_s": 3.0,
            "complete_s": 3.0,
            "steps_rerun": 0,
            "num_started": 1,
        }
    )


def test_steps_that_run_again_after_a_restart_do_not_count_as_the_next_step() -> None:
    events = [
        *steps(OLD, 12, 99.9),
        Event("error", 0, OLD[0], 12, ALL, 100.02),
        *[Event("enter", worker, pid, -1, ALL, 105.0 + worker) for worker, pid in enumerate(NEW)],
        *steps(NEW, 11, 109.0),
        *steps(NEW, 12, 109.1),
        *steps(NEW, 13, 109.2),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert (found["entered_s"], found["first_step_s"], found["next_step_s"]) == pytest.approx((8.0, 9.0, 9.2))
    assert (found["steps_rerun"], found["num_started"]) == (2, 4)


def test_survivors_that_go_on_with_fewer_are_not_yet_complete() -> None:
    events = [
        *steps(OLD, 8, 99.9),
        *steps(OLD[:3], 9, 100.4, FEWER),
        Event("enter", 3, NEW[3], -1, ALL, 102.0),
        *steps((*OLD[:3], NEW[3]), 10, 103.0),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert (found["next_step_s"], found["complete_s"]) == pytest.approx((0.4, 3.0))


def test_a_batch_depends_on_seed_step_and_worker_alone() -> None:
    keys = [(step, worker, seed) for step in range(3) for worker in range(4) for seed in range(2)]
    first = [common.batch(*key)[0] for key in keys]
    assert all(torch.equal(text, common.batch(*key)[0]) for text, key in zip(first, keys, strict=True))
    assert len({text.numpy().tobytes() for text in first}) == len(keys)
