"""The files under a preparation's sources, cut into pieces of about equal size.

The cut depends on the files alone, so pieces are the same whatever the number of workers. A piece is one worker's task
and becomes one or more token shards. Nothing is tokenised here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from elastic_ring.data.filesystem import raise_if_away
from elastic_ring.data.listing import File, Listing

OPENED_AT_ONCE = 16
ARROW_FILE, FILE_END_BYTES, CONTINUED = b"ARROW1", 10, b"\xff\xff\xff\xff"
DICTIONARY, BATCH, COMPRESSED = 2, 3, b"ARROW:experimental_compression"
MAX_BATCH_BYTES = 128 << 20
"""The most bytes that the columns of a batch that are read, or the dictionaries of a file, expand to."""
MAX_EXPANSION = 32
"""Times its stored bytes, a batch or row group may expand beyond that: text and numbers shrink to a third or so."""
WHOLE = -1
"""`stop` of a span that reaches to the end of its file."""


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes of JSON lines, row groups of Parquet, batches of Arrow; other files are never cut."""

    file: File
    num_bytes: int
    start: int = 0
    stop: int = WHOLE

    @property
    def part(self) -> str:
        """Which part of its file it is, for messages; empty for the whole."""
        return f" (part {self.start} to {self.stop})" if self.stop != WHOLE else ""


@dataclass(frozen=True)
class Piece:
    """One task. `number` counts the pieces of its source."""

    source: int
    number: int
    uri: str
    spans: tuple[Span, ...]
    num_bytes: int

    @property
    def name(self) -> str:
        return f"{self.source:03d}-{self.number:07d}"


def cut(listing: Listing, source: int, piece_bytes: int) -> list[Piece]:
    """The pieces of a source: small files together, large ones in parts, none of many more than `piece_bytes`."""
    with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="elastic-ring-inputs") as threads:
        parts = threads.map(partial(_spans, listing.filesystem, piece_bytes), listing.files)
        spans = [span for of_file in parts for span in of_file]
    groups: list[list[Span]] = []
    filled = 0
    for span in spans:
        if not groups or filled + span.num_bytes > piece_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(span)
        filled += span.num_bytes
    return [
        Piece(source, number, listing.uri, tuple(group), sum(span.num_bytes for span in group))
        for number, group in enumerate(groups)
    ]


def _spans(filesystem: Any, piece_bytes: int, file: File) -> list[Span]:
    """A file's spans. Only tables above `piece_bytes` are opened; a broken one stays whole."""
    if file.num_bytes <= piece_bytes or file.kind in ("text", "json") or file.compression:
        return [Span(file, file.num_bytes)]
    if file.kind == "jsonl":
        starts = range(0, file.num_bytes, piece_bytes)
        stops = [min(at + piece_bytes, file.num_bytes) for at in starts]
        return [Span(file, stop - at, at, stop) for at, stop in zip(starts, stops, strict=True)]
    try:
        if file.kind == "parquet":
            with filesystem.open_input_file(file.path) as stream:
                metadata = pq.ParquetFile(stream).metadata
                sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
        else:
            with open_arrow(filesystem, file.path) as batches:
                sizes = [max(batch.nbytes, 1) for batch in batches]
    except (OSError, pa.ArrowException) as error:
        raise_if_away(error, file.path)  # else the same corpus would be cut into other pieces
        return [Span(file, file.num_bytes)]  # its reader says what is wrong with it
    spans: list[Span] = []
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if filled and filled + size > piece_bytes:
            spans.append(Span(file, filled, first, index))
            first, filled = index, 0
        filled += size
    return [*spans, Span(file, filled, first, len(sizes))]


