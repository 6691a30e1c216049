"""Whether a step moves, judged on numbers with times of its own, and what counts as moving.

What follows from the judgement, in a real worker's threads, is in test_stall_in_worker.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch

from elastic_ring.config import Timeouts
from elastic_ring.data.loader import Loader
from elastic_ring.errors import GroupAborted
from elastic_ring.runtime.worker import stall_watchdog
from elastic_ring.runtime.worker.stall_watchdog import (
    DeviceMarks,
    PauseWatch,
    StallDetected,
    StallWatchdog,
    look_at_device,
)
from elastic_ring.runtime.worker.training_thread import TrainingThread

LIMIT_S = 920.0
MEMBERSHIP = (1, 3)
WAIT_S = 60.0

# ------------------------------------------------------------ the judgement


class Scene:
    """A judge on a clock of its own, over numbers that a test moves."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.numbers = [0, 0, 0]
        self.judge = StallWatchdog(limit_s, lambda: tuple(self.numbers))
        self.now = 1000.0

    def pass_time(self, duration_s: float, look_s: float = 0.1) -> list[StallDetected]:
        told = []
        for _ in range(round(duration_s / look_s)):
            self.now += look_s
            said = self.judge.look(self.now)
            told += [said] if said is not None else []
        return told


@pytest.mark.parametrize("what", [0, 1, 2])
def test_a_step_is_well_however_long_it_takes_while_one_of_the_numbers_moves(what: int) -> None:
    scene = Scene()
    scene.judge.begin(MEMBERSHIP)
    for _ in range(8):
        assert scene.pass_time(LIMIT_S - 20.0, look_s=1.0) == []
        scene.numbers[what] += 1


def test_what_stands_for_the_limit_is_told_once_and_again_after_as_long_again() -> None:
    scene = Scene()
    scene.judge.begin(MEMBERSHIP)
    assert scene.pass_time(LIMIT_S - 5.0) == []
    (told,) = scene.pass_time(15.0)
    assert (told.term, told.generation, told.moved) == (*MEMBERSHIP, (0, 0, 0))
    assert scene.judge.holds(told)
    assert scene.pass_time(LIMIT_S - 20.0) == []
    assert len(scene.pass_time(30.0)) == 1


def test_between_steps_of_generations_nothing_is_told_and_what_was_told_no_longer_holds() -> None:
    scene = Scene()
    assert scene.pass_time(3 * LIMIT_S, look_s=1.0) == []
    scene.judge.begin(MEMBERSHIP)
    (told,) = scene.pass_time(LIMIT_S + 10.0, look_s=1.0)
    scene.judge.end((1, 2))  # of a thread that was left behind in an older generation
    assert scene.judge.holds(told)
    scene.numbers[0] += 1
    assert not scene.judge.holds(told), "it has moved since"
    scene.judge.end(MEMBERSHIP)
    assert scene.pass_time(3 * LIMIT_S, look_s=1.0) == []
    assert not scene.judge.holds(StallDetected(*MEMBERSHIP, "NCCL reports COMM_ERROR"))


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    scene = Scene()
    scene.judge.begin(MEMBERSHIP)
    scene.pass_time(10.0)
    assert scene.pass_time(20 * LIMIT_S, look_s=10 * LIMIT_S) == []


@pytest.mark.parametrize("collective_s", [61.0, 900.0, 7200.0])
def test_the_limit_lies_above_the_time_that_one_exchange_may_take_whatever_is_set(collective_s: float) -> None:
    timeouts = Timeouts(collective_s=collective_s)
    assert timeouts.stall_s == collective_s + timeouts.park_s > collective_s


# ------------------------------------------------------------ what moves


class Event:
    """As the device's: passed once the work before it is done."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.place = -1

    def record(self) -> None:
        self.place = Stream.queued

    def query(self) -> bool:
        if Stream.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Stream.done >= self.place


class Stream:
    queued = done = 0
    failed = False


@pytest.fixture
def stream() -> type[Stream]:
    Stream.queued = Stream.done = Event.made = 0
    Stream.failed = False
    return Stream


def test_a_device_that_works_off_what_the_thread_queued_long_ago_moves_all_the_while(stream: type[Stream]) -> None:
    """The host has queued a whole step and waits for its result: only the device's events tell that it goes on."""
    marks = DeviceMarks(Event)
    for _ in range(50):
        stream.queued += 1
        marks.leave()
    marks.look()
    assert marks.num_passed == 0
    for done in range(1, 51):
        stream.done = done
        marks.look()
        assert marks.num_passed == done
    marks.leave()
    assert Event.made == 50, "events are used again"


def test_on_another_device_no_event_of_the_one_before_is_used(stream: type[Stream]) -> None:
    marks = DeviceMarks(Event)
    made = Event.made
    marks.move_to(torch.device("cuda", 0))
    for index in (0, 0, 1, 1, 0):
        marks.move_to(torch.device("cuda", index))
        stream.queued += 1
        stream.done = stream.queued
        marks.leave()
        marks.look()
    assert marks.num_passed == 5
    assert Event.made - made == 3  # the first of each stay, and that of the first device is new again: it was let go


