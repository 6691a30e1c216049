"""A disk that is full: at the start of a run, and at its end. The disk is a real one, a small tmpfs."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import Membership, Running, State, Worker
from elastic_ring.errors import RunFailed
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import write_json
from elastic_ring.runtime.coordinator.recorder import RunRecorder, write_end
from elastic_ring.trainer import check_writable

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if LIBC.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    LIBC.umount2(os.fsencode(folder), 2)


def fill(disk: Path) -> None:
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    assert os.statvfs(disk).f_bavail == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def training() -> State:
    workers = {name: Worker(name, "node", "ready", 0.0) for name in ("w-0", "w-1", "w-2")}
    membership = Membership(1, 1, Mesh(2, 1), ("w-0", "w-1"), 0)
    return State(ControlOptions("full", 2, 1, 4), Running(membership), 1, 1, workers)


def test_a_run_is_refused_with_its_folder_and_the_way_out(disk: Path) -> None:
    check_writable(disk / "run")
    fill(disk)
    with pytest.raises(ValueError, match=rf"run_dir='{disk}/run' .*No space left.*free space there, or give a folder"):
        check_writable(disk / "run")


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_temporary_file(disk: Path) -> None:
    write_json(disk / "status.json", {"n": 1})
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(disk / "status.json", {"n": "x" * 5000})
    assert read_json(disk / "status.json") == {"n": 1}
    assert names(disk) == {"status.json", "filler"}


@pytest.mark.parametrize("opened", [True, False])
def test_the_end_is_in_the_status_although_the_disk_is_full(disk: Path, opened: bool) -> None:
    run = RunConfig("full", str(disk))
    recorder = RunRecorder(run, lambda note: None, lambda: 100.0)
    run.folder.mkdir(exist_ok=True)
    recorder.open(0.0)
    recorder.write_status(training(), force=True)
    journal = Journal(run.folder / "journal.jsonl").open()
    fill(disk)
    with pytest.raises(RunFailed, match=rf"journal {run.folder}/journal.jsonl(.|\n)*Free space there") as failed:
        journal.append({"event": "x" * 5000})
    end = {"error": "RunFailed", "message": f"RunFailed: {failed.value}", "facts": {}, "attempt": "a"}
    if opened:
        recorder.write_status(training(), force=True, end=end)
    else:
        write_end(run, end)
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["phase"], status["ended"], status["members"], status["end"]) == ("ended", True, [], end)
    assert names(run.folder) - {"filler"} == {"status.json", "journal.jsonl", "metrics.jsonl"}
