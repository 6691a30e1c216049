"""Plain-text sources, one token per byte: the running Python's standard library, or the user's files.

Paths may be local, s3:// or anything that fsspec opens (gs://, hf:// ...). Text is read in pieces of its bytes; records
and compressed files as `elastic-ring data prepare` reads them. Empty files are skipped.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pyarrow import fs

from elastic_ring.data.filesystem import reading
from elastic_ring.data.listing import (
    File,
    Listing,
    left_out_groups,
    list_source,
    shown,
    size,
    summary,
    used_groups,
)
from elastic_ring.data.packing import (
    BYTE_VOCAB_SIZE,
    END_OF_DOCUMENT,
    Files,
    Loaded,
    PackedSource,
    aligned,
    check_context,
)
from elastic_ring.data.preparation.documents import BOM, MAX_RECORD_BYTES, Tally, TextIn, read_documents, text_problem
from elastic_ring.data.preparation.inputs import OPENED_AT_ONCE, Piece, cut
from elastic_ring.files import absolute
from elastic_ring.validation import Must, settings

# Larger files are read in pieces of this size, to bound memory.
PIECE_BYTES = 16 * 2**20
TEXT_COLUMN = "text"

# Not every distribution installs the standard library's own tests, so the corpus leaves them out.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@settings
class StdlibText:
    """The .py files of the running Python's standard library, in path order, one document per file.

    Without site-packages and test directories. The fingerprint covers every byte. With `align_tokens` each document
    starts at a multiple of it; block-sparse kernels need 128.
    """

    vocab_size: ClassVar[int] = BYTE_VOCAB_SIZE

    context_tokens: int
    align_tokens: int = 1

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)

    def open(self) -> PackedSource:
        """List the files without reading them. Raises ValueError where there are none."""
        root = Path(sysconfig.get_path("stdlib"))
        paths: list[Path] = []
        for directory, directories, names in os.walk(root):
            directories[:] = [name for name in directories if name not in _STDLIB_SKIPPED]
            paths += [Path(directory, name) for name in names if name.endswith(".py")]
        if not paths:
            raise ValueError(
                f"StdlibText: no .py files under {root}; this Python keeps its standard library elsewhere "
                "(in an archive?): use TextFiles with a directory of your own"
            )
        ordered = sorted(paths, key=lambda path: path.relative_to(root).as_posix())
        files = tuple(File(str(path), path.name, "text", path.stat().st_size) for path in ordered)
        listing = Listing(str(root), fs.LocalFileSystem(), files)
        return _open([listing], self.context_tokens, self.align_tokens, "StdlibText")


@settings
class TextFiles:
    """Files as documents of bytes: `paths` are files, directories (searched recursively) or glob patterns.

    In the given order, and in path order within each entry; a file named twice counts once. A text file is a document;
    JSON, JSON lines, Parquet and Arrow have one in each record's `text`. Files that are no text by their names are left
    out of a directory or pattern, which the driver prints once; it is an error where they have more bytes than the used
    ones, unless `allow_left_out`. The fingerprint covers every byte, so computing it reads the corpus once.
    `align_tokens` as for `StdlibText`.
    """

    _prefix: ClassVar[str] = "TextFiles "
    vocab_size: ClassVar[int] = BYTE_VOCAB_SIZE

    context_tokens: int
    paths: Annotated[tuple[str, ...], Must("a tuple of at least one path or pattern")]
    align_tokens: int = 1
    allow_left_out: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        if not all(self.paths) or not self.paths:
            raise ValueError(
                f"TextFiles paths={self.paths!r}: give a tuple of at least one path or pattern, none of them empty "
                "(--data PATH)"
            )
        object.__setattr__(self, "paths", tuple(map(absolute, self.paths)))

    def open(self) -> PackedSource:
        """List the files, and count the documents of records. Raises ValueError with the path that has no readable
        file, or more that is no text than text."""
        listings = [
            list_source(entry, allow_left_out=self.allow_left_out, flag="--data", allow="--data.allow-left-out")
            for entry in self.paths
        ]
        return _open(listings, self.context_tokens, self.align_tokens, shown(f"TextFiles{self.paths!r}"))


@dataclass(frozen=True)
class _Piece:
    """Bytes [start, stop) of a file; a file's last piece also holds `num_ends` end-of-document tokens."""

    filesystem: Any
    file: File
    start: int
    stop: int
    num_ends: int
    is_first: bool

    @property
    def name(self) -> str:
        return self.file.path

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start + (self.num_ends if self.stop == self.file.num_bytes else 0)

    def load(self) -> Loaded:
        """Raises ValueError where the file is no text, by its first piece."""
        ends = self.stop == self.file.num_bytes
        # The last piece reads to the file's current end, so that a file that grew is detected.
        data = _read(self.filesystem, self.file.path, self.start, None if ends else self.stop)
        if self.is_first and (problem := text_problem(data)):
            raise ValueError(f"{self.file.path}: {problem}")
        tokens = np.full(len(data) + (self.num_ends if ends else 0), END_OF_DOCUMENT, dtype=np.int32)
        tokens[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return Loaded(tokens, np.array([0] if self.is_first else [], dtype=np.int64))


@dataclass(frozen=True)
class _Records:
    """The documents of a part of a file of records, or of a compressed file."""

    piece: Piece
    align_tokens: int
    num_tokens: int

    @property
    def file(self) -> File:
        return self.piece.spans[0].file

    @property
    def name(self) -> str:
        span = self.piece.spans[0]
        return f"{span.file.path} (from {span.start} on)" if span.start else span.file.path

    def load(self) -> Loaded:
        documents = list(read_documents(self.piece, TextIn(TEXT_COLUMN), Tally("fail")))
        in_stream = aligned(np.array([len(text) + 1 for text in documents], dtype=np.int64), self.align_tokens)
        starts = np.cumsum(in_stream) - in_stream
        tokens = np.full(int(in_stream.sum()), END_OF_DOCUMENT, dtype=np.int32)
        for start, document in zip(starts, documents, strict=True):
            tokens[start : start + len(document)] = np.frombuffer(document, dtype=np.uint8)
        return Loaded(tokens, starts)


def _open(listings: Sequence[Listing], context_tokens: int, align_tokens: int, describe: str) -> PackedSource:
    """Sequences over the files, each once. Looks at the first bytes of text, for a byte order mark, and counts the
    documents of records."""
    files = _once(listings)
    with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="elastic-ring-inputs") as threads:
        parts = threads.map(lambda pair: _chunks(pair[0], pair[1], align_tokens), files)
        chunks = [chunk for of_file in parts for chunk in of_file]

    def digests() -> Files:
        of_files: dict[str, tuple[str, Any]] = {}  # by path: two folders may have files of one name
        for chunk in chunks:
            _, total = of_files.setdefault(chunk.file.path, (chunk.file.name, hashlib.sha256()))
            total.update(chunk.load().tokens.astype("<i4", copy=False).tobytes())
        return tuple((name, total.hexdigest()) for name, total in of_files.values())

    notes: list[str] = []  # what of an entry is used and left out, where it is not all text
    for listing in listings:
        if listing.left_out or any(file.kind != "text" for file in listing.files):
            groups = [*summary("used", used_groups([listing])), *summary("left out", left_out_groups([listing]))]
            notes.append(f"{shown(listing.uri)}: " + "\n".join(groups))
    return PackedSource(
        chunks=chunks,
        context_tokens=context_tokens,
        vocab_size=BYTE_VOCAB_SIZE,
        notes=notes,
        describe=describe,
        digests=digests,
        how=["text", context_tokens, BYTE_VOCAB_SIZE, END_OF_DOCUMENT, align_tokens],
        padding=END_OF_DOCUMENT if align_tokens > 1 else None,
    )