@contextmanager
def open_arrow(
    filesystem: Any, path: str, choose: Callable[[Any], Sequence[str]] = lambda schema: schema.names
) -> Iterator[Iterator[Any]]:
    """The record batches of an Arrow file or stream, with the columns that `choose` names by its schema. Local files
    are mapped: batches passed by cost nothing. Raises ArrowInvalid for one that expands to more than may be."""
    local = isinstance(filesystem, fs.LocalFileSystem)
    with pa.memory_map(path) if local else filesystem.open_input_file(path) as file:
        is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
        file.seek(0)
        opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = opened(file).schema
        if not (fields := [schema.get_field_index(name) for name in choose(schema)]):
            yield iter(())
            return
        check_arrow(file, schema, fields)
        file.seek(0)
        reader = opened(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
        yield (reader.get_batch(index) for index in range(reader.num_record_batches)) if is_file else iter(reader)


def sound(batch: Any) -> Any:
    """A batch of an Arrow file. Raises ArrowInvalid for places outside its buffers, where pyarrow ends the process."""
    batch.validate(full=True)
    return batch


# ------------------------------------------------------------ what Arrow expands to
# pyarrow expands a buffer whole. Its length then stands before it; where buffers are, messages in flatbuffers say.


def check_arrow(file: Any, schema: Any, fields: Sequence[int]) -> None:
    """Raises ArrowInvalid where all dictionaries, or these fields of a batch, expand to more bytes than may be."""
    try:
        chosen = [index in fields for index, kind in enumerate(schema.types) for _ in range(_num_buffers(kind))]
        of_dictionaries = [0, 0]
        for text, body in _messages(file):
            is_batch, buffers = text[_field(text, 1)] == BATCH, _buffers(text)
            stored, expanded = [0, 0] if is_batch else of_dictionaries
            for number, (at, length) in enumerate(buffers):
                if length > 8 and (not is_batch or len(chosen) != len(buffers) or chosen[number]):
                    stored, expanded = stored + length, expanded + max(_number(file.read_at(8, body + at), "q"), 0)
            of_dictionaries = of_dictionaries if is_batch else [stored, expanded]
            if expanded > (most_bytes := max(MAX_BATCH_BYTES, MAX_EXPANSION * min(stored, file.size()))):
                raise pa.ArrowInvalid(
                    f"a batch or dictionary expands to {expanded:,} bytes: there may be {most_bytes:,} in each batch "
                    "and in all dictionaries: write it in smaller ones, or without compression"
                )
    except (IndexError, OverflowError, struct.error) as error:
        raise pa.ArrowInvalid("a message is damaged") from error


def _num_buffers(kind: Any) -> int:
    """How many buffers a column has in a batch; columns of views may have more."""
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, kind)], ["x"])
    return len(_buffers(bytes(pa.ipc.read_message(empty.serialize()).metadata), is_any=True))


def _messages(file: Any) -> Iterator[tuple[bytes, int]]:
    """The text of each message, and where its body begins: of a file as its footer lists them."""
    at, end = 0, file.size() - FILE_END_BYTES
    if file.read_at(len(ARROW_FILE), 0) == ARROW_FILE:
        num_bytes = min(_number(file.read_at(4, end), "I"), end)
        footer = file.read_at(num_bytes, end - num_bytes)
        for start, num_bytes, *_ in (block for field in (2, 3) for block in _structs(footer, field, "qiiq")):
            head = file.read_at(min(num_bytes, end), start)
            yield head[8 if head.startswith(CONTINUED) else 4 :], start + num_bytes
        return
    while head := file.read_at(8, at):
        at += 8 if head.startswith(CONTINUED) else 4
        if not (text := file.read_at(min(_number(head, "I", 4 if head.startswith(CONTINUED) else 0), end), at)):
            return
        yield text, at + len(text)
        at += len(text) + (max(_number(text, "q", length), 0) if (length := _field(text, 3)) else 0)


def _buffers(text: bytes, *, is_any: bool = False) -> list[tuple[int, ...]]:
    """(offset in the body, bytes) of each buffer of a message, if they are compressed, or of `is_any`."""
    kind, batch = text[_field(text, 1)], _follow(text, _field(text, 2))
    batch = _follow(text, _field(text, 1, batch)) if kind == DICTIONARY else batch
    # A key of the message said so at first.
    is_any = kind in (DICTIONARY, BATCH) and bool(is_any or _field(text, 3, batch) or COMPRESSED in text)
    return _structs(text, 2, "qq", batch) if is_any else []


def _number(text: bytes, kind: str, at: int = 0) -> int:
    return int(struct.unpack_from(f"<{kind}", text, at)[0])


def _follow(text: bytes, at: int) -> int:
    return at + _number(text, "I", at)


def _field(text: bytes, number: int, table: int | None = None) -> int:
    """Where a field of a table is, by default of the outermost; 0 for one that is left out."""
    table = _follow(text, 0) if table is None else table
    names = table - _number(text, "i", table)
    offset = _number(text, "H", names + 4 + 2 * number) if 4 + 2 * number < _number(text, "H", names) else 0
    return table + offset if offset else 0


def _structs(text: bytes, field: int, kinds: str, table: int | None = None) -> list[tuple[int, ...]]:
    if not (at := _field(text, field, table)):
        return []
    begin, size = _follow(text, at), struct.calcsize(f"<{kinds}")
    return list(struct.iter_unpack(f"<{kinds}", text[begin + 4 :][: _number(text, "I", begin) * size]))
