"""Token shards: Parquet or Arrow IPC files with one document per row, as a list of tokens.

Read through `pyarrow.fs`: a local path, s3://, gs:// or hdfs://. The index comes from metadata: from the footers for
Parquet; for Arrow, whose footers do not count list values, from one pass over the list offsets (local uncompressed
files are memory-mapped, so only offsets are read). Tokens are loaded one row group or record batch at a time, which
bounds memory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from elastic_ring.data.filesystem import reading
from elastic_ring.data.manifest import COUNTED
from elastic_ring.data.packing import (
    BYTE_VOCAB_SIZE,
    END_OF_DOCUMENT,
    MAX_VOCAB_SIZE,
    Files,
    Loaded,
    PackedSource,
    Starts,
    Tokens,
    aligned,
    check_context,
)
from elastic_ring.data.preparation.documents import check_pages, column_chunks
from elastic_ring.data.preparation.inputs import check_arrow, sound
from elastic_ring.files import absolute, check_links, shown_url
from elastic_ring.validation import settings

SAMPLE_BYTES = 1 << 16
_PARQUET = (".parquet", ".pq")
UNREADABLE = "cannot be read as token shard"
_ARROW = (".arrow", ".feather", ".ipc")


@settings
class TokenShards:
    """`uri` is one shard or a directory of them (.parquet, .pq, .arrow, .feather, .ipc), used in path order.

    column: a list of integers per row. vocab_size: tokens are in [0, vocab_size). end_of_document: the token appended
    to each row; with `rows_end_documents` rows must already end with it. Empty rows are skipped. align_tokens: each
    document starts at a multiple of it; block-sparse kernels need 128. The lengths of all rows must then be known, so
    opening reads the column once.

    The fingerprint covers sizes, row and token counts, the footers' statistics and samples of each file's bytes, in
    order; neither every token nor a name.
    """

    _prefix: ClassVar[str] = "TokenShards "

    context_tokens: int
    uri: str
    column: str = "tokens"
    vocab_size: int = BYTE_VOCAB_SIZE
    end_of_document: int = END_OF_DOCUMENT
    rows_end_documents: bool = False
    align_tokens: int = 1

    def __post_init__(self) -> None:
        check_context(self.context_tokens, self.align_tokens)
        object.__setattr__(self, "uri", absolute(self.uri))
        if not self.uri:
            raise ValueError("TokenShards uri='': give --data shards:URI, a token shard or a directory of them")
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"TokenShards vocab_size={self.vocab_size}: must be in [1, {MAX_VOCAB_SIZE}]")
        if not 0 <= self.end_of_document < self.vocab_size:
            raise ValueError(
                f"TokenShards end_of_document={self.end_of_document}: must be a token below "
                f"vocab_size={self.vocab_size}; make the vocabulary one larger for it"
            )

    def open(self) -> PackedSource:
        """Read the metadata of every shard. Raises ValueError with the shard and the reason."""
        filesystem, paths = _list_shards(self.uri)
        chunks: list[_RowBlock] = []
        facts: list[list[object]] = []
        for path, _ in paths:
            index = _index_parquet if path.lower().endswith(_PARQUET) else _index_arrow
            blocks, shard_facts = reading(path, partial(index, filesystem, path, self), problem=UNREADABLE)
            chunks += blocks
            facts.append(shard_facts)

        def digest(path: str, size: int, shard_facts: list[object]) -> str:
            """Of a file's facts and its first, middle and last bytes: other tokens may have the same lengths."""
            with filesystem.open_input_file(path) as file:
                starts = (0, size // 2, max(0, size - SAMPLE_BYTES))
                sample = b"".join(file.read_at(min(SAMPLE_BYTES, size - start), start) for start in starts)
            return hashlib.sha256(json.dumps([size, shard_facts]).encode() + sample).hexdigest()

        def digests() -> Files:
            files = [(path, partial(digest, path, size, of)) for (path, size), of in zip(paths, facts, strict=True)]
            return tuple((Path(path).name, reading(path, read, problem=UNREADABLE)) for path, read in files)

        return PackedSource(
            chunks=[chunk for chunk in chunks if chunk.num_tokens],
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            describe=f"TokenShards({shown_url(self.uri)!r})",
            how=["shards", self.context_tokens, self.vocab_size, self.end_of_document, self.align_tokens],
            digests=digests,
            padding=self.end_of_document if self.align_tokens > 1 else None,
        )


@dataclass(frozen=True)
class _RowBlock:
    """One row group of a Parquet file, or one record batch of an Arrow file."""

    filesystem: Any
    path: str
    block: int
    num_tokens: int
    config: TokenShards
    place: tuple[int, int] = (0, 0)
    """Of the column in a Parquet file: where it begins, and its bytes."""
    checked: set[int] = field(default_factory=set, compare=False)
    """Sizes of the file at which its pages were checked."""

    @property
    def name(self) -> str:
        return f"{self.path} (row group or batch {self.block})"

    def load(self) -> Loaded:
        def read() -> Any:
            column = self.config.column
            with self.filesystem.open_input_file(self.path) as file:
                if self.path.lower().endswith(_PARQUET):
                    if (size := file.size()) not in self.checked:
                        check_pages(file, *self.place)
                        self.checked.add(size)
                    return pq.ParquetFile(file).read_row_group(self.block, columns=[column]).column(0)
                return pa.chunked_array([sound(_open_arrow(file, column).get_batch(self.block)).column(0)])

        return Loaded(*_pack(reading(self.path, read, problem=UNREADABLE), self.config, self.name))


def _list_shards(uri: str) -> tuple[Any, list[tuple[str, int]]]:
    """The file system, and (path, size in bytes) of every shard, in path order."""
    setting = f"TokenShards uri={shown_url(uri)!r}"

    def look() -> tuple[Any, Any, list[Any]]:
        filesystem, path = fs.FileSystem.from_uri(uri if "://" in uri else str(Path(uri).absolute()))
        info = filesystem.get_file_info(path)
        if info.type != fs.FileType.Directory:
            return filesystem, info, [info]
        return filesystem, info, filesystem.get_file_info(fs.FileSelector(path, recursive=True))

    filesystem, info, files = reading(setting, look)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"{setting}: does not exist")
    endings = _PARQUET + _ARROW
    shards = sorted((file.path, file.size) for file in files if file.is_file and file.path.lower().endswith(endings))
    if not shards:
        raise ValueError(f"{setting}: no file here ends in {', '.join(endings)}")
    if isinstance(filesystem, fs.LocalFileSystem):
        check_links(info.path, (shard for shard, _ in shards))
    return filesystem, shards


