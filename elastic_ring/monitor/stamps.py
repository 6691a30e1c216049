"""Progress stamps: what a worker's training thread last did, in shared memory that its node agent reads.

One small file per worker process, normally under /dev/shm. A write takes about a microsecond, no lock and no system
call; the file stays readable when the writer is stopped, hung or dead. `detect` judges the stamps; nothing here may
block.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from elastic_ring.errors import ElasticRingError


class Phase(enum.IntEnum):
    """What the training thread does. Faults and messages use the names in lower case."""

    STARTING = 0
    IDLE = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCE = 4
    VOTE = 5
    APPLY = 6
    REBUILD = 7
    HEAL = 8
    VALIDATE = 9
    FINALIZE = 10
    COMPILE = 11
    SAVE = 12
    UPDATE = 13


_MAGIC = 0x45525354
_VERSION = 3
_FILE_BYTES = 256
_HEADER = struct.Struct("@IIqq")  # magic, version, pid, training thread's native tid
_BEGUN_SLOT = 3  # in 8-byte words: the counter of the stamp that is being written
_BODY = struct.Struct("@qqiiq")  # step, generation, phase, hop, monotonic_ns
_BODY_AT = 32
_COUNTER_SLOT = 8  # the counter of the last stamp that is written
_TOUCH_SLOT = 9
_CLOCK = struct.Struct(f"@qq{len(Phase)}q")  # a step that has ended, ns of waits for data in it, ns in each phase
_CLOCK_AT = 128
_NUM_READ_TRIES = 8


@dataclass(frozen=True)
class Stamp:
    """One reading. `counter` grows by one with each stamp and each touch; `hop` is -1 outside attention.

    `whole` is False when the writer was stopped or killed in the middle of a stamp: step, phase and hop may then be of
    two neighbouring stamps; counter, pid and tid are right.
    """

    pid: int
    tid: int
    counter: int
    step: int
    generation: int
    phase: int
    hop: int
    monotonic_ns: int
    whole: bool = True
    clock: Clock | None = None


@dataclass(frozen=True)
class Clock:
    """How long the training thread was in each phase of the newest step that it has left, all attempts together, and
    how long of that it waited for data. On a GPU it is the host's time: what it has launched it waits for in reduce."""

    step: int
    data_wait_s: float
    phases_s: dict[str, float]


def phase_name(phase: int) -> str:
    """`backward` for `Phase.BACKWARD`; `phase 99` for a number that this version does not know."""
    return Phase(phase).name.lower() if phase in Phase._value2member_map_ else f"phase {phase}"


