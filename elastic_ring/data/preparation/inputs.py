"""What a preparation reads: the files under its sources, cut into pieces of about equal size.

The cut depends on the files alone, so pieces are the same whatever the number of workers. A piece is one worker's task
and becomes one or more token shards. Nothing is tokenised here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.utils import glob_translate
from pyarrow import fs

from elastic_ring.data.filesystem import located, read_file

log = logging.getLogger(__name__)

ENDINGS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
    ".feather": "arrow", ".ipc": "arrow", ".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
}  # fmt: skip
"""File endings and how they are read. In a folder, files with other endings are left out."""
ARROW_FILE = b"ARROW1"
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
OPENED_AT_ONCE = 16
WHOLE = -1
"""`stop` of a span that reaches to the end of its file."""


@dataclass(frozen=True)
class File:
    """An input file: its path in the file system, its name under the source, how it is read."""

    path: str
    name: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes of JSON lines, row groups of Parquet, batches of Arrow; text is never cut."""

    file: File
    start: int = 0
    stop: int = WHOLE

    @property
    def name(self) -> str:
        return self.file.name


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


@dataclass(frozen=True)
class Listing:
    """The files of one source in order."""

    uri: str
    files: tuple[File, ...]

    @property
    def facts(self) -> list[list[object]]:
        """What identifies the input: names and sizes."""
        return [[file.name, file.kind, file.num_bytes] for file in self.files]


def list_source(uri: str) -> Listing:
    """The files of a source: one file, a folder (searched through), a pattern, or a saved Hugging Face dataset.

    Raises ValueError for one that has no file to read.
    """
    filesystem, path = located(uri)
    try:
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.Directory:
            files = _saved_dataset(filesystem, path, uri) or _in_folder(filesystem, path, uri)
        elif info.type == fs.FileType.File:
            files = [File(path, path.rpartition("/")[2], _kind(path, named=True) or "text", int(info.size))]
        else:
            files = _matching(filesystem, path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"--source {uri}: cannot be listed: {error}") from error
    if not files:
        raise ValueError(
            f"--source {uri}: there is no such file, or none below it that ends in {', '.join(ENDINGS)} "
            f"(also compressed: {', '.join(COMPRESSED)}); name files of other endings by a pattern, as in 'src/*.py'"
        )
    return Listing(uri, tuple(files))


def cut(listing: Listing, source: int, piece_bytes: int) -> list[Piece]:
    """The pieces of a source: small files together, large ones in parts, none of many more than `piece_bytes`."""
    filesystem, _ = located(listing.uri)
    with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="elastic-ring-inputs") as threads:
        parts = threads.map(partial(_parts, filesystem, piece_bytes), listing.files)
        sized = [part for of_file in parts for part in of_file]
    groups: list[list[tuple[Span, int]]] = []
    filled = 0
    for span, num_bytes in sized:
        if not groups or filled + num_bytes > piece_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((span, num_bytes))
        filled += num_bytes
    return [
        Piece(source, number, listing.uri, tuple(span for span, _ in group), sum(size for _, size in group))
        for number, group in enumerate(groups)
    ]


def _parts(filesystem: Any, piece_bytes: int, file: File) -> list[tuple[Span, int]]:
    """A file's spans with their sizes. Only files above `piece_bytes` are opened; a broken one stays whole."""
    if file.num_bytes <= piece_bytes or file.kind == "text" or file.name.lower().endswith(COMPRESSED):
        return [(Span(file), file.num_bytes)]
    if file.kind == "jsonl":
        starts = range(0, file.num_bytes, piece_bytes)
        stops = [min(at + piece_bytes, file.num_bytes) for at in starts]
        return [(Span(file, at, stop), stop - at) for at, stop in zip(starts, stops, strict=True)]
    sizes = _parquet_sizes if file.kind == "parquet" else _arrow_sizes
    try:
        return list(_together(file, sizes(filesystem, file.path), piece_bytes))
    except (OSError, pa.ArrowException):
        return [(Span(file), file.num_bytes)]  # whoever reads it says what is wrong with it


def _together(file: File, sizes: Sequence[int], piece_bytes: int) -> Iterator[tuple[Span, int]]:
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if filled and filled + size > piece_bytes:
            yield Span(file, first, index), filled
            first, filled = index, 0
        filled += size
    yield Span(file, first, len(sizes)), filled


def _parquet_sizes(filesystem: Any, path: str) -> list[int]:
    with filesystem.open_input_file(path) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]


def _arrow_sizes(filesystem: Any, path: str) -> list[int]:
    with open_arrow(filesystem, path) as batches:
        return [max(batch.nbytes, 1) for batch in batches]


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


# ------------------------------------------------------------ listing


def _kind(path: str, *, named: bool) -> str | None:
    """How a file is read; text for unknown endings of a file that was `named`, else None."""
    name = path.rpartition("/")[2].lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    ending = f".{name.rpartition('.')[2]}"
    if named and ending == ".json":
        return "jsonl"
    return ENDINGS.get(ending, "text" if named else None)


def _in_folder(filesystem: Any, path: str, uri: str) -> list[File]:
    found = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    names = {info.path: info.path.removeprefix(path).lstrip("/") for info in found if info.is_file}
    files: list[File] = []
    left_out: list[str] = []
    for info in sorted((info for info in found if info.is_file), key=lambda info: info.path):
        name = names[info.path]
        kind = _kind(info.path, named=False)
        if any(part.startswith((".", "_")) for part in name.split("/")):
            continue  # what Spark, git and editors leave
        if kind is None:
            left_out.append(name)
        else:
            files.append(File(info.path, name, kind, int(info.size)))
    if left_out:
        log.warning("%s: %d files of other endings are left out, the first is %s", uri, len(left_out), left_out[0])
    return files


def _matching(filesystem: Any, pattern: str) -> list[File]:
    """Files by a pattern in which `*` stays within a folder and `**` does not."""
    magic = min((at for sign in "*?[" if (at := pattern.find(sign)) >= 0), default=-1)
    if magic < 0:
        return []
    base = pattern[:magic].rpartition("/")[0]
    matches = re.compile(glob_translate(pattern))
    found = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
    paths = sorted((info.path, int(info.size)) for info in found if info.is_file and matches.match(info.path))
    return [
        File(path, path.removeprefix(base).lstrip("/"), _kind(path, named=True) or "text", size) for path, size in paths
    ]


def _saved_dataset(filesystem: Any, path: str, uri: str) -> list[File]:
    """The files of a folder that `datasets.Dataset.save_to_disk` wrote, in its order; none for other folders."""
    names = {info.base_name for info in filesystem.get_file_info(fs.FileSelector(path)) if info.is_file}
    if "dataset_dict.json" in names:
        splits = json.loads(read_file(filesystem, f"{path}/dataset_dict.json", uri))["splits"]
        if len(splits) != 1:
            raise ValueError(f"--source {uri}: holds the splits {', '.join(splits)}: name one, {uri}/{splits[0]}")
        path, names = f"{path}/{splits[0]}", {"state.json"}
    if "state.json" not in names:
        return []
    state = json.loads(read_file(filesystem, f"{path}/state.json", uri))
    listed = [part["filename"] for part in state.get("_data_files") or ()]
    infos = filesystem.get_file_info([f"{path}/{name}" for name in listed])
    return [
        File(info.path, name, "arrow", max(int(info.size or 0), 0)) for name, info in zip(listed, infos, strict=True)
    ]
