"""A disk that is full or read-only: at the start of a run, while it trains, and at its end. The disk is a real one, a
small tmpfs."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.errors import StorageFailed
from elastic_ring.monitor.journal import Journal, read
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import write_json
from elastic_ring.monitor.report import render_status
from elastic_ring.runtime.coordinator.inbox import End
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles, write_end
from elastic_ring.runtime.coordinator.run_spec import Clock
from elastic_ring.runtime.coordinator.term_storage import StorageWait
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.state.storage import backend
from elastic_ring.state.storage.folder import Storage
from tests.unit.coordinator.builders import training

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT = 1, 32


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if LIBC.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    LIBC.umount2(os.fsencode(folder), 2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a waiting writer has told of, soon."""
    monkeypatch.setattr(backend, "TELL_AFTER_S", 0.2)
    return []


def until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def remount(disk: Path, flags: int = 0) -> None:
    if LIBC.mount(b"none", os.fsencode(disk), b"tmpfs", MS_REMOUNT | flags, None) != 0:
        pytest.skip(f"it cannot be mounted again: {os.strerror(ctypes.get_errno())}")


def fill(disk: Path) -> None:
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    assert os.statvfs(disk).f_bavail == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_is_refused_with_its_folder_and_the_way_out(disk):
    check_writable(disk / "run")
    fill(disk)
    with pytest.raises(ValueError, match=rf"run_dir='{disk}/run' .*No space left.*free space there, or give a folder"):
        check_writable(disk / "run")


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_temporary_file(disk):
    write_json(disk / "status.json", {"n": 1})
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(disk / "status.json", {"n": "x" * 5000})
    assert read_json(disk / "status.json") == {"n": 1}
    assert names(disk) == {"status.json", "filler"}


@pytest.mark.parametrize("opened", [True, False])
def test_the_end_is_in_the_status_although_the_disk_is_full(disk, opened):
    run = RunConfig("full", str(disk))
    recorder = RunRecorder(run, lambda note: None, Clock())
    run.folder.mkdir(exist_ok=True)
    recorder.open(Begin())
    files = RunFiles(run, recorder)
    files.write_status(training())
    journal = Journal(run.folder / "journal.jsonl").open()
    fill(disk)
    with pytest.raises(StorageFailed, match=rf"journal {run.folder}/journal.jsonl(.|\n)*Free space there") as failed:
        journal.append({"event": "x" * 5000})
    end: End = {"error": "StorageFailed", "message": f"{failed.value}", "facts": {}, "attempt": "a"}
    if opened:
        files.write_status(training(), end)
    else:
        write_end(run, end)
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["phase"], status["ended"], status["members"], status["end"]) == ("ended", True, [], end)
    assert names(run.folder) - {"filler", "metrics.index"} == {"status.json", "journal.jsonl", "metrics.jsonl"}


def test_a_full_run_folder_is_waited_for_and_told_while_the_clock_stands(disk, told):
    clock = Clock()
    wait = StorageWait(RunConfig("full", str(disk)), clock)
    wait.tell = told.append
    journal = Journal(disk / "journal.jsonl", retries=wait).open()
    journal.append({"n": 1})
    fill(disk)
    begun_s, begun = time.monotonic(), clock()
    line = {"event": "x" * 20_000}
    with ThreadPoolExecutor(1) as deciding:
        done = deciding.submit(journal.append, line)
        until(lambda: told)
        assert wait.is_waiting
        assert not done.done()
        (disk / "filler").unlink()
        done.result(timeout=30)
    assert told[0].startswith("the run's folder waits for storage")
    assert told[0].endswith("No space left on device; training goes on")
    assert list(read(journal.path)) == [{"n": 1}, line], "the part that had found room is the beginning of the line"
    assert clock() - begun < 0.5 * (time.monotonic() - begun_s), "no deadline passes that nobody could keep"
    assert not wait.is_waiting


def test_a_member_lost_while_its_folder_is_read_only_makes_training_stand_which_driver_and_status_say(disk, told):
    wait, folder = StorageWait(RunConfig("full", str(disk)), Clock()), disk / "run"
    wait.tell = told.append
    folder.mkdir()
    long_ago = {"run": "full", "phase": "running", "updated_unix_s": time.time() - 20}
    write_json(folder / "status.json", long_ago)
    assert "no news for 20 s: its coordinator is gone or stuck" in render_status(folder)
    remount(disk, MS_RDONLY)
    assert "its coordinator waits for the disk, which is read-only, or is gone" in render_status(folder)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(wait, lambda: write_json(folder / "a", {}), lambda error: False)
        until(lambda: told)
        wait.loses("w3.t1")
        wait.loses("w2.t1")
        remount(disk)
        written.result()
    assert "the run's folder waits for storage" in told[0]
    assert told[0].endswith("; training goes on")
    stands = "training stands until it can be written, for at most 3600 s (checkpoint.fail_after_s): w3.t1 was lost"
    assert told[1:] == [f"the run's folder cannot be written; {stands}"]


def test_a_run_that_is_to_end_waits_for_its_folder_no_longer(disk, told):
    wait = StorageWait(RunConfig("full", str(disk)), Clock())
    wait.tell = told.append
    journal = Journal(disk / "journal.jsonl", retries=wait).open()
    fill(disk)
    with ThreadPoolExecutor(1) as deciding:
        done = deciding.submit(journal.append, {"event": "x" * 20_000})
        until(lambda: told)
        wait.give_up()
        with pytest.raises(StorageFailed, match=r"journal.*No space left.*attempts in"):
            done.result(timeout=30)


def test_a_checkpoint_folder_that_is_read_only_for_a_while_is_waited_for_and_named(disk, told):
    storage = Storage(str(disk / "run"), timeout_s=30.0, tell=told.append).open()
    remount(disk, MS_RDONLY)
    with ThreadPoolExecutor(1) as saver:
        done = saver.submit(storage.write, "part", [b"state"])
        until(lambda: told)
        assert not done.done()
        remount(disk)
        assert done.result(timeout=30) == storage.digest("part")
    assert "Read-only file system" in told[0]
    assert f"{disk}/run" in told[0]