def _index_parquet(filesystem: Any, path: str, config: TokenShards) -> tuple[list[_RowBlock], list[object]]:
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        _check_column(parquet.schema_arrow, config.column, path)
        metadata = parquet.metadata
        blocks: list[_RowBlock] = []
        facts: list[object] = []
        for group, chunks in enumerate(column_chunks(file, range(metadata.num_row_groups))):
            start, stored_bytes = next(chunk[1:] for chunk in chunks if chunk[0].split(".")[0] == config.column)
            rows = metadata.row_group(group)
            columns = (rows.column(index) for index in range(rows.num_columns))
            leaf = next(column for column in columns if column.path_in_schema.split(".")[0] == config.column)
            statistics = leaf.statistics
            extremes = [statistics.min, statistics.max] if statistics is not None and statistics.has_min_max else []
            if extremes:
                _check_range(extremes[0], extremes[1], config.vocab_size, f"{path} (row group {group})")
            num_nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
            if config.align_tokens == 1 and config.rows_end_documents and num_nulls is not None:
                num_tokens = leaf.num_values - num_nulls
            elif config.align_tokens == 1 and num_nulls == 0:
                # No row is empty or null, so each adds one end-of-document token.
                num_tokens = leaf.num_values + rows.num_rows
            else:
                check_pages(file, start, stored_bytes)
                lists = parquet.read_row_group(group, columns=[config.column]).column(0)
                num_tokens = int(_lengths(lists, config)[1].sum())
            blocks.append(_RowBlock(filesystem, path, group, num_tokens, config, (start, stored_bytes)))
            facts.append([rows.num_rows, num_tokens, leaf.total_compressed_size, extremes])
    return blocks, facts


