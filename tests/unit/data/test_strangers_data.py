"""Data of strangers: what expands beyond its bound is refused before it is expanded, and names and links stay in their
folder or in its repository of Hugging Face's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ring.cli import train
from elastic_ring.cli.forecasts.folders import sizes_of
from elastic_ring.data import shards
from elastic_ring.data.listing import LEADS_OUT, list_source
from elastic_ring.data.preparation import documents, inputs
from elastic_ring.data.preparation.chat import Conversations
from elastic_ring.data.prepared import PreparedTokens
from elastic_ring.data.shards import TokenShards
from elastic_ring.data.text import TextFiles
from elastic_ring.data.tokenizer import open_saved, open_tokenizer
from elastic_ring.files import plain_json
from elastic_ring.integrations.transformers.model import ring_model
from elastic_ring.integrations.transformers.weights import FolderWeights
from tests.unit.data.corpora import prepared, texts, texts_of, write_jsonl, write_table

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
RECORD = b'{"text": "%s"}\n'


def write_compressed(path: Path, content: bytes) -> Path:
    with pa.CompressedOutputStream(str(path), {".zst": "zstd", ".gz": "gzip"}[path.suffix]) as stream:
        stream.write(content)
    return path


# ---------------------------------------------------------------- what expands

MEASURED = """
import sys
from elastic_ring.data.listing import list_source
from elastic_ring.data.preparation import documents, inputs
from elastic_ring.data.preparation.inputs import cut

def peak_bytes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) << 10

def read(name):
    content, tally = documents.TextIn("text"), documents.Tally("skip")
    (piece,) = cut(list_source(f"{sys.argv[1]}/{name}"), 0, 1 << 30)
    num_documents = sum(1 for _ in documents.read_documents(piece, content, tally))
    return num_documents, tally.bad

