"""The documents of a piece, one after the other: JSON lines and lists, Parquet, Arrow, or one document a text file.

A document is its UTF-8 bytes. What cannot be read is named and left out, or ends the preparation, as the caller asks.
Whatever one record raises is that record's fault. What expands is bounded here, before it is in memory.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_ring.data.filesystem import READ_ERRORS, located, raise_if_away, reading
from elastic_ring.data.listing import EXPORT
from elastic_ring.data.manifest import Dropped
from elastic_ring.data.preparation import MAX_RECORD_BYTES, OnBadInput
from elastic_ring.data.preparation.chat import Conversations
from elastic_ring.data.preparation.inputs import MAX_EXPANSION, WHOLE, Piece, Span, open_arrow, sound
from elastic_ring.files import JSON_PARTS, cut, plain_json

BUFFER_BYTES = 1 << 20
NUM_ROWS = 256  # of Parquet that are decoded at once, at most
OBJECT_BYTES = 64  # of a value of Python, besides its content
RECORD_BYTES_PER_PART, LIST_BYTES_PER_PART = 32, 8  # texts, commas and brackets of JSON; lists are of short records
MAX_NAMED = 50
"""How many kinds of bad records, and bad files, of a piece are named; all are counted."""
MORE = "more"
VARIES = re.compile(r"""(?<!\w)'[^']*'|"[^"]*"|\d[\d,.]*""")
"""What differs between problems of one kind: names, values, numbers."""
MAX_WORDS = 500  # characters about one bad input
MAX_NO_TEXT = 0.1
"""Share of bytes that are no UTF-8, or control characters, above which a file is no text. Latin-1 has about 0.03."""
BOM = b"\xef\xbb\xbf"
GIT_LFS = b"version https://git-lfs"
_CONTROL = bytes(sorted({*range(32)} - {*b"\t\n\v\f\r\b\x1b"}))


@dataclass
class Tally:
    """What was read of a piece so far, and what was left out. `num_bad` counts all, `bad` names the first of each of
    `kinds`. `place`: of the record that was read last."""

    on_bad_input: OnBadInput
    num_empty_documents: int = 0
    num_empty_files: int = 0
    num_records: int = 0
    num_bad_records: int = 0
    num_bad: int = 0
    bad_bytes: int = 0
    bad: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    place: str = ""

    def dropped(self, num_duplicates: int) -> Dropped:
        """The counts as a manifest has them."""
        counts = {name: count for name, count in vars(self).items() if name.startswith("num_")}
        kinds = tuple(self.kinds.items())
        return Dropped(num_duplicates, bad=tuple(self.bad), bad_bytes=self.bad_bytes, bad_kinds=kinds, **counts)

    def leave_out_record(self, problem: str) -> None:
        """Note a bad record at `place`. Raises ValueError where that is to end the preparation."""
        self.num_bad_records += 1
        self.leave_out(f"{self.place} {problem}", kind=VARIES.sub("_", problem))

    def leave_out(self, problem: str, num_bytes: int = 0, kind: str = "") -> None:
        """Note a bad file of so many bytes, by default of a kind of its own. Raises ValueError where that is to end the
        preparation."""
        problem = cut(problem, MAX_WORDS)
        if self.on_bad_input == "fail":
            raise ValueError(
                f"{problem}; mend or remove it and prepare again, or go on without it: elastic-ring data prepare "
                "--on-bad-input skip"
            )
        self.num_bad += 1
        self.bad_bytes += num_bytes
        kind = cut(kind or problem, MAX_WORDS)
        kind = kind if kind in self.kinds or len(self.kinds) < MAX_NAMED else MORE
        if kind not in self.kinds:
            self.bad.append(problem)
        self.kinds[kind] += 1