def _index_arrow(filesystem: Any, path: str, config: TokenShards) -> tuple[list[_RowBlock], list[object]]:
    # Map for the index only: if a mapped file shrinks, reading it kills the process (SIGBUS).
    local = isinstance(filesystem, fs.LocalFileSystem)
    with pa.memory_map(path) if local else filesystem.open_input_file(path) as file:
        schema = pa.ipc.open_file(file).schema
        _check_column(schema, config.column, path)
        check_arrow(file, schema, [schema.get_field_index(config.column)])
        reader = _open_arrow(file, config.column)
        blocks: list[_RowBlock] = []
        facts: list[object] = []
        for index in range(reader.num_record_batches):
            batch = sound(reader.get_batch(index))
            num_tokens = int(_lengths(pa.chunked_array([batch.column(0)]), config)[1].sum())
            blocks.append(_RowBlock(filesystem, path, index, num_tokens, config))
            facts.append([batch.num_rows, num_tokens])
    return blocks, facts


def _open_arrow(file: Any, column: str) -> Any:
    """A reader that decodes only the token column."""
    schema = pa.ipc.open_file(file).schema
    options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(column)])
    return pa.ipc.open_file(file, options=options)


def _check_column(schema: Any, column: str, path: str) -> None:
    if column not in schema.names:
        raise ValueError(f"{path}: no column {column!r}; it has {', '.join(schema.names)}: set `column` to one of them")
    if COUNTED in schema.names:
        raise ValueError(
            f"{path}: column {COUNTED!r} says which tokens count, and shards alone are read without it: give the "
            "preparation's manifest (--data MANIFEST)"
        )
    kind = schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise ValueError(f"{path}: column {column!r} is of type {kind}; a list of integers a row is needed")


def _check_range(low: int, high: int, vocab_size: int, name: str) -> None:
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{name}: token {wrong} is outside the vocabulary [0, {vocab_size}); set vocab_size to the tokenizer's"
        )


def _lengths(lists: Any, config: TokenShards) -> tuple[Starts, Starts]:
    """(tokens per row, those with end-of-document tokens and padding), without empty rows and nulls."""
    values = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    lengths: Starts = values[values > 0]
    return lengths, aligned(lengths + (not config.rows_end_documents), config.align_tokens)


def _pack(lists: Any, config: TokenShards, name: str) -> tuple[Tokens, Starts]:
    """(rows concatenated, each with its end-of-document token and padding; the offset of each)."""
    values = pc.list_flatten(lists)
    if values.null_count:
        raise ValueError(f"{name}: column {config.column!r} has {values.null_count} null tokens; drop or replace them")
    flat = values.to_numpy()
    if len(flat):
        _check_range(int(flat.min()), int(flat.max()), config.vocab_size, name)
    lengths, in_stream = _lengths(lists, config)
    ends = np.cumsum(lengths)
    if config.rows_end_documents:
        missing = np.flatnonzero(flat[ends - 1] != config.end_of_document)
        if len(missing):
            raise ValueError(
                f"{name}: {len(missing)} rows do not end in end_of_document={config.end_of_document}; "
                "set rows_end_documents=False to have it put there"
            )
    starts = np.cumsum(in_stream) - in_stream
    tokens = np.full(int(in_stream.sum()), config.end_of_document, dtype=np.int32)
    if len(tokens) == len(flat):
        tokens[:] = flat
    else:
        tokens[np.arange(len(flat)) + np.repeat(starts - (ends - lengths), lengths)] = flat
    return tokens, starts
