"""Plain-text sources, one token per byte: the running Python's standard library, or the user's files.

Paths may be local or anything that fsspec opens (s3://, gs://, hf:// ...). Nothing is decoded, so encodings do not
matter. Empty files are skipped.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import fsspec
import numpy as np

from elastic_ring.data.chunks import Starts, Tokens
from elastic_ring.data.packing import BYTE_VOCAB_SIZE, END_OF_DOCUMENT, PackedSource, check_context
from elastic_ring.validation import Must, settings

# Larger files are read in pieces of this size, to bound memory.
PIECE_BYTES = 16 * 2**20

# Binary tables, and JSON lines, whose keys and quotes are not part of the documents.
_NOT_TEXT = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".jsonl", ".ndjson")

# Not every distribution installs the standard library's own tests, so the corpus leaves them out.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@settings
class StdlibText:
    """The .py files of the running Python's standard library, in path order, one document per file.

    Without site-packages and test directories. The fingerprint covers every byte. With `align_tokens` each document
    starts at a multiple of it; block-sparse kernels need 128.
    """

    context_tokens: int
    align_tokens: int = 1

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCAB_SIZE

    def open(self) -> PackedSource:
        """List the files without reading them. Raises ValueError where there are none."""
        root = Path(sysconfig.get_path("stdlib"))
        found = []
        for directory, directories, names in os.walk(root):
            directories[:] = [name for name in directories if name not in _STDLIB_SKIPPED]
            found += [Path(directory, name) for name in names if name.endswith(".py")]
        if not found:
            raise ValueError(
                f"StdlibText: no .py files under {root}; this Python keeps its standard library elsewhere "
                "(in an archive?): use TextFiles with a directory of your own"
            )
        ordered = sorted(found, key=lambda path: path.relative_to(root).as_posix())
        return _open(
            fsspec.filesystem("file"), [str(path) for path in ordered], self.context_tokens, self.align_tokens,
            "StdlibText",
        )  # fmt: skip


@settings
class TextFiles:
    """Files as documents of bytes: `paths` are files, directories (searched recursively) or glob patterns.

    In the given order, and in path order within each entry; a file named twice counts once. The fingerprint covers
    every byte, so computing it reads the corpus once. `align_tokens` as for `StdlibText`.
    """

    _prefix: ClassVar[str] = "TextFiles "

    context_tokens: int
    paths: Annotated[tuple[str, ...], Must("a tuple of at least one path or pattern")]
    align_tokens: int = 1

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        if not all(self.paths) or not self.paths:
            raise ValueError(
                f"TextFiles paths={self.paths!r}: give a tuple of at least one path or pattern, none of them empty "
                "(--data PATH)"
            )

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCAB_SIZE

    def open(self) -> PackedSource:
        """List the files without reading them. Raises ValueError with the path that has no readable file."""
        ordered: dict[str, None] = {}
        filesystem: Any = None
        for entry in self.paths:
            opened, path = _url_to_filesystem(entry)
            if filesystem is not None and type(opened) is not type(filesystem):
                raise ValueError(f"TextFiles paths={self.paths!r}: all must be of one file system")
            filesystem = opened
            ordered.update(dict.fromkeys(_expand(opened, path, entry)))
        return _open(filesystem, list(ordered), self.context_tokens, self.align_tokens, f"TextFiles{self.paths!r}")


@dataclass(frozen=True)
class _Piece:
    """Bytes [start, stop) of a file; a file's last piece also holds `num_ends` end-of-document tokens."""

    filesystem: Any
    path: str
    start: int
    stop: int
    file_bytes: int
    num_ends: int

    @property
    def name(self) -> str:
        return self.path

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start + (self.num_ends if self.stop == self.file_bytes else 0)

    def load(self) -> tuple[Tokens, Starts]:
        ends = self.stop == self.file_bytes
        # The last piece reads to the file's current end, so that a file that grew is detected.
        data = _read(self.filesystem, self.path, self.start, None if ends else self.stop)
        tokens = np.full(len(data) + (self.num_ends if ends else 0), END_OF_DOCUMENT, dtype=np.int32)
        tokens[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return tokens, np.array([0] if self.start == 0 else [], dtype=np.int64)


def _open(filesystem: Any, paths: Sequence[str], context_tokens: int, align_tokens: int, describe: str) -> PackedSource:
    pieces: list[_Piece] = []
    for path in paths:
        size_bytes = _size_bytes(filesystem, path)
        num_ends = 1 + -(size_bytes + 1) % align_tokens
        for start in range(0, size_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size_bytes)
            pieces.append(_Piece(filesystem, path, start, stop, size_bytes, num_ends))

    def digest() -> str:
        how = f"text {context_tokens} {BYTE_VOCAB_SIZE} {END_OF_DOCUMENT}"
        total = hashlib.sha256((how if align_tokens == 1 else f"{how} {align_tokens}").encode())
        for piece in pieces:
            if piece.start == 0:
                total.update(piece.file_bytes.to_bytes(8, "little"))
            total.update(piece.load()[0].astype("<i4", copy=False).tobytes())
        return total.hexdigest()

    return PackedSource(
        pieces, context_tokens=context_tokens, vocab_size=BYTE_VOCAB_SIZE, describe=describe, digest=digest,
        padding=END_OF_DOCUMENT if align_tokens > 1 else None,
    )  # fmt: skip


def _url_to_filesystem(entry: str) -> tuple[Any, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(entry)
    except Exception as error:  # as in `_expand`
        raise ValueError(f"TextFiles path {entry!r}: cannot be opened: {error}") from error
    return filesystem, path


def _expand(filesystem: Any, path: str, entry: str) -> list[str]:
    """The files of one entry of `paths`, in path order."""
    try:
        if fsspec.core.has_magic(path) and not filesystem.exists(path):
            found = sorted(match for match in filesystem.glob(path) if filesystem.isfile(match))
        else:
            found = sorted(filesystem.find(path))
    except Exception as error:  # object stores raise their own classes: no credentials, no such bucket
        raise ValueError(f"TextFiles path {entry!r}: cannot be listed: {error}") from error
    tables = [name for name in found if name.lower().endswith(_NOT_TEXT)]
    if tables:
        raise ValueError(
            f"TextFiles path {tables[0]!r}: is no plain text, and its bytes are not what a model should learn: for "
            "Parquet or Arrow with a column of tokens give TokenShards (--data shards:URI); write JSON lines out as "
            "text files or token shards first"
        )
    if not found:
        raise ValueError(f"TextFiles path {entry!r}: no such file, no file below it, or none that matches")
    return found


def _size_bytes(filesystem: Any, path: str) -> int:
    try:
        # Open it: an unreadable file has a size too.
        with filesystem.open(path, "rb") as file:
            return int(file.seek(0, os.SEEK_END))
    except Exception as error:  # as in `_expand`
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _read(filesystem: Any, path: str, start: int, stop: int | None) -> bytes:
    try:
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    except Exception as error:  # as in `_expand`
        raise ValueError(f"{path}: cannot be read: {error}") from error
