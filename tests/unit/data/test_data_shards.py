"""Token shards: Parquet and Arrow files, written here and read back; wrong ones refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ring.data.source import PackedSource, TokenShards, open_source

EOD = 99
ROWS: list[list[int] | None] = [
    [1, 2, 3],
    [4],
    [],
    [5, 6, 7, 8, 9, 10, 11],
    None,
    [12, 13],
    [14],
    [15, 16, 17],
]
FULL_ROWS = [row for row in ROWS if row]


def table(rows: Sequence[Any], kind: Any = None, column: str = "tokens") -> pa.Table:
    lists = pa.array(rows, type=kind or pa.list_(pa.int32()))
    return pa.table({"other": pa.array(range(len(rows))), column: lists})


def write(path: Path, content: pa.Table, rows_per_block: int = 3, compression: str | None = None) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(content, path, row_group_size=rows_per_block)
        return path
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=rows_per_block)
    return path


def config(uri: Path | str, context_tokens: int = 4, **settings: Any) -> TokenShards:
    return TokenShards(context_tokens, str(uri), **{"vocab_size": 100, "end_of_document": EOD, **settings})


def stream(source: PackedSource) -> tuple[list[int], list[int]]:
    """Tokens that are inputs, and where documents begin in them (but not where sequences do)."""
    tokens: list[int] = []
    starts: list[int] = []
    for sample_id in range(source.num_sequences):
        sample = source.read(sample_id)
        starts += [len(tokens) + start for start in sample.document_starts]
        tokens += sample.tokens[:-1].tolist()
    return tokens, [start for start in starts if start == 0 or tokens[start - 1] == EOD]


def expected(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    starts: list[int] = []
    for row in rows:
        starts.append(len(tokens))
        tokens += [*row, EOD]
    return tokens, starts


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize("rows", [ROWS, FULL_ROWS])
@pytest.mark.parametrize("rows_per_block", [1, 3, 100])
def test_rows_are_documents_and_empty_ones_are_not(
    tmp_path: Path, ending: str, rows: list[list[int] | None], rows_per_block: int
) -> None:
    path = write(tmp_path / f"shard{ending}", table(rows), rows_per_block)
    tokens, starts = expected(FULL_ROWS)
    source = config(path, context_tokens=1).open()
    assert source.num_tokens == len(tokens)
    assert stream(source) == (tokens[:-1], starts)
    wide = config(path, context_tokens=5).open()
    assert stream(wide)[0] == tokens[: wide.num_sequences * 5]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.uint8(), 2), pa.list_(pa.int8())]
)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_every_list_of_integers_is_read_alike(tmp_path: Path, kind: Any, ending: str) -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    source = config(write(tmp_path / f"a{ending}", table(rows, kind), 2), context_tokens=1).open()
    assert stream(source)[0] == expected(rows)[0][:-1]


def test_a_directory_is_read_in_path_order_over_both_formats(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", table([[3]]))
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "z.arrow", table([[1], [2]]), compression="zstd")
    write(tmp_path / "c.feather", table([[4, 5]]))
    (tmp_path / "README.md").write_text("not a shard")
    source = config(tmp_path, context_tokens=1).open()
    assert stream(source)[0] == expected([[1], [2], [3], [4, 5]])[0][:-1]
    assert stream(config(tmp_path.as_uri(), context_tokens=1).open()) == stream(source)


def test_parquet_is_opened_from_footers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", table(FULL_ROWS))

    def refuse(*_args: Any, **_settings: Any) -> None:
        raise AssertionError("a row group was read")

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "read_row_group", refuse)
        source = config(path).open()
        assert source.num_tokens == len(expected(FULL_ROWS)[0])
        assert source.fingerprint
        with pytest.raises(AssertionError):
            source.read(0)


def test_parquet_without_statistics_is_counted_by_reading(tmp_path: Path) -> None:
    pq.write_table(table(ROWS), tmp_path / "a.parquet", write_statistics=False, row_group_size=3)
    assert stream(config(tmp_path, context_tokens=1).open())[0] == expected(FULL_ROWS)[0][:-1]


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_rows_that_end_themselves_get_no_second_end(tmp_path: Path, ending: str) -> None:
    rows = [[*row, EOD] for row in FULL_ROWS]
    path = write(tmp_path / f"a{ending}", table([*rows, []]))
    source = config(path, context_tokens=1, rows_end_documents=True).open()
    assert stream(source) == (expected(FULL_ROWS)[0][:-1], expected(FULL_ROWS)[1])
    other = write(tmp_path / f"b{ending}", table(FULL_ROWS))
    with pytest.raises(ValueError, match=r"do not end in end_of_document=99"):
        config(other, context_tokens=1, rows_end_documents=True).open().read(0)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_the_fingerprint_is_repeatable_wherever_the_shards_are_and_notices_other_tokens_of_the_same_lengths(
    tmp_path: Path, ending: str
) -> None:
    path = write(tmp_path / f"a{ending}", table(FULL_ROWS))
    before = config(path).open().fingerprint
    assert before == config(path).open().fingerprint
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(path, tmp_path / "elsewhere" / f"renamed{ending}")
    assert before == config(tmp_path / "elsewhere").open().fingerprint
    assert before != config(path, context_tokens=5).open().fingerprint
    write(path, table([*FULL_ROWS[:-1], [15, 16, 18]]))
    assert before != config(path).open().fingerprint


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [(100, "token 100 is outside.*100"), (-1, "token -1 is outside.*100"), (None, "1 null tokens")],
)
def test_a_token_that_is_none_is_named(tmp_path: Path, ending: str, wrong: int | None, problem: str) -> None:
    path = write(tmp_path / f"bad{ending}", table([[1, 2, 3], [4, wrong, 6]]))
    with pytest.raises(ValueError, match=rf"bad\{ending}.*{problem}"):
        open_source(config(path)).read(0)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_the_wrong_column_or_type_is_named_when_opened(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a{ending}", table([[1, 2]]))
    with pytest.raises(ValueError, match=r"no column 'text'; it has other, tokens"):
        config(path, column="text").open()
    with pytest.raises(ValueError, match=r"column 'other' is of type int64"):
        config(path, column="other").open()
    floats = write(tmp_path / f"f{ending}", table([[1.0, 2.0]], pa.list_(pa.float32())))
    with pytest.raises(ValueError, match=r"column 'tokens' is of type list.*float"):
        config(floats).open()


def test_what_is_no_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent"):
        config(tmp_path / "absent").open()
    with pytest.raises(ValueError, match="no file here ends in"):
        config(tmp_path).open()
    for ending in (".parquet", ".arrow"):
        (tmp_path / f"junk{ending}").write_bytes(b"this is neither of the two")
        with pytest.raises(ValueError, match=rf"junk\{ending}.*cannot be read"):
            config(tmp_path / f"junk{ending}").open()
    with pytest.raises(ValueError, match="nowhere://x"):
        config("nowhere://x").open()
    with pytest.raises(ValueError, match="corpus is empty"):
        open_source(config(write(tmp_path / "short.parquet", table([[1]])), context_tokens=64))


def test_a_vocabulary_without_room_for_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="end_of_document=50000"):
        TokenShards(4, "x", vocab_size=50_000, end_of_document=50_000)
    with pytest.raises(ValueError, match="vocab_size=0"):
        TokenShards(4, "x", vocab_size=0)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize("have_ends", [False, True])
@pytest.mark.parametrize("rows_per_block", [1, 3, 100])
def test_aligned_rows_are_filled_up_with_the_end_of_document(
    tmp_path: Path, ending: str, have_ends: bool, rows_per_block: int
) -> None:
    rows = [row and [*row, EOD] for row in ROWS] if have_ends else ROWS
    path = write(tmp_path / f"shard{ending}", table(rows), rows_per_block)
    source = config(path, context_tokens=4, rows_end_documents=have_ends, align_tokens=4).open()
    tokens = [token for row in FULL_ROWS for token in [*row, *[EOD] * (4 - len(row) % 4)]]
    assert source.num_tokens == len(tokens)
    for sample_id in range(source.num_sequences):
        sample = source.read(sample_id)
        assert sample.tokens.tolist() == tokens[4 * sample_id : 4 * sample_id + 5]
        assert sample.document_starts == (0,)
        assert sample.padding == EOD
    assert source.fingerprint != config(path, context_tokens=4, rows_end_documents=have_ends).open().fingerprint
