"""Files are whole or absent, a name is won once, errors name the place: in a folder and in a real object store."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from elastic_ring.errors import StorageFailed
from elastic_ring.runtime.run_storage import check_writable
from elastic_ring.state.storage import object_store as s3
from elastic_ring.state.storage.backend import Retries, StoredFile
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from tests.object_store.store import ObjectStore

MIB = 1 << 20
CHUNK_BYTES = s3.ObjectStore.piece_bytes


@pytest.fixture(params=["folder", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"s3://{request.getfixturevalue('bucket')}/runs/one"


@pytest.fixture
def bucket(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    object_store.enter(monkeypatch)
    return object_store.new_bucket()


@pytest.fixture
def storage(uri: str) -> Storage:
    return Storage(uri).open()


# ---------------------------------------------------------------- what is written and read


def test_a_file_is_written_and_digested_while_the_interpreter_ends_and_starts_no_threads(tmp_path):
    program = (
        "import atexit, sys\nfrom elastic_ring.state.storage.folder import Storage\n"
        "atexit.register(lambda: print(Storage(sys.argv[1]).write('a', [b'one', b'two']).sha256))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [sha256(b"onetwo").hexdigest()], done.stderr
    assert (tmp_path / "a").read_bytes() == b"onetwo"


def test_what_is_written_is_read_whole_and_in_parts(storage):
    written = storage.write("a/b", [b"one", memoryview(b"two")])
    assert storage.read("a/b") == b"onetwo"
    assert storage.read("a/b", 1, 3) == b"net"
    assert storage.read("a/b", 4, 100) == b"wo"
    assert storage.digest("a/b") == written
    assert list(storage.names()) == [("a/b", 6)]
    assert storage.folders() == ["a"]
    assert storage.write("empty", []).num_bytes == 0
    assert storage.read("empty") == b""


def test_a_file_of_many_pieces_is_the_same_bytes(storage):
    data = os.urandom(MIB) * 37
    view = memoryview(data)
    sizes = [5, 18 * MIB, 1, MIB, 20, 17 * MIB]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    written = storage.write("big", [view[start : start + size] for start, size in zip(starts, sizes, strict=False)])
    expected = data[: starts[-1]]
    assert (written.num_bytes, written.sha256) == (len(expected), sha256(expected).hexdigest())
    assert storage.read("big") == expected
    assert storage.load("big") == (expected, written)
    assert storage.read("big", CHUNK_BYTES - 3, 6) == expected[CHUNK_BYTES - 3 : CHUNK_BYTES + 3]
    assert storage.uploads() == []


def test_of_many_writers_one_creates(storage):
    for name in ("first", "second"):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda index, name=name: storage.create(name, b"%d" % index), range(8)))
        assert won.count(True) == 1
        assert storage.read(name) == b"%d" % won.index(True)


def test_a_replaced_file_is_never_half_there(storage):
    storage.replace("status", b"one")
    storage.replace("status", b"two")
    assert storage.read("status") == b"two"
    assert [name for name, _ in storage.names()] == ["status"], "no temporary file stays"


def test_listing_is_sorted_and_sees_one_folder_or_all_below(storage, monkeypatch):
    monkeypatch.setattr(s3, "PAGE", 2)
    for name in ("b/2", "b/10", "a", "b/c/d", "bb/x", "c"):
        storage.replace(name, name.encode())
    assert list(storage.names()) == [("a", 1), ("b/10", 4), ("b/2", 3), ("b/c/d", 5), ("bb/x", 4), ("c", 1)]
    assert [name for name, _ in storage.names("b", recursive=False)] == ["b/10", "b/2"]
    assert (storage.folders(), storage.folders("b"), storage.folders("nothing")) == (["b", "bb"], ["c"], [])
    assert list(storage.names("nothing")) == []
    assert all(abs(time.time() - entry.modified_unix_s) < 60 for entry in storage.entries())


def test_what_is_removed_is_gone_and_nothing_is_left_in_its_place(storage, monkeypatch):
    monkeypatch.setattr(s3, "PAGE", 2)
    names = ["keep", "step-1/a/x", "step-1/a/y", "step-1/a/z", "step-10/x"]
    for name in names:
        storage.replace(name, b".")
    storage.remove("nothing")
    storage.remove("keep")
    storage.remove_folder("step-1/a")
    storage.remove_folder("nothing")
    assert [name for name, _ in storage.names()] == ["step-10/x"]
    assert storage.folders() == ["step-10"], "the empty folder above is gone, too"
    assert storage.exists("step-10/x")
    assert storage.exists("step-10")
    assert not storage.exists("step-1")


def test_a_missing_file_is_named_at_once(storage):
    begun = time.monotonic()
    with pytest.raises(StorageFailed, match=f"{storage.uri}/nothing cannot be read"):
        storage.read("nothing")
    assert time.monotonic() - begun < storage.timeout_s / 2


def test_opening_leaves_nothing_behind(storage):
    assert list(storage.names()) == []
    assert storage.excludes


def test_another_process_can_be_handed_it(storage):
    storage.replace("name", b"data")
    again = pickle.loads(pickle.dumps(storage))
    assert again == storage
    assert again.read("name") == b"data"


# ---------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(("uri", "told"), [("gs://bucket/x", "s3://bucket/prefix"), ("s3:///x", "name the bucket")])
def test_what_is_no_storage_is_refused(uri, told):
    with pytest.raises(ValueError, match=told):
        Storage(uri)


def test_a_place_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageFailed, match="taken"):
        Storage(str(tmp_path / "taken")).open()
    with pytest.raises(ValueError, match=r"storage_path='.*taken': .*give a folder that every node can write to"):
        open_or_refuse(str(tmp_path / "taken"))


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch.*check AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", "nobody", "InvalidAccessKeyId.*check AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", None, "Credentials.*set AWS_ACCESS_KEY_ID"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "127.0.0.1:9.*check AWS_ENDPOINT_URL"),
        ("AWS_ENDPOINT_URL", "http://no-such-host.invalid", "no-such-host.*check AWS_ENDPOINT_URL"),
    ],
)
def test_wrong_credentials_and_endpoints_are_refused_at_once_with_the_way_out(
    bucket, monkeypatch, variable, value, told
):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    if value is None:
        monkeypatch.delenv(variable)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv(variable, value)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=f"storage_path='s3://{bucket}/run': .*{told}"):
        open_or_refuse(f"s3://{bucket}/run")
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(("name", "told"), [("not-there", "there is no bucket not-there"), ("a b", "bucket's name")])
def test_a_missing_bucket_is_refused_with_the_way_out(bucket, name, told):
    with pytest.raises(ValueError, match=told):
        open_or_refuse(f"s3://{name}/run")


def test_what_can_be_used_is_opened_with_the_time_that_was_asked_for(uri):
    storage = open_or_refuse(uri, timeout_s=3.0)
    assert (storage.timeout_s, storage.excludes) == (3.0, True)
    assert storage.create("name", b"data")


def test_an_endpoint_may_be_a_name(bucket, monkeypatch, object_store):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{object_store.port}")
    assert Storage(f"s3://{bucket}").open().create("name", b"data")


def test_a_store_that_ignores_conditions_is_warned_about(bucket, proxy, caplog, monkeypatch):
    proxy.fault = lambda method, path: "ignore condition"
    with caplog.at_level(logging.WARNING):
        storage = Storage(f"s3://{bucket}/run").open()
    assert not storage.excludes
    assert f"s3://{bucket}/run ignores conditional requests" in caplog.text
    monkeypatch.setattr("elastic_ring.state.storage.folder.SETTLE_S", 1.0)
    assert [storage.create("name", data) for data in (b"first", b"second")] == [True, False], "it is looked up first"
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda index: storage.create("at-once", b"%d" % index), range(4)))
    assert won.count(True) == 1, "each reads back what it wrote"


# ---------------------------------------------------------------- faults while running


def failing(num_requests: int, fault: str, method: str = "") -> Callable[[str, str], str | None]:
    """The next requests (of `method`) meet a fault, those after them do not."""
    left = [num_requests]
    lock = threading.Lock()

    def decide(asked: str, path: str) -> str | None:
        with lock:
            if method not in (asked, "") or left[0] == 0:
                return None
            left[0] -= 1
            return fault

    return decide


@pytest.mark.parametrize("fault", ["503", pytest.param("hang", marks=pytest.mark.slow), "lose answer"])
def test_a_request_that_fails_is_tried_again(bucket, proxy, fault):
    storage = Storage(f"s3://{bucket}/run", timeout_s=8.0)
    proxy.fault = failing(2, fault)
    data = os.urandom(MIB) * 33
    written = storage.write("big", [data])
    proxy.fault = failing(1, fault, "GET")
    assert storage.digest("big") == written
    proxy.fault = failing(1, fault, "PUT")
    assert storage.create("name", b"data"), "the answer may have been lost, the name was not"
    assert not storage.create("name", b"other")


def test_an_upload_whose_last_answer_was_lost_has_ended(bucket, proxy):
    storage = Storage(f"s3://{bucket}/run").open()
    answers = iter(["lose answer", "gone"])
    proxy.fault = lambda method, path: next(answers) if method == "POST" and "uploadId" in path else None
    assert storage.write("big", [bytes(2 * CHUNK_BYTES)]) == storage.digest("big")
    assert next(answers, None) is None, "both were given"
    answers = iter(["gone"])
    with pytest.raises(StorageFailed, match=r"other cannot be written: .*NoSuchUpload"):
        storage.write("other", [bytes(2 * CHUNK_BYTES)])


@pytest.mark.parametrize("fault", ["503", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_store_that_stays_away_is_given_up_within_the_time_and_named(bucket, proxy, fault):
    storage = Storage(f"s3://{bucket}/run", timeout_s=2.0)
    proxy.fault = lambda method, path: fault
    for operation in (lambda: storage.write("a", [b"x"]), lambda: storage.read("a"), lambda: list(storage.names())):
        begun = time.monotonic()
        with pytest.raises(StorageFailed, match=rf"s3://{bucket}/run.*\d attempts in \d\.\d s") as failed:
            operation()
        assert time.monotonic() - begun < 4 * storage.timeout_s
        assert failed.value.facts["path"].startswith(f"s3://{bucket}/run")


def test_a_first_attempt_that_was_slow_is_not_the_only_one():
    attempts = []

    def attempt() -> int:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            time.sleep(0.4)
            raise OSError("slow down")
        return len(attempts)

    assert Retries(0.3)(attempt, lambda error: False) == 2
    attempts.clear()
    with pytest.raises(OSError, match="slow down"):
        Retries(0.0)(attempt, lambda error: False)


def test_an_upload_that_is_given_up_leaves_neither_object_nor_parts(bucket, proxy):
    storage = Storage(f"s3://{bucket}/run", timeout_s=4.0)
    storage._files._retries = Retries(1.0)  # gives up before the parts that are slow
    proxy.fault = lambda method, path: "503" if "partNumber=2" in path else None
    with pytest.raises(StorageFailed, match=f"s3://{bucket}/run/big cannot be written.*SlowDown"):
        storage.write("big", [bytes(3 * CHUNK_BYTES)])
    assert any("partNumber=3" in path for _, path in proxy.requests), "the others were under way"
    assert (list(storage.names()), storage.uploads()) == ([], [])


def test_a_writer_that_fails_leaves_nothing(storage):
    def chunks() -> Iterator[bytes]:
        yield bytes(3 * CHUNK_BYTES)
        raise RuntimeError("the device is gone")

    with pytest.raises(StorageFailed, match="the device is gone"):
        storage.write("big", chunks())
    assert (list(storage.names()), storage.uploads()) == ([], [])


def test_uploads_that_others_left_are_listed_and_aborted(bucket, object_store, monkeypatch):
    monkeypatch.setattr(s3, "PAGE", 2)
    client = object_store.client()
    for name in ("run/a", "run/b", "run/c", "running"):
        client.create_multipart_upload(Bucket=bucket, Key=name)
    storage = Storage(f"s3://{bucket}/run").open()
    assert [upload.path for upload in storage.uploads()] == ["a", "b", "c"]
    assert all(abs(time.time() - upload.begun_unix_s) < 60 for upload in storage.uploads())
    for upload in storage.uploads():
        storage.abort(upload)
    assert [upload.path for upload in Storage(f"s3://{bucket}").uploads()] == ["running"]


@pytest.mark.slow
def test_credentials_that_are_renewed_are_used(bucket, monkeypatch, tmp_path, object_store):
    def credentials(secret: str) -> str:
        return f"[default]\naws_access_key_id = elastic-ring\naws_secret_access_key = {secret}\n"

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(credentials("expired"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with pytest.raises(StorageFailed, match=f"s3://{bucket}/run/a cannot be written: .*SignatureDoesNotMatch"):
        Storage(f"s3://{bucket}/run", timeout_s=4.0).write("a", [b"data"])
    storage = Storage(f"s3://{bucket}/run", timeout_s=60.0)
    renewal = threading.Timer(0.5, file.write_text, [credentials("elastic-ring")])
    renewal.start()
    storage.write("a", [b"data"])
    renewal.join()
    assert storage.read("a") == b"data"


@pytest.mark.slow
def test_what_a_gateway_acknowledged_is_there_after_it_was_killed_and_the_writer_goes_on(
    object_store, bucket, monkeypatch
):
    gateway = object_store.another_gateway()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.endpoint)
    storage = Storage(f"s3://{bucket}/run", timeout_s=200.0).open()  # a gateway on a busy host starts slowly
    acknowledged: list[StoredFile] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            data = os.urandom(64) * (MIB // 4 if len(acknowledged) % 3 == 2 else 1024)
            acknowledged.append(storage.write(f"file-{len(acknowledged)}", [data]))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        wait_for_number(acknowledged, 4, writing)
        gateway.kill()
        gateway.start()
        before = len(acknowledged)
        wait_for_number(acknowledged, before + 4, writing)
        stop.set()
        writing.result()
    gateway.kill()
    gateway.start()
    assert [storage.digest(file.name) for file in acknowledged] == acknowledged
    gateway.kill()


def wait_for_number(found: list[StoredFile], number: int, writing: Future[None]) -> None:
    limit = time.monotonic() + 60
    while len(found) < number:
        assert time.monotonic() < limit, f"{len(found)} of {number}"
        if writing.done():
            writing.result()
        time.sleep(0.02)


# ---------------------------------------------------------------- what a file system lacks, a folder that is away


@pytest.mark.parametrize(
    ("call", "number", "name"),
    [
        ("link", errno.EPERM, "hard links"),
        ("link", errno.EOPNOTSUPP, "hard links"),
        ("fsync", errno.EINVAL, "fsync"),
        ("replace", errno.ENOSYS, "rename"),
    ],
)
def test_a_call_that_a_file_system_lacks_is_named_at_once_and_before_the_start(
    tmp_path, monkeypatch, call, number, name
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    for look in (lambda: open_or_refuse(str(tmp_path)), lambda: check_writable(tmp_path / "run")):
        with pytest.raises(ValueError, match=f"its file system has no {name}.*: give a folder on a file system that"):
            look()
    begun = time.monotonic()
    if call != "replace":
        with pytest.raises(StorageFailed, match=f"its file system has no {name}"):
            Storage(str(tmp_path), timeout_s=60).create("a", b"")
    assert time.monotonic() - begun < 30, "no retry mends it"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_a_runs_folder_was_until_it_is_back(tmp_path):
    folder, away = tmp_path / "run", tmp_path / "away"
    Storage(str(folder)).open()
    (folder / "journal").touch()
    storage = pickle.loads(pickle.dumps(Storage(str(folder), timeout_s=0.1, anchor="journal")))
    folder.rename(away)
    for as_after_an_unmount in (False, True):
        if as_after_an_unmount:
            folder.mkdir()
        for write in (storage.write, storage.replace, storage.create):
            with pytest.raises(StorageFailed, match="was moved, removed or unmounted: it has no journal"):
                write("checkpoints/a", [b"1"] if write == storage.write else b"1")
        assert not any(folder.rglob("*"))
    folder.rmdir()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(Storage(str(folder), anchor="journal").write, "checkpoints/a", [b"1"])
        time.sleep(0.3)
        assert not folder.exists()
        away.rename(folder)
        written.result()
    assert (folder / "checkpoints" / "a").read_bytes() == b"1"


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def limited() -> Iterator[None]:
    """No file of this process can be longer than a MiB; the kernel answers EFBIG, as it answers ENOSPC elsewhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_named_and_nothing_stays(tmp_path, limited):
    storage = Storage(str(tmp_path / "run"), timeout_s=0.5).open()
    for write in (storage.write, lambda name, data: storage.replace(name, data[0])):
        with pytest.raises(StorageFailed, match=rf"{tmp_path}/run/big cannot be written: OSError.*\d attempts"):
            write("big", [bytes(2 * MIB)])
    assert list(storage.names()) == []


def test_a_write_goes_on_once_there_is_room(tmp_path, limited):
    storage = Storage(str(tmp_path / "run")).open()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = threading.Timer(0.5, resource.setrlimit, [resource.RLIMIT_FSIZE, (hard, hard)])
    room.start()
    data = os.urandom(3 * MIB)
    storage.write("big", [data])
    room.join()
    assert storage.read("big") == data
