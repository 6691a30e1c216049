"""Files are whole or absent, a name is won once, and errors name the place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from elastic_ring.errors import StorageFailed
from elastic_ring.state.storage import Storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "run")).open()


def test_what_is_written_is_read_whole_and_in_parts(storage: Storage) -> None:
    written = storage.write("a/b", [b"one", memoryview(b"two")])
    assert storage.read("a/b") == b"onetwo"
    assert storage.read("a/b", 1, 3) == b"net"
    assert storage.digest("a/b") == written
    assert list(storage.names()) == [("a/b", 6)]
    assert storage.folders() == ["a"]


def test_of_many_writers_one_creates(storage: Storage) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(index: int) -> None:
        barrier.wait()
        if storage.create("name", str(index).encode()):
            won.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [storage.read("name")] == [str(index).encode() for index in won]


def test_a_replaced_file_is_never_half_there(storage: Storage) -> None:
    storage.replace("status", b"one")
    storage.replace("status", b"two")
    assert storage.read("status") == b"two"
    assert [name for name, _ in storage.names()] == ["status"], "no temporary file stays"


def test_opening_leaves_nothing_behind(storage: Storage) -> None:
    assert list(storage.names()) == []
    assert storage.excludes


@pytest.mark.parametrize(("uri", "told"), [("gs://bucket/x", "s3://bucket/prefix"), ("s3:///x", "name the bucket")])
def test_what_is_no_storage_is_refused(uri: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Storage(uri)


def test_a_place_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageFailed, match="taken"):
        Storage(str(tmp_path / "taken")).open()


def test_a_missing_file_is_named(storage: Storage) -> None:
    with pytest.raises(StorageFailed, match="nothing"):
        storage.read("nothing")


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(StorageFailed, match="s3://bucket/run cannot be reached"):
        Storage("s3://bucket/run").open()


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full")
def test_a_full_disk_leaves_no_partial_file(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *args: real("/dev/full", "wb") if "status" in str(path) else real(path, *args)
    )
    with pytest.raises(StorageFailed, match="No space left"):
        storage.replace("status", b"x" * 100_000)
    assert list(storage.names()) == []
