"""Passwords and signatures in URIs open what they name, and stand in nothing that a run or a preparation leaves."""

from __future__ import annotations

import json
import logging
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import pytest

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, StepConfig
from elastic_ring.cli import settings, train
from elastic_ring.control.messages import CorpusVersion
from elastic_ring.data.filesystem import located, reading
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from elastic_ring.data.prepared import versions_beside, with_versions
from elastic_ring.data.source import PreparedTokens, TokenShards
from elastic_ring.errors import StorageFailed
from elastic_ring.files import shown_url, with_access
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.coordinator.services import CorpusWatcher
from elastic_ring.train.task import TrainingTask, description_of
from tests.unit.data.corpora import texts, write_jsonl

SECRET = "hunter2"
STORE = f"memory://me:{SECRET}@store"  # fsspec's own, in this process; the name and password are a folder to it


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("ftp://me:hunter2@host:21/a/b.txt", "ftp://host:21/a/b.txt"),
        ("sftp://me@host/a@b", "sftp://host/a@b"),
        ("https://host/a?X-Amz-Signature=hunter2#hunter2", "https://host/a"),
        ("simplecache::https://u:hunter2@host/a", "simplecache::https://host/a"),
        ("s3://key:hunter2@bucket/a?endpoint_override=host", "s3://bucket/a"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("/a/b?c=d", "/a/b?c=d"),
        ("a@b", "a@b"),
        ("abfs://runs@acct.dfs.net/a", "abfs://runs@acct.dfs.net/a"),
        ("az://runs:hunter2@acct/a", "az://runs@acct/a"),
        ("wasbs://:hunter2@acct/a?sig=hunter2", "wasbs://acct/a"),
        ("abfs://acct/runs", "abfs://acct/runs"),
        ("s3://u:hun/ter2@bucket/a", "s3://bucket/a"),
        ("s3://k:hunt?er2@b", "s3://b"),
        ("s3://k:h#2@b/a", "s3://b/a"),
        ("ftp://u:hunter2@h:21/a@b", "ftp://h:21/a@b"),
        ("hdfs://host:8020/a@b", "hdfs://host:8020/a@b"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("s3://u:hun ter2@h/x", "s3://h/x"),
        ("redis://:hun 'ter2@h", "redis://h"),
        ("s3://u:hun'ter2@h/x", "s3://h/x"),
        ("at ...s3://u:hunter2@h/x", "at ...s3://h/x"),
        ("gs://b/a?X-Goog-Signature=hunter2", "gs://b/a"),
        ("s3://b/a?1&secret_key=hunter2", "s3://b/a"),
        ("s3://b/day-?/kind=a.parquet", "s3://b/day-?/kind=a.parquet"),
        ("http://host:8020 and a mail to a@b", "http://host:8020 and a mail to a@b"),
        ("wait, http://host:8020, or ask a@b", "wait, http://host:8020, or ask a@b"),
        ("data ('http://u:hunter2@h/a?b', 'ftp://h/c') and more?", "data ('http://h/a', 'ftp://h/c') and more?"),
    ],
)
def test_a_uri_is_shown_without_name_password_and_query(given, shown):
    assert shown_url(given) == shown


def test_quotes_in_a_uri_leave_the_records_of_a_run_readable(tmp_path):
    storage = f'http://u:{SECRET}@h/x?q="v"&w=\\'
    data = TokenShards(64, f'memory://me:{SECRET}@h/x?q="v"', vocab_size=257)
    run = RunConfig("r", run_dir=str(tmp_path), resume=storage)
    task = TrainingTask(partial(Transformer, preset("laptop")), data, StepConfig(context_tokens=64), OptimConfig())
    kept = replace(settings.parse(["--run-dir", str(tmp_path)]), run=run)
    written = kept.toml(), json.dumps(description_of(task))
    assert tomllib.loads(written[0])["run"]["resume"].startswith("http://h/x")
    assert json.loads(written[1])["data"]["uri"].startswith("memory://h/x")
    assert SECRET not in "".join(written)


def put(uri: str, path: Path) -> None:
    with fsspec.open(uri, "wb") as file:
        file.write(path.read_bytes())


def test_neither_files_nor_lines_nor_errors_of_a_run_have_the_password(tmp_path, caplog):
    caplog.set_level(logging.INFO)  # fsspec's own debug lines name the folders of its memory
    source = f"{STORE}/in/a.jsonl"
    put(source, write_jsonl(tmp_path / "a.jsonl", texts(40)))
    manifest = prepare(PrepareConfig((source,), str(tmp_path / "out"), workers=0))
    assert manifest.about["sources"] == ["memory://store/in/a.jsonl"]
    for file in sorted((tmp_path / "out").rglob("*.json")) + sorted((tmp_path / "out").rglob("shards/*")):
        put(f"{STORE}/out/{file.relative_to(tmp_path / 'out')}", file)
    uri = f"{STORE}/out/manifest.json"
    data = PreparedTokens.of(uri, 64)
    assert data.open().num_sequences > 0, "the password is used"
    step, run = StepConfig(steps=2, context_tokens=64), RunConfig("r", run_dir=str(tmp_path / "run"))
    made = ElasticRingTrainer(partial(Transformer, preset("laptop")), data, step_config=step, run_config=run)
    made.submission().write_record()
    asked = settings.parse(["--data", uri, "--run-dir", str(tmp_path / "two"), "--context", "128"])
    train.build(asked).submission().write_record()
    written = "".join(path.read_text() for folder in ("run", "two") for path in (tmp_path / folder).iterdir())
    assert "memory://store/out/manifest.json" in written
    assert SECRET not in written + caplog.text + (tmp_path / "out" / "manifest.json").read_text()


def test_an_error_names_the_place_without_the_password(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    put(f"{STORE}/manifest.json", tmp_path / "manifest.json")
    for fails in (lambda: read_manifest(f"{STORE}/manifest.json"), lambda: located(f"nobody://me:{SECRET}@h/x")):
        with pytest.raises(ValueError, match=r"^(memory://store/manifest\.json|nobody://h/x): ") as refused:
            fails()
        assert SECRET not in str(refused.value)


def test_what_a_store_answers_is_told_without_the_password():
    def away() -> None:
        raise ConnectionError(f"GET http://me:{SECRET}@host/x?Signature={SECRET}: refused")

    with pytest.raises(StorageFailed) as told:
        reading(f"{STORE}/x", away)
    assert SECRET not in json.dumps([str(told.value), told.value.facts])


def test_a_corpus_that_grows_is_journalled_without_the_password_and_opened_with_it():
    data = PreparedTokens(64, f"{STORE}/out/manifest-2.json", "a" * 64, 257, 1)
    (version,) = versions_beside(data, [CorpusVersion(3, "elsewhere/manifest-4.json", "b" * 64)])
    assert version.uri == "memory://store/out/manifest-4.json"
    assert with_versions(data, [version]).later[0].uri == f"{STORE}/out/manifest-4.json"
    assert with_access("memory://another/out/manifest-4.json", data.uri) == "memory://another/out/manifest-4.json"
    told: list[tuple[str, str]] = []
    watcher = CorpusWatcher(data, 1.0, lambda uri, digest: told.append((uri, digest)), print)
    assert watcher._uri == data.uri
