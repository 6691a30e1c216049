"""metrics.jsonl as its writer and its readers use it, and metrics.index beside it: for each step, where its line stands
and whether it counts, in rows of fixed width.

So the newest steps, and those from a step on, are a seek, however long the run. The index is no record: one that is
missing, damaged, behind, or of another file is made anew from metrics.jsonl.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from elastic_ring.errors import JournalDamaged, RecordDamaged, RunFailed
from elastic_ring.monitor.journal import Flaw, Journal, Lines, Link, Place, Retried, StoredLine, line_at, opened
from elastic_ring.monitor.metrics import (
    AGAIN,
    BEGINS,
    METRICS_NAME,
    OF_RUN,
    WENT_BACK,
    MetricsLine,
    StepMetrics,
    Validation,
)
from elastic_ring.state.storage.backend import ONCE

log = logging.getLogger(__name__)

INDEX_NAME = "metrics.index"
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
        ("validated", "u1"),  # as `state`
        ("begins", "?"),  # the lines before it are missing
    ],
    align=True,
)
_HEAD = struct.Struct("<8sQQqQIIIqqQQ")
"""Magic; the last line's begin and end; the file's time of change; the next line's link; the newest build that went
back; the last step; the last validated one; the numbers of rows and of those that count. A checksum follows."""
_MAGIC, _HEAD_BYTES = b"steps 2\n", 128
_CHUNK_ROWS = 1 << 14


Rows = NDArray[np.void]


class RowFile:
    """The rows of all steps, in a file or in memory; read and written in chunks."""

    def __init__(self) -> None:
        self.fd, self.num, self.num_standing = os.memfd_create(INDEX_NAME), 0, 0

    def get(self, first: int, stop: int) -> Rows:
        """The rows of these steps; of zeros where there are none."""
        rows = np.zeros(stop - first, ROW)
        os.preadv(self.fd, [rows.view(np.uint8).data], _HEAD_BYTES + first * ROW.itemsize)
        return rows

    def put(self, first: int, rows: Rows) -> None:
        before = self.get(first, first + len(rows))
        _put(self.fd, rows.tobytes(), _HEAD_BYTES + first * ROW.itemsize)
        self.num = max(self.num, first + len(rows))
        now, earlier = (int(np.count_nonzero(some["state"] == STANDING)) for some in (rows, before))
        self.num_standing += now - earlier

    def move(self, target: int) -> None:
        """Go on in another file, with a copy of all rows. Raises: OSError; the rows are then where they were."""
        try:
            end, offset = _HEAD_BYTES + self.num * ROW.itemsize, 0
            while offset < end and (num_bytes := os.sendfile(target, self.fd, offset, end - offset)):
                offset += num_bytes
        except OSError:
            os.close(target)
            raise
        os.close(self.fd)
        self.fd = target

    def chunks(self, first: int = 0, size: int = _CHUNK_ROWS) -> Iterator[tuple[int, Rows]]:
        """All rows from `first` on: the first step of a chunk, and its rows."""
        for at in range(first, self.num, size):
            yield at, self.get(at, min(at + size, self.num))

    def backwards(self, stop: int, size: int = 1 << 8) -> Iterator[tuple[int, Rows]]:
        """As `chunks`, of the steps before `stop`, the last chunk first; each is twice as large as that behind."""
        while stop > 0:
            first = max(0, stop - size)
            yield first, self.get(first, stop)
            stop, size = first, min(2 * size, _CHUNK_ROWS)

    def standing(self, first: int = 0) -> Iterator[tuple[NDArray[np.int64], Rows]]:
        """The steps that count from `first` on, in order, and their rows; in chunks."""
        for at, rows in self.chunks(first):
            places = np.flatnonzero(rows["state"] == STANDING)
            if places.size:
                yield places + at, rows[places]

    def last(self, stop: int, has: Callable[[Rows], NDArray[np.bool_]]) -> int:
        """The last step before `stop` whose row has it; -1 for none."""
        for first, rows in self.backwards(stop):
            if (places := np.flatnonzero(has(rows))).size:
                return first + int(places[-1])
        return -1

    def newest(self, column: str = "state") -> int:
        """The newest step that counts and has `column`; -1 for none."""
        return self.last(self.num, lambda rows: (rows["state"] == STANDING) & (rows[column] == STANDING))

    def values(self, column: str) -> list[float]:
        """Of the steps that count, in order."""
        return [value for _, rows in self.standing() for value in rows[column].tolist()]

    def total(self, column: str = "state", first: int = 0) -> float:
        """Of the steps that count from `first` on; by default their number."""
        return float(sum(rows[column][rows["state"] == STANDING].sum() for _, rows in self.chunks(first)))

    def missing(self, first: int, stop: int) -> list[int]:
        """The steps from `first` to before `stop` that are not on record."""
        steps = list[int]()
        for at in range(first, stop, _CHUNK_ROWS):
            rows = self.get(at, min(at + _CHUNK_ROWS, stop))
            steps += (np.flatnonzero(rows["state"] != STANDING) + at).tolist()
        return steps


class StepTable:
    """The steps of a metrics.jsonl, as `load` finds or makes its index; a context manager. Its memory does not grow
    with the run, except where the index can be kept in no file: then it has a row for each step."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, RowFile()
        self._file: BinaryIO | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._start_bytes, self.after = 0, Place()  # of the last line
        self.last_step = -1  # that counts, or after which lines are missing
        self.last_validated = -1
        self.went_back = (0, 0)  # the newest build that did
        self.rows.num = self.rows.num_standing = 0

    @classmethod
    def load(cls, path: Path, flaws: list[Flaw] | None = None, *, uses_index: bool = True) -> StepTable:
        """The steps of the file at `path`; none where there is none. Damage goes to `flaws`; with the index, that of
        the lines behind it, as the lines that it has are checked when they are read.

        Raises: as `journal.opened`; OtherFormat; without `flaws` JournalDamaged.
        """
        table = cls(path)
        try:
            with suppress(FileNotFoundError):
                table._file = opened(path)
            if table._file is not None:
                if uses_index:
                    table._find_index()
                table._follow(flaws)
        except BaseException:
            table.close()
            raise
        return table

    def _find_index(self) -> None:
        """Take the index that is there, if it is the file's: not where the file was cut, changed, or replaced."""
        try:
            with opened(self.path.with_name(INDEX_NAME)) as index:
                head, fd = index.read(_HEAD_BYTES), os.dup(index.fileno())
        except (OSError, RecordDamaged):
            return
        os.close(self.rows.fd)
        self.rows.fd, checksum = fd, zlib.crc32(head[: _HEAD.size]).to_bytes(4, "little")
        if len(head) == _HEAD_BYTES and head[_HEAD.size :].startswith(checksum):
            magic, start_bytes, end_bytes, changed_ns, number, crc, *counts = _HEAD.unpack(head[: _HEAD.size])
            term, generation, self.last_step, self.last_validated, self.rows.num, self.rows.num_standing = counts
            self._start_bytes, self.after = start_bytes, Place(end_bytes, Link(number, crc))
            self.went_back = (term, generation)
            about, last = os.fstat(self._lines_file().fileno()), line_at(self._lines_file(), start_bytes)
            is_edited = about.st_size == end_bytes and about.st_mtime_ns != changed_ns
            is_whole = os.fstat(fd).st_size >= _HEAD_BYTES + self.rows.num * ROW.itemsize
            is_whole = is_whole and self.rows.total() == self.rows.num_standing
            if magic == _MAGIC and not is_edited and last is not None and last.after == self.after and is_whole:
                return
        self._start_anew()
        self.rows.move(os.memfd_create(INDEX_NAME))

    def _follow(self, flaws: list[Flaw] | None) -> None:
        """Take the lines that the index lacks; all lines again where one of those is flawed."""
        size, behind = os.fstat(self._lines_file().fileno()).st_size, list[Flaw]() if self.after.end_bytes else flaws
        if size <= self.after.end_bytes:
            return
        self.rows.move(os.memfd_create(INDEX_NAME))  # the index's file stays its writer's
        for line in Lines(self._lines_file(), self.path, behind, self.after):
            self._take(line)
            if line.after.end_bytes >= size:  # a live writer may be quicker than this reader
                break
        if behind and behind is not flaws:
            self._start_anew()
            self._follow(flaws)

    # ------------------------------------------------------------ the writer's

    def keep(self) -> None:
        """Keep the index in its file from now on. An earlier writer's file is left to it: it may live still."""
        path = self.path.with_name(INDEX_NAME)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.rows.move(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            self._write_head()
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._keep_in_memory(error)

    def add(self, line: StoredLine) -> None:
        """Take a line that was just written, and those of another writer before it."""
        try:
            is_next = line.start_bytes == self.after.end_bytes
            for new in [line] if is_next else Lines(self._lines_file(), self.path, [], self.after):
                self._take(new)
            self._write_head()
        except OSError as error:
            self._keep_in_memory(error)
            self._take(line)

    def _keep_in_memory(self, error: OSError) -> None:
        log.warning("%s cannot be written (%s): the index stays in memory", self.path.with_name(INDEX_NAME), error)
        self.rows.move(os.memfd_create(INDEX_NAME))
        with suppress(OSError):
            self.path.with_name(INDEX_NAME).unlink()  # it would be behind

    def _write_head(self) -> None:
        changed_ns = os.fstat(self._lines_file().fileno()).st_mtime_ns
        place, steps = (self._start_bytes, self.after.end_bytes), (self.last_step, self.last_validated)
        nums = self.rows.num, self.rows.num_standing
        head = _HEAD.pack(_MAGIC, *place, changed_ns, *self.after.link, *self.went_back, *steps, *nums)
        _put(self.rows.fd, (head + zlib.crc32(head).to_bytes(4, "little")).ljust(_HEAD_BYTES, b"\0"), 0)

    def _take(self, line: StoredLine) -> None:
        """Enter a line. Taking the same lines again changes nothing, so rows may be ahead of the head."""
        record = cast(MetricsLine, line.record)
        self._start_bytes, self.after = line.start_bytes, line.after
        step, note = record.get("step"), record.get("note")
        if type(step) is not int or not 0 <= step < MAX_STEPS:
            return
        rows = self.rows.get(step, step + 1)
        row: Any = rows[0]
        if note == WENT_BACK:
            self._go_back(step, record.get("build"))
            return
        if note == OF_RUN:
            self.went_back = (0, 0)
        if note == AGAIN and row["state"] == UNDONE:  # else its line is lost
            row["state"] = STANDING
            row["validated"] = STANDING if row["validated"] else 0
        elif note == BEGINS:
            row["begins"] = True
        elif note is None and "loss_hex" in record:
            if not _fill(row, record, line):
                return
        elif note is None:
            row["validation_bytes"], row["validation_crc"] = line.start_bytes, line.after.link.crc
            row["validated"] = STANDING
        else:
            return
        if row["state"] == STANDING or note == BEGINS:
            self.last_step = max(self.last_step, step - (note == BEGINS))
        if row["validated"] == STANDING:
            self.last_validated = max(self.last_validated, step)
        self.rows.put(step, rows)

    def _go_back(self, step: int, build: object) -> None:
        """The lines from `step` on are undone, and the validations after these steps."""
        for first, rows in self.rows.chunks(step):
            for column in ("state", "validated"):
                rows[column][rows[column] == STANDING] = UNDONE
            rows["begins"][first == step :] = False  # lines of the steps before will come after all
            self.rows.put(first, rows)
        if isinstance(build, list) and len(build) == 2 and all(type(n) is int and 0 <= n < 1 << 32 for n in build):
            self.went_back = max(self.went_back, (build[0], build[1]))
        self.last_validated = self.rows.last(step + 1, lambda rows: rows["validated"] == STANDING)
        last = self.rows.last(step + 1, lambda rows: (rows["state"] == STANDING) | rows["begins"])
        self.last_step = last - int(last >= 0 and self.rows.get(last, last + 1)[0]["state"] != STANDING)

    # ------------------------------------------------------------ lines

    def lines(self, first: int = 0) -> Iterator[MetricsLine]:
        """The lines of the steps that count from `first` on, in order, each with the values of its validation.

        Raises: JournalDamaged for a line that is no longer what was written.
        """
        for steps, rows in self.rows.standing(first):
            for step, row in zip(steps.tolist(), rows, strict=True):
                yield self._line(step, row)

    def newest(self, num: int) -> list[MetricsLine]:
        """The last lines that count, at most `num`, in order. Raises: as `lines`."""
        chosen = list[MetricsLine]()
        for first, rows in self.rows.backwards(self.rows.num, num):
            places = np.flatnonzero(rows["state"] == STANDING)[len(chosen) - num :].tolist()
            chosen = [*(self._line(first + at, rows[at]) for at in places), *chosen]
            if len(chosen) == num:
                break
        return chosen

    def sample(self, most: int) -> list[MetricsLine]:
        """The lines that count; where there are more than `most`, from each of so many stretches its first and last,
        those with the least and largest loss and gradient norm, a validation and a skipped step; and those before and
        after each change of the generation. Raises: as `lines`."""
        if self.rows.total() <= most:
            return list(self.lines())
        chosen, before = list[MetricsLine](), -1
        first = int(next(self.rows.standing())[0][0])
        for at, rows in self.rows.chunks(first, -(-8 * (self.rows.num - first) // most)):
            places = np.flatnonzero(rows["state"] == STANDING)
            if not places.size:
                continue
            kept, generations = rows[places], rows["generation"][places]
            picks = {0, len(kept) - 1}
            for values in (kept["loss"], kept["grad_norm"]):
                if (finite := np.flatnonzero(np.isfinite(values))).size:
                    picks |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
            flagged = [np.flatnonzero(kept[flag] == STANDING) for flag in ("validated", "skipped")]
            picks |= {int(places[-1]) for places in flagged if places.size}
            changes = np.flatnonzero(np.diff(generations, prepend=before if before >= 0 else generations[0]))
            picks |= {place for change in changes.tolist() for place in (max(0, change - 1), change)}
            before = int(generations[-1])
            chosen += [self._line(at + int(places[pick]), kept[pick]) for pick in sorted(picks)]
        return chosen

    def losses_hex(self) -> list[str]:
        """The losses of all steps in order, by `float.hex`, without those that a note reports as missing.

        Raises: RunFailed with the first step that is missing.
        """
        before = -1
        for steps, rows in self.rows.standing():
            for gap in np.flatnonzero((np.diff(steps, prepend=before) != 1) & ~rows["begins"])[:1].tolist():
                missing = 1 + (int(steps[gap - 1]) if gap else before)
                raise RunFailed(f"{self.path} has no line for step {missing}", step=missing)
            before = int(steps[-1])
        return [loss.hex() for loss in self.rows.values("loss")]

    @property
    def identity(self) -> str:
        """Whose lines these are; empty where the first line does not say it."""
        line = line_at(self._file, 0) if self._file is not None else None
        return str(line.record.get("identity", "")) if line and line.record.get("note") == OF_RUN else ""

    def newest_validation(self) -> dict[str, object]:
        """The values of the last validation, whose step may be missing; empty without one."""
        if self.last_validated < 0:
            return {}
        (row,) = self.rows.get(self.last_validated, self.last_validated + 1)
        line = self.record(self.last_validated, row, "validation")
        return {name: value for name, value in line.items() if name != "step"}

    def _line(self, step: int, row: Any) -> MetricsLine:
        line = self.record(step, row)
        return line | self.record(step, row, "validation") if row["validated"] == STANDING else line

    def record(self, step: int, row: Any, of: Literal["line", "validation"] = "line") -> MetricsLine:
        """The line of a step, or of its validation, by its row. Raises: JournalDamaged."""
        line = line_at(self._lines_file(), int(row[f"{of}_bytes"]))
        if line is None or line.after.link.crc != row[f"{of}_crc"] or line.record.get("step") != step:
            with suppress(OSError):  # the next reader checks all lines
                self.path.with_name(INDEX_NAME).unlink()
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
        if self.rows.fd >= 0:
            os.close(self.rows.fd)
            self.rows.fd = -1

    def __enter__(self) -> StepTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:  # a coordinator closes nothing: it is ended
        self.close()


def _fill(row: Any, record: MetricsLine, line: StoredLine) -> bool:
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


def _is_equal(row: Any, metrics: StepMetrics) -> bool:
    """Whether a step of equal loss had the same gradient too: only then are the weights after it equal."""
    before, norm = float(row["grad_norm"]), float(np.float32(metrics.grad_norm))
    is_same = before == norm or not (math.isfinite(before) or math.isfinite(norm))  # as JSON has them
    return is_same and bool(row["skipped"]) == metrics.skipped


def _put(fd: int, data: bytes, offset: int) -> None:
    """Raises: OSError, also for a disk that takes only a part."""
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(f"only a part of {len(data)} bytes could be written")


@dataclass
class NewestMetrics:
    """The newest committed step and the Unix time of its record, the newest step that timed its exchanges, the newest
    validation, and how many steps were skipped."""

    step: StepMetrics | None = None
    unix_s: float | None = None
    timed: StepMetrics | None = None
    validation: Validation | None = None
    num_skipped: int = 0

    @classmethod
    def of(cls, table: StepTable, num_skipped: int) -> NewestMetrics:
        def line_of(step: int) -> MetricsLine | None:
            return next(table.lines(step)) if step >= 0 else None

        newest, timed = line_of(table.rows.newest()), line_of(table.rows.newest("timed"))
        values = cast("dict[str, float | None]", table.newest_validation())
        return cls(
            step=StepMetrics.from_json(newest) if newest else None,
            unix_s=newest["unix_s"] if newest else None,
            timed=StepMetrics.from_json(timed) if timed else None,
            validation=Validation(table.last_validated, values) if values else None,
            num_skipped=num_skipped,
        )

    def committed(self, step: StepMetrics, unix_s: float) -> None:
        self.step, self.unix_s = step, unix_s
        self.num_skipped += step.skipped
        if step.exposed_hop_wait_s is not None:
            self.timed = step


class MetricsLog:
    """DIR/metrics.jsonl: one line per committed step, however often the step is reported.

    Where a run goes back to a checkpoint, a line notes it. A step that runs again then has no second line if its loss
    and its gradient's norm are the same, bit for bit (a note says that it counts again, with its validation), else one
    with both losses (`replaces_loss_hex`). A validation that runs again has a second line, which counts.
    """

    def __init__(self, directory: str | os.PathLike[str], retries: Retried = ONCE) -> None:
        """`retries`: as `Journal` takes them."""
        self.path = Path(directory) / METRICS_NAME
        self._journal = Journal(self.path, durable=False, retries=retries)
        self.table = StepTable(self.path)
        self._retries = retries
        self.newest = NewestMetrics()

    @property
    def last_step(self) -> int:
        """The last step written, -1 for none; the one before which lines are missing."""
        return self.table.last_step

    def open(self, identity: str = "") -> MetricsLog:
        """Open the file and continue it; a new one begins with the identity. Raises: JournalDamaged."""
        self.table = StepTable.load(self.path)
        self._journal.open(self.table.after)
        self.table.keep()
        if identity and not self.path.stat().st_size:
            self._append({"step": 0, "note": OF_RUN, "identity": identity})
        self.newest = NewestMetrics.of(self.table, int(self.table.rows.total("skipped")))
        return self

    def _append(self, line: Mapping[str, object]) -> None:
        written = self._journal.append({**line})
        self._retries(lambda: self.table.add(written), lambda error: True)  # as slow as the folder

    def go_back(self, step: int, build: tuple[int, int]) -> int:
        """The members of `build`, (term, generation), begin at a checkpoint of `step` steps: later steps run again.

        Once for each build. Returns how many steps that undid.
        """
        if build <= self.table.went_back:
            return 0
        num_undone, num_skipped = int(self.table.rows.total(first=step)), int(self.table.rows.total("skipped", step))
        # Also where there are none: a new coordinator must not undo what these members commit.
        self._append({"step": step, "note": WENT_BACK, "build": list(build)})
        self.newest = NewestMetrics.of(self.table, self.newest.num_skipped - num_skipped)
        return num_undone

    def begin_at(self, step: int) -> str:
        """A build begins at `step`: missing steps before it will not come any more. Returns, once, which; else ""."""
        first = self.last_step + 1
        if step <= first:
            return ""
        self._append({"step": step, "note": BEGINS})
        missing = f"{self.path} has no lines for steps {first} to {step - 1}"
        return f"{missing}: they were lost with their writer, or it began elsewhere"

    def sync(self) -> None:
        """All lines are on disk when this returns."""
        self._journal.sync()

    def record(self, metrics: StepMetrics) -> bool:
        """Write a step; False if it is on record (members report recent steps again to a new coordinator).

        Raises: RunFailed when it is on record with another loss: a published step was undone.
        """
        line, (row,) = metrics.to_json(), self.table.rows.get(metrics.step, metrics.step + 1)
        before_hex = float(row["loss"]).hex()
        if row["state"] == STANDING:
            if before_hex != line["loss_hex"]:
                raise RunFailed(
                    f"step {metrics.step} was published with loss {before_hex} and now has {line['loss_hex']}",
                    step=metrics.step,
                )
            return False
        unix_s = round(time.time(), 3)
        if row["state"] == UNDONE and before_hex == line["loss_hex"] and _is_equal(row, metrics):
            self._append({"step": metrics.step, "note": AGAIN})
        else:
            replaces = {"replaces_loss_hex": before_hex} if row["state"] == UNDONE else {}
            self._append({**line, **replaces, "unix_s": unix_s})
        self.newest.committed(metrics, unix_s)
        return True

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a validation after `step` (`val_loss`, `val_...`), once.

        It has its own line, possibly before the step's: the ring validates before it goes on, and may fail in between.
        """
        if self.table.rows.get(step, step + 1)[0]["validated"] != STANDING:
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self.newest.validation = Validation(step, finite)
            self._append(self.newest.validation.to_json())

    def close(self) -> None:
        self._journal.close()
        self.table.close()

    def __enter__(self) -> MetricsLog:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


def rebuild_metrics(
    table: StepTable, damaged: Sequence[Flaw], identity: str, before: int
) -> tuple[str, Iterator[MetricsLine], list[int]]:
    """The damage of a metrics.jsonl, empty for none; the lines of a new file in its place; and the steps before
    `before` that it lacks.

    The new file has the undamaged lines of the steps before `before` and notes where lines are missing, but no line
    of a run with another `identity`.
    """

    def kept(stop: int) -> Iterator[MetricsLine]:
        yield {"step": 0, "note": OF_RUN, "identity": identity}
        last_step = -1
        for steps, rows in table.rows.standing():
            for step, row in zip(steps[steps < stop].tolist(), rows, strict=False):
                if step != last_step + 1:
                    yield {"step": step, "note": BEGINS}
                last_step = step
                yield table.record(step, row)
                if row["validated"] == STANDING:
                    yield table.record(step, row, "validation")

    if table.identity not in ("", identity):
        return "it is another run's", kept(0), [*range(before)]
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    wrong = f"line {damaged[0].line}{more} of it {damaged[0].problem}" if damaged else ""
    return wrong, kept(before), table.rows.missing(0, before)
