"""The documents of a piece, one after the other: JSON lines and lists, Parquet, Arrow, or one document a text file.

A document is its UTF-8 bytes. What cannot be read is named and left out, or ends the preparation, as the caller asks.
Whatever one record raises is that record's fault.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ring.data.filesystem import READ_ERRORS, located, raise_if_away, reading
from elastic_ring.data.kinds import BOM, NO_TEXT, no_text
from elastic_ring.data.listing import File
from elastic_ring.data.preparation.inputs import WHOLE, Piece, Span, open_arrow
from elastic_ring.data.preparation.pages import row_bytes, row_groups
from elastic_ring.files import plain_json
from elastic_ring.wording import cut

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
NUM_ROWS = 256  # of Parquet that are decoded at once, at most
MAX_RECORD_BYTES = 64 * 2**20
"""The most bytes of a line, of a record's document, and of a document out of a compressed file."""
MAX_NAMED = 20
"""How many bad inputs of a piece are named; all are counted."""
MAX_WORDS = 500  # characters about one bad input
OnBadInput = Literal["fail", "skip"]
CONVERSATIONS = frozenset({"messages", "conversations"})
"""Columns that `--chat` takes."""


@dataclass
class Tally:
    """What was read of a piece so far, and what was left out. `num_bad` counts what `bad` names the first of."""

    on_bad_input: OnBadInput
    num_empty_documents: int = 0
    num_empty_files: int = 0
    num_records: int = 0
    num_bad_records: int = 0
    num_bad: int = 0
    bad_bytes: int = 0
    bad: list[str] = field(default_factory=list)

    def leave_out_record(self, what: str) -> None:
        """Note a bad record. Raises ValueError where that is to end the preparation."""
        self.num_bad_records += 1
        self.leave_out(what)

    def leave_out(self, what: str, num_bytes: int = 0) -> None:
        """Note a bad file of so many bytes. Raises ValueError where that is to end the preparation."""
        what = cut(what, MAX_WORDS)
        if self.on_bad_input == "fail":
            raise ValueError(
                f"{what}; mend or remove it and prepare again, or go on without it: elastic-ring data prepare "
                "--on-bad-input skip"
            )
        self.num_bad += 1
        self.bad_bytes += num_bytes
        if self.num_bad <= MAX_NAMED:
            log.warning("left out: %s", what)
            self.bad.append(what)
        elif self.num_bad == MAX_NAMED + 1:
            log.warning("left out: more, which are counted and not named")


class Content(Protocol):
    """What of a record is its document."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of records and columns of tables; each record needs one."""

    @property
    def is_text(self) -> bool:
        """Whether it is the text in a column, and a text file is a document. Else it needs whole records."""

    @property
    def told(self) -> str:
        """What a record has, for messages."""

    def document(self, record: Any) -> bytes:
        """Raises KeyError for a record without such a key; whatever else for another bad one."""


@dataclass(frozen=True)
class TextIn:
    """The text in one column."""

    column: str
    is_text: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def told(self) -> str:
        return f"text in {self.column!r}"

    def document(self, record: Any) -> bytes:
        return b"" if (text := record[self.column]) is None else text.encode()


def read_documents(piece: Piece, content: Content, tally: Tally) -> Iterator[bytes]:
    """The documents of a piece in order, without empty ones. Raises ValueError for a file that has changed since it was
    listed, and for bad input where `tally` says so; StorageFailed where the storage is away."""
    filesystem, _ = located(piece.uri)
    readers = {"jsonl": _json_lines, "json": _json, "parquet": _parquet, "arrow": _arrow, "text": _text}
    for span in piece.spans:
        if span.file.problem:
            tally.leave_out(f"{span.name}: {span.file.problem}", span.num_bytes)
            continue
        size = reading(span.file.path, partial(filesystem.get_file_info, span.file.path)).size
        if size != span.file.num_bytes:
            raise ValueError(
                f"{span.file.path}: has {size} bytes, {span.file.num_bytes} when it was listed: input must not change "
                "while it is prepared; prepare it anew into another folder"
            )
        if not size:
            tally.num_empty_files += 1
            tally.leave_out(f"{span.name}: is empty")
            continue
        try:
            for document in readers[span.file.kind](filesystem, span, content, tally):
                tally.num_records += 1
                if document:
                    yield document
                else:
                    tally.num_empty_documents += 1
        except READ_ERRORS as error:
            raise_if_away(error, span.name)
            tally.leave_out(f"{span.name}: cannot be read{_from(span)}: {error}", span.num_bytes)


