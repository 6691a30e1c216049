"""Preparing a corpus: every document once and in order, equal digests, a killed preparation that goes on, refusals."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from elastic_ring.cli import data as command
from elastic_ring.data.manifest import Manifest, digest_of, read_manifest
from elastic_ring.data.preparation import prepare as prepare_module
from elastic_ring.data.preparation.piece import PieceWorker
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from tests.unit.data.corpora import prepared, texts, texts_of, tokens_of, write_jsonl, write_table

ROOT = Path(__file__).parents[3]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", texts(60))
    write_jsonl(folder / "b" / "c.jsonl.gz", texts(20, 60))
    write_table(folder / "c.parquet", texts(40, 80))
    write_table(folder / "d.arrow", texts(40, 120))
    write_table(folder / "e.ipc", texts(40, 160))
    (folder / "f.txt").write_text(texts(1, 200)[0])
    return folder


def test_every_document_of_every_format_is_there_once_and_in_order_in_row_groups_of_a_fixed_size(
    corpus: Path, tmp_path: Path
) -> None:
    manifest = prepared(tmp_path / "out", corpus)
    assert manifest.num_shards > 5
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(201)
    assert manifest.num_documents == 201
    assert manifest.num_tokens == sum(len(text.encode()) + 1 for text in texts(201))
    lengths = [len(text.encode()) + 1 for text in texts(201)]
    assert manifest.longest_document_tokens == max(lengths)
    for power, num_tokens in enumerate(manifest.tokens_by_length):
        assert num_tokens == sum(length for length in lengths if 2**power <= length < 2 ** (power + 1))
    assert sum(manifest.tokens_by_length) == manifest.num_tokens
    old = {**dataclasses.asdict(manifest), "tokens_by_length": ()}
    assert digest_of(old) == manifest.digest, "a corpus that was prepared before is the same corpus"
    assert (manifest.vocab_size, manifest.end_of_document, manifest.is_complete) == (257, 256, True)
    for shard in manifest.sources[0].shards:
        file = pq.ParquetFile(tmp_path / "out" / "shards" / shard.name)
        sizes = [
            sum(map(len, file.read_row_group(group)["tokens"].to_pylist())) for group in range(file.num_row_groups)
        ]
        assert sizes[:-1] == [64] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 64
        assert sum(sizes) == shard.num_tokens


@pytest.mark.parametrize("piece_bytes", [100, 700, 10**9])
def test_how_the_input_is_cut_loses_and_repeats_nothing(corpus: Path, tmp_path: Path, piece_bytes: int) -> None:
    manifest = prepared(tmp_path / "out", corpus, piece_bytes=piece_bytes)
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(201)


def test_a_piece_of_many_tokens_becomes_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ring.data.preparation.piece.SHARD_ROW_GROUPS", 3)
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    manifest = prepared(tmp_path / "out", source, piece_bytes=10**9)
    assert all(shard.num_tokens == 3 * 64 for shard in manifest.sources[0].shards[:-1])
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(30)
    assert manifest.num_documents == 30


def test_equal_input_and_settings_give_equal_digests_and_are_found_complete_and_others_do_not(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepared(tmp_path / "one", corpus)
    with caplog.at_level(logging.INFO), pytest.MonkeyPatch.context() as patched:
        patched.setattr(PieceWorker, "prepare", None)
        assert prepared(tmp_path / "one", corpus) == first
    assert "is complete already" in caplog.text
    assert prepared(tmp_path / "two", corpus).digest == first.digest
    assert prepared(tmp_path / "three", corpus, align_tokens=32).digest != first.digest
    write_jsonl(corpus / "a.jsonl", [*texts(59), "x" * len(texts(60)[-1].encode())])
    assert prepared(tmp_path / "four", corpus).digest != first.digest


def test_documents_are_filled_up_to_multiples(corpus: Path, tmp_path: Path) -> None:
    manifest = prepared(tmp_path / "out", corpus, align_tokens=32)
    documents = tokens_of(tmp_path / "out", manifest.sources[0])
    assert all(len(tokens) % 32 == 0 for tokens in documents)
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(201)


def test_the_first_of_equal_documents_is_kept(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", [*texts(20), *texts(5)])
    write_jsonl(tmp_path / "in" / "b.jsonl", [*texts(10, 15), *texts(3, 100), texts(1, 100)[0]])
    manifest = prepared(tmp_path / "out", tmp_path / "in", drop_duplicates=True, piece_bytes=400)
    assert texts_of(tmp_path / "out", manifest.sources[0]) == [*texts(25), *texts(3, 100)]
    assert manifest.dropped.num_duplicates == 5 + 5 + 1
    assert not (tmp_path / "out" / "duplicates").exists()


def test_sources_with_weights_stay_apart_and_those_without_are_one(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "one.jsonl", texts(50)), write_jsonl(tmp_path / "two.jsonl", texts(30, 50))
    mixture = prepared(tmp_path / "mixture", one, two, weights=(3.0, 1.0))
    assert [(source.name, source.weight) for source in mixture.sources] == [("one.jsonl", 3.0), ("two.jsonl", 1.0)]
    assert texts_of(tmp_path / "mixture", mixture.sources[0]) == texts(50)
    assert texts_of(tmp_path / "mixture", mixture.sources[1]) == texts(30, 50)
    plain = prepared(tmp_path / "plain", one, two)
    assert texts_of(tmp_path / "plain", plain.sources[0]) == texts(80)


def test_complete_beginnings_get_manifests_on_the_way(corpus: Path, tmp_path: Path) -> None:
    whole = prepared(tmp_path / "out", corpus)
    found = sorted((tmp_path / "out").glob("manifest-*.json"))
    assert len(found) >= 2
    for path in found:
        part = read_manifest(str(path))
        assert not part.is_complete
        assert part.sources[0].shards == whole.sources[0].shards[: part.num_shards]
        assert part.digest != whole.digest


KILLED = """
import os, signal, sys
from elastic_ring.data.preparation import piece
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tests.unit.data.corpora import prepared
whole, left = piece.ShardWriter.close, [4]
def close(self):
    done = whole(self)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)  # the piece's shards are there, its record is not
    return done
