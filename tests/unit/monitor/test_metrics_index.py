"""The index of metrics.jsonl says what the lines say, and is made anew where it does not fit them."""

from __future__ import annotations

import errno
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.errors import JournalDamaged
from elastic_ring.monitor import metrics_log
from elastic_ring.monitor.journal import Flaw, StoredLine, read
from elastic_ring.monitor.metrics import METRICS_NAME, read_metrics
from elastic_ring.monitor.metrics_log import INDEX_NAME, MetricsLog, StepTable
from elastic_ring.monitor.report import Records, render_status
from tests.journals import journal_bytes
from tests.unit.monitor.test_monitor_metrics import metrics


def loss_of(step: int) -> float:
    return 1.0 + step / 7


def write(folder: Path, *steps: int) -> None:
    with MetricsLog(folder) as log:
        for step in steps:
            log.record(metrics(step, loss_of(step), grad_norm=float(step)))


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder)]


# ---------------------------------------------------------------- what the lines say


class Branch:
    """The lines that count, as a reader of the whole file finds them."""

    def __init__(self, path: Path) -> None:
        standing: dict[int, dict[str, Any]] = {}
        undone: dict[int, dict[str, Any]] = {}
        self.begins: set[int] = set()
        validations: dict[int, dict[str, Any]] = {}
        earlier: dict[int, dict[str, Any]] = {}  # validations that were undone
        for line in read(path):
            step, note = line["step"], line.get("note")
            if note == "went back":
                undone |= {later: standing.pop(later) for later in [*standing] if later >= step}
                earlier |= {later: validations.pop(later) for later in [*validations] if later >= step}
                self.begins = {first for first in self.begins if first <= step}
            elif note == "again":
                if step in undone:
                    standing[step] = undone.pop(step)
                    validations = {step: earlier[step], **validations} if step in earlier else validations
            elif note == "begins":
                self.begins.add(step)
            elif "loss_hex" in line:
                undone.pop(step, None)
                standing[step] = line
            elif note is None:
                validations[step] = line
        self.lines = [{**line, **validations.get(step, {})} for step, line in sorted(standing.items())]
        self.newest_validation = validations[max(validations)] if validations else {}
        self.last_step = max([*standing, *(step - 1 for step in self.begins)], default=-1)


def check(folder: Path) -> None:
    branch = Branch(folder / METRICS_NAME)
    with StepTable.load(folder / METRICS_NAME) as table:
        assert list(table.lines()) == branch.lines
        assert table.newest(3) == branch.lines[-3:]
        assert table.last_step == branch.last_step
        validation = {name: value for name, value in branch.newest_validation.items() if name != "step"}
        assert table.newest_validation() == validation
        validated = [line["step"] for line in branch.lines if "val_loss" in line and line["val_loss"] is not None]
        assert table.rows.newest("validated") == max(validated, default=-1)
        assert table.rows.total("skipped") == sum(line["skipped"] for line in branch.lines)
        assert table.rows.values("step_s") == [line["step_s"] for line in branch.lines]
        assert table.rows.total("step_s", 2) == pytest.approx(
            sum(line["step_s"] for line in branch.lines if line["step"] >= 2)
        )
        timed = [line["step"] for line in branch.lines if line["exposed_hop_wait_s"] is not None]
        assert table.rows.newest("timed") == max(timed, default=-1)
        standing = {line["step"] for line in branch.lines}
        assert table.rows.missing(0, 12) == [step for step in range(12) if step not in standing]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1.0, 2.0]), st.booleans()),
        st.tuples(st.just("back"), st.integers(0, 12)),
        st.tuples(st.just("begin"), st.integers(0, 12)),
        st.tuples(st.just("validate"), st.integers(0, 12), st.sampled_from([1.0, 2.0])),
        st.tuples(st.just("restart"), st.sampled_from(["", "missing", "behind", "ahead"])),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_in_a_run_the_index_has_the_branch_that_counts(
    tmp_path_factory: pytest.TempPathFactory, actions: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    log, generation, older = MetricsLog(folder).open("run"), 1, b""
    for action in actions:
        match action:
            case "step", loss, skipped:
                wait_s = None if skipped else 0.5
                step = metrics(log.last_step + 1, loss, skipped=skipped, exposed_hop_wait_s=wait_s, step_s=loss)
                log.record(step)
            case "back", step:
                generation += 1
                log.go_back(step, (1, generation))
                assert log.go_back(step, (1, generation)) == 0
            case "begin", step:
                log.begin_at(step)
            case "validate", step, loss:
                log.validated(step, {"val_loss": loss})
            case "restart", damage:
                log.close()
                index = folder / INDEX_NAME
                if damage == "missing":
                    index.unlink()
                elif damage == "behind" and older:  # the pages that held the newest rows and head were lost
                    index.write_bytes(older)
                elif damage == "ahead" and older:  # rows reached the disk, and the head did not
                    index.write_bytes(older[:128] + index.read_bytes()[128:])
                check(folder)
                log = MetricsLog(folder).open("run")
        if len(older) < 400:
            older = (folder / INDEX_NAME).read_bytes()
        check(folder)
    log.close()


def test_after_going_back_a_newer_build_goes_back_and_an_older_one_does_not(tmp_path: Path) -> None:
    write(tmp_path, *range(6))
    with MetricsLog(tmp_path) as log:
        assert log.go_back(4, (2, 3)) == 2
    with MetricsLog(tmp_path) as log:
        assert (log.last_step, log.newest.step and log.newest.step.step) == (3, 3)
        assert log.go_back(1, (2, 2)) == 0
        assert log.go_back(2, (3, 1)) == 2
        assert log.record(metrics(2, loss_of(2), grad_norm=2.0, step_s=5.0))
        assert log.record(metrics(3, loss_of(3), grad_norm=9.0))
        assert log.record(metrics(4, 9.0))
    assert [(line["step"], line["loss"], line["grad_norm"], line["step_s"]) for line in read_metrics(tmp_path)][2:] == [
        (2, loss_of(2), 2.0, 0.9),  # the same result: the first line counts again
        (3, loss_of(3), 9.0, 0.9),  # the same loss alone: the weights after it are others
        (4, 9.0, 1.25, 0.9),
    ]


# ---------------------------------------------------------------- an index that does not fit


def cut_the_lines(folder: Path) -> None:
    path = folder / METRICS_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))