def _from(span: Span) -> str:
    return f" (part {span.start} to {span.stop})" if span.stop != WHOLE else ""


def _json_lines(filesystem: Any, span: Span, content: Content, tally: Tally) -> Iterator[bytes]:
    for number, (at, line) in enumerate(_lines(filesystem, span), 1):
        if line.strip():
            where = f"line {number} at byte {at}" if not span.start else f"the line at byte {at}"
            yield from _record(partial(plain_json, line, MAX_RECORD_BYTES), f"{span.name}: {where}", content, tally)


def _json(filesystem: Any, span: Span, content: Content, tally: Tally) -> Iterator[bytes]:
    """One list of records, or one record, over all lines of a file."""
    data = _content(filesystem, span.file)
    try:
        found = plain_json(data, len(data))
    except ValueError as error:
        tally.leave_out(f"{span.name}: is no JSON: {type(error).__name__}: {error}", span.num_bytes)
        return
    for number, value in enumerate(found if isinstance(found, list) else [found], 1):
        yield from _record(partial(_same, value), f"{span.name}: record {number}", content, tally)


def _same(value: Any) -> Any:
    return value


def _record(load: Callable[[], Any], where: str, content: Content, tally: Tally) -> Iterator[bytes]:
    """The document of a record, or none of a bad one."""
    try:
        value = load()
        document = content.document(value)
        if len(document) > MAX_RECORD_BYTES:
            raise ValueError(f"it has {len(document):,} bytes: there may be {MAX_RECORD_BYTES:,}")
    except KeyError:
        tally.num_records += 1
        tally.leave_out_record(f"{where} has no {_lacks(content, value)}")
    except (
        Exception
    ) as error:  # no JSON or no UTF-8; no object; no text; nested too deep: whatever it is, it is one record
        tally.num_records += 1
        tally.leave_out_record(f"{where} is no JSON object with {content.told}: {type(error).__name__}: {error}")
    else:
        yield document


def _lacks(content: Content, names: Any) -> str:
    """Which columns something with these ones needs."""
    way_out = "--text-column names the one to take" if content.is_text else "name one of them so"
    if content.is_text and not CONVERSATIONS.isdisjoint(names):
        way_out = "elastic-ring data prepare --chat takes conversations"
    return f"{' or '.join(map(repr, content.columns))}: it has {', '.join(map(str, names))}; {way_out}"