piece.ShardWriter.close = close
prepared(Path(sys.argv[1]), sys.argv[2], drop_duplicates=True)
"""


def test_a_preparation_that_was_killed_goes_on_without_repeating_or_losing_a_document(
    corpus: Path, tmp_path: Path
) -> None:
    undisturbed = prepared(tmp_path / "calm", corpus, drop_duplicates=True)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(out), str(corpus)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "manifest.json").exists()
    records = {path.name: path.stat().st_mtime_ns for path in (out / "pieces").iterdir()}
    assert len(records) == 3
    assert len(list((out / "shards").iterdir())) > len(records)
    manifest = prepared(out, corpus, drop_duplicates=True)
    assert manifest.digest == undisturbed.digest
    assert texts_of(out, manifest.sources[0]) == texts(201)
    assert {name: (out / "pieces" / name).stat().st_mtime_ns for name in records} == records


def test_a_manifest_is_of_the_planned_pieces_alone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = prepared(tmp_path / "out", corpus), tmp_path / "out"
    (out / "manifest.json").unlink()
    record = sorted((out / "pieces").iterdir())[1]
    record.write_text(json.dumps(json.loads(record.read_text()) | {"name": "000-other"}))
    assert prepared(out, corpus).digest == whole.digest
    (out / "manifest.json").unlink()
    record.unlink()
    monkeypatch.setattr(prepare_module, "_in_process", lambda job, task, pieces: iter(()))
    with pytest.raises(ValueError, match=rf"piece {record.stem} has not been prepared"):
        prepared(out, corpus)


# ------------------------------------------------------------ bad input


BAD: dict[str, tuple[Any, str]] = {
    "broken.jsonl": (b'{"text": "fine"}\n{"text": \n{"text": "fine too"}\n', "line 2 at byte 17 is no JSON object"),
    "column.jsonl": (b'{"other": "x"}\n{"text": "fine"}\n', "line 1 at byte 0 has no 'text': it has other"),
    "number.jsonl": (b'{"text": 3}\n{"text": "fine"}\n', "line 1 at byte 0 is no JSON object with text in 'text'"),
    "list.jsonl": (b'["text"]\n{"text": "fine"}\n', "line 1 at byte 0 is no JSON object with text in 'text'"),
    "half.jsonl": (
        b'{"text": "\\ud800"}\n{"text": "fine"}\n',
        "line 1 at byte 0 is no JSON object with text in 'text'",
    ),
    "empty.jsonl": (b"", "empty.jsonl: is empty"),
    "junk.parquet": (b"PAR1 this is not", "junk.parquet: cannot be read"),
    "junk.arrow": (b"ARROW1 this is not", "junk.arrow: cannot be read"),
    "junk.jsonl.gz": (b"\x1f\x8bthis is not", "junk.jsonl.gz: cannot be read"),
    "nothing.json.gz": (gzip.compress(b""), "nothing.json.gz: is no JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_ends_the_preparation_or_is_left_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, told = BAD[name]
    write_jsonl(tmp_path / "in" / "good.jsonl", ["good"])
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(ValueError, match="--on-bad-input skip") as refused:
        prepared(tmp_path / "out", tmp_path / "in")
    assert told in str(refused.value)
    assert name in str(refused.value)
    # Goes on where the first one stopped.
    manifest = prepared(tmp_path / "out", tmp_path / "in", on_bad_input="skip", max_bad_share=1.0)
    assert [told in line for line in manifest.dropped.bad] == [True]
    assert told in caplog.text
    expected = ["fine"] * content.count(b'"fine"') + ["fine too"] * content.count(b"fine too")
    assert sorted(texts_of(tmp_path / "out", manifest.sources[0])) == [*expected, "good"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_without_the_column_or_with_numbers_in_it_is_named(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / f"a.{kind}", texts(3))
    with pytest.raises(ValueError, match=r"has no column 'body': it has id, text"):
        prepared(tmp_path / "out", path, text_column="body")
    with pytest.raises(ValueError, match="column 'id' is of type int64 and not text"):
        prepared(tmp_path / "other", path, text_column="id")
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    if kind == "parquet":
        pq.write_table(table, tmp_path / "two.parquet")
    else:
        with pa.OSFile(str(tmp_path / "two.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"has 2 columns 'text'"):
        prepared(tmp_path / "two", tmp_path / f"two.{kind}")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    for name in ("c.arrow", "d.ipc"):
        data = write_table(tmp_path / name, texts(50)).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=f"{name}: cannot be read"):
            prepared(tmp_path / f"out-{name}", tmp_path / name)


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "", None, "two"])
    table = write_table(tmp_path / "b.parquet", ["three", "", None])
    manifest = prepared(tmp_path / "out", path, table)
    assert texts_of(tmp_path / "out", manifest.sources[0]) == ["one", "two", "three"]
    assert manifest.dropped.num_empty_documents == 4


def test_a_source_without_a_document_is_refused(tmp_path: Path) -> None:
    full, empty = write_jsonl(tmp_path / "full.jsonl", ["one"]), write_jsonl(tmp_path / "none.jsonl", [""])
    with pytest.raises(ValueError, match=r"none\.jsonl has no document"):
        prepared(tmp_path / "out", full, empty, weights=(1.0, 1.0))
    with pytest.raises(ValueError, match="there is no such file"):
        prepared(tmp_path / "out2", tmp_path / "absent")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match=r"none below it that can be read as text\. Left out: is a picture"):
        prepared(tmp_path / "out2", tmp_path / "pictures")


def test_a_preparation_starts_no_ray_by_itself(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    @contextmanager
    def session(num_cpus: int) -> Iterator[None]:
        asked.append(num_cpus)
        yield

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever ran in this process before
    monkeypatch.setattr(ray, "init", None)
    config = PrepareConfig((str(corpus),), str(tmp_path / "out"), workers=3)
    for given in (None, session):
        with pytest.raises(ValueError, match=r"workers=3: this process has no Ray: give prepare\(config, .*cluster\)"):
            prepare(config, given)
    assert asked == [3]
    whole = prepare(dataclasses.replace(config, workers=0))
    assert prepare(config, session) == whole  # it is complete, so nobody is asked
    assert asked == [3]
    unsaid = dataclasses.replace(config, out=str(tmp_path / "small"), workers=None)
    assert prepare(unsaid, session).digest == whole.digest, "a small corpus needs nobody"
    assert asked == [3]
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 10)
    with pytest.raises(ValueError, match="this process has no Ray"):
        prepare(dataclasses.replace(unsaid, out=str(tmp_path / "large")), session)
    assert asked[1:] == [os.cpu_count()]


def test_input_that_changed_since_it_was_listed_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grown(self: PieceWorker, piece: Any) -> None:
        write_jsonl(corpus / "a.jsonl", texts(61))
        monkeypatch.undo()
        PieceWorker.prepare(self, piece)

    monkeypatch.setattr(PieceWorker, "prepare", grown)
    with pytest.raises(ValueError, match=r"a\.jsonl: has .* bytes, .* when it was listed"):
        prepared(tmp_path / "out", corpus)
    with pytest.raises(ValueError, match="holds another preparation: its input had other files or sizes"):
        prepared(tmp_path / "out", corpus)


def test_a_folder_with_other_files_or_another_preparation_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex"):
        prepared(tmp_path / "full", corpus)
    prepared(tmp_path / "out", corpus)
    with pytest.raises(ValueError, match="align_tokens was 1, is 32; give a new folder"):
        prepared(tmp_path / "out", corpus, align_tokens=32)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"weights": (1.0,)}, "give one for each of the 2 sources"),
        ({"weights": (1.0, 0.0)}, "weights"),
        ({"tokenizer": "/no/such/folder"}, "tokenizer='/no/such/folder': no such folder"),
        ({"end_of_document": "</s>"}, "the byte tokenizer has one of its own"),
        ({"align_tokens": 3}, "row_group_tokens=64 must be a multiple of it"),
        ({"on_bad_input": "ignore"}, "on_bad_input='ignore': must be one of fail, skip"),
        ({"workers": -1}, "workers=-1"),
        ({"worker": 1}, "did you mean workers"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ValueError, match=r".") as refused:
        prepared(tmp_path / "out", path, path, **settings)
    assert told in str(refused.value)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------ the manifest, the command


def test_a_manifest_that_was_altered_is_refused(corpus: Path, tmp_path: Path) -> None:
    manifest = prepared(tmp_path / "out", corpus)
    path = tmp_path / "out" / "manifest.json"
    assert read_manifest(str(path)) == manifest
    assert read_manifest(path.as_uri()) == manifest
    plain = json.loads(path.read_text())
    plain["sources"][0]["shards"][0]["num_tokens"] += 1
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="was altered after it was written"):
        read_manifest(str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no manifest"):
        read_manifest(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        read_manifest(str(tmp_path / "absent" / "manifest.json"))


def test_the_digest_is_of_the_content_and_not_of_the_place(corpus: Path, tmp_path: Path) -> None:
    manifest = prepared(tmp_path / "out", corpus)
    elsewhere = dataclasses.replace(manifest, about={"sources": ["s3://elsewhere"]})
    assert elsewhere.sealed().digest == manifest.digest
    other = dataclasses.replace(manifest, end_of_document=0)
    assert other.sealed().digest != manifest.digest
    assert digest_of(json.loads(manifest.to_json())) == manifest.digest
    assert isinstance(other, Manifest)


def test_the_command_prints_what_was_left_out_and_the_digest_last(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus / "empty.txt").write_text("")
    words = ["prepare", "--source", str(corpus), "--out", str(tmp_path / "out"), "--workers", "0"]
    assert command.main(words) == 2
    assert "empty.txt: is empty; mend or remove it" in capsys.readouterr().err
    assert command.main([*words, "--on-bad-input", "skip", "--drop-duplicates"]) == 2  # another preparation
    capsys.readouterr()
    assert command.main([*words, "--on-bad-input", "skip"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("201 documents")
    assert lines[1] == "left out: 0 duplicates, 0 empty documents, 1 empty files, 0 bad inputs"
    assert lines[-2:] == [str(tmp_path / "out" / "manifest.json"), read_manifest(lines[-2]).digest]


def test_files_by_pattern_and_by_other_endings(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "c.c"):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(name)
    deep = prepared(tmp_path / "deep", f"{tmp_path}/src/**/*.py")
    assert texts_of(tmp_path / "deep", deep.sources[0]) == ["a.py", "sub/b.py"]
    flat = prepared(tmp_path / "flat", f"{tmp_path}/src/*.py")
    assert texts_of(tmp_path / "flat", flat.sources[0]) == ["a.py"]
    named = prepared(tmp_path / "named", tmp_path / "src" / "c.c")
    assert texts_of(tmp_path / "named", named.sources[0]) == ["c.c"]


def test_any_file_system_of_fsspec_is_read(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.jsonl", b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts(40)))
    memory.pipe("/corpus/b.txt", b"last")
    try:
        manifest = prepared(tmp_path / "out", "memory://corpus", piece_bytes=500)
        assert texts_of(tmp_path / "out", manifest.sources[0]) == [*texts(40), "last"]
    finally:
        memory.rm("/corpus", recursive=True)
    with pytest.raises(ValueError, match=r"nowhere://x: cannot be opened"):
        prepare(PrepareConfig(("nowhere://x",), str(tmp_path / "other"), workers=0))


def test_the_command_sets_every_setting_and_leaves_out_what_is_not_given() -> None:
    given = ["prepare", "--source", "a,b", "--out", "o", "--piece-bytes", "77", "--row-group-tokens", "256"]
    options = command.parser().parse_args(given)
    assert set(PrepareConfig.__pydantic_fields__) - {"sources"} - set(vars(options)) == set()
    asked = command.config_of(options)
    places = tuple(str(Path(name).absolute()) for name in ("a", "b"))  # workers have other working directories
    assert (asked.sources, asked.piece_bytes, asked.row_group_tokens, asked.workers) == (places, 77, 256, None)
    assert asked.out == str(Path("o").absolute())
    assert command.config_of(command.parser().parse_args(given[:5])) == PrepareConfig(("a", "b"), "o")