def test_events_of_a_device_that_was_left_are_let_go_of(stream: type[Stream]) -> None:
    """One that lived on would make a context there when it is freed."""
    marks = DeviceMarks(Event)
    marks.move_to(torch.device("cuda", 0))
    for _ in range(2):  # one is passed and waits to be used again, one is passed later
        stream.queued += 1
        marks.leave()
    stream.done = 1
    marks.look()
    events = [weakref.ref(event) for _, event in (*marks._free, *marks._ahead)]
    marks.move_to(torch.device("cuda", 1))
    stream.done = 2
    marks.look()
    assert (len(events), marks.num_passed) == (2, 2)
    assert [event() for event in events] == [None, None]


def test_the_thread_that_asks_a_device_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    marks = DeviceMarks(Event)
    for device in (None, torch.device("cpu"), torch.device("cuda", 1)):
        if device is not None:
            marks.move_to(device)
        marks.set_device()
    assert chosen == [torch.device("cuda", 1)]


def test_a_device_that_has_failed_passes_nothing_and_breaks_nothing(stream: type[Stream]) -> None:
    marks = DeviceMarks(Event)
    stream.queued = 1
    marks.leave()
    stream.failed = True
    marks.look()
    marks.look()
    assert marks.num_passed == 0


def test_a_thread_that_computes_without_a_stamp_moves_and_one_that_sleeps_does_not() -> None:
    thread, over, computing = TrainingThread("under test"), threading.Event(), threading.Event()
    thread.start()
    waiting = threading.Event()

    def work() -> None:
        computing.set()
        while not over.is_set():
            sum(range(1000))
        waiting.wait(WAIT_S)

    thread.give(work)
    assert computing.wait(WAIT_S)
    before = thread.cpu_ticks
    deadline = time.monotonic() + WAIT_S
    while thread.cpu_ticks < before + 3:
        assert time.monotonic() < deadline
    over.set()
    while (ticks := thread.cpu_ticks) != (time.sleep(0.2), thread.cpu_ticks)[1]:
        assert time.monotonic() < deadline
    assert thread.cpu_ticks == ticks
    waiting.set()
    assert thread.paused.wait(WAIT_S)
    assert TrainingThread("never started").cpu_ticks == 0


def test_a_source_that_takes_long_calls_back_while_it_is_waited_for() -> None:
    """What `Member` hangs its count on; the wait ends when the count's owner raises."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow:
        def read(self, sample_id: int) -> Any:
            go_on.wait(WAIT_S)

    def count() -> None:
        asked.set()
        raise GroupAborted("nobody needs it any more")

    loader = Loader(Slow(), count)  # type: ignore[arg-type]
    with pytest.raises(GroupAborted):
        loader.load(0, 0, None, 0)  # type: ignore[arg-type]
    assert asked.is_set()
    go_on.set()
    loader.close()


def test_a_broken_link_that_the_groups_know_of_is_told_once_for_each_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Enough(Exception):
        pass

    looks: list[float] = []
    judge, told = StallWatchdog(LIMIT_S, lambda: (0,)), list[StallDetected]()

    def next_look(duration_s: float) -> None:
        looks.append(duration_s)
        if len(looks) == 2:
            judge.begin(MEMBERSHIP)
        if len(looks) == 6:
            judge.begin((1, 4))
        if len(looks) == 9:
            raise Enough

    monkeypatch.setattr(stall_watchdog.time, "sleep", next_look)
    answers = iter([RuntimeError("the group is being freed")])

    def exchange_error() -> str:
        for error in answers:
            raise error  # and the thread goes on
        return "NCCL reports COMM_ERROR"

    with pytest.raises(Enough):
        look_at_device(DeviceMarks(Event), judge, exchange_error, told.append)
    assert [(word.generation, word.why) for word in told] == [
        (3, "NCCL reports COMM_ERROR"),
        (4, "NCCL reports COMM_ERROR"),
    ]


# ------------------------------------------------------------ pauses of the host


class Host:
    """A clock, and a CPU clock, that the test moves."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0

    def watch(self) -> PauseWatch:
        return PauseWatch(lambda: self.now, lambda: self.cpu)


@pytest.mark.parametrize("beats_first", [True, False])
def test_a_host_that_stands_still_for_100_s_is_seen_whichever_thread_wakes_first(beats_first: bool) -> None:
    host = Host()
    watch = host.watch()
    host.now = host.cpu = 2.0
    watch.beat()
    host.now = 102.0
    if beats_first:
        watch.beat()
    assert watch.within_s(1.0) == pytest.approx(100.0)
    assert watch.within_s(52.0) == pytest.approx(50.0), "of a step that began meanwhile"
    watch.beat()
    assert watch.within_s(1.0) == pytest.approx(100.0), "once"
    host.now = 103.0
    assert watch.within_s(102.5) == 0.0


def test_a_busy_machine_and_a_compiler_that_keeps_the_gil_are_no_pause() -> None:
    host = Host()
    watch = host.watch()
    host.now = 4.0
    watch.beat()
    host.now, host.cpu = 64.0, 30.0
    watch.beat()
    assert watch.within_s(0.0) == 0.0
