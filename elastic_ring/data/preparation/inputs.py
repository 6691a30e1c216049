"""The files under a preparation's sources, cut into pieces of about equal size.

The cut depends on the files alone, so pieces are the same whatever the number of workers. A piece is one worker's task
and becomes one or more token shards. Nothing is tokenised here.
"""

from __future__ import annotations

from collections.abc import Iterator
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
ARROW_FILE = b"ARROW1"
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
def open_arrow(filesystem: Any, path: str) -> Iterator[Iterator[Any]]:
    """The record batches of an Arrow file or stream. Local files are mapped: batches passed by cost nothing."""
    local = isinstance(filesystem, fs.LocalFileSystem)
    with pa.memory_map(path) if local else filesystem.open_input_file(path) as file:
        magic = file.read(len(ARROW_FILE))
        file.seek(0)
        if magic == ARROW_FILE:
            reader = pa.ipc.open_file(file)
            yield (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield iter(pa.ipc.open_stream(file))
