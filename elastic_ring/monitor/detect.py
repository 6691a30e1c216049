"""Which worker hangs: judged from progress stamps and /proc, on a clock that only its own ticks move.

`HangDetector` is pure (time, stamps and readings come in as arguments) and `ProcReader` is its eyes.
Killing, telling the coordinator and probing devices must not enter this module.
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
}


@dataclass(frozen=True)
class HangSettings:
    """Times in seconds.

    period_s: nominal time between two ticks. floor_s, factor, cap_s: the limit is `factor` times the slowest
    recent stamp interval of any worker, at least `floor_s`, at most `cap_s`; a slow interval counts half as
    much after `half_life_s`. warmup_floor_s: least limit in a process's first two steps: the first compiles,
    tunes and allocates, and the second shows how long its intervals really are. phase_floors_s: least
    limit inside phases that have long pieces without a stamp. stopped_limit_s: a stopped process is hung
    after this time.
    """

    period_s: float = 0.05
    floor_s: float = 1.0
    factor: float = 4.0
    cap_s: float = 60.0
    half_life_s: float = 30.0
    warmup_floor_s: float = 20.0
    stopped_limit_s: float = 0.5
    phase_floors_s: Mapping[int, float] = field(default_factory=lambda: dict(_PHASE_FLOORS_S))

    def __post_init__(self) -> None:
        for name in ("period_s", "floor_s", "factor", "cap_s", "half_life_s", "stopped_limit_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        if self.cap_s < self.floor_s:
            raise ValueError(f"cap_s={self.cap_s} is below floor_s={self.floor_s}: raise cap_s")
        if self.floor_s < 4 * self.period_s:
            raise ValueError(
                f"floor_s={self.floor_s} is less than four ticks of period_s={self.period_s}: look more often"
            )


@dataclass(frozen=True)
class ProcReading:
    """/proc of one process. States are the kernel's letters; `thread_*` and the times are of its training
    thread: `run_ns` on a CPU so far, `wait_ns` runnable but waiting for one (0 where the kernel keeps none).
    """

    state: str
    thread_state: str
    run_ns: int
    wait_ns: int


@dataclass(frozen=True)
class Observation:
    """What the node agent saw of one worker at one tick. `reading` is None when the process is gone."""

    worker: str
    pid: int
    stamp: Stamp | None
    reading: ProcReading | None


@dataclass(frozen=True)
class Hang:
    """A worker that must be fenced. kind: `stopped` or `stalled`. `still_s` is how long, on the detector's
    clock; `step` and `phase` are of its last stamp."""

    worker: str
    pid: int
    kind: str
    still_s: float
    limit_s: float
    step: int
    phase: str

    def describe(self) -> str:
        what = "was stopped" if self.kind == "stopped" else "made no progress"
        where = self.phase if self.step < 0 else f"{self.phase} of step {self.step}"
        return f"{what} for {self.still_s:.2f} s (limit {self.limit_s:.2f} s) in {where}"


@dataclass
class _Track:
    """What is remembered of one worker process."""

    pid: int
    counter: int = -1
    step: int = -1
    phase: int = Phase.STARTING
    num_steps: int = 0
    run_ns: int = 0
    wait_ns: int = 0
    has_reading: bool = False
    still_s: float = 0.0
    stopped_s: float = 0.0
    was_stopped: bool = False
    reported: bool = False


class HangDetector:
    """Tells who hangs, once for each standstill. One per node agent; not for several threads."""

    def __init__(self, settings: HangSettings | None = None) -> None:
        self.settings = settings or HangSettings()
        self._tracks: dict[str, _Track] = {}
        self._slowest_s = 0.0
        self._last_s: float | None = None

    def tick(self, now_s: float, observations: Sequence[Observation]) -> list[Hang]:
        """Judge all workers of the node at monotonic time `now_s`; those not observed are forgotten.

        A tick counts at most twice its nominal period: what went by while the detector itself did not run
        (a suspended machine, a starved agent) proves nothing about the workers.
        """
        elapsed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        counted_s = min(elapsed_s, 2 * self.settings.period_s)
        self._slowest_s *= 0.5 ** (counted_s / self.settings.half_life_s)
        seen = {observation.worker for observation in observations}
        self._tracks = {worker: track for worker, track in self._tracks.items() if worker in seen}
        hangs = [self._judge(observation, counted_s) for observation in observations]
        return [hang for hang in hangs if hang is not None]

    def limit_s(self, worker: str, phase: int) -> float:
        """How long `worker` may stand still in `phase` at this moment, in seconds."""
        settings = self.settings
        limit_s = min(settings.cap_s, max(settings.floor_s, settings.factor * self._slowest_s))
        track = self._tracks.get(worker)
        # Waiting for work is stamped all the time from the first moment on; only training warms up.
        if phase != Phase.IDLE and (track is None or track.num_steps < 2):
            limit_s = max(limit_s, settings.warmup_floor_s)
        return max(limit_s, settings.phase_floors_s.get(phase, 0.0))

    def _judge(self, seen: Observation, counted_s: float) -> Hang | None:
        track = self._tracks.get(seen.worker)
        if track is None or track.pid != seen.pid:
            track = self._tracks[seen.worker] = _Track(seen.pid)
            counted_s = 0.0
        if seen.reading is None or seen.reading.state in "ZX":  # its death is reported by others
            return None
        # A stamp of another process is one that its predecessor left at the same path.
        stamp = seen.stamp if seen.stamp is not None and seen.stamp.pid == seen.pid else None
        stopped = seen.reading.state in "Tt"
        self._follow(track, stamp, seen.reading, stopped, counted_s)
        step, phase = (stamp.step, stamp.phase) if stamp is not None else (-1, int(Phase.STARTING))
        if stopped and track.stopped_s > self.settings.stopped_limit_s:
            kind, still_s, limit_s = "stopped", track.stopped_s, self.settings.stopped_limit_s
        else:
            kind, still_s, limit_s = "stalled", track.still_s, self.limit_s(seen.worker, phase)
        if track.reported or still_s <= limit_s:
            return None
        track.reported = True
        return Hang(seen.worker, seen.pid, kind, still_s, limit_s, step, phase_name(phase))

    def _follow(
        self, track: _Track, stamp: Stamp | None, reading: ProcReading, stopped: bool, counted_s: float
    ) -> None:
        waited_s = _waited_s(track, reading, counted_s)
        track.run_ns, track.wait_ns, track.has_reading = reading.run_ns, reading.wait_ns, True
        # A stop seen at two looks in a row lasted the time between them; one look alone proves no duration.
        track.stopped_s = track.stopped_s + counted_s if stopped and track.was_stopped else 0.0
        still_s = track.still_s + max(0.0, counted_s - waited_s)
        if stamp is not None and stamp.counter != track.counter:
            # A stop that has ended, a first step and the phases with limits of their own say nothing about
            # how long honest work takes between two stamps.
            usual = track.num_steps > 0 and track.phase not in self.settings.phase_floors_s
            if usual and not track.was_stopped:
                self._slowest_s = max(self._slowest_s, still_s)
            if 0 <= track.step < stamp.step:
                track.num_steps += 1
            track.counter, track.step, track.phase = stamp.counter, stamp.step, stamp.phase
            still_s = 0.0
            track.reported = False
        track.still_s = still_s
        track.was_stopped = stopped


def _waited_s(track: _Track, reading: ProcReading, counted_s: float) -> float:
    """Seconds of this tick that the training thread was ready to run and had no CPU."""
    if not track.has_reading:
        return 0.0
    waited_s = max(0, reading.wait_ns - track.wait_ns) / 1e9
    # The kernel adds a wait to the sum when it ends. One that still lasts shows as: runnable, and not a
    # nanosecond on a CPU since the last look.
    starved = reading.thread_state == "R" and 0 < reading.run_ns == track.run_ns
    return counted_s if starved else min(waited_s, counted_s)


class ProcReader:
    """Reads /proc for one process and its training thread, in some twenty microseconds."""

    def __init__(self, proc: str | os.PathLike[str] = "/proc") -> None:
        self._proc = os.fspath(proc)

    def read(self, pid: int, tid: int | None = None) -> ProcReading | None:
        """The reading, or None when the process is gone. Without `tid` the main thread's times are read;
        a training thread that is gone while its process lives reads as state `X`, with no times."""
        state = self._state(f"{self._proc}/{pid}/stat")
        if state is None:
            return None
        task = f"{self._proc}/{pid}/task/{pid if tid is None else tid}"
        thread_state = self._state(f"{task}/stat")
        if thread_state is None:
            return ProcReading(state, "X", 0, 0)
        run_ns, wait_ns = self._times(f"{task}/schedstat")
        return ProcReading(state, thread_state, run_ns, wait_ns)

    @staticmethod
    def _state(path: str) -> str | None:
        # The command's name stands in parentheses and may hold spaces and parentheses itself.
        data = _read(path)
        return None if data is None else data.rpartition(b")")[2].split(maxsplit=1)[0].decode()

    @staticmethod
    def _times(path: str) -> tuple[int, int]:
        data = _read(path)
        if data is None:  # just gone, or a kernel without schedstats
            return 0, 0
        run_ns, wait_ns, _ = data.split()
        return int(run_ns), int(wait_ns)


def _read(path: str) -> bytes | None:
    """A file of /proc in one system call: ten readings a second of each worker, on its own cores."""
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