documents.MAX_RECORD_BYTES = inputs.MAX_BATCH_BYTES = int(sys.argv[2])
assert read(sys.argv[3]) == (2, [])
before = peak_bytes()
num_documents, bad = read(sys.argv[4])
print(num_documents, len(bad), peak_bytes() - before, os.path.getsize(f"{sys.argv[1]}/{sys.argv[4]}"), *bad)
"""


def measured(folder: Path, name: str, small: str, most_bytes: int = 4 * MIB) -> tuple[int, int, int, int, str]:
    """(documents, bad ones, growth in memory, size, what is told) of reading a file with a bound of 4 MiB."""
    words = [str(folder), str(most_bytes), small, name]
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{MEASURED}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *numbers, told = done.stdout.split(maxsplit=4) if done.stdout.count(" ") > 3 else [*done.stdout.split(), ""]
    num_documents, num_bad, grown, size = map(int, numbers)
    return num_documents, num_bad, grown, size, told


def write_batch(path: Path, columns: dict[str, Any]) -> Path:
    """An Arrow file (.arrow) or stream (.ipc) of one compressed batch."""
    table, new = pa.table(columns), pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return path


TABLES = ["value.parquet", "value.arrow", "value.ipc", "dictionary.arrow", "dictionary.ipc"]


@pytest.mark.parametrize("name", ["line.jsonl.zst", "list.json.zst", "text.txt.gz", *TABLES])
def test_what_a_few_bytes_expand_to_is_refused_before_it_is_in_memory(tmp_path: Path, name: str) -> None:
    num_bytes = 192 * MIB
    bomb, lines = b"a" * num_bytes, RECORD % b"one" + RECORD % b"two"
    if name.endswith(".parquet"):
        small = write_table(tmp_path / "small.parquet", ["one", "two"]).name
        pq.write_table(pa.table({"text": ["one", "two", bomb.decode()]}), tmp_path / name, compression="zstd")
    elif name in TABLES:
        small, column = write_table(tmp_path / "small.parquet", ["one", "two"]).name, pa.array(["one", bomb.decode()])
        write_batch(tmp_path / name, {"text": column.dictionary_encode() if name.startswith("dict") else column})
    else:
        small = write_compressed(tmp_path / "small.jsonl.zst", lines).name
        content = {"line": lines + RECORD % bomb, "list": b"[" + RECORD % bomb + b"]", "text": bomb}
        write_compressed(tmp_path / name, content[name.partition(".")[0]])
    num_documents, num_bad, grown, size, told = measured(tmp_path, name, small)
    assert size < num_bytes / 500
    assert num_bad == 1
    assert name in told
    assert any(
        text in told for text in ("there may be", "than 4,194,304 bytes: decompress", "more than 4,194,304 bytes")
    )
    assert num_documents == (2 if name.startswith("line") else 0)
    assert grown < 48 * MIB, f"{grown / MIB:.0f} MiB for what expands to {num_bytes // MIB} MiB"


def test_one_large_value_in_many_rows_is_in_memory_once(tmp_path: Path) -> None:
    """Each row is a document; a dictionary has the value once."""
    write_table(tmp_path / "small.parquet", ["one", "two"])
    pq.write_table(pa.table({"text": ["a" * MIB] * 256}), tmp_path / "rows.parquet", compression="zstd")
    num_documents, num_bad, grown, size, _ = measured(tmp_path, "rows.parquet", "small.parquet")
    assert (num_documents, num_bad) == (256, 0)
    assert size < MIB / 10
    assert grown < 48 * MIB, f"{grown / MIB:.0f} MiB"


def test_a_column_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    small, blob = write_table(tmp_path / "small.parquet", ["one", "two"]).name, bytes(192 * MIB)
    for name in ("blob.arrow", "blob.ipc", "blob.parquet"):
        columns = {"image": pa.array([b"x", blob]), "text": ["one", "two"], "tags": [["x"], []]}
        if name.endswith(".parquet"):
            pq.write_table(pa.table(columns), tmp_path / name, compression="zstd")
        else:
            write_batch(tmp_path / name, columns)
        num_documents, num_bad, grown, *_ = measured(tmp_path, name, small)
        assert (num_documents, num_bad) == (2, 0)
        assert grown < 8 * MIB, f"{name}: {grown / MIB:.0f} MiB"


def test_token_shards_that_expand_beyond_their_bound_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(inputs, "MAX_BATCH_BYTES", 1 << 15)
    varied = np.random.default_rng(0).integers(0, 8, 10_000)
    for tokens, is_bomb in (([7] * 10_000, True), (varied, False)):  # what is stored in as many bytes may be as large
        columns = {"tokens": pa.array([tokens, [7] * 10], pa.list_(pa.int32()))}
        write_batch(tmp_path / "a.arrow", columns)
        pq.write_table(pa.table(columns), tmp_path / "b.parquet")
        for name in ("a.arrow", "b.parquet"):
            words = rf"{name}: cannot be read as token shard: .* expands to .* there may be"
            with pytest.raises(ValueError, match=words) if is_bomb else nullcontext():
                TokenShards(4, str(tmp_path / name), vocab_size=9, end_of_document=8).open().read(0)


def test_statistics_at_which_pyarrow_ends_the_process_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"tokens": pa.array([[70_000, 70_001]] * 9, pa.list_(pa.int32()))}), path)
    right, low = path.read_bytes(), (70_000).to_bytes(4, "little")
    at = right.rindex(b"\x04" + low)
    path.write_bytes(right[:at] + b"\x02" + low[:2] + right[at + 5 :])  # two bytes for a number of four
    length = int.from_bytes(right[-8:-4], "little") - 2
    path.write_bytes(path.read_bytes()[:-8] + length.to_bytes(4, "little") + b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read as token shard: the footer is damaged"):
        TokenShards(4, str(path), vocab_size=1 << 17).open()


def test_places_outside_a_buffer_of_arrow_are_refused(tmp_path: Path) -> None:
    """pyarrow believes them, and ends the process."""
    table = pa.table({"text": ["one" * 9, "two"], "tokens": pa.array([[1] * 27, [2] * 3], pa.list_(pa.int32()))})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 27, 30))
    right = (tmp_path / "a.arrow").read_bytes()
    assert right.count(offsets) == 2
    (tmp_path / "a.arrow").write_bytes(right.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:]))
    for read in (
        lambda: TextFiles(4, (str(tmp_path / "a.arrow"),)).open(),
        lambda: TokenShards(4, str(tmp_path / "a.arrow"), vocab_size=9, end_of_document=8).open().read(0),
    ):
        with pytest.raises(ValueError, match=r"a\.arrow: cannot be read"):
            read()


def test_a_conversation_of_a_table_that_is_large_as_values_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of nulls has no bytes, and a dictionary has a text once that a row may name a million times."""
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1 << 20)
    turns = pa.array([[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]] * 2)
    text = pa.array(["a" * 1000])
    many = {"nulls.arrow": pa.nulls(100_000), "texts.arrow": text.dictionary_encode().take(pa.array([0] * 2000))}
    for name, values in {**many, "texts.parquet": text.take(pa.array([0] * 2000))}.items():
        tools = pa.ListArray.from_arrays(pa.array([0, 0, len(values)], pa.int32()), values)
        table = pa.table({"messages": turns, "tools": tools})
        if name.endswith(".parquet"):
            pq.write_table(table, tmp_path / name)
        else:
            write_batch(tmp_path / name, {"messages": turns, "tools": tools})
        (piece,), tally = inputs.cut(list_source(str(tmp_path / name)), 0, 1 << 30), documents.Tally("skip")
        assert len(list(documents.read_documents(piece, Conversations(), tally))) == 1
        assert f"{name}: row 2 is no JSON object with a conversation: ValueError: it takes " in tally.bad[0]


