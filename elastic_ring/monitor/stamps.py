"""Progress stamps: what a worker's training thread last did, in shared memory that its node agent reads.

One small file per worker process, normally under /dev/shm. Writing costs about a microsecond, needs no
lock and no system call, and goes on being readable when the writer is stopped, stuck or dead. Judging the
stamps is `detect`'s work; nothing here may block.
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
    """Where the training thread is. The names in lower case are those of faults and messages."""

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


_MAGIC = 0x45525354
_VERSION = 1
_FILE_BYTES = 128
_HEADER = struct.Struct("@IIqq")  # magic, version, pid, training thread's native tid
_BEGUN_SLOT = 3  # in 8-byte words: the counter of the stamp that is being written
_BODY = struct.Struct("@qqiiq")  # step, generation, phase, hop, monotonic_ns
_BODY_AT = 32
_COUNTER_SLOT = 8  # the counter of the last stamp that is written
_TOUCH_SLOT = 9
_NUM_READ_TRIES = 8


@dataclass(frozen=True)
class Stamp:
    """One reading. `counter` grows by one with each stamp and each touch; `hop` is -1 outside attention.

    `whole` is False when the writer stands still in the middle of a stamp (it was stopped or killed there):
    then step, phase and hop may be of two neighbouring stamps, counter and identity are still right.
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


def phase_name(phase: int) -> str:
    """`backward` for `Phase.BACKWARD`; a number that this version does not know stays a number."""
    return Phase(phase).name.lower() if phase in Phase._value2member_map_ else f"phase {phase}"


class StampWriter:
    """The worker's end. `stamp` is for one thread and `touch` for one thread, the same or another: each has
    words of its own. Whoever touches says that it is alive, and nothing about other threads: where that is
    not the training thread, a training thread that hangs with the GIL free goes unnoticed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.generation = 0
        self.phase: int = Phase.STARTING
        self._memory: mmap.mmap | None = None
        self._counter = 0
        self._num_touches = 0
        self._now_ns = time.monotonic_ns
        self._words = memoryview(b"")

    def open(self) -> StampWriter:
        """Create the file, with the calling thread as the watched one. It appears whole or not at all."""
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
        self.bind_thread()
        self.stamp(-1, Phase.STARTING)
        os.replace(partial, self.path)
        return self

    def bind_thread(self) -> None:
        """Make the calling thread the one whose waits for a CPU are no standstill: the one that touches."""
        assert self._memory is not None, "StampWriter.bind_thread before open"
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, os.getpid(), threading.get_native_id())

    def stamp(self, step: int, phase: int, hop: int = -1) -> None:
        """Note progress: `step` under way (-1: none), its phase, the hop inside attention."""
        self._counter = counter = self._counter + 1
        self.phase = phase
        # Begun first, counter last, and a reader looks in the opposite order: where it finds them equal, no
        # stamp began before it had read the whole of the last one. (Where a CPU reorders stores, as ARM may,
        # it can rarely see two neighbours mixed; the counter, on which judgement stands, is one word.)
        words = self._words
        words[_BEGUN_SLOT] = counter
        _BODY.pack_into(words, _BODY_AT, step, self.generation, phase, hop, self._now_ns())
        words[_COUNTER_SLOT] = counter

    @property
    def num_stamps(self) -> int:
        """So many were left in this process, touches not counted: it grows while the training thread moves."""
        return self._counter

    def touch(self) -> None:
        """Alive, nothing new: what a thread that waits for its peers calls every 50 ms or more often."""
        self._num_touches = number = self._num_touches + 1
        self._words[_TOUCH_SLOT] = number

    def close(self, *, unlink: bool = True) -> None:
        """Give the memory back; the file goes too unless its last stamp is still wanted."""
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
    """The node agent's end. Maps the file at the first `read` that finds it and keeps it mapped, so the
    last stamp of a dead worker stays readable. A new process at the same path needs a new reader."""

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
            whole = self._words[_BEGUN_SLOT] == counter
            if whole:
                break
        counter += self._words[_TOUCH_SLOT]
        return Stamp(pid, tid, counter, step, generation, phase, hop, monotonic_ns, whole)

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
            raise ElasticRingError(
                f"{self.path} is no progress stamp of version {_VERSION}", path=str(self.path)
            )
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        return True

    def close(self) -> None:
        if self._memory is not None:
            self._words.release()
            self._memory.close()
            self._memory = None
