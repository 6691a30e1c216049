"""Preparing from and to an object store, and reading the tokens back from there."""

from __future__ import annotations

import queue
import re
import threading
import time
from pathlib import Path

import pytest

from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import data_source
from elastic_ring.control.messages import CorpusVersion
from elastic_ring.control.state import State
from elastic_ring.data.manifest import MANIFEST, read_manifest
from elastic_ring.data.preparation.inputs import Piece
from elastic_ring.data.preparation.piece import PieceRecord, PieceWorker
from elastic_ring.data.prepared import PreparedTokens, with_versions
from elastic_ring.data.source import open_source, order_of
from elastic_ring.runtime.coordinator.services import CorpusWatcher
from tests.object_store.store import ObjectStore
from tests.sim.simulator.options import simulated
from tests.unit.data.corpora import prepared, texts, write_jsonl, write_table


@pytest.fixture
def bucket(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    object_store.enter(monkeypatch)
    return object_store.new_bucket()


def upload(store: ObjectStore, bucket: str, folder: Path) -> None:
    for path in sorted(folder.rglob("*.*")):
        store.client().put_object(Bucket=bucket, Key=f"in/{path.relative_to(folder)}", Body=path.read_bytes())


@pytest.mark.slow
def test_a_corpus_on_an_object_store_is_prepared_and_read_as_one_in_a_folder(
    object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", texts(60))
    write_jsonl(tmp_path / "in" / "b.jsonl.gz", texts(20, 60))
    write_table(tmp_path / "in" / "c.parquet", texts(40, 80))
    write_table(tmp_path / "in" / "d.ipc", texts(40, 120))
    upload(object_store, bucket, tmp_path / "in")
    here = prepared(tmp_path / "out", tmp_path / "in", drop_duplicates=True)
    uri = f"s3://{bucket}/out"
    there = prepared(uri, f"s3://{bucket}/in", drop_duplicates=True)
    assert there.digest == here.digest
    assert prepared(uri, f"s3://{bucket}/in", drop_duplicates=True) == there  # found complete
    with pytest.raises(ValueError, match="holds another preparation: align_tokens was 1, is 8"):
        prepared(uri, f"s3://{bucket}/in", drop_duplicates=True, align_tokens=8)
    near, far = (PreparedTokens.of(f"{place}/manifest.json", 48).open() for place in (str(tmp_path / "out"), uri))
    assert far.fingerprint == near.fingerprint
    ids = order_of(far, 0, 8).sample_ids(3)
    far.read_ahead(ids)
    assert [far.read(i).tokens.tolist() for i in ids] == [near.read(i).tokens.tolist() for i in ids]


@pytest.mark.slow
def test_a_pattern_on_an_object_store_names_files(object_store: ObjectStore, bucket: str, tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "c.c"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    upload(object_store, bucket, tmp_path / "in")
    assert prepared(tmp_path / "out", f"s3://{bucket}/in/**/*.py").num_tokens == len("a.py") + len("sub/b.py") + 2
    with pytest.raises(ValueError, match=rf"--source s3://{bucket}/none: there is no such file"):
        prepared(tmp_path / "other", f"s3://{bucket}/none")


@pytest.mark.slow
def test_text_files_on_an_object_store_are_those_of_a_folder(
    object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    for number, text in enumerate(texts(30)):
        (tmp_path / "in" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / str(number % 3) / f"{number}.txt").write_text(text)
    (tmp_path / "in" / "notes.md").write_text("no text of this corpus")
    upload(object_store, bucket, tmp_path / "in")
    here, there = (
        open_source(data_source(asked.data, asked.model, asked.step))
        for asked in (
            parse(["--data", f"{place}/*/*.txt", "--context=48"]) for place in (tmp_path / "in", f"s3://{bucket}/in")
        )
    )
    assert there.fingerprint == here.fingerprint
    assert there.num_sequences == here.num_sequences > 20
    ids = range(0, here.num_sequences, 5)
    assert [there.read(i).tokens.tolist() for i in ids] == [here.read(i).tokens.tolist() for i in ids]
    asked = parse(["--data", f"s3://{bucket}/none/*.txt", "--context", "48"])
    with pytest.raises(ValueError, match=rf"s3://{bucket}/none/\*\.txt: there is no such file"):
        open_source(data_source(asked.data, asked.model, asked.step))


def test_a_shard_that_the_store_has_lost_is_named(object_store: ObjectStore, bucket: str, tmp_path: Path) -> None:
    manifest = prepared(f"s3://{bucket}/out", write_jsonl(tmp_path / "a.jsonl", texts(60)))
    source = PreparedTokens.of(f"s3://{bucket}/out/manifest.json", 48).open()
    name = manifest.sources[0].shards[0].name
    object_store.client().delete_object(Bucket=bucket, Key=f"out/shards/{name}")
    with pytest.raises(ValueError, match=rf"s3://{bucket}/out/shards/{name}: cannot be read as token shard"):
        source.read(0)


@pytest.mark.slow
def test_a_run_on_an_object_store_finds_what_is_prepared_meanwhile_and_reads_the_same_as_from_a_folder(
    object_store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, whole = threading.Event(), PieceWorker.prepare

    def held(worker: PieceWorker, piece: Piece) -> PieceRecord:
        assert piece.number < 4 or more.wait(60)
        return whole(worker, piece)

    source, uri = write_jsonl(tmp_path / "a.jsonl", texts(80)), f"s3://{bucket}/out"
    prepared(tmp_path / "out", source)
    monkeypatch.setattr(PieceWorker, "prepare", held)
    preparing = threading.Thread(target=prepared, args=(uri, source))
    preparing.start()
    found, refused = queue.Queue[tuple[str, str]](), queue.Queue[str]()
    data = PreparedTokens.of(first_manifest(object_store, bucket), 48)
    watcher = CorpusWatcher(data, 0.05, lambda uri, digest: found.put((uri, digest)), refused.put)
    watcher.open(State(simulated("run", 1, 1, 10)))
    more.set()
    preparing.join(60)
    versions = [CorpusVersion(3, *found.get(timeout=10))]
    while not versions[-1].uri.endswith(MANIFEST):
        versions.append(CorpusVersion(versions[-1].first_step + 3, *found.get(timeout=10)))
    watcher.close(10)
    assert (found.empty(), refused.empty()) == (True, True)
    assert versions[-1].digest == read_manifest(str(tmp_path / "out" / MANIFEST)).digest
    read = {}
    for place in (uri, str(tmp_path / "out")):
        there = [CorpusVersion(one.first_step, one.uri.replace(uri, place), one.digest) for one in versions]
        corpus = open_source(with_versions(PreparedTokens.of(data.uri.replace(uri, place), 48), there))
        order = order_of(corpus, 0, 4)
        read[place] = [corpus.read(i).tokens.tolist() for step in range(12) for i in order.sample_ids(step)]
    assert read[uri] == read[str(tmp_path / "out")]


def first_manifest(store: ObjectStore, bucket: str) -> str:
    for _ in range(600):
        if store.client().list_objects_v2(Bucket=bucket, Prefix="out/manifest-000004.json").get("Contents"):
            return f"s3://{bucket}/out/manifest-000004.json"
        time.sleep(0.05)
    raise AssertionError("no manifest of a beginning came")


def test_a_watcher_names_what_the_store_lost_once_and_goes_on_when_it_is_back(
    object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    prepared(f"s3://{bucket}/out", write_jsonl(tmp_path / "a.jsonl", texts(80)))
    store, key = object_store.client(), "out/manifest-000004.json"
    data, body = PreparedTokens.of(f"s3://{bucket}/{key}", 48), store.get_object(Bucket=bucket, Key=key)["Body"].read()
    store.delete_object(Bucket=bucket, Key=key)
    found, refused = queue.Queue[tuple[str, str]](), queue.Queue[str]()
    watcher = CorpusWatcher(data, 0.02, lambda uri, digest: found.put((uri, digest)), refused.put)
    watcher.open(State(simulated("run", 1, 1, 10)))
    told = refused.get(timeout=10)
    assert re.search(rf"s3://{bucket}/{key}: cannot be read: .*; expected the manifest in use, of digest ", told)
    time.sleep(0.3)
    store.put_object(Bucket=bucket, Key=key, Body=body)
    assert found.get(timeout=10)[0] == f"s3://{bucket}/out/{MANIFEST}"
    watcher.close(10)
    assert refused.empty()