# ---------------------------------------------------------------- what is honest is read


def read_all(path: Path, content: documents.Content | None = None) -> tuple[int, list[str]]:
    """(documents, bad ones)"""
    (piece,), tally = inputs.cut(list_source(str(path)), 0, 1 << 30), documents.Tally("skip")
    return sum(1 for _ in documents.read_documents(piece, content or Conversations(), tally)), tally.bad


def conversations(num: int, content: str = "") -> Any:
    return pa.array(
        [[{"role": "user", "content": f"{content} {n}"}, {"role": "assistant", "content": "y"}] for n in range(num)]
    )


LEAVES = ("messages.list.element.role", "messages.list.element.content")


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "fallback"])
def test_conversations_of_parquet_are_read_whatever_their_encoding_and_measured_a_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.delattr(documents, "_plain_row")  # which measures a row
    num, path = 6000, tmp_path / "a.parquet"
    options: dict[str, Any] = {"dictionary_pagesize_limit": 1 << 17}
    if encoding != "fallback":
        options = {"use_dictionary": False, "column_encoding": dict.fromkeys(LEAVES, encoding)}
    pq.write_table(pa.table({"messages": conversations(num, "x" * 40)}), path, data_page_size=1 << 15, **options)
    assert read_all(path) == (num, [])


def test_conversations_in_types_of_every_kind_are_read(tmp_path: Path) -> None:
    plain = conversations(2)
    metadata = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    tools = {
        "view": pa.array([["x" * 9000], ["y" * 9000]] * 1, pa.list_(pa.string_view())),
        "numbers": pa.array([7, 7]).dictionary_encode(),
        "lists": pa.array([["x"], ["y", "z"]], pa.list_view(pa.string())),
        "map": metadata,
    }
    for name, values in tools.items():
        table = pa.table({"messages": plain, "tools": values})
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
        _, bad = read_all(tmp_path / f"{name}.arrow")
        assert not any("takes" in problem or "values of type" in problem or "kernel" in problem for problem in bad), bad
    texts = pa.array([f"{number} " + "x" * 30_000 for number in range(300)], pa.string_view())
    table = pa.table({"messages": conversations(300), "system": texts})
    with pa.ipc.new_file(str(tmp_path / "many.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert read_all(tmp_path / "many.arrow") == (300, [])


def test_a_list_of_many_short_records_is_read_and_one_of_too_many_values_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 20}] * 20_000))
    assert read_all(path, documents.TextIn("text")) == (20_000, [])
    monkeypatch.setattr(documents, "JSON_PARTS", 1000)
    path.write_text("[" + "[]," * 9000 + "[]]")
    num, (problem,) = read_all(path, documents.TextIn("text"))
    assert (num, "has more than 3,3" in problem, "is no JSON" in problem) == (0, True, False)
    dense = json.dumps({"merges": [["a", "b"]] * 500_000})  # of a large tokenizer
    assert len(plain_json(dense)["merges"]) == 500_000


def test_an_empty_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for name, rows in (("a", [[1, 2]] * 9), ("b", [])):
        table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / "shards" / f"{name}.parquet")
    TokenShards(4, str(tmp_path / "shards"), vocab_size=9, end_of_document=8, align_tokens=2).open().read(0)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "text.parquet")
    assert read_all(tmp_path / "text.parquet", documents.TextIn("text")) == (0, [])


def test_a_batch_with_metadata_of_its_own_is_read(tmp_path: Path) -> None:
    batch = pa.record_batch({"text": ["one", "two"]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"made": "by hand"})
    assert read_all(tmp_path / "a.arrow", documents.TextIn("text")) == (2, [])