class StampWriter:
    """The worker's end. One thread may call `stamp`, and one, the same or another, `touch`: they write different words.
    A touch shows that its thread is alive and nothing about others: a training thread that hangs with the GIL free goes
    unnoticed while another one touches."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.generation = 0
        self.phase: int = Phase.STARTING
        self._memory: mmap.mmap | None = None
        self._counter = 0
        self._num_touches = 0
        self._interrupted: tuple[int, int, int] = (-1, Phase.STARTING, -1)
        self._now_ns = time.monotonic_ns
        self._step = -1
        self._since_ns = 0
        self._spent_ns = [0] * len(Phase)
        self._data_waited_ns = 0
        self._words = memoryview(b"")

    def open(self) -> StampWriter:
        """Create the file, whole or not at all. The calling thread is the watched one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, _FILE_BYTES)
            self._memory = mmap.mmap(fd, _FILE_BYTES)
        finally:
            os.close(fd)
        # A native view stores 8 aligned bytes at once; struct's portable formats would store byte by byte.
        self._words = memoryview(self._memory).cast("Q")
        self._counter = self._num_touches = 0
        self._since_ns = self._now_ns()
        self.bind_thread()
        self.stamp(-1, Phase.STARTING)
        os.replace(partial, self.path)
        return self

    def bind_thread(self) -> None:
        """Make the calling thread the watched one, whose waits for a CPU do not count as silence."""
        assert self._memory is not None, "StampWriter.bind_thread before open"
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, os.getpid(), threading.get_native_id())

    def stamp(self, step: int, phase: int, hop: int = -1) -> None:
        """Record progress: the running `step` (-1: none), its phase, the hop inside attention (-1: none)."""
        self._counter = counter = self._counter + 1
        now_ns = self._now_ns()
        self._spent_ns[self.phase] += now_ns - self._since_ns
        self._since_ns, self.phase = now_ns, phase
        # The begun word is written first and the counter last; a reader reads them in the opposite order. Equal words
        # mean that no stamp began during the read. (A CPU that reorders stores, as ARM may, can rarely show a mix of
        # two neighbours; the detector relies on the counter only, which is one word.)
        words = self._words
        words[_BEGUN_SLOT] = counter
        _BODY.pack_into(words, _BODY_AT, step, self.generation, phase, hop, now_ns)
        if step != self._step:
            _CLOCK.pack_into(words, _CLOCK_AT, self._step, self._data_waited_ns, *self._spent_ns)
            self._step, self._data_waited_ns, self._spent_ns = step, 0, [0] * len(Phase)
        words[_COUNTER_SLOT] = counter

    def waited_for_data(self, seconds: float) -> None:
        """The stamping thread has waited so long for data in the step that it is in."""
        self._data_waited_ns += int(seconds * 1e9)

    @property
    def num_stamps(self) -> int:
        """How many stamps this process has written, touches not counted."""
        return self._counter

    def compile_begins(self) -> None:
        """The stamping thread is about to compile: the node agent allows for a long silence."""
        if self.phase != Phase.COMPILE:
            step, _, phase, hop, _ = _BODY.unpack_from(self._words, _BODY_AT)
            self._interrupted = (step, phase, hop)
            self.stamp(step, Phase.COMPILE, hop)

    def compile_ended(self) -> None:
        """Back to the phase that the compilation interrupted, unless another one has begun since."""
        if self.phase == Phase.COMPILE:
            self.stamp(*self._interrupted)

    def touch(self) -> None:
        """The calling thread is alive. Call it several times a second."""
        self._num_touches = number = self._num_touches + 1
        self._words[_TOUCH_SLOT] = number

    def close(self, *, unlink: bool = True) -> None:
        """Unmap the memory, and remove the file unless its last stamp is still wanted."""
        if self._memory is None:
            return
        self._words.release()
        self._memory.close()
        self._memory = None
        if unlink:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> StampWriter:
        return self if self._memory is not None else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


class StampReader:
    """The node agent's end. The first `read` that finds the file maps it, so the last stamp of a dead worker stays
    readable. A new process at the same path needs a new reader."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._memory: mmap.mmap | None = None
        self._words = memoryview(b"")

    def read(self) -> Stamp | None:
        """The newest stamp, or None while the worker has not created its file.

        Raises: ElasticRingError when the file is no stamp file of this version.
        """
        if self._memory is None and not self._map():
            return None
        memory = self._memory
        assert memory is not None
        _, _, pid, tid = _HEADER.unpack_from(memory, 0)
        for _ in range(_NUM_READ_TRIES):
            counter = self._words[_COUNTER_SLOT]
            step, generation, phase, hop, monotonic_ns = _BODY.unpack_from(memory, _BODY_AT)
            ended, waited_ns, *spent_ns = _CLOCK.unpack_from(memory, _CLOCK_AT)
            whole = self._words[_BEGUN_SLOT] == counter
            if whole:
                break
        counter += self._words[_TOUCH_SLOT]
        phases_s = {phase.name.lower(): ns / 1e9 for phase, ns in zip(Phase, spent_ns, strict=True)}
        clock = Clock(ended, waited_ns / 1e9, phases_s) if whole and counter > 1 and ended >= 0 else None
        return Stamp(pid, tid, counter, step, generation, phase, hop, monotonic_ns, whole, clock)

    def _map(self) -> bool:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            right_size = os.fstat(fd).st_size == _FILE_BYTES
            memory = mmap.mmap(fd, _FILE_BYTES, access=mmap.ACCESS_READ) if right_size else None
        finally:
            os.close(fd)
        if memory is None or _HEADER.unpack_from(memory, 0)[:2] != (_MAGIC, _VERSION):
            raise ElasticRingError(f"{self.path} is no progress stamp of version {_VERSION}", path=str(self.path))
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        return True

    def close(self) -> None:
        if self._memory is not None:
            self._words.release()
            self._memory.close()
            self._memory = None
