"""Preparing from and to an object store, and reading the tokens back from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.source import order_of
from tests.object_store.store import ObjectStore
from tests.unit.data.corpora import prepared, texts, write_jsonl, write_table


@pytest.fixture
def bucket(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
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


def test_a_pattern_on_an_object_store_names_files(object_store: ObjectStore, bucket: str, tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "c.c"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    upload(object_store, bucket, tmp_path / "in")
    assert prepared(tmp_path / "out", f"s3://{bucket}/in/**/*.py").num_tokens == len("a.py") + len("sub/b.py") + 2
    with pytest.raises(ValueError, match=rf"--source s3://{bucket}/none: there is no such file"):
        prepared(tmp_path / "other", f"s3://{bucket}/none")


def test_a_shard_that_the_store_has_lost_is_named(object_store: ObjectStore, bucket: str, tmp_path: Path) -> None:
    manifest = prepared(f"s3://{bucket}/out", write_jsonl(tmp_path / "a.jsonl", texts(60)))
    source = PreparedTokens.of(f"s3://{bucket}/out/manifest.json", 48).open()
    name = manifest.sources[0].shards[0].name
    object_store.client().delete_object(Bucket=bucket, Key=f"out/shards/{name}")
    with pytest.raises(ValueError, match=rf"s3://{bucket}/out/shards/{name}: cannot be read as token shard"):
        source.read(0)