class TextIn:
    """A document is the text in one column or key of a record, or a text file.

    As `Conversations`: `columns` are keys of records and columns of tables, of which each record needs one; it may have
    `optional_columns`, too. `description` is of a record, for messages.
    """

    is_text = True
    optional_columns: tuple[str, ...] = ()
    missing_columns: frozenset[str] = frozenset()

    def __init__(self, column: str) -> None:
        self.columns: tuple[str, ...] = (column,)
        self.description = f"text in {column!r}"

    def document(self, record: Any) -> bytes:
        """Raises KeyError for a record without such a key; whatever else for another bad one."""
        return b"" if (text := record[self.columns[0]]) is None else text.encode()


Content = TextIn | Conversations


def read_documents(piece: Piece, content: Content, tally: Tally) -> Iterator[bytes]:
    """The documents of a piece in order, without empty ones. Raises ValueError for a file that has changed since it was
    listed, and for bad input where `tally` says so; StorageFailed where the storage is away."""
    filesystem, _ = located(piece.uri)
    for span in piece.spans:
        name = span.file.name
        size = reading(span.file.path, partial(filesystem.get_file_info, span.file.path)).size
        if size != span.file.num_bytes:
            raise ValueError(
                f"{span.file.path}: has {size} bytes, {span.file.num_bytes} when it was listed: input must not change "
                "while it is prepared; prepare it anew into another folder"
            )
        if not size:
            tally.num_empty_files += 1
            tally.leave_out(f"{name}: is empty")
            continue
        try:
            for document in _SpanReader(filesystem, span, content, tally).documents():
                tally.num_records += 1
                if document:
                    yield document
                else:
                    tally.num_empty_documents += 1
        except READ_ERRORS as error:
            if not isinstance(error, PermissionError):  # one file's, which its owner mends: the others are read
                raise_if_away(error, name)
            way_out = "; decompress it, as zstd -d --long=31 does" if "too much memory" in str(error) else ""
            tally.leave_out(f"{name}: cannot be read{span.part}: {error}{way_out}", span.num_bytes)


def text_problem(data: bytes) -> str:
    """Why the bytes of a file are not used as text; empty where they are."""
    if data.startswith(GIT_LFS):
        return "is a pointer of Git LFS in place of the file: fetch the file: git lfs pull"
    num_decodable = len(data.decode("utf-8", "ignore").encode())
    num_control = len(data) - len(data.translate(None, _CONTROL))
    share = (len(data) - num_decodable + num_control) / max(len(data), 1)
    if share <= MAX_NO_TEXT:
        return ""
    return (
        f"is binary data or in another encoding ({share:.0%} of {len(data):,} bytes are no UTF-8 text): convert it "
        f"with iconv, or {EXPORT}"
    )


