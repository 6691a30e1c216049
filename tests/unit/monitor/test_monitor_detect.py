"""Who hangs and who only waits: on a virtual clock. Real processes are in test_monitor_detect_processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from elastic_ring.monitor.hang_detection import Hang, HangDetector, HangSettings, Observation, ProcReading
from elastic_ring.monitor.stamps import Phase, Stamp

PERIOD_S = 0.05
SETTINGS = HangSettings(period_s=PERIOD_S)


@dataclass
class Worker:
    """A worker whose clock and /proc are made up; `now_s` is not its business."""

    name: str
    pid: int = 100
    counter: int = 1
    step: int = 5
    phase: int = Phase.FORWARD
    state: str = "S"
    thread_state: str = "S"
    run_ns: int = 1
    wait_ns: int = 0
    cpu_ns: int = 0
    gone: bool = False
    _computed_s: float = 0.0

    def stamp(self, step: int | None = None) -> None:
        self.counter += 1
        self.step = self.step if step is None else step

    def compute(self, share: float = 1.0) -> None:
        """Use this share of one CPU for a tick; the kernel counts it in clock ticks of 10 ms."""
        self._computed_s += share * PERIOD_S
        self.cpu_ns = int(self._computed_s / 0.01) * 10_000_000

    def seen(self) -> Observation:
        stamp = Stamp(self.pid, self.pid, self.counter, self.step, 1, self.phase, -1, 0)
        reading = ProcReading(self.state, self.thread_state, self.run_ns, self.wait_ns, self.cpu_ns)
        return Observation(self.name, self.pid, stamp, None if self.gone else reading)


@dataclass
class World:
    """Ticks a detector at its nominal period, unless told otherwise."""

    workers: list[Worker]
    detector: HangDetector = field(default_factory=lambda: HangDetector(SETTINGS))
    now_s: float = 1000.0

    def tick(self, elapsed_s: float = PERIOD_S) -> list[Hang]:
        self.now_s += elapsed_s
        return self.detector.tick(self.now_s, [worker.seen() for worker in self.workers])

    def warm_up(self) -> None:
        """Three steps of all workers, a stamp a tick."""
        for _ in range(3):
            for worker in self.workers:
                worker.stamp(worker.step + 1)
            assert self.tick() == []

    def ticks_until_hang(self, limit: int = 10_000) -> tuple[int, list[Hang]]:
        for number in range(1, limit):
            if hangs := self.tick():
                return number, hangs
        return limit, []


def warm_world(*names: str) -> World:
    world = World([Worker(name, pid=100 + index) for index, name in enumerate(names)])
    world.warm_up()
    return world


def test_a_worker_that_stands_still_is_hung_just_past_the_floor_and_once() -> None:
    world = warm_world("w-0", "w-1")
    for tick in range(1, 60):
        world.workers[1].stamp()
        hangs = world.tick()
        if tick == 21:
            (hang,) = hangs
            assert (hang.worker, hang.pid, hang.kind) == ("w-0", 100, "stalled")
            assert hang.limit_s == 1.0
            assert hang.describe() == "made no progress for 1.05 s (limit 1.00 s) in forward of step 8"
        else:
            assert hangs == [], tick


def test_waiters_that_keep_stamping_are_not_hung_with_the_one_they_wait_for() -> None:
    world = warm_world("w-0", "w-1", "w-2")
    reported: list[str] = []
    for _ in range(400):
        world.workers[0].stamp()
        world.workers[2].stamp()
        reported += [hang.worker for hang in world.tick()]
    assert reported == ["w-1"]


def test_a_stopped_process_is_hung_after_half_a_second_even_before_its_first_step() -> None:
    for letter in "Tt":
        world = World([Worker("w-0", phase=Phase.STARTING, step=-1)])
        world.tick()
        world.workers[0].state = letter
        number, (hang,) = world.ticks_until_hang()
        assert number == 12  # the first look proves no duration, then more than ten periods of 0.05 s
        assert (hang.kind, hang.limit_s) == ("stopped", 0.5)
        assert hang.describe() == "was stopped for 0.55 s (limit 0.50 s) in starting"


def test_stops_that_end_in_time_do_not_add_up() -> None:
    """A profiler that stops the process again and again for 0.3 s, with progress in between."""
    world = warm_world("w-0")
    for _ in range(20):
        world.workers[0].state = "t"
        for _ in range(6):
            assert world.tick() == []
        world.workers[0].state = "S"
        world.workers[0].stamp()
        assert world.tick() == []
    assert world.detector.limit_s("w-0", Phase.FORWARD) == 1.0


def test_a_suspended_machine_raises_no_alarm() -> None:
    world = warm_world("w-0")
    world.workers[0].stamp()
    world.tick()
    assert world.tick(8 * 3600.0) == []
    assert world.tick(8 * 3600.0) == []
    world.workers[0].stamp()
    assert world.tick() == []


def test_a_starved_detector_needs_as_many_ticks_as_ever_to_be_sure() -> None:
    """Ticks of 3 s count two periods each: eleven of them pass the floor of 1 s, not one."""
    world = warm_world("w-0")
    hung_after = [tick for tick in range(1, 20) if world.tick(3.0)]
    assert hung_after == [11]


def test_time_spent_waiting_for_a_cpu_is_not_standing_still() -> None:
    world = warm_world("w-0")
    worker = world.workers[0]
    for _ in range(200):  # ten seconds without a stamp, all but a twentieth of it in the run queue
        worker.wait_ns += int(0.95 * PERIOD_S * 1e9)
        worker.run_ns += int(0.05 * PERIOD_S * 1e9)
        assert world.tick() == []
    number, hangs = world.ticks_until_hang()
    assert [hang.kind for hang in hangs] == ["stalled"]
    assert number == 11  # ten seconds weighed half a second


def test_a_wait_for_a_cpu_that_still_lasts_is_not_standing_still_either() -> None:
    """The kernel adds a wait to its sum when it ends; until then the thread is runnable and never ran."""
    world = warm_world("w-0")
    worker = world.workers[0]
    worker.thread_state = "R"
    world.tick()
    for _ in range(200):
        assert world.tick() == []
    worker.run_ns += 1000  # it got the CPU at last: from here on an endless loop is an endless loop
    worker.wait_ns += int(200 * PERIOD_S * 1e9)
    num_ticks = 1
    while not world.tick():
        worker.run_ns += 1000
        num_ticks += 1
    assert 20 <= num_ticks <= 23


def test_without_scheduler_statistics_a_runnable_thread_can_still_hang() -> None:
    world = warm_world("w-0")
    world.workers[0].run_ns, world.workers[0].thread_state = 0, "R"
    _, hangs = world.ticks_until_hang(100)
    assert [hang.kind for hang in hangs] == ["stalled"]


def test_the_limit_follows_the_slowest_interval_of_any_worker_and_comes_back_down() -> None:
    world = warm_world("w-0", "w-1")
    slow, other = world.workers
    for tick in range(1, 16):  # 0.75 s between two stamps
        other.stamp()
        if tick == 15:
            slow.stamp()
        assert world.tick() == []
    limits = [world.detector.limit_s(worker.name, Phase.FORWARD) for worker in world.workers]
    assert limits == pytest.approx([3.0, 3.0])
    for _ in range(int(SETTINGS.half_life_s / PERIOD_S)):
        slow.stamp()
        other.stamp()
        world.tick()
    assert world.detector.limit_s("w-1", Phase.FORWARD) == pytest.approx(1.5, rel=1e-3)


def test_a_silent_process_that_computes_has_a_limit_of_its_own() -> None:
    """A compiler that keeps the GIL for 39 s, alone on its CPU or with a fifth of it, is left alone; an endless loop is
    found."""
    for share in (1.0, 0.2):
        world = warm_world("w-0")
        for _ in range(int(39.0 / PERIOD_S)):
            world.workers[0].compute(share)
            assert world.tick() == []
        for _ in range(40):
            world.workers[0].compute(share)
            if hangs := world.tick():
                break
        (hang,) = hangs
        assert (hang.kind, hang.limit_s) == ("computing", SETTINGS.computing_floor_s)
        assert hang.describe() == "computed without progress for 40.05 s (limit 40.00 s) in forward of step 8"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_a_few_service_threads_do_not_make_an_idle_process_a_computing_one(share: float) -> None:
    world = warm_world("w-0")
    hangs: list[Hang] = []
    for _ in range(42):  # 2.1 s
        world.workers[0].compute(share)
        hangs += world.tick()
    assert [hang.kind for hang in hangs] == ["stalled"]


def test_a_process_that_stops_computing_is_found_within_the_idle_limit() -> None:
    world = warm_world("w-0")
    for _ in range(200):
        world.workers[0].compute()
        assert world.tick() == []
    number, (hang,) = world.ticks_until_hang()
    assert (number, hang.kind, hang.limit_s) == (21, "stalled", 1.0)


def test_a_long_compilation_raises_the_limit_of_those_that_compute_and_of_no_other() -> None:
    world = warm_world("w-0")
    for _ in range(int(30.0 / PERIOD_S)):
        world.workers[0].compute()
        assert world.tick() == []
    world.workers[0].stamp()
    assert world.tick() == []
    assert world.detector.limit_s("w-0", Phase.FORWARD) == 1.0
    assert world.detector.computing_limit_s("w-0", Phase.FORWARD) == pytest.approx(120.0, rel=0.01)


def test_a_compilation_that_was_announced_has_its_own_limit_and_teaches_nothing() -> None:
    world = warm_world("w-0")
    world.workers[0].phase = Phase.COMPILE
    world.workers[0].stamp()
    for _ in range(int(60.0 / PERIOD_S)):
        assert world.tick() == []
    world.workers[0].phase = Phase.FORWARD
    world.workers[0].stamp()
    assert world.tick() == []
    assert world.detector.limit_s("w-0", Phase.FORWARD) == 1.0


def test_a_worker_whose_end_costs_more_is_waited_for_so_much_longer_stopped_or_silent() -> None:
    world = warm_world("last", "other")
    world.detector.least_s = {"last": 3.0}
    for worker in world.workers:
        worker.state = worker.thread_state = "T"
    (number, (other,)), (more, (last,)) = world.ticks_until_hang(), world.ticks_until_hang()
    assert (number, other.worker) == (12, "other")
    assert (round((number + more) * PERIOD_S, 2), last.worker, last.limit_s) == (3.05, "last", 3.0)
    silent = warm_world("last")
    silent.detector.least_s = {"last": 3.0}
    assert silent.ticks_until_hang()[0] == 61


def test_a_stopped_process_has_the_short_limit_however_much_it_computed() -> None:
    world = warm_world("w-0")
    for _ in range(100):
        world.workers[0].compute()
        assert world.tick() == []
    world.workers[0].state = "T"
    number, (hang,) = world.ticks_until_hang()
    assert (number, hang.kind) == (12, "stopped")


def test_the_limit_is_capped() -> None:
    world = warm_world("w-0", "w-1")
    world.detector = HangDetector(replace(SETTINGS, factor=1000.0, cap_s=2.0))
    world.warm_up()
    assert world.detector.limit_s("w-0", Phase.FORWARD) == 2.0


def test_a_first_step_may_take_long_and_does_not_raise_the_limit_of_the_others() -> None:
    world = warm_world("w-0")
    newcomer = Worker("w-9", pid=900, step=8)
    world.workers.append(newcomer)
    for _ in range(300):  # 15 s of compiling
        world.workers[0].stamp()
        assert world.tick() == []
    newcomer.stamp()
    world.workers[0].stamp()
    world.tick()
    assert world.detector.limit_s("w-0", Phase.FORWARD) == 1.0
    assert world.detector.limit_s("w-9", Phase.FORWARD) == SETTINGS.warmup_floor_s
    world.warm_up()
    assert world.detector.limit_s("w-9", Phase.FORWARD) == 1.0


def test_phases_with_long_pieces_have_limits_of_their_own_and_idle_has_not() -> None:
    world = warm_world("w-0")
    world.workers[0].phase = Phase.HEAL
    world.workers[0].stamp()
    number, (hang,) = world.ticks_until_hang()
    assert (number, hang.phase) == (202, "heal")  # the tick that sees the stamp, then more than 10 s
    spare = World([Worker("w-1", phase=Phase.IDLE, step=-1)])
    spare.tick()
    number, (hang,) = spare.ticks_until_hang()
    assert (number, hang.phase) == (20 + 1, "idle")


def test_a_worker_that_never_stamps_is_hung_at_last() -> None:
    settings = replace(SETTINGS, phase_floors_s={Phase.STARTING: 3.0}, warmup_floor_s=1.0)
    detector = HangDetector(settings)
    reading = ProcReading("S", "S", 1, 0)
    hangs: list[Hang] = []
    for tick in range(200):
        hangs += detector.tick(tick * PERIOD_S, [Observation("w-0", 1, None, reading)])
    (hang,) = hangs
    assert (hang.step, hang.phase, hang.limit_s) == (-1, "starting", 3.0)


def test_the_dead_are_left_to_others() -> None:
    for change in ({"gone": True}, {"state": "Z"}):
        world = warm_world("w-0")
        for name, value in change.items():
            setattr(world.workers[0], name, value)
        assert world.ticks_until_hang(200)[1] == []


def test_a_new_process_under_an_old_name_begins_anew() -> None:
    """It inherits neither the stall nor the stamp of its predecessor."""
    world = warm_world("w-0")
    for _ in range(19):
        assert world.tick() == []
    old = world.workers[0].seen()
    world.workers[0] = Worker("w-0", pid=555, phase=Phase.STARTING, step=-1)
    for _ in range(100):
        world.now_s += PERIOD_S
        left_behind = replace(world.workers[0].seen(), stamp=old.stamp)
        assert world.detector.tick(world.now_s, [left_behind]) == []
    assert world.ticks_until_hang(100)[1] == []


def test_a_worker_that_moves_again_can_hang_again() -> None:
    world = warm_world("w-0")
    first, _ = world.ticks_until_hang()
    world.workers[0].stamp()
    assert world.tick() == []
    second, hangs = world.ticks_until_hang()
    assert hangs[0].worker == "w-0"
    assert second > first  # its long interval counts now


def test_the_same_readings_give_the_same_verdicts() -> None:
    def story() -> list[tuple[int, Hang]]:
        world = warm_world("w-0", "w-1", "w-2")
        told = []
        for tick in range(500):
            for index, worker in enumerate(world.workers):
                if tick % (7 + 13 * index) == 0 and not (index == 2 and tick > 100):
                    worker.stamp()
            told += [(tick, hang) for hang in world.tick(0.01 + 0.01 * (tick % 11))]
        return told

    assert story() == story() != []


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"floor_s": 0.0}, "floor_s"),
        ({"cap_s": 0.5}, "cap_s"),
        ({"period_s": 0.5}, "period_s"),
        ({"factor": float("nan")}, "factor"),
        ({"computing_cap_s": 1.0}, "computing_cap_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        HangSettings(**wrong)  # type: ignore[arg-type]
