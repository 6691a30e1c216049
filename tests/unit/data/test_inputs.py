"""What is read, and what happens to files that are no documents: at both doors the same, and nothing in silence."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from elastic_ring.cli import data as command
from elastic_ring.data.listing import list_source
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.packing import END_OF_DOCUMENT
from elastic_ring.data.preparation import documents as reader
from elastic_ring.data.source import TextFiles
from tests.unit.data.corpora import prepared, texts, tokens_of, write_jsonl, write_table
from tests.unit.data.odd_files import BAD, GOOD, OTHER, make


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return make(tmp_path / "odd")


def documents(uri: Path | str) -> list[bytes]:
    """What training reads."""
    source = TextFiles(4, (str(uri),), allow_left_out=True).open()
    chunks = source._cache.chunks
    stream = [token for index in range(len(chunks)) for token in chunks[index].load()[0].tolist()]
    found, document = [], bytearray()
    for token in stream:
        if token == END_OF_DOCUMENT:
            found.append(bytes(document))
            document.clear()
        else:
            document.append(token)
    return found


def in_shards(out: Path) -> list[bytes]:
    manifest = read_manifest(str(out / "manifest.json"))
    return [bytes(tokens[:-1]) for tokens in tokens_of(out, manifest.sources[0])]


def test_every_file_of_an_odd_folder_is_used_or_counted(
    odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prepare", "--source", str(odd), "--out", str(tmp_path / "out"), "--workers", "0", "--piece-bytes", "2000"]
    skip = ["--on-bad-input", "skip", "--max-bad-share", "1"]
    assert command.main([*words, *skip, "--allow-left-out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    manifest = read_manifest(lines[-2])
    files = manifest.about["files"]
    on_disk = sum(len(names) for _, _, names in os.walk(odd)) + 1  # and the link to the folder
    assert sum(group["num_files"] for groups in files.values() for group in groups) == on_disk > 40
    listing = list_source(str(odd), allow_left_out=True)
    used = {file.name for file in listing.files}
    assert used == {*GOOD, *BAD, "batches.arrow", "stream.ipc", "empty.txt", "sub/deep.txt"} - {"hard.txt"}
    left_out = {file.name: file.reason for file in listing.left_out}
    assert set(left_out) == {
        *OTHER,
        "base.db",
        "empty.dat",
        "caf\\xe9.txt",
        "pipe.txt",
        "loop",
        "dangling.txt",
        "same.txt",
        "hard.txt",
    }
    assert left_out["loop"] == "a link to a folder that is read under another name"
    assert "an archive by its ending .zip: unpack it" in left_out["archive.zip"]
    named_bad = {line.partition(":")[0] for line in manifest.dropped.bad}
    assert named_bad == {*BAD, "empty.txt"}
    heads = [line for line in lines if line.startswith(("used: ", "left out: ")) and "files" in line]
    assert [head.partition(":")[0] for head in heads] == ["left out", "used", "left out"]


@pytest.mark.parametrize("name", [*GOOD, "batches.arrow", "stream.ipc"])
def test_both_doors_read_the_same_documents(odd: Path, tmp_path: Path, name: str) -> None:
    assert command.main(["prepare", "--source", str(odd / name), "--out", str(tmp_path / "out"), "--workers=0"]) == 0
    found = documents(odd / name)
    assert found == in_shards(tmp_path / "out")
    assert not any(b"{" in document or document.startswith(b"\xef\xbb\xbf") for document in found)


@pytest.mark.parametrize("name", [*BAD, *(name for name in OTHER if OTHER[name] and not name.startswith("."))])
def test_both_doors_refuse_what_is_no_text_by_name(
    odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert command.main(["prepare", "--source", str(odd / name), "--out", str(tmp_path / "out"), "--workers=0"]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert len(told.splitlines()) == 1
    with pytest.raises(ValueError, match=r".") as refused:
        documents(odd / name)
    assert name in str(refused.value)


def test_what_to_do_with_a_file_that_is_refused_is_named(odd: Path) -> None:
    for name, way_out in {
        "records.jsonl.xz": "is compressed in a format that is not read by its ending .xz: decompress it",
        "table.parquet.gz": "is gzip of parquet: decompress it",
        "paper.pdf": "is a PDF by its ending .pdf: take its text out, as pdftotext does",
        "table.csv": "is a table of separated values by its ending .csv: write its text out as JSON lines",
        "utf16.txt": "% of 30 bytes are no UTF-8 text): convert it with iconv",
        "lfs.txt": "fetch the file: git lfs pull",
        "window.txt.zst": "zstd -d --long=31",
        "config.json": "record 1 has no 'text': it has hidden_size; --text-column names the one to take",
        "noise": "% of 4,096 bytes are no UTF-8 text): convert it with iconv",
        "pipe.txt": "is a pipe, a socket or a device, which cannot be read twice: give a file",
    }.items():
        with pytest.raises(ValueError, match=name.replace(".", r"\.")) as refused:
            documents(odd / name)
        assert way_out in str(refused.value)
    with pytest.raises(ValueError, match=r"caf\\xe9\.txt: its name is not UTF-8: rename it"):
        list_source(os.fsdecode(os.fsencode(odd) + b"/caf\xe9.txt"))


def test_a_folder_with_more_that_is_left_out_than_is_used_is_refused_at_both_doors(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README.md").write_text("about the corpus")
    for number in range(7):
        (tmp_path / "in" / f"{number}.bin").write_bytes(bytes(99))
    told = r"more is left out \(693 bytes\) than is used \(16 bytes in 1 file\).*7 files, 693 bytes \(0\.bin, 1\.bin, "
    with pytest.raises(ValueError, match=rf"{told}2\.bin, 3\.bin, 4\.bin, \.\.\.\).*: --allow-left-out"):
        prepared(tmp_path / "out", tmp_path / "in")
    with pytest.raises(ValueError, match=rf"{told}.*--data\.allow-left-out"):
        TextFiles(4, (str(tmp_path / "in"),)).open()
    assert documents(tmp_path / "in") == [b"about the corpus"]
    assert prepared(tmp_path / "out", tmp_path / "in", allow_left_out=True).num_documents == 1


def test_links_do_not_multiply_a_corpus_and_what_is_hidden_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".store").mkdir(parents=True)
    (folder / "b").mkdir()
    (folder / "b" / "x.txt").write_text("x")
    (folder / ".store" / "y").write_text("y")
    (folder / "loop").symlink_to(".")
    (folder / "a").symlink_to("b")
    (folder / "y.txt").symlink_to(".store/y")
    for uri in (folder, f"{folder}/**"):
        assert [file.name for file in list_source(str(uri)).files][:2] == ["b/x.txt", "y.txt"]
        assert documents(uri) == [b"x", b"y"]


def test_a_pattern_takes_links_whose_targets_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f3a").write_text("x")
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "snapshots" / "1" / "x.txt").symlink_to("../../blobs/0f3a")
    (tmp_path / "zero").symlink_to("snapshots/1")
    for pattern in ("**/*.txt", "snap*/*/x.txt", "zer*/x.txt", "[z]ero/*"):
        assert documents(f"{tmp_path}/{pattern}") == [b"x"]


def test_what_is_hidden_or_beside_a_saved_dataset_does_not_outweigh_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "text" / ".git").mkdir(parents=True)
    (tmp_path / "text" / ".git" / "pack").write_bytes(bytes(9999))
    (tmp_path / "text" / "a.txt").write_text("x")
    listing = list_source(str(tmp_path / "text"))
    assert [file.name for file in listing.files] == ["a.txt"]
    assert [(file.name, file.num_bytes) for file in listing.left_out] == [(".git/pack", 9999)]
    folder = tmp_path / "in"
    folder.mkdir()
    write_table(folder / "data-0.arrow", ["one", "two"])
    write_table(folder / "cache-0f.arrow", texts(99))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    assert documents(folder) == [b"one", b"two"]


@pytest.mark.parametrize("text", ["BZh is a name", "PAR1 is a receptor", '{"text": "in a text file"}'])
def test_content_does_not_change_how_a_file_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert documents(tmp_path / "a.txt") == [text.encode()]


def test_the_parts_of_a_bad_file_have_its_bytes_together(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", texts(70))
    write_jsonl(tmp_path / "b.jsonl", texts(70), column="body")
    manifest = prepared(
        tmp_path / "out",
        tmp_path / "a.parquet",
        tmp_path / "b.jsonl",
        text_column="body",
        piece_bytes=300,
        on_bad_input="skip",
        max_bad_share=1.0,
    )
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    total_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    assert (manifest.dropped.num_bad, manifest.dropped.bad_bytes) == (10, total_bytes)


def test_writing_into_what_is_read_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "a.jsonl", texts(3)).parent
    (tmp_path / "link").symlink_to(source)
    into = source / "out"
    for uri, out in (
        (source, into),
        (source, source),
        (tmp_path, into),
        (source, tmp_path / "link" / "out"),
        (tmp_path / "link", into),
        (f"{tmp_path}/**/*.parquet", into),
    ):
        with pytest.raises(ValueError, match="lies inside --source"):
            prepared(out, uri)
        assert not (source / "out").exists()
    assert prepared(source / "out", f"{source}/*.jsonl").num_documents == 3
    assert prepared(tmp_path / "in-2", f"{source}/*.jsonl").num_documents == 3


def test_skipping_has_a_bound_and_a_manifest_names_the_first_bad_record_of_each_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the pieces; a record differs in its numbers and names alone."""
    (tmp_path / "a.jsonl").write_bytes(b"[" * 9 + b"\n" + b"{}\n" * 5000 + b'{"text": "good"}\n' * 50)
    told = (
        r"max_bad_share=0\.01: 5,001 of 5,051 records \(99\.0%\) are bad; the first: a\.jsonl: line 1 at byte 0 is no"
    )
    with pytest.raises(ValueError, match=told):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", on_bad_input="skip")
    manifest = prepared(tmp_path / "out", tmp_path / "a.jsonl", on_bad_input="skip", max_bad_share=0.995)
    assert (manifest.dropped.num_bad, manifest.dropped.num_records, manifest.num_documents) == (5001, 5051, 50)
    assert [count for _, count in manifest.dropped.bad_kinds] == [1, 5000]
    assert re.match(r"a\.jsonl: line 2 at byte 10 has no 'text'", manifest.dropped.bad[1])
    lines = [line for line in caplog.messages if line.startswith("left out: ")]
    assert len(lines) == 4, "two of each preparation"
    assert lines[-1] == f"left out: {manifest.dropped.bad[1]} (5,000 of this kind)"
    assert (tmp_path / "out" / "manifest.json").stat().st_size < 30_000
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": {number}}}\n' for number in range(900)) + "{\n" * 50)
    words = ["prepare", "--source", str(tmp_path / "all.jsonl"), "--workers=0", "--on-bad-input=skip"]
    for share, told in (
        (
            0.01,
            r"max_bad_share=0\.01: 950 of 950 records \(100\.0%\) are bad; the first: all\.jsonl: "
            r"line 1 at byte 0 is no JSON object .*'int' object has no attribute 'encode'",
        ),
        (1.0, "all has no document; give text"),
    ):
        caplog.clear()
        out = ["--out", str(tmp_path / f"all-{share}"), "--piece-bytes=2000", f"--max-bad-share={share}"]
        assert command.main([*words, *out]) == 2
        assert re.search(told, capsys.readouterr().err)
        counts = [re.search(r"\(([\d,]+) of this kind\)$", line) for line in caplog.messages if "left out: " in line]
        assert [match and match[1] for match in counts] == ["900", "50"]
    write_jsonl(tmp_path / "b.jsonl", texts(9))
    (tmp_path / "c.parquet").write_bytes(b"PAR1" + bytes(3000))
    with pytest.raises(ValueError, match=r"bytes, whole files, \(\d\d\.\d%\) are bad"):
        prepared(tmp_path / "out2", tmp_path / "b.jsonl", tmp_path / "c.parquet", on_bad_input="skip")


def test_a_name_with_a_comma_is_one_source_where_there_is_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "a,b.txt").write_text("x")
    comma, plain = str(tmp_path / "a,b.txt"), str(tmp_path / "c.txt")
    options = command.parser().parse_args(["prepare", "--source", comma, "--source", f"{plain},s", "--out", "o"])
    assert command.sources_of(options.source) == [comma, plain, "s"]


