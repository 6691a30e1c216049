"""What both kinds of storage speak of: files, uploads that were begun, bytes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file by its name under the storage's root. `sha256` is of the bytes that were handed to the store."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A file that is there, by the path of its file system or store."""

    path: str
    num_bytes: int
    modified_unix_s: float


@dataclass(frozen=True)
class Upload:
    """A multipart upload that has neither ended nor been aborted."""

    path: str
    upload_id: str
    begun_unix_s: float


def pieces(chunks: Iterable[bytes | memoryview], num_bytes: int = PIECE_BYTES) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of exactly `num_bytes`, but for the last; large chunks are not copied."""
    kept = bytearray()
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        if kept:
            missing = num_bytes - len(kept)
            kept += rest[:missing]
            rest = rest[missing:]
            if len(kept) == num_bytes:
                yield memoryview(kept)
                kept = bytearray()
        while len(rest) >= num_bytes:
            yield rest[:num_bytes]
            rest = rest[num_bytes:]
        kept += rest
    if kept:
        yield memoryview(kept)
