"""A real store that misbehaves for a while, at each moment at which a run needs it: it is waited for and told of, and
what is read and written is right. The table of docs/guarantees.md has the same rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.config import RunConfig, Timeouts
from elastic_ring.data.loader import Loader
from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.source import open_source
from elastic_ring.errors import StorageFailed
from elastic_ring.runtime.run_storage import RunRecords
from elastic_ring.runtime.terms import Terms
from elastic_ring.state.storage import backend
from elastic_ring.state.storage.folder import Storage, open_or_refuse
from tests.object_store.store import ObjectStore
from tests.unit.data.corpora import prepared, texts, write_jsonl

CONTEXT = 48
LAYOUT = make_layout("contiguous", CONTEXT, 1)
WAIT_S = 20.0
FAULTS = ["refuse", "cut", "delay", "503", "403"]
DATA = b"state" * 1000


@pytest.fixture(scope="module")
def corpus(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a manifest in a bucket of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    prepared(folder / "out", write_jsonl(folder / "in" / "a.jsonl", texts(60)))
    bucket = object_store.new_bucket()
    for path in sorted((folder / "out").rglob("*.*")):
        object_store.client().put_object(Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())
    return f"s3://{bucket}/out/manifest.json"


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    return object_store.new_bucket()


def read_all(loader: Loader, num: int = 3) -> list[Any]:
    ids = list(range(num))
    return [loader.load(i, 0, LAYOUT, 0, upcoming=ids[at + 1 :]).tokens.numpy() for at, i in enumerate(ids)]


# ---------------------------------------------------------------- moments, each with what it must give


def submits(bucket: str) -> None:
    assert open_or_refuse(f"s3://{bucket}/run", write=False).uri == f"s3://{bucket}/run"


def claims_a_term(bucket: str) -> None:
    run = RunConfig("run", f"s3://{bucket}", timeouts=Timeouts(storage_s=WAIT_S))
    terms = Terms(run).open()
    assert [terms.claim("a").term, terms.claim("a").term] == [1, 2]


def writes_a_checkpoint(bucket: str) -> None:
    storage = Storage(f"s3://{bucket}/run", timeout_s=WAIT_S)
    assert storage.write("checkpoints/part", [DATA]) == storage.digest("checkpoints/part")


def reads_a_checkpoint(bucket: str) -> None:
    storage = Storage(f"s3://{bucket}/run", timeout_s=WAIT_S)
    assert storage.load("checkpoints/here")[0] == DATA


def lists_checkpoints(bucket: str) -> None:
    storage = Storage(f"s3://{bucket}/run", timeout_s=WAIT_S)
    assert [name for name, _ in storage.names("checkpoints")] == ["checkpoints/here"]


def writes_the_weights(bucket: str) -> None:
    storage = Storage(f"s3://{bucket}/run", timeout_s=WAIT_S)
    storage.replace("weights.safetensors", [DATA])
    assert storage.read("weights.safetensors") == DATA


MOMENTS = [submits, claims_a_term, writes_a_checkpoint, reads_a_checkpoint, lists_checkpoints, writes_the_weights]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_store_that_misbehaves_for_a_moment_is_waited_for(proxy, bucket, moment, fault):
    Storage(f"s3://{bucket}/run").replace("checkpoints/here", DATA)
    left = [fault] * 2
    proxy.fault = lambda method, path: left.pop() if left else None
    if (moment, fault) == (submits, "403"):  # a person is there to mend it
        with pytest.raises(ValueError, match="or use other credentials"):
            moment(bucket)
        return
    moment(bucket)
    assert len(left) < 2, "a fault was met"


@pytest.mark.parametrize("fault", ["503", *(pytest.param(one, marks=pytest.mark.slow) for one in FAULTS[:3])])
def test_data_on_a_store_that_misbehaves_are_read_all_the_same(proxy, corpus, fault, monkeypatch):
    """Long enough for what the client tries again by itself to fail."""
    monkeypatch.setattr(backend, "TELL_AFTER_S", 0.0)
    source = open_source(PreparedTokens.of(corpus, CONTEXT))
    with Loader(source) as loader:
        expected = read_all(loader)
    told: list[str] = []
    with Loader(open_source(PreparedTokens.of(corpus, CONTEXT)), patience_s=WAIT_S, tell=told.append) as loader:
        until_s = time.monotonic() + (2.0 if fault == "delay" else 15.0)
        proxy.fault = lambda method, path: fault if not told and time.monotonic() < until_s else None
        assert np.array_equal(read_all(loader), expected)
    if fault != "delay":
        assert "waits for storage" in told[0]
        assert corpus.rpartition("/")[0] in told[0]


def test_a_flipped_byte_of_data_is_read_again_and_one_that_stays_names_the_shard(proxy, corpus):
    with Loader(open_source(PreparedTokens.of(corpus, CONTEXT))) as loader:
        expected = read_all(loader)
    source = open_source(PreparedTokens.of(corpus, CONTEXT))
    flips = iter(["flip"])
    proxy.fault = lambda method, path: next(flips, None) if method == "GET" and "shards/" in path else None
    with Loader(source) as loader:
        assert np.array_equal(read_all(loader), expected)
    assert next(flips, None) is None, "a byte was flipped"
    proxy.fault = lambda method, path: "flip" if method == "GET" and "shards/" in path else None
    with (
        Loader(open_source(PreparedTokens.of(corpus, CONTEXT)), patience_s=WAIT_S) as loader,
        pytest.raises(ValueError, match=r"shards/.*parquet"),
    ):
        read_all(loader)


def test_a_store_of_data_that_stays_away_ends_as_storage_failed_with_the_place_within_the_time(proxy, corpus):
    source = open_source(PreparedTokens.of(corpus, CONTEXT))
    proxy.fault = lambda method, path: "503"
    begun_s = time.monotonic()
    with (
        Loader(source, patience_s=1.0) as loader,
        pytest.raises(StorageFailed, match=r"shards/.* attempts in") as failed,
    ):
        read_all(loader)
    assert time.monotonic() - begun_s < 30
    assert failed.value.facts["path"].startswith(corpus.rpartition("/")[0])


def test_a_flipped_byte_of_a_checkpoint_shows_in_its_digest(proxy, bucket):
    storage = Storage(f"s3://{bucket}/run")
    written = storage.write("part", [DATA])
    proxy.fault = lambda method, path: "flip"
    assert storage.load("part")[1].sha256 != written.sha256


def test_a_term_that_a_listing_hides_is_not_claimed_again(proxy, bucket):
    run = RunConfig("run", f"s3://{bucket}")
    assert Terms(run).open().claim("a").term == 1
    proxy.fault = lambda method, path: "hide"
    terms = Terms(run).open()
    assert terms.claim("a") is None
    assert terms.claim("a").term == 2


def test_an_onlooker_is_told_soon_and_waits_for_a_bounded_time(proxy, bucket, monkeypatch):
    monkeypatch.setattr(backend, "TELL_AFTER_S", 0.2)
    monkeypatch.setattr("elastic_ring.runtime.run_storage.LOOK_S", 1.0)
    proxy.fault = lambda method, path: "503"
    told: list[str] = []
    begun_s = time.monotonic()
    with RunRecords(f"s3://{bucket}/run", told.append) as records, pytest.raises(StorageFailed, match=f"s3://{bucket}"):
        records.look()
    assert time.monotonic() - begun_s < 10
    assert told[0].startswith("waits for storage")
    assert f"s3://{bucket}/run" in told[0]


def test_the_last_attempt_begins_at_the_end_of_the_time_and_not_a_pause_before_it():
    begun_s, tried_s = time.monotonic(), list[float]()

    def attempt() -> None:
        tried_s.append(time.monotonic() - begun_s)
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        backend.Retries(1.0)(attempt, lambda error: False)
    assert tried_s[-1] >= 1.0


def test_prepared_files_may_lie_on_a_disk_that_is_away_for_a_moment(tmp_path):
    """As a mount does: the error is one of the file system's, and neither absence nor damage."""
    prepared(tmp_path / "out", write_jsonl(tmp_path / "in" / "a.jsonl", texts(20)))
    source = open_source(PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), CONTEXT))
    answers = iter([OSError(116, "Stale file handle"), PermissionError(13, "Permission denied")])

    class Away:
        context_tokens = CONTEXT

        def read(self, sample_id: int) -> Any:
            if (error := next(answers, None)) is not None:
                raise error
            return source.read(sample_id)

    with Loader(Away(), patience_s=WAIT_S) as loader:  # type: ignore[arg-type]
        found = read_all(loader, 1)
    with Loader(source) as loader:
        assert np.array_equal(found, read_all(loader, 1))