def test_a_long_header_over_the_end_of_a_block_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BUFFER_BYTES", 1 << 13)
    text = b"\x18" + bytes([0x80 | (100_000 & 127), 0x80 | (100_000 >> 7 & 127), 100_000 >> 14]) + b"x" * 100_000
    first = b"\x15\x00\x15\x02\x15\x80\xfa\x01\x00" + bytes(16_000)
    chunk = first + b"\x15\x00\x15\x12\x15\x00\x2c\x15\x02" + text + b"\x00\x00"
    assert max(page.memory_bytes for page in documents.pages(pa.BufferReader(chunk), 0, len(chunk))) == 9


def test_pages_are_checked_once_however_often_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(shards, "check_pages", lambda *args: calls.append(args))
    pq.write_table(pa.table({"tokens": pa.array([[1, 2]] * 9, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    source = TokenShards(4, str(tmp_path / "a.parquet"), vocab_size=9, end_of_document=8).open()
    calls.clear()
    for _ in range(3):
        source.chunks[0].load()
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet", "a.arrow", "a.ipc"])
@pytest.mark.parametrize("num_bytes", [62 * MIB, 66 * MIB])
def test_a_reader_takes_at_most_three_times_the_bound(tmp_path: Path, name: str, num_bytes: int) -> None:
    """Just below it and just above."""
    document, small = "a" * num_bytes, write_table(tmp_path / "small.parquet", ["one", "two"]).name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": ["one", "two", document]}), tmp_path / name)
    elif name.endswith((".arrow", ".ipc")):
        write_batch(tmp_path / name, {"text": ["one", "two", document]})
    else:
        content = document if ".txt" in name else "".join(f'{{"text": "{text}"}}\n' for text in ("1", "2", document))
        if name.endswith("l"):
            (tmp_path / name).write_text(content)
        else:
            write_compressed(tmp_path / name, content.encode())
    num_documents, num_bad, grown, *_ = measured(tmp_path, name, small, 64 * MIB)
    assert num_documents + num_bad == (1 if ".txt" in name else 3) or name.endswith((".arrow", ".ipc"))
    assert num_bad == (num_bytes > 64 * MIB)
    most = 5 if name.endswith(".parquet") else 3  # pyarrow has a page, its dictionary and the column in memory
    assert grown <= most * 64 * MIB, f"{grown / MIB:.0f} MiB"


def test_the_bound_is_in_force_at_both_doors(tmp_path: Path) -> None:
    assert documents.MAX_RECORD_BYTES == 64 * MIB
    path = write_compressed(tmp_path / "a.jsonl.zst", RECORD % (b"a" * 65 * MIB))
    for read in (lambda: TextFiles(4, (str(path),)).open(), lambda: prepared(tmp_path / "out", path)):
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst: line 1 at byte 0 .*there may be 67108864"):
            read()


@pytest.mark.parametrize("piece_bytes", [300, 10**9])
def test_a_line_that_is_too_long_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Wherever the file is cut."""
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(documents, "BUFFER_BYTES", 128)
    path = write_jsonl(tmp_path / "a.jsonl", [*texts(5), "x" * 2000, *texts(5, 5)])
    manifest = prepared(
        tmp_path / "out", path, piece_bytes=piece_bytes, row_group_tokens=64, on_bad_input="skip", max_bad_share=0.5
    )
    assert texts_of(tmp_path / "out", manifest.sources[0]) == texts(10)
    assert manifest.dropped.num_bad_records == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.ipc"])
def test_a_row_that_is_too_long_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    for kind in (pa.string(), pa.large_string()):
        path = write_table(tmp_path / name, ["one", "x" * 1001, "two", None], kind=kind)
        out = tmp_path / f"out-{kind}"
        manifest = prepared(out, path, piece_bytes=10**9, on_bad_input="skip", max_bad_share=0.5)
        assert texts_of(out, manifest.sources[0]) == ["one", "two"]
        assert manifest.dropped.bad == (f"{name}: row 2 has 1,001 bytes: there may be 1,000",)


def test_plain_text_and_lists_that_are_not_compressed_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    (tmp_path / "a.txt").write_text("x" * 2000)
    (tmp_path / "b.json").write_text(json.dumps([{"text": "y" * 900}] * 3))
    manifest = prepared(tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.json")
    assert texts_of(tmp_path / "out", manifest.sources[0]) == ["x" * 2000, *["y" * 900] * 3]


def test_headers_of_pages_that_two_readers_read_differently_are_refused() -> None:
    """Thrift takes 32 bits of a number and 16 of a field, and each field may come again."""

    def varint(number: int) -> bytes:
        return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])

    def header(expanded: int, stored: int, more: bytes = b"") -> bytes:
        return b"\x15\x00\x15" + varint(expanded << 1) + b"\x15" + varint(stored << 1) + more + b"\x00"

    def largest(chunk: bytes) -> int:
        return max(page.memory_bytes for page in documents.pages(pa.BufferReader(chunk), 0, len(chunk)))

    large = header(1 << 30, 0)
    in_page = b"\x2c\x15\x02\x18\x03abc\x11\x17" + bytes(8) + b"\x00"  # a struct with a number, text, true, a double
    assert largest(header(7, 3, in_page) + b"xyz" + header(9, 0)) == 9
    assert largest(header(7, 3 + (1 << 31)) + b"xyz" + large) == 1 << 30
    assert largest(header(7, -1 % (1 << 31)) + large) == 7, "pyarrow reads no page behind one of 2 GiB"
    for odd in (
        header(1 << 30, 0, b"\x05\x04\x0e"),  # field 2 again
        header(1 << 30, 0, b"\x05" + varint((1 << 17) + 4) + b"\x0e"),
        b"\x15\x00",
        b"\x15" + b"\xff" * 11,
        b"\x19\xf5" + b"\xff" * 4 + b"\x0f",
        b"\x1c" * 9999,
        bytes(9),
    ):
        with pytest.raises(pa.ArrowInvalid, match="page header"):
            largest(odd + bytes(20))


@pytest.mark.parametrize("number", [0, 1])
def test_tokens_beyond_the_manifests_are_not_unpacked_whatever_the_footer_says(tmp_path: Path, number: int) -> None:
    """`number`: how many bytes they expand to by the footer."""
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(150)), row_group_tokens=1 << 14, piece_bytes=MIB)
    (path,) = (tmp_path / "out" / "shards").iterdir()
    rows, tokens = np.zeros(16_000, np.int64), np.zeros(16_000_000, np.uint16)
    lists = pa.ListArray.from_arrays(np.arange(len(rows) + 1, dtype=np.int32) * 1000, tokens)
    table = pa.table({"tokens": lists, "offset": rows}).replace_schema_metadata(pq.read_metadata(path).metadata)
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_page_checksum=True)
    size = pq.read_metadata(path).row_group(0).total_byte_size << 1  # as the footer has it, 7 bits a byte
    true = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21])
    assert path.read_bytes().count(true) == 1
    path.write_bytes(path.read_bytes().replace(true, bytes([number << 1 | 128, 128, 128, 0])))
    assert pq.read_metadata(path).row_group(0).total_byte_size == number
    source = PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 48).open()
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ValueError, match=rf"{path.name}: .*row group 0 has not the 16384 tokens of its manifest"):
            source.read(0)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 16 * MIB < tokens.nbytes


# ---------------------------------------------------------------- names and links


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Somebody's files beside a stranger's folder `in`."""
    (tmp_path / "private").mkdir()
    write_table(tmp_path / "private" / "data.arrow", ["secret"])
    (tmp_path / "private" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (tmp_path / "private" / "merges.txt").write_text("secret")
    (tmp_path / "in").mkdir()
    return tmp_path / "private"


@pytest.mark.parametrize("name", ["../private/data.arrow", "/etc/passwd", "a\\b", 7, None, ["x"]])
def test_names_of_a_saved_dataset_stay_in_its_folder(private: Path, name: object) -> None:
    folder = private.parent / "in"
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ValueError, match=r"in/state\.json: names .* not in its folder"):
        list_source(str(folder), allow_left_out=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../private" if name == "/etc/passwd" else name]}))
    with pytest.raises(ValueError, match=r"in/dataset_dict\.json: names .* not in its folder"):
        list_source(str(folder), allow_left_out=True)


def test_links_of_a_saved_dataset_stay_in_its_folder(private: Path) -> None:
    folder = private.parent / "in"
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "data.arrow").symlink_to(private / "data.arrow")
    with pytest.raises(ValueError, match=r"in/data\.arrow: is a link to .*private/data\.arrow, out of its folder"):
        list_source(str(folder), allow_left_out=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (folder / "train").symlink_to(private)
    with pytest.raises(ValueError, match=r"in/train: is a link to .*private, out of its folder"):
        list_source(str(folder), allow_left_out=True)


def test_links_out_of_a_data_folder_are_refused_by_name_or_left_out(private: Path) -> None:
    folder = private.parent / "in"
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to(private / "merges.txt")
    (folder / "c").symlink_to(private)
    (folder / ".git").symlink_to(private)
    for uri in (str(folder), f"{folder}/[a-c]*"):
        with pytest.raises(ValueError, match=rf"b\.txt: {LEADS_OUT}: .*--allow-left-out"):
            list_source(uri)
        listing = list_source(uri, allow_left_out=True)
        assert [file.name for file in listing.files] == ["a.txt"]
        left_out = {file.name for file in listing.left_out if file.reason == LEADS_OUT}
        assert left_out == {"b.txt", "c"} if uri == str(folder) else "b.txt" in left_out
    (folder / "b.txt").unlink()
    (folder / "c").unlink()
    assert [file.name for file in list_source(str(folder)).files] == ["a.txt"], "hidden links are not read anyway"
    assert [file.name for file in list_source(str(private / "merges.txt")).files] == ["merges.txt"]
    (private.parent / "own").symlink_to(private / "merges.txt")
    assert [file.name for file in list_source(str(private.parent / "own")).files] == ["own"], "named by the user"
    (folder / ".git").unlink()
    (folder / "t.parquet").symlink_to(private / "data.arrow")
    with pytest.raises(ValueError, match=r"in/t\.parquet: is a link to .*, out of its folder"):
        TokenShards(4, str(folder)).open()


def test_links_into_the_blobs_of_the_same_repository_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "datasets--a--b"
    snapshot = repository / "snapshots" / "0f" / "data"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("text")
    (snapshot / "a.txt").symlink_to("../../../blobs/1")
    for folder in (snapshot, snapshot.parent):
        assert [file.path for file in list_source(str(folder)).files] == [str(snapshot / "a.txt")]
    other = tmp_path / "hub" / "datasets--a--c"
    (other / "blobs").mkdir(parents=True)
    (other / "blobs" / "1").write_text("another's")
    (snapshot / "b.txt").symlink_to(other / "blobs" / "1")
    with pytest.raises(ValueError, match=rf"b\.txt: {LEADS_OUT}"):
        list_source(str(snapshot))
    own = tmp_path / "snapshots" / "x"
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("no cache")
    own.mkdir(parents=True)
    (own / "c.txt").symlink_to(tmp_path / "blobs" / "1")
    with pytest.raises(ValueError, match=rf"c\.txt: {LEADS_OUT}"):
        list_source(str(own))


@pytest.mark.parametrize("name", ["merges.txt", "config.json", "additional_chat_templates/a.jinja"])
def test_links_out_of_a_tokenizers_or_models_folder_are_refused_by_name(private: Path, name: str) -> None:
    folder = private.parent / "in"
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(private / "merges.txt")
    (folder / "runs").symlink_to(private)  # is not read
    (private / "merges.txt").write_text('{"model_type": "llama"}')
    readers: dict[str, Callable[[str], object]] = {
        "data prepare": open_tokenizer,
        "train": ring_model,
        "train, before torch is there": lambda at: train._begins_at_once(train.parse(["--model-folder", at])),
        "forecast": lambda at: sizes_of(train.parse(["--model-folder", at])),
        "adapters": lambda at: FolderWeights.open(Path(at)),
    }
    for read in readers.values():
        with pytest.raises(ValueError, match=rf"in/{name}: is a link to .*merges\.txt, out of its folder"):
            read(str(folder))


@pytest.mark.parametrize("name", ["../private/tokenizer.5.0.0.json", "sub/tokenizer.5.0.0.json"])
def test_a_tokenizer_s_config_names_no_file_out_of_its_folder(private: Path, name: str) -> None:
    """Which transformers would open instead of the one that was checked."""
    folder = private.parent / "in"
    (folder / "sub").symlink_to(private)
    for path, word in ((folder / "tokenizer.json", "own"), (private / "tokenizer.5.0.0.json", "theirs")):
        model = {"type": "WordLevel", "vocab": {word: 0}, "unk_token": word}
        path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "fast_tokenizer_files": [name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"in'?: cannot be read: .*out of its folder|which is not in its folder"):
        open_saved(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "fast_tokenizer_files": ["tokenizer.json"]}))
    assert open_saved(folder).get_vocab() == {"own": 0}