def _once(listings: Sequence[Listing]) -> list[tuple[Listing, File]]:
    """The files that are not empty, each with its listing, the first time that it is named."""
    by_path = {file.path: (listing, file) for listing in reversed(listings) for file in reversed(listing.files)}
    ordered = [by_path.pop(file.path) for listing in listings for file in listing.files if file.path in by_path]
    record_bytes = sum(file.num_bytes for _, file in ordered if file.kind != "text" or file.compression)
    if record_bytes > MAX_RECORD_BYTES:  # counted by reading them all, in every process: prepared once instead
        where = shown(listings[0].uri)
        raise ValueError(
            f"--data {where}: {size(record_bytes)} of records and compressed text, which every process would read "
            f"whole: prepare them once, elastic-ring data prepare --source {where} --out prepared, and train with "
            "--data prepared/manifest.json"
        )
    return [(listing, file) for listing, file in ordered if file.num_bytes]


def _chunks(listing: Listing, file: File, align_tokens: int) -> list[_Piece | _Records]:
    """The pieces of a text file, or the parts of a file of records, each with its tokens counted."""
    if file.kind != "text" or file.compression:
        pieces = cut(Listing(listing.uri, listing.filesystem, (file,)), 0, PIECE_BYTES)
        records = [_Records(part, align_tokens, len(_Records(part, align_tokens, 0).load().tokens)) for part in pieces]
        return [part for part in records if part.num_tokens]
    begins_at = len(BOM) if _read(listing.filesystem, file.path, 0, len(BOM)) == BOM else 0
    num_ends = 1 + -(file.num_bytes - begins_at + 1) % align_tokens
    return [
        _Piece(listing.filesystem, file, start, min(start + PIECE_BYTES, file.num_bytes), num_ends, start == begins_at)
        for start in range(begins_at, file.num_bytes, PIECE_BYTES)
    ]


def _read(filesystem: Any, path: str, start: int, stop: int | None) -> bytes:
    def read() -> bytes:
        with filesystem.open_input_file(path) as file:
            file.seek(start)
            return bytes(file.read(None if stop is None else stop - start))

    return reading(path, read)