def _parse_json(data: bytes, *, is_list: bool = False) -> Any:
    """Raises ValueError for anything but JSON in UTF-8; Python's own reader takes UTF-16 and UTF-32 as well."""
    if is_list:
        return plain_json(data.decode("utf-8-sig"), len(data), max(len(data) // LIST_BYTES_PER_PART, JSON_PARTS))
    most_parts = max(MAX_RECORD_BYTES // RECORD_BYTES_PER_PART, 1 << 16)
    return plain_json(data.decode("utf-8-sig"), MAX_RECORD_BYTES, most_parts)


def _plain_rows(batch: Any) -> Iterator[Callable[[], Any]]:
    """What gives each row as Python's values, or raises ValueError where they would be too large."""
    table, is_small = batch.to_struct_array(), False
    with suppress(ValueError):  # of a type that its rows name
        is_small = _num_bytes(table) <= MAX_RECORD_BYTES
    if is_small:
        return (scalar.as_py for scalar in table)
    return (partial(_plain_row, table.slice(index, 1)) for index in range(len(table)))


def _plain_row(row: Any) -> Any:
    if (num_bytes := _num_bytes(row)) > MAX_RECORD_BYTES:
        raise ValueError(f"it takes {num_bytes:,} bytes: there may be {MAX_RECORD_BYTES:,}")
    return row[0].as_py()


def _num_bytes(column: Any) -> int:
    """What the values of a column take, of which a few bytes may name many."""
    if isinstance(column, pa.StructArray):
        inner = sum(map(_num_bytes, column.flatten()))
    elif isinstance(column, pa.MapArray):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        inner = sum(_num_bytes(part[first:last]) for part in (column.keys, column.items))
    elif isinstance(column, (pa.ListViewArray, pa.LargeListViewArray)):  # which may name one value many times
        inner = OBJECT_BYTES * (pc.sum(pc.list_value_length(column)).as_py() or 0)
        inner = inner if inner > MAX_RECORD_BYTES else _num_bytes(column.flatten())
    elif isinstance(column, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        inner = _num_bytes(column.flatten())
    elif isinstance(column, pa.DictionaryArray):
        counts = column.indices.drop_null().value_counts()
        lengths = _text_bytes(column.dictionary.take(counts.field("values")))
        inner = int(np.dot(lengths, counts.field("counts").to_numpy()))
    elif pa.types.is_nested(column.type):
        raise ValueError(f"it has values of type {column.type}")
    else:
        inner = int(_text_bytes(column).sum()) if pa.types.is_string_view(column.type) else column.nbytes
    return OBJECT_BYTES * len(column) + inner


def _text_bytes(column: Any) -> Any:
    """The bytes of each text of a column; zeros for numbers."""
    if not len(column) or pa.types.is_primitive(column.type):
        return np.zeros(len(column), np.int64)
    if pa.types.is_string_view(column.type):  # 16 bytes each, of which the first four say its length
        return np.frombuffer(column.buffers()[1], np.int32)[4 * column.offset :: 4][: len(column)].astype(np.int64)
    return pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)


@dataclass(frozen=True)
class _SpanReader:
    """Reads a part of a file as its kind says; notes bad records and a bad file in `tally`."""

    filesystem: Any
    span: Span
    content: Content
    tally: Tally

    def documents(self) -> Iterator[bytes]:
        readers = {
            "jsonl": self._json_lines,
            "json": self._json,
            "parquet": self._parquet,
            "arrow": self._arrow,
            "text": self._text,
        }
        return readers[self.span.file.kind]()

    def _text(self) -> Iterator[bytes]:
        if not self.content.is_text:
            self._refuse(f"is text: give records with {self.content.description}")
            return
        document = self._read_whole().removeprefix(BOM)
        if problem := text_problem(document):
            self._refuse(problem)
        else:
            self.tally.place = f"{self.span.file.name}:"
            yield document

    def _json_lines(self) -> Iterator[bytes]:
        for number, (at, line) in enumerate(self._lines(), 1):
            if line.strip():
                where = f"the line at byte {at}" if self.span.start else f"line {number} at byte {at}"
                yield from self._record(line, _parse_json, where)

    def _json(self) -> Iterator[bytes]:
        """The records of one list, one record over all lines, or a record a line: files of all three end in .json."""
        with closing(self._lines()) as lines:
            _, first = next(lines, (0, b""))
            has_more = next(lines, None) is not None
        try:
            if has_more and isinstance(_parse_json(first), dict):
                yield from self._json_lines()
                return
        except ValueError:
            pass
        data = self._read_whole()
        try:
            value = _parse_json(data, is_list=True)
        except ValueError as error:
            is_json = not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
            self._refuse(str(error) if is_json else f"is no JSON: {type(error).__name__}: {error}")
            return
        for number, record in enumerate(value if isinstance(value, list) else [value], 1):
            yield from self._record(record, lambda record: record, f"record {number}")

    def _parquet(self) -> Iterator[bytes]:
        with self.filesystem.open_input_file(self.span.file.path) as file:
            parquet = pq.ParquetFile(file)
            stop = parquet.metadata.num_row_groups if self.span.stop == WHOLE else self.span.stop
            if columns := self._columns(parquet.schema_arrow):
                yield from self._rows(_parquet_batches(file, parquet, range(self.span.start, stop), columns))

    def _arrow(self) -> Iterator[bytes]:
        with open_arrow(self.filesystem, self.span.file.path, self._columns) as batches:
            stop = None if self.span.stop == WHOLE else self.span.stop
            yield from self._rows(map(sound, itertools.islice(batches, self.span.start, stop)))

    # ------------------------------------------------------------ records and rows

    def _refuse(self, problem: str) -> None:
        self.tally.leave_out(f"{self.span.file.name}: {problem}", self.span.num_bytes)

    def _record(self, raw: Any, parse: Callable[[Any], Any], where: str) -> Iterator[bytes]:
        """The document of a record, or none of a bad one: no JSON or no UTF-8, no object, no text, nested too deep."""
        self.tally.place = f"{self.span.file.name}: {where}"
        try:
            value = parse(raw)
            document = self.content.document(value)
            if len(document) > MAX_RECORD_BYTES:
                raise ValueError(f"it has {len(document):,} bytes: there may be {MAX_RECORD_BYTES:,}")
        except Exception as error:
            problem = f"is no JSON object with {self.content.description}: {type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                problem = f"has no {self._missing_columns(value)}"
            self.tally.num_records += 1
            self.tally.leave_out_record(problem)
        else:
            yield document

    def _rows(self, batches: Iterator[Any]) -> Iterator[bytes]:
        """The documents of tables, row by row: many rows may have one large value."""
        if not self.content.is_text:
            for number, row in enumerate(itertools.chain.from_iterable(map(_plain_rows, batches)), 1):
                yield from self._record(row, lambda row: row(), f"row {number}{self.span.part}")
            return
        rows = ((batch.column(0), index) for batch in batches for index in range(len(batch)))
        for number, (table, index) in enumerate(rows, 1):
            self.tally.place = f"{self.span.file.name}: row {number}{self.span.part}"
            row = table[index]
            value = getattr(row, "value", row).as_buffer()  # a dictionary's row has its value in it
            if value is not None and len(value) > MAX_RECORD_BYTES:
                self.tally.num_records += 1
                self.tally.leave_out_record(f"has {len(value):,} bytes: there may be {MAX_RECORD_BYTES:,}")
            else:
                yield b"" if value is None else value.to_pybytes()

    def _columns(self, schema: Any) -> list[str]:
        """The columns to read of a table; none of one that is a bad file."""
        columns = [name for name in self.content.columns if name in schema.names]
        if not columns:
            tokens = "; tokens are trained on with --data shards:URI" if self.content.is_text else ""
            self._refuse(f"has no column {self._missing_columns(schema.names)}{tokens}")
        elif not self.content.is_text:
            return columns + [name for name in self.content.optional_columns if name in schema.names]
        for name in columns:
            if schema.names.count(name) > 1:
                self._refuse(f"has {schema.names.count(name)} columns {name!r}")
                return []
            kind = schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
                self._refuse(f"column {name!r} is of type {kind} and not text")
                return []
        return columns

    def _missing_columns(self, names: Any) -> str:
        """The columns that a table or record with these `names` lacks, and the way out."""
        way_out = "--text-column names the one to take" if self.content.is_text else "--columns names others"
        if self.content.is_text and not {"messages", "conversations"}.isdisjoint(names):
            way_out = "elastic-ring data prepare --chat takes conversations"
        return f"{' or '.join(map(repr, self.content.columns))}: it has {', '.join(map(str, names))}; {way_out}"

    # ------------------------------------------------------------ bytes

    def _lines(self) -> Generator[tuple[int, bytes]]:
        """(offset, line) of the lines that begin in the span; of a line that is too long its first bytes."""
        start, stop = self.span.start, self.span.stop
        opened = self._open() if stop == WHOLE else self.filesystem.open_input_file(self.span.file.path)
        with opened as file, io.BufferedReader(file, BUFFER_BYTES) as reader:
            at = reader.seek(start - 1) if start else 0
            begins = not start  # else the end of a line that began before
            while (stop == WHOLE or at < stop) and (part := reader.readline(MAX_RECORD_BYTES + 1)):
                if begins:
                    yield at, part
                at += len(part)
                begins = part.endswith(b"\n")

    def _read_whole(self) -> bytes:
        """All bytes of the file. Raises ArrowInvalid for a compressed one that has more than a document may have."""
        is_compressed = self.span.file.compression is not None
        with self._open() as stream:
            data: bytes = stream.read(MAX_RECORD_BYTES + 1 if is_compressed else None)
        if is_compressed and len(data) > MAX_RECORD_BYTES:
            raise pa.ArrowInvalid(
                f"it expands to more than {MAX_RECORD_BYTES:,} bytes: decompress it, or write JSON lines"
            )
        return data

    def _open(self) -> Any:
        """The bytes of the file as a stream, decompressed where they are compressed: the only place that does so."""
        file = self.span.file
        return self.filesystem.open_input_stream(file.path, compression=file.compression, buffer_size=BUFFER_BYTES)


# ------------------------------------------------------------ pages of Parquet
# pyarrow expands a page whole. What it expands to is read off the headers first, which are structs in Thrift's compact
# protocol, as the footer is. pyarrow's own view of a footer ends the process where its statistics are damaged.

DAMAGED = (LookupError, RecursionError, StopIteration, TypeError, UnicodeDecodeError)
FOOTER_END_BYTES, MAX_FIELD = 8, 99
WIDTHS, EXTREMES = {1: 4, 2: 8, 4: 4, 5: 8}, (1, 2, 5, 6)
"""Bytes of a number, by physical type; fields of statistics with one."""
MAX_CHUNK_BYTES, VALUE_BYTES = 1 << 29, 8
"""Of each value in memory: a few bytes may say millions of equal ones, or of nulls."""
BOOL, INT64, DOUBLE, BINARY, STRUCT = (1, 2), 6, 7, 8, 12
LISTS, INTEGERS = (9, 10), (4, 5, INT64)
BY_DICTIONARY = (2, 8)  # encodings


def _parquet_batches(file: Any, parquet: Any, groups: range, names: Sequence[str]) -> Iterator[Any]:
    """As many rows at a time as surely fit in memory. Raises ArrowInvalid for a page that expands to more than may be,
    and for a damaged footer or header."""
    most_bytes, columns = 2 * MAX_RECORD_BYTES, column_chunks(file, groups)
    for group, chunks in zip(groups, columns, strict=True):
        row_bytes, repeated = 1, []
        for path, start, num_bytes in chunks:
            if not any(f"{path}.".startswith(f"{name}.") for name in names):
                continue
            largest, values, most_values, dictionary, encodings = 0, 0, 0, 0, set[int]()
            for page in pages(file, start, num_bytes):
                if page.memory_bytes > (most := max(most_bytes, MAX_EXPANSION * min(page.stored_bytes, num_bytes))):
                    problem = f"a page of {path!r} expands to {page.memory_bytes:,} bytes: there may be {most:,}"
                    raise pa.ArrowInvalid(problem)
                largest = max(largest, page.expanded_bytes)
                if page.encoding is None:
                    dictionary = max(dictionary, page.expanded_bytes)
                else:
                    values, most_values = values + page.num_values, max(most_values, page.num_values)
                    encodings.add(page.encoding)
            # A conversation may name one long text many times. pyarrow keeps only whole dictionaries.
            if path not in names and encodings.issubset(BY_DICTIONARY) and dictionary * values > MAX_RECORD_BYTES:
                repeated.append(path)
            is_large = VALUE_BYTES * values > MAX_CHUNK_BYTES  # else all its values fit, however they are in rows
            row_bytes += max(largest, VALUE_BYTES * most_values * is_large)
        num_rows = min(max(MAX_RECORD_BYTES // row_bytes, 1), NUM_ROWS)
        reader = pq.ParquetFile(file, read_dictionary=repeated) if repeated else parquet
        yield from reader.iter_batches(num_rows, row_groups=[group], columns=names)


def column_chunks(file: Any, groups: range) -> list[list[tuple[str, int, int]]]:
    """(path, start, bytes) of each column of these row groups. Raises ArrowInvalid for a damaged footer, also for one
    with statistics at which pyarrow ends the process."""
    end = max(file.size() - FOOTER_END_BYTES, 0)
    num_bytes = min(int.from_bytes(file.read_at(4, end), "little"), end)
    try:
        row_groups = _read_struct(file.read_at(num_bytes, end - num_bytes), 0)[0][4]
        return [[_column_chunk(chunk[3], end) for chunk in row_groups[group][1]] for group in groups]
    except DAMAGED as error:
        raise pa.ArrowInvalid("the footer is damaged") from error


def _column_chunk(about: dict[int, Any], most_bytes: int) -> tuple[str, int, int]:
    first, dictionary, statistics = about[9], about.get(11, 0), about.get(12, {})
    start = min((at for at in (first, dictionary) if at > 0), default=0)
    if any(len(statistics.get(field, b"")) not in (0, WIDTHS[about[1]]) for field in EXTREMES if about[1] in WIDTHS):
        raise LookupError("statistics")
    return ".".join(part.decode() for part in about[3]), start, max(min(about[7], most_bytes), 0) if about[5] else 0


class Page(NamedTuple):
    """`memory_bytes`: what its values take in memory, at least. `encoding`: None of a dictionary."""

    memory_bytes: int
    stored_bytes: int
    expanded_bytes: int
    num_values: int
    encoding: int | None


def pages(file: Any, start: int, num_bytes: int) -> Iterator[Page]:
    """Each page of a column chunk. Raises ArrowInvalid for a damaged header."""
    at, block, block_at = 0, b"", 0
    try:
        while at < num_bytes:
            try:
                header, end = _read_struct(block, at - block_at)
            except IndexError:  # it begins or ends behind the block
                block, block_at = file.read_at(min(16 * BUFFER_BYTES, num_bytes - at), start + at), at
                header, end = _read_struct(block, 0)
            abouts = {field: about for field in (5, 7, 8) if (about := header.get(field, {})) is not None}
            num_values = max(about.get(1, 0) for about in abouts.values())
            encoding = abouts.get(5, {}).get(2, abouts.get(8, {}).get(4))
            yield Page(max(header[2], VALUE_BYTES * num_values), max(header[3], 0), header[2], num_values, encoding)
            at = block_at + end + max(header[3], 0)
    except DAMAGED as error:
        raise pa.ArrowInvalid(f"the page header before byte {at} of a column is damaged") from error


def check_pages(file: Any, start: int, num_bytes: int) -> None:
    """Raises ArrowInvalid for a column chunk that expands to more than may be: a large one may be large."""
    most_bytes = max(MAX_CHUNK_BYTES, MAX_EXPANSION * num_bytes)
    if (expanded := sum(page.memory_bytes for page in pages(file, start, num_bytes))) > most_bytes:
        raise pa.ArrowInvalid(f"a row group expands to {expanded:,} bytes: there may be {most_bytes:,}")


def _read_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Values by field, and where they end. Fields rise by at most 15: else pyarrow may read others."""
    fields, field = dict[int, Any](), 0
    while head := data[at]:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if not head >> 4 or field > MAX_FIELD:
            raise LookupError(f"field {field}")
        fields[field], at = (None, at) if kind in BOOL else _read_value(data, at, kind)
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == STRUCT:
        return _read_struct(data, at)
    if kind in LISTS:
        num, kind, at = data[at] >> 4, data[at] & 15, at + 1
        num, at = _read_number(data, at) if num == 15 else (num, at)
        values = []
        for _ in range(min(num, len(data))):
            value, at = _read_value(data, at, kind)
            values.append(value)
        return values, at
    if kind == BINARY:
        num, at = _read_number(data, at)
        return data[at : at + num], at + num
    if kind in INTEGERS:
        number, at = _read_number(data, at, 64 if kind == INT64 else 32)
        return number >> 1 ^ -(number & 1), at
    return None, at + {**dict.fromkeys((*BOOL, 3), 1), DOUBLE: 8}[kind]


def _read_number(data: bytes, at: int, num_bits: int = 32) -> tuple[int, int]:
    if data[at] < 128:
        return data[at], at + 1
    end = next(end for end in range(at, at + 10) if data[end] < 128) + 1
    return sum((byte & 127) << 7 * place for place, byte in enumerate(data[at:end])) % (1 << num_bits), end