def _lines(filesystem: Any, span: Span) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in the span; of a line that is too long its first bytes."""
    whole = span.stop == WHOLE
    opened = _stream(filesystem, span.file) if whole else filesystem.open_input_file(span.file.path)
    with opened as file, io.BufferedReader(file, BUFFER_BYTES) as reader:
        at = reader.seek(span.start - 1) if span.start else 0
        begins = not span.start  # else the end of a line that began before
        while (whole or at < span.stop) and (part := reader.readline(MAX_RECORD_BYTES + 1)):
            if begins:
                yield at, part
            at += len(part)
            begins = part.endswith(b"\n")


def _parquet(filesystem: Any, span: Span, content: Content, tally: Tally) -> Iterator[bytes]:
    with filesystem.open_input_file(span.file.path) as file:
        parquet = pq.ParquetFile(file)
        stop = parquet.metadata.num_row_groups if span.stop == WHOLE else span.stop
        columns = _columns(parquet.schema_arrow, content, span, tally)
        if columns:
            batches = _batches(file, parquet, range(span.start, stop), columns)
            yield from _rows(batches, content, span, tally)


def _batches(file: Any, parquet: Any, groups: range, names: Sequence[str]) -> Iterator[Any]:
    """As many rows at a time as surely fit in memory."""
    columns = row_groups(file)
    for group in groups:
        num_bytes = row_bytes(file, columns[group], names, 2 * MAX_RECORD_BYTES)
        num_rows = min(max(MAX_RECORD_BYTES // num_bytes, 1), NUM_ROWS)
        yield from parquet.iter_batches(num_rows, row_groups=[group], columns=names)


def _arrow(filesystem: Any, span: Span, content: Content, tally: Tally) -> Iterator[bytes]:
    with open_arrow(filesystem, span.file.path) as batches:
        mine = itertools.islice(batches, span.start, None if span.stop == WHOLE else span.stop)
        first = next(mine, None)
        columns = [] if first is None else _columns(first.schema, content, span, tally)
        if columns:
            chosen = (batch.select(columns) for batch in itertools.chain([first], mine))
            yield from _rows(chosen, content, span, tally)


def _columns(schema: Any, content: Content, span: Span, tally: Tally) -> list[str]:
    """The columns to read of a table; none of one that is a bad file."""
    found = [name for name in content.columns if name in schema.names]
    if not found:
        tokens = "; tokens are trained on with --data shards:URI" if content.is_text else ""
        tally.leave_out(f"{span.name}: has no column {_lacks(content, schema.names)}{tokens}", span.num_bytes)
    if not content.is_text:
        return list(schema.names) if found else []
    for name in found:
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
            tally.leave_out(f"{span.name}: column {name!r} is of type {kind} and not text", span.num_bytes)
            return []
    return found


def _rows(batches: Iterator[Any], content: Content, span: Span, tally: Tally) -> Iterator[bytes]:
    """The documents of tables, row by row: many rows may have one large value."""
    rows = (row for batch in batches for row in (batch.column(0) if content.is_text else batch.to_struct_array()))
    for number, row in enumerate(rows, 1):
        where = f"{span.name}: row {number}{_from(span)}"
        if not content.is_text:
            yield from _record(row.as_py, where, content, tally)
            continue
        value = getattr(row, "value", row).as_buffer()  # a dictionary's row has its value in it
        if value is not None and len(value) > MAX_RECORD_BYTES:
            tally.num_records += 1
            tally.leave_out_record(f"{where} has {len(value):,} bytes: there may be {MAX_RECORD_BYTES:,}")
        else:
            yield b"" if value is None else value.to_pybytes()


def _text(filesystem: Any, span: Span, content: Content, tally: Tally) -> Iterator[bytes]:
    if not content.is_text:
        tally.leave_out(f"{span.name}: is text: give records with {content.told}", span.num_bytes)
        return
    document = _content(filesystem, span.file).removeprefix(BOM)
    try:
        document.decode()
        why = ""
    except UnicodeDecodeError:
        why = no_text(document)
    if why:
        tally.leave_out(f"{span.name}: looks like {NO_TEXT}{why}", span.num_bytes)
    else:
        yield document


def _content(filesystem: Any, file: File) -> bytes:
    """All bytes of a file. Raises ArrowInvalid for a compressed one that has more than a document may have."""
    with _stream(filesystem, file) as stream:
        data: bytes = stream.read(MAX_RECORD_BYTES + 1 if file.compression else None)
    if file.compression and len(data) > MAX_RECORD_BYTES:
        raise pa.ArrowInvalid(f"it expands to more than {MAX_RECORD_BYTES:,} bytes: decompress it, or write JSON lines")
    return data


def _stream(filesystem: Any, file: File) -> Any:
    """The bytes of a file, decompressed where they are compressed."""
    return filesystem.open_input_stream(file.path, compression=file.compression, buffer_size=BUFFER_BYTES)
