"""Which worker hangs: judged from its progress stamps and from /proc, on a virtual clock.

`HangDetector` is pure: time, stamps and readings are arguments. `ProcReader` takes the readings. Killing, reporting to
the coordinator and probing devices must not enter this module.

A silent process is in one of three states, each with its own limit. Stopped (state T): half a second. Idle, using no
CPU: a second or so, since nothing in it can make progress. Computing: tens of seconds, since native code that keeps the
GIL, such as a kernel compiler, silences a healthy process. So a thread that sleeps while it holds the GIL is found
within the idle limit, and one that loops while it holds the GIL within the computing limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ring.monitor.stamps import Phase, Stamp, phase_name

_PHASE_FLOORS_S: dict[int, float] = {
    Phase.STARTING: 300.0,
    Phase.REBUILD: 10.0,
    Phase.HEAL: 10.0,
    Phase.VALIDATE: 10.0,
    Phase.FINALIZE: 60.0,
    Phase.COMPILE: 300.0,
    Phase.SAVE: 10.0,
}
_COMPUTING_SHARE = 0.1
"""A process that uses this share of one CPU computes. A sleeping process with some idle service threads uses a few
percent; a compiler that shares its CPU with nine others still gets this much."""


@dataclass(frozen=True)
class HangSettings:
    """Times in seconds.

    period_s: nominal time between two ticks. floor_s, factor, cap_s: the limit for silence without CPU use is `factor`
    times the longest recent such silence of any worker, at least `floor_s`, at most `cap_s`. computing_floor_s,
    computing_cap_s: the same for silence in which the process uses the CPU. A recent silence counts half as much after
    `half_life_s`. warmup_floor_s: least limit in a process's first two steps: the first one compiles and allocates,
    the second shows how long its intervals are. phase_floors_s: least limit in phases with long pieces of work
    without a stamp. stopped_limit_s: how long a process may be stopped.
    """

    period_s: float = 0.05
    floor_s: float = 1.0
    factor: float = 4.0
    cap_s: float = 60.0
    computing_floor_s: float = 40.0
    computing_cap_s: float = 300.0
    half_life_s: float = 30.0
    warmup_floor_s: float = 20.0
    stopped_limit_s: float = 0.5
    phase_floors_s: Mapping[int, float] = field(default_factory=lambda: dict(_PHASE_FLOORS_S))

    def __post_init__(self) -> None:
        for name in (
            "period_s",
            "floor_s",
            "factor",
            "cap_s",
            "computing_floor_s",
            "computing_cap_s",
            "half_life_s",
            "stopped_limit_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for cap, floor in (("cap_s", "floor_s"), ("computing_cap_s", "computing_floor_s")):
            if getattr(self, cap) < getattr(self, floor):
                raise ValueError(f"{cap}={getattr(self, cap)} is below {floor}={getattr(self, floor)}: raise {cap}")
        if self.floor_s < 4 * self.period_s:
            raise ValueError(
                f"floor_s={self.floor_s} is less than four ticks of period_s={self.period_s}: look more often"
            )


@dataclass(frozen=True)
class ProcReading:
    """/proc of one process. States are the kernel's letters. `cpu_ns` is the CPU time of all its threads so far, in
    steps of the kernel's clock tick (10 ms). `thread_state`, `run_ns` and `wait_ns` are of the thread that stamps:
    its time on a CPU, and its time runnable without one (0 where the kernel keeps none).
    """

    state: str
    thread_state: str
    run_ns: int
    wait_ns: int
    cpu_ns: int = 0


@dataclass(frozen=True)
class Observation:
    """What the node agent saw of one worker at one tick. `reading` is None when the process is gone."""

    worker: str
    pid: int
    stamp: Stamp | None
    reading: ProcReading | None


@dataclass(frozen=True)
class Hang:
    """A worker that must be fenced.

    kind: `stopped`, `stalled` (silent and idle) or `computing` (silent, and used the CPU). `still_s` is the time on the
    detector's clock that passed `limit_s`; `step` and `phase` are of the last stamp.
    """

    worker: str
    pid: int
    kind: str
    still_s: float
    limit_s: float
    step: int
    phase: str

    def describe(self) -> str:
        verb = {"stopped": "was stopped", "computing": "computed without progress"}.get(self.kind, "made no progress")
        where = self.phase if self.step < 0 else f"{self.phase} of step {self.step}"
        return f"{verb} for {self.still_s:.2f} s (limit {self.limit_s:.2f} s) in {where}"


@dataclass
class _Track:
    """The history of one worker process.

    `silent_s`: time since the last stamp. `idle_s`: how much of it the process did not compute. `longest_idle_s`: the
    largest `idle_s` since the last stamp.
    """

    pid: int
    counter: int = -1
    step: int = -1
    phase: int = Phase.STARTING
    num_steps: int = 0
    run_ns: int = 0
    wait_ns: int = 0
    cpu_ns: int = 0
    has_reading: bool = False
    silent_s: float = 0.0
    idle_s: float = 0.0
    longest_idle_s: float = 0.0
    stopped_s: float = 0.0
    was_stopped: bool = False
    reported: bool = False


class HangDetector:
    """Finds the workers of a node that hang, each hang once. Not thread-safe."""

    def __init__(self, settings: HangSettings | None = None) -> None:
        self.settings = settings or HangSettings()
        self._tracks: dict[str, _Track] = {}
        self._slowest_idle_s = self._slowest_computing_s = 0.0
        self._last_s: float | None = None
        self.least_s: Mapping[str, float] = {}
        """How long a worker may be stopped or silent at least, where its end would cost more than the wait."""

    def tick(self, now_s: float, observations: Sequence[Observation]) -> list[Hang]:
        """Judge all workers of the node at monotonic time `now_s`. Workers without an observation are forgotten.

        A tick counts at most twice its nominal period: time in which the detector itself did not run (a suspended
        machine, a starved agent) proves nothing about the workers.
        """
        elapsed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        counted_s = min(elapsed_s, 2 * self.settings.period_s)
        decay = 0.5 ** (counted_s / self.settings.half_life_s)
        self._slowest_idle_s *= decay
        self._slowest_computing_s *= decay
        seen = {observation.worker for observation in observations}
        self._tracks = {worker: track for worker, track in self._tracks.items() if worker in seen}
        hangs = [self._judge(observation, counted_s) for observation in observations]
        return [hang for hang in hangs if hang is not None]

    def limit_s(self, worker: str, phase: int) -> float:
        """How long `worker` may be silent and idle in `phase` at this moment, in seconds."""
        settings = self.settings
        limit_s = min(settings.cap_s, max(settings.floor_s, settings.factor * self._slowest_idle_s))
        track = self._tracks.get(worker)
        # A worker that waits for work stamps regularly from its first moment; only training warms up.
        if phase != Phase.IDLE and (track is None or track.num_steps < 2):
            limit_s = max(limit_s, settings.warmup_floor_s)
        return max(limit_s, settings.phase_floors_s.get(phase, 0.0), self.least_s.get(worker, 0.0))

    def computing_limit_s(self, worker: str, phase: int) -> float:
        """How long `worker` may be silent in `phase` while it uses the CPU, in seconds."""
        settings = self.settings
        adaptive_s = max(settings.computing_floor_s, settings.factor * self._slowest_computing_s)
        return max(min(settings.computing_cap_s, adaptive_s), self.limit_s(worker, phase))

    def _judge(self, seen: Observation, counted_s: float) -> Hang | None:
        track = self._tracks.get(seen.worker)
        if track is None or track.pid != seen.pid:
            track = self._tracks[seen.worker] = _Track(seen.pid)
            counted_s = 0.0
        if seen.reading is None or seen.reading.state in "ZX":  # a death is not reported from here
            return None
        # The predecessor at the same path may have left a stamp of its own.
        stamp = seen.stamp if seen.stamp is not None and seen.stamp.pid == seen.pid else None
        stopped = seen.reading.state in "Tt"
        self._follow(track, stamp, seen.reading, stopped, counted_s)
        step, phase = (stamp.step, stamp.phase) if stamp is not None else (-1, int(Phase.STARTING))
        stopped_limit_s = max(self.settings.stopped_limit_s, self.least_s.get(seen.worker, 0.0))
        if stopped and track.stopped_s > stopped_limit_s:
            kind, still_s, limit_s = "stopped", track.stopped_s, stopped_limit_s
        else:
            kind, still_s, limit_s = "stalled", track.idle_s, self.limit_s(seen.worker, phase)
            if still_s <= limit_s:
                kind, still_s, limit_s = "computing", track.silent_s, self.computing_limit_s(seen.worker, phase)
        if track.reported or still_s <= limit_s:
            return None
        track.reported = True
        return Hang(seen.worker, seen.pid, kind, still_s, limit_s, step, phase_name(phase))

    def _follow(
        self, track: _Track, stamp: Stamp | None, reading: ProcReading, stopped: bool, counted_s: float
    ) -> None:
        computed_s = waited_s = 0.0
        if track.has_reading:
            computed_s = max(0, reading.cpu_ns - track.cpu_ns) / 1e9
            # The kernel adds a wait for a CPU to the sum when the wait ends. During a wait the thread is runnable and
            # its time on a CPU does not grow.
            starved = reading.thread_state == "R" and 0 < reading.run_ns == track.run_ns
            waited_s = counted_s if starved else min(max(0, reading.wait_ns - track.wait_ns) / 1e9, counted_s)
        track.run_ns, track.wait_ns, track.cpu_ns = reading.run_ns, reading.wait_ns, reading.cpu_ns
        track.has_reading = True
        # Two stopped readings in a row show that the stop lasted the time between them; one shows no duration.
        track.stopped_s = track.stopped_s + counted_s if stopped and track.was_stopped else 0.0
        passed_s = max(0.0, counted_s - waited_s)
        track.silent_s += passed_s
        # A leaky sum: a clock tick of CPU time may be counted in the reading after the one in which it was used.
        track.idle_s = max(0.0, track.idle_s + passed_s - computed_s / _COMPUTING_SHARE)
        track.longest_idle_s = max(track.longest_idle_s, track.idle_s)
        if stamp is not None and stamp.counter != track.counter:
            # A silence has ended. A stop, a first step and the phases with limits of their own do not show how long
            # healthy work is silent.
            is_usual = track.num_steps > 0 and track.phase not in self.settings.phase_floors_s
            if is_usual and not track.was_stopped:
                self._slowest_idle_s = max(self._slowest_idle_s, track.longest_idle_s)
                self._slowest_computing_s = max(self._slowest_computing_s, track.silent_s)
            if 0 <= track.step < stamp.step:
                track.num_steps += 1
            track.counter, track.step, track.phase = stamp.counter, stamp.step, stamp.phase
            track.silent_s = track.idle_s = track.longest_idle_s = 0.0
            track.reported = False
        track.was_stopped = stopped


class ProcReader:
    """Reads /proc for one process and one of its threads, in some twenty microseconds."""

    def __init__(self, proc: str | os.PathLike[str] = "/proc") -> None:
        self._proc = os.fspath(proc)

    def read(self, pid: int, tid: int | None = None) -> ProcReading | None:
        """The reading, or None when the process is gone. `tid` defaults to the main thread. A thread that has ended
        in a living process reads as state `X` with times of 0."""
        fields = self._stat(f"{self._proc}/{pid}/stat")
        if fields is None:
            return None
        state, cpu_ns = fields[0].decode(), (int(fields[_UTIME]) + int(fields[_STIME])) * _NS_PER_CLOCK_TICK
        task = f"{self._proc}/{pid}/task/{pid if tid is None else tid}"
        thread = self._stat(f"{task}/stat")
        if thread is None:
            return ProcReading(state, "X", 0, 0, cpu_ns)
        times = (_read(f"{task}/schedstat") or b"0 0 0").split()  # just gone, or a kernel without schedstats
        return ProcReading(state, thread[0].decode(), int(times[0]), int(times[1]), cpu_ns)

    @staticmethod
    def _stat(path: str) -> list[bytes] | None:
        """The fields of a stat file from the state on."""
        # The command's name stands in parentheses and may contain spaces and parentheses.
        data = _read(path)
        return None if data is None else data.rpartition(b")")[2].split()


_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat, counted from the state
_NS_PER_CLOCK_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes | None:
    """A file of /proc in one read: the agent takes ten readings a second of each worker, on the workers' cores."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