def test_a_record_of_any_fault_is_counted_and_the_tokenizer_may_refuse_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic_ring.data.tokenizer import Tokenizer

    def encode(self: Tokenizer, documents: list[bytes]) -> object:
        if b"two" in documents:
            raise RuntimeError("no such character")
        return whole(self, documents)

    whole = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", encode)
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2 at byte 25 cannot be tokenised: RuntimeError: no such"):
        prepared(tmp_path / "fail", path)
    manifest = prepared(tmp_path / "out", path, on_bad_input="skip", max_bad_share=0.4)
    assert in_shards(tmp_path / "out") == [b"one", b"three"]
    assert manifest.dropped.num_bad_records == 1


def test_a_file_that_may_not_be_read_is_a_bad_input_and_no_storage_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, to whom no file is closed."""

    def read(self: reader._SpanReader) -> object:
        if self.span.file.name == "b.jsonl":
            raise PermissionError(13, "Permission denied", self.span.file.name)
        return whole(self)

    whole = reader._SpanReader.documents
    monkeypatch.setattr(reader._SpanReader, "documents", read)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "abc":
        write_jsonl(folder / f"{name}.jsonl", [name])
    with pytest.raises(ValueError, match=r"b\.jsonl.*Permission denied"):
        prepared(tmp_path / "fail", folder)
    prepared(tmp_path / "out", folder, on_bad_input="skip", max_bad_share=0.5)
    assert in_shards(tmp_path / "out") == [b"a", b"c"]


def test_many_records_are_prepared_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ring.data.text.MAX_RECORD_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(
        ValueError, match=rf"prepare them once, elastic-ring data prepare --source {path} --out prepared"
    ):
        TextFiles(4, (str(path),)).open()


def test_records_are_read_in_pieces_and_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(30))
    whole = TextFiles(8, (str(path),), 4).open()
    monkeypatch.setattr("elastic_ring.data.text.PIECE_BYTES", 300)
    parts = TextFiles(8, (str(path),), 4).open()
    assert len(parts._cache.chunks) > 5
    assert parts.fingerprint == whole.fingerprint
    for index in range(whole.num_sequences):
        assert parts.read(index).tokens.tolist() == whole.read(index).tokens.tolist()
        assert all(start % 4 == 0 for start in parts.read(index).document_starts)


def test_a_prepared_folder_given_as_text_is_refused_with_its_manifest(tmp_path: Path) -> None:
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(3)))
    with pytest.raises(ValueError, match=r"is a prepared corpus: train on it with --data .*/out/manifest\.json"):
        documents(tmp_path / "out")