def take_another_file_s(folder: Path) -> None:
    (folder / "other").mkdir()
    write(folder / "other", *range(9))
    shutil.copy2(folder / "other" / INDEX_NAME, folder / INDEX_NAME)


def put_a_folder_there(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).mkdir()


def tear(folder: Path) -> None:
    data = (folder / INDEX_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(data[:20] + b"\0" * 20 + data[40:])


def lose_rows(folder: Path) -> None:
    os.truncate(folder / INDEX_NAME, 128)


def lose_a_page(folder: Path) -> None:
    data = (folder / INDEX_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(data[:200] + b"\0" * 100 + data[300:])


DAMAGES = [cut_the_lines, take_another_file_s, put_a_folder_there, tear, lose_rows, lose_a_page]


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_an_index_that_does_not_fit_is_made_anew_and_one_that_does_is_used(
    tmp_path: Path, damage: Callable[[Path], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *range(8))
    if damage is not None:
        damage(tmp_path)
    num_lines = 5 if damage is cut_the_lines else 8
    starts, take = list[int](), StepTable._take

    def counted(self: StepTable, line: StoredLine) -> None:
        starts.append(line.start_bytes)
        take(self, line)

    monkeypatch.setattr(StepTable, "_take", counted)
    assert steps_of(tmp_path) == [*range(num_lines)]
    assert len(starts) == (num_lines if damage else 0), "a reader reads all lines, and leaves no file"
    write(tmp_path, num_lines)
    del starts[:]
    assert steps_of(tmp_path) == [*range(num_lines + 1)]
    assert len(starts) == (num_lines + 1 if damage is put_a_folder_there else 0)


def test_a_changed_line_is_damage_and_one_that_rots_unseen_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, *range(8))
    path = tmp_path / METRICS_NAME
    about = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"grad_norm":1.0', b'"grad_norm":8.0'))
    flaws = list[Flaw]()
    with StepTable.load(path, flaws) as table:
        assert ([line["step"] for line in table.lines()], [flaw.line for flaw in flaws]) == ([0, *range(2, 8)], [2])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with StepTable.load(path) as table:
        assert [line["step"] for line in table.newest(3)] == [5, 6, 7]
        with pytest.raises(JournalDamaged, match="line of step 1 in"):
            list(table.lines())
    assert f"line 2 of {path}" in render_status(tmp_path), "without the index, which does not know of it"


def test_a_reader_takes_a_line_that_is_written_while_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = StepTable._find_index
    with MetricsLog(tmp_path) as log:
        log.record(metrics(0, loss_of(0)))

        def find_and_wait(table: StepTable) -> None:
            find(table)
            log.record(metrics(1, loss_of(1)))

        monkeypatch.setattr(StepTable, "_find_index", find_and_wait)
        assert steps_of(tmp_path) == [0, 1]


def test_lines_of_a_frozen_writer_are_taken_by_its_successor(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    before, frozen = (tmp_path / INDEX_NAME).read_bytes(), MetricsLog(tmp_path).open()
    with MetricsLog(tmp_path) as successor:
        frozen.record(metrics(2, loss_of(2)))
        successor.validated(1, {"val_loss": 2.0})
        assert (successor.last_step, successor.record(metrics(2, loss_of(2)))) == (2, False)
        frozen.record(metrics(3, loss_of(3)))
    check(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(before)  # the lines behind it are no chain
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_full_disk_takes_the_index_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, 1)
    with MetricsLog(tmp_path) as log:
        target, put = log.table.rows.fd, metrics_log._put

        def full(fd: int, data: bytes, offset: int) -> None:
            if fd == target:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            put(fd, data, offset)

        monkeypatch.setattr(metrics_log, "_put", full)
        for step in (2, 3):
            log.record(metrics(step, loss_of(step)))
        assert log.table.losses_hex() == [loss_of(step).hex() for step in range(4)]
        assert not (tmp_path / INDEX_NAME).exists()
    check(tmp_path)


@pytest.mark.parametrize("step", [-1, 1 << 60, True, "0", None, 1.0])
def test_steps_of_strangers_have_no_row(tmp_path: Path, step: object) -> None:
    lines = [{"step": step, **rest} for rest in ({"loss_hex": "0x1p0"}, {"note": "went back", "build": [1, 1]}, {})]
    lines += [{"step": 0, "loss_hex": loss, "generation": -1} for loss in ("no number", "0x1p0")]
    lines += [{"step": 0, "note": "went back", "build": [-1, 1 << 70]}]
    (tmp_path / METRICS_NAME).write_bytes(journal_bytes(lines))
    with StepTable.load(tmp_path / METRICS_NAME) as table:
        assert (list(table.lines()), table.last_step, table.went_back) == ([], -1, (0, 0))


# ---------------------------------------------------------------- a long run


def test_neither_status_nor_a_restart_nor_going_back_reads_more_of_a_longer_run(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    num_read = []
    for num_steps in (200, 2000):
        folder = tmp_path / str(num_steps)
        folder.mkdir()
        write(folder, *range(num_steps))
        begun = bytes_read()
        render_status(folder)
        with MetricsLog(folder) as log:
            log.go_back(num_steps - 10, (1, 2))
        rows = 6 * num_steps * metrics_log.ROW.itemsize  # a restart copies the index, and sums its columns
        num_read.append(bytes_read() - begun - rows)
    assert num_read[1] < num_read[0] + 100_000, num_read
    assert (tmp_path / "2000" / METRICS_NAME).stat().st_size > 1_000_000


def test_a_step_leaves_nothing_in_memory(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        held = []
        tracemalloc.start()
        for step in range(3000):
            log.record(metrics(step, loss_of(step)))
            if step % 1000 == 500:
                held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert held[-1] - held[0] < 2000, "less than a byte a step"


def test_of_a_long_run_curves_have_the_ends_the_spikes_and_each_generation(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1000):
            values = {"loss": 99.0} if step == 417 else {"grad_norm": 500.0} if step == 733 else {}
            values |= {"skipped": step == 222, "generation": 1 + (step >= 901)}
            log.record(metrics(step, **{"loss": loss_of(step), **values}))
            if step == 555:
                log.validated(step, {"val_loss": 7.0})
    with StepTable.load(tmp_path / METRICS_NAME) as table:
        assert len(table.sample(1000)) == 1000
        sample = table.sample(80)
        steps = [line["step"] for line in sample]
        assert len(steps) <= 82
        assert steps == sorted(set(steps))
        assert {0, 999, 222, 417, 555, 733, 900, 901} <= {*steps}
        assert next(line for line in sample if line["step"] == 555)["val_loss"] == 7.0
    records = Records.of(tmp_path, most_lines=80)
    assert (records.num_steps, len(records.steps), records.steps[-1]["step"]) == (1000, 64, 999)
    assert records.validated is not None
    assert records.validated["step"] == 555
