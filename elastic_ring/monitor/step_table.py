"""metrics.index: for each step, where its line in metrics.jsonl stands and whether it counts, in rows of fixed width.

So the newest steps, and those from a step on, are a seek, however long the run. The index is no record: one that is
missing, damaged, behind, or of another file is made anew from metrics.jsonl. `metrics` writes that file.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Required, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from elastic_ring.errors import JournalDamaged, RunFailed
from elastic_ring.monitor.journal import Flaw, Line, Lines, Link, Place, line_at, opened

log = logging.getLogger(__name__)

INDEX_NAME = "metrics.index"
WENT_BACK, AGAIN, BEGINS, OF_RUN = "went back", "again", "begins", "run"
"""Notes in metrics.jsonl: the run begins at this step again; the step ran again with the same loss; the lines before
this step are missing; whose lines these are, by the run's identity."""
MAX_STEPS = 1 << 28
"""A line of a later step is a stranger's: MAX_BYTES of metrics.jsonl have fewer lines."""
STANDING, UNDONE = 1, 2
ROW = np.dtype(
    [
        ("line_bytes", "<u8"),  # where the step's line begins
        ("validation_bytes", "<u8"),  # where the line of its validation begins
        ("loss", "<f8"),
        ("step_s", "<f8"),
        ("grad_norm", "<f4"),
        ("generation", "<u4"),
        ("line_crc", "<u4"),  # checksums of the two lines
        ("validation_crc", "<u4"),
        ("state", "u1"),  # STANDING, UNDONE by going back, or 0 for no line
        ("skipped", "?"),
        ("timed", "?"),  # its exchanges
        ("validated", "?"),
        ("begins", "?"),  # the lines before it are missing
    ],
    align=True,
)
Rows = NDArray[np.void]
_HEAD = struct.Struct("<8sQQqQIIIqqQ")
"""Magic; the last line's begin and end; the file's time of change; the next line's link; the newest build that went
back; the last step; the number of rows. A checksum follows."""
_MAGIC, _HEAD_BYTES = b"steps 1\n", 128
_CHUNK_ROWS = 1 << 14
_NUM_LOOKS, _LOOK_S = 3, 0.005
"""How often a reader looks at an index that is behind its file, as a live writer's is for a moment."""


class MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl, as far as its readers use it: a step, a validation with `val_` keys, or a note."""

    step: Required[int]
    note: str
    identity: str
    build: list[int]
    loss: float | None
    loss_hex: str
    replaces_loss_hex: str
    step_s: float
    skipped: bool
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    exposed_hop_wait_s: float | None
    expert_load_max: float | None
    generation: int
    mesh: dict[str, int]
    samples: str
    val_loss: float | None
    unix_s: float


class StepTable:
    """The steps of a metrics.jsonl, read or made by `load`; a context manager. Its memory does not grow with the run,
    except where the index can be kept in no file: then it has a row for each step."""

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        self._file: BinaryIO | None = None
        self._forget()

    def _forget(self) -> None:
        self._start_bytes, self.after = 0, Place()  # of the last line
        self.last_step = -1  # that counts, or after which lines are missing
        self.last_validated = -1
        self.went_back = (0, 0)  # the newest build that did
        self._num_rows = 0

    @classmethod
    def load(cls, path: Path, flaws: list[Flaw] | None = None) -> StepTable:
        """The steps of the file at `path`; none where there is none. Damage goes to `flaws`.

        Raises: as `journal.opened`; OtherFormat; without `flaws` JournalDamaged.
        """
        table = cls(path)
        try:
            with suppress(FileNotFoundError):
                table._file = opened(path)
            if table._file is None or not table._opens_whole():
                table._move(_in_memory())
                table._follow(flaws)
        except BaseException:
            table.close()
            raise
        return table

    def _opens_whole(self) -> bool:
        """Take the index that is there. False where it lacks lines at the end, or all of them."""
        try:
            self._fd = os.open(self.path.with_name(INDEX_NAME), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        for look in range(_NUM_LOOKS):
            if not self._reads_head():
                self._forget()
                return False
            if os.fstat(self._lines_file().fileno()).st_size == self.after.end_bytes:
                return True
            time.sleep(_LOOK_S if look < _NUM_LOOKS - 1 else 0.0)
        return False

    def _reads_head(self) -> bool:
        """Read the head. False if it does not match the file: one that was cut, changed, or replaced."""
        head = os.pread(self._fd, _HEAD_BYTES, 0)
        if len(head) < _HEAD_BYTES or zlib.crc32(head[: _HEAD.size]) != int.from_bytes(
            head[_HEAD.size :][:4], "little"
        ):
            return False
        magic, start_bytes, end_bytes, changed_ns, number, crc, *build_and_steps = _HEAD.unpack(head[: _HEAD.size])
        term, generation, self.last_step, self.last_validated, self._num_rows = build_and_steps
        file, self._start_bytes, self.after = self._lines_file(), start_bytes, Place(end_bytes, Link(number, crc))
        self.went_back = (term, generation)
        about, last = os.fstat(file.fileno()), line_at(file, start_bytes)
        is_edited = about.st_size == end_bytes and about.st_mtime_ns != changed_ns
        return magic == _MAGIC and not is_edited and last is not None and last.after == self.after

    def _follow(self, flaws: list[Flaw] | None) -> None:
        """Take the lines that the index lacks. Where one of them is flawed, all lines are read again."""
        if self._file is None:
            return
        flaws_behind = list[Flaw]()
        if not self._take_until(os.fstat(self._file.fileno()).st_size, flaws_behind if self.after.end_bytes else flaws):
            self._forget()
            self._move(_in_memory(), num_bytes=0)
            self._take_until(os.fstat(self._file.fileno()).st_size, flaws)

    def _take_until(self, end_bytes: int, flaws: list[Flaw] | None) -> bool:
        """Take the lines behind the last one up to `end_bytes`: a live writer may be quicker than this reader. False
        where the index has lines, and these are flawed."""
        is_behind = bool(self.after.end_bytes)
        for line in Lines(self._lines_file(), self.path, flaws, self.after):
            if is_behind and flaws:
                return False
            self._take(line)
            if line.after.end_bytes >= end_bytes:
                break
        return not (is_behind and flaws)

    # ------------------------------------------------------------ the writer's

    def keep(self) -> None:
        """Keep the index in its file from now on. An earlier writer's file is left to it: it may live still."""
        path = self.path.with_name(INDEX_NAME)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            target = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                self._move(target)
                self._write_head()
                os.replace(partial, path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._keep_in_memory(error)

    def add(self, line: Line) -> None:
        """Take a line that was just written, and those of another writer before it."""
        try:
            if line.start_bytes != self.after.end_bytes:
                for other in Lines(self._lines_file(), self.path, [], self.after):
                    if other.start_bytes >= line.start_bytes:
                        break
                    self._take(other)
            self._take(line)
            self._write_head()
        except OSError as error:
            self._keep_in_memory(error)
            self._take(line)

    def _keep_in_memory(self, error: OSError) -> None:
        log.warning("%s cannot be written (%s): the index stays in memory", self.path.with_name(INDEX_NAME), error)
        self._move(_in_memory())
        with suppress(OSError):
            self.path.with_name(INDEX_NAME).unlink()  # it would be behind

    def _write_head(self) -> None:
        changed_ns = os.fstat(self._lines_file().fileno()).st_mtime_ns
        place, steps = (self._start_bytes, self.after.end_bytes), (self.last_step, self.last_validated, self._num_rows)
        head = _HEAD.pack(_MAGIC, *place, changed_ns, *self.after.link, *self.went_back, *steps)
        _put(self._fd, (head + zlib.crc32(head).to_bytes(4, "little")).ljust(_HEAD_BYTES, b"\0"), 0)

    def _take(self, line: Line) -> None:
        """Enter a line. Taking the same lines again changes nothing, so rows may be ahead of the head."""
        record = cast(MetricsLine, line.record)
        self._start_bytes, self.after = line.start_bytes, line.after
        step, note = record.get("step"), record.get("note")
        if type(step) is not int or not 0 <= step < MAX_STEPS:
            return
        rows = self.rows(step, step + 1)
        row: Any = rows[0]
        if note == WENT_BACK:
            self._go_back(step, record.get("build"))
            return
        if note == AGAIN and row["state"] == UNDONE:  # else its line is lost
            row["state"] = STANDING
        elif note == BEGINS:
            row["begins"] = True
        elif note is None and "loss_hex" in record:
            if not _fill(row, record, line):
                return
        elif note is None:
            row["validation_bytes"], row["validation_crc"] = line.start_bytes, line.after.link.crc
            row["validated"], self.last_validated = True, step
        else:
            return
        if row["state"] == STANDING or note == BEGINS:
            self.last_step = max(self.last_step, step - (note == BEGINS))
        self._put_rows(step, rows)

    def _go_back(self, step: int, build: object) -> None:
        """The lines from `step` on are undone."""
        for first, rows in self._chunks(step):
            rows["state"][rows["state"] == STANDING] = UNDONE
            rows["begins"][first == step :] = False  # lines of the steps before will come after all
            self._put_rows(first, rows)
        if isinstance(build, list) and len(build) == 2 and all(type(n) is int and 0 <= n < 1 << 32 for n in build):
            self.went_back = max(self.went_back, (build[0], build[1]))
        self.last_step = -1
        if self.rows(step, step + 1)[0]["begins"]:
            self.last_step = step - 1
            return
        for first, rows in self._backwards(step):
            if (places := np.flatnonzero((rows["state"] == STANDING) | rows["begins"])).size:
                at = int(places[-1])
                self.last_step = first + at - int(rows[at]["state"] != STANDING)
                return

    # ------------------------------------------------------------ rows

    def rows(self, first: int, stop: int) -> Rows:
        """The rows of these steps; of zeros where there are none."""
        rows = np.zeros(stop - first, ROW)
        data = os.pread(self._fd, rows.nbytes, _HEAD_BYTES + first * ROW.itemsize)
        there = np.frombuffer(data[: len(data) - len(data) % ROW.itemsize], ROW)
        rows[: len(there)] = there
        return rows

    def _put_rows(self, first: int, rows: Rows) -> None:
        self._num_rows = max(self._num_rows, first + len(rows))
        _put(self._fd, rows.tobytes(), _HEAD_BYTES + first * ROW.itemsize)

    def _move(self, target: int, num_bytes: int | None = None) -> None:
        """Go on in the file `target`, with the first bytes of the one before, by default all."""
        source, self._fd = self._fd, target
        if source < 0:
            return
        offset, end = 0, _HEAD_BYTES + self._num_rows * ROW.itemsize if num_bytes is None else num_bytes
        try:
            while offset < end and (data := os.pread(source, min(1 << 20, end - offset), offset)):
                _put(target, data, offset)
                offset += len(data)
        except OSError:
            self._fd = source
            os.close(target)
            raise
        os.close(source)

    def _chunks(self, first: int = 0, size: int = _CHUNK_ROWS) -> Iterator[tuple[int, Rows]]:
        """All rows from `first` on: the first step of a chunk, and its rows."""
        for at in range(first, self._num_rows, size):
            yield at, self.rows(at, min(at + size, self._num_rows))

    def _backwards(self, stop: int, size: int = 1 << 10) -> Iterator[tuple[int, Rows]]:
        """As `_chunks`, of the steps before `stop`, the last chunk first."""
        while stop > 0:
            first = max(0, stop - size)
            yield first, self.rows(first, stop)
            stop = first

    def standing(self, first: int = 0) -> Iterator[tuple[NDArray[np.int64], Rows]]:
        """The steps that count from `first` on, in order, and their rows; in chunks."""
        for at, rows in self._chunks(first):
            places = np.flatnonzero(rows["state"] == STANDING)
            yield places + at, rows[places]

    # ------------------------------------------------------------ what the steps say

    def step_times_s(self, first: int = 0) -> list[float]:
        """Of the steps that count from `first` on."""
        return [step_s for _, rows in self.standing(first) for step_s in rows["step_s"].tolist()]

    def kept_s(self, first: int = 0) -> float:
        """The time of the steps that count from `first` on."""
        return float(sum(rows["step_s"].sum() for _, rows in self.standing(first)))

    def num_standing(self, first: int = 0) -> int:
        return sum(len(rows) for _, rows in self.standing(first))

    def num_skipped(self) -> int:
        return sum(int(rows["skipped"].sum()) for _, rows in self.standing())

    def losses_hex(self) -> list[str]:
        """The losses of all steps in order, by `float.hex`, without those that a note reports as missing.

        Raises: RunFailed with the first step that is missing.
        """
        losses, before = list[str](), -1
        for steps, rows in self.standing():
            gaps = np.flatnonzero((np.diff(steps, prepend=before) != 1) & ~rows["begins"])
            if gaps.size:
                missing = int(([before, *steps.tolist()])[gaps[0]]) + 1
                raise RunFailed(f"{self.path} has no line for step {missing}", step=missing)
            before = int(steps[-1]) if steps.size else before
            losses += [loss.hex() for loss in rows["loss"].tolist()]
        return losses

    @property
    def first_step(self) -> int:
        """The first step that counts; 0 without any."""
        return next((int(steps[0]) for steps, _ in self.standing() if steps.size), 0)

    def missing(self, first: int, stop: int) -> list[int]:
        """The steps from `first` to before `stop` that are not on record."""
        steps = list[int]()
        for at in range(first, stop, _CHUNK_ROWS):
            rows = self.rows(at, min(at + _CHUNK_ROWS, stop))
            steps += (np.flatnonzero(rows["state"] != STANDING) + at).tolist()
        return steps

    def newest_where(self, column: str = "state") -> int:
        """The newest step that counts and has `column`; -1 for none."""
        for first, rows in self._backwards(self._num_rows):
            if (places := np.flatnonzero((rows["state"] == STANDING) & rows[column].astype(bool))).size:
                return first + int(places[-1])
        return -1

    def newest_validation(self) -> MetricsLine | None:
        """The last validation's line; the step's own may be missing."""
        rows = self.rows(max(0, self.last_validated), self.last_validated + 1)
        return self._record(self.last_validated, rows[0], "validation") if rows.size else None

    def identity(self) -> str | None:
        """Whose lines these are; None where the first line does not say it."""
        line = line_at(self._file, 0) if self._file is not None else None
        return line.record.get("identity") if line is not None and line.record.get("note") == OF_RUN else None

    # ------------------------------------------------------------ lines

    def lines(self, first: int = 0) -> Iterator[MetricsLine]:
        """The lines of the steps that count from `first` on, in order, each with the values of its validation.

        Raises: JournalDamaged for a line that is no longer what was written.
        """
        for steps, rows in self.standing(first):
            for step, row in zip(steps.tolist(), rows, strict=True):
                yield self._line(step, row)

    def newest(self, num: int) -> list[MetricsLine]:
        """The last lines that count, at most `num`, in order. Raises: as `lines`."""
        chosen = list[MetricsLine]()
        for first, rows in self._backwards(self._num_rows, num):
            for at in np.flatnonzero(rows["state"] == STANDING)[::-1].tolist():
                if len(chosen) == num:
                    return chosen[::-1]
                chosen.append(self._line(first + at, rows[at]))
        return chosen[::-1]

    def sample(self, most: int) -> list[MetricsLine]:
        """The lines that count; where there are more than `most`, from each of so many stretches its first and last,
        those with the least and largest loss and gradient norm, a validation and a skipped step; and those before and
        after each change of the generation. Raises: as `lines`."""
        if self.num_standing() <= most:
            return list(self.lines())
        chosen, before = list[MetricsLine](), -1
        first = self.first_step
        for at, rows in self._chunks(first, -(-8 * (self._num_rows - first) // most)):
            places = np.flatnonzero(rows["state"] == STANDING)
            if not places.size:
                continue
            kept, generations = rows[places], rows["generation"][places]
            picks = {0, len(kept) - 1}
            for values in (kept["loss"], kept["grad_norm"]):
                if (finite := np.flatnonzero(np.isfinite(values))).size:
                    picks |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
            picks |= {int(np.flatnonzero(kept[flag])[-1]) for flag in ("validated", "skipped") if kept[flag].any()}
            changes = np.flatnonzero(np.diff(generations, prepend=before if before >= 0 else generations[0]))
            picks |= {place for change in changes.tolist() for place in (max(0, change - 1), change)}
            before = int(generations[-1])
            chosen += [self._line(at + int(places[pick]), kept[pick]) for pick in sorted(picks)]
        return chosen

    def raw_lines(self, stop: int) -> Iterator[MetricsLine]:
        """The lines of the steps before `stop` that count as they were written, each followed by that of its
        validation, also where the step itself has none."""
        for first, rows in self._chunks():
            for at in np.flatnonzero((rows["state"] == STANDING) | rows["validated"]).tolist():
                if first + at >= stop:
                    return
                if rows[at]["state"] == STANDING:
                    yield self._record(first + at, rows[at])
                if rows[at]["validated"]:
                    yield self._record(first + at, rows[at], "validation")

    def _line(self, step: int, row: Any) -> MetricsLine:
        line = self._record(step, row)
        return line | self._record(step, row, "validation") if row["validated"] else line

    def _record(self, step: int, row: Any, of: Literal["line", "validation"] = "line") -> MetricsLine:
        line = line_at(self._lines_file(), int(row[f"{of}_bytes"]))
        if line is None or line.after.link.crc != row[f"{of}_crc"] or line.record.get("step") != step:
            raise JournalDamaged(f"the line of step {step} in {self.path} is damaged", path=str(self.path))
        return cast(MetricsLine, line.record)

    def _lines_file(self) -> BinaryIO:
        if self._file is None:
            self._file = opened(self.path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StepTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:  # a coordinator closes nothing: it is ended
        self.close()


def _fill(row: Any, record: MetricsLine, line: Line) -> bool:
    """Enter a step's line into its row. False for a line that no run writes."""
    try:
        row["loss"] = float.fromhex(record["loss_hex"])
        for name in ("step_s", "grad_norm"):
            value = record.get(name)
            row[name] = value if isinstance(value, (int, float)) else np.nan if name == "grad_norm" else 0.0
        row["generation"] = generation if isinstance(generation := record.get("generation", 0), int) else 0
    except (ValueError, OverflowError):
        return False
    row["skipped"], row["timed"] = record.get("skipped") is True, record.get("exposed_hop_wait_s") is not None
    row["line_bytes"], row["line_crc"], row["state"] = line.start_bytes, line.after.link.crc, STANDING
    return True


def _in_memory() -> int:
    return os.memfd_create(INDEX_NAME)


def _put(fd: int, data: bytes, offset: int) -> None:
    """Raises: OSError, also for a disk that takes only a part."""
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(f"only a part of {len(data)} bytes could be written")
