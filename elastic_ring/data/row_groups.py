"""Row groups of a manifest's shards as the chunks of a token stream.

Footers are read once and files stay open; a row group is read in one piece, on any thread. Pages have checksums, and a
shard's footer names the digest of its tokens, so a damaged or swapped file is noticed when it is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ring.data.filesystem import NUM_READS, located, reading
from elastic_ring.data.manifest import COLUMN, COUNTED, OFFSET, TOKENS_KEY, Manifest, PreparedSource, Shard
from elastic_ring.data.packing import Loaded

OPEN_SHARDS = 64
ROWS_AT_ONCE = 1024
MAX_TOKEN_BYTES, MAX_HEADER_BYTES = 32, 1 << 16
"""What a row group has at most for each token, were each a document, and beside them."""
UNREADABLE = "cannot be read as token shard"


class RowGroups:
    """The row groups of a source as chunks, made on demand: there may be millions. Keeps the footers of the latest
    OPEN_SHARDS shards. Thread-safe."""

    def __init__(self, uri: str, manifest: Manifest, source: PreparedSource) -> None:
        size = manifest.row_group_tokens
        counts = np.array([-(-shard.num_tokens // size) for shard in source.shards], dtype=np.int64)
        self._manifest, self._source = manifest, source
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._uri = uri
        self._opened = lru_cache(OPEN_SHARDS)(self._open)
        begins = np.concatenate([[0], np.cumsum([shard.num_tokens for shard in source.shards], dtype=np.int64)])
        self.ends = np.concatenate(
            [np.empty(0, np.int64)]
            + [
                np.minimum(begin + size * np.arange(1, count + 1), end)
                for begin, end, count in zip(begins[:-1], begins[1:], counts, strict=True)
            ]
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> RowGroup:
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        num_tokens = int(self.ends[index] - (self.ends[index - 1] if index else 0))
        return RowGroup(
            self,
            self._source.shards[shard],
            index - int(self._firsts[shard]),
            num_tokens,
            self._manifest.vocab_size,
        )

    @cached_property
    def _place(self) -> tuple[Any, str]:
        return located(self._uri)

    def path(self, shard: Shard) -> str:
        return f"{self._uri.rpartition('/')[0]}/shards/{shard.name}"

    def read(self, shard: Shard, number: int, num_tokens: int) -> Any:
        """One row group. Raises StorageFailed; ValueError where the file is absent, damaged, another shard, or has
        another number of tokens there."""
        path, columns = self.path(shard), [COLUMN, OFFSET] if shard.num_counted is None else [COLUMN, OFFSET, COUNTED]

        def read() -> Any:
            file, metadata, lock = self._opened(shard)
            with lock:
                parquet = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True, pre_buffer=True)
                problem = f"{path}: {UNREADABLE}: row group {number} has not the {num_tokens} tokens of its manifest"
                # What the footer says is refused before anything is unpacked. It may be untrue, so tokens are counted
                # on the way. A column's own number would be asked of its statistics too, and pyarrow ends the process
                # where these are damaged.
                if number >= metadata.num_row_groups:
                    raise ValueError(problem)
                row_group, most_bytes = metadata.row_group(number), MAX_TOKEN_BYTES * num_tokens + MAX_HEADER_BYTES
                if not (0 < row_group.num_rows <= num_tokens and 0 < row_group.total_byte_size <= most_bytes):
                    raise ValueError(problem)
                batches, counts = list[Any](), Counter[str]()
                for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=[number], columns=columns):
                    batches.append(batch)
                    counts.update({name: len(batch[name].values) for name in batch.schema.names if name != OFFSET})
                    if max(counts.values()) > num_tokens:
                        raise ValueError(problem)
                if counts[COLUMN] != num_tokens:
                    raise ValueError(problem)
                return pa.Table.from_batches(batches)

        for left in reversed(range(NUM_READS)):
            try:
                return reading(path, read, problem=UNREADABLE)
            except ValueError:
                self._opened.cache_clear()  # its footer may have been damaged on its way
                if not left:
                    raise
        raise AssertionError("the last read returns or raises")

    def _open(self, shard: Shard) -> tuple[Any, Any, Lock]:
        """(file, footer, its lock)."""
        filesystem, manifest = self._place
        file = filesystem.open_input_file(f"{manifest.rpartition('/')[0]}/shards/{shard.name}")
        metadata = pq.read_metadata(file)
        if (metadata.metadata or {}).get(TOKENS_KEY, b"").decode() != shard.tokens_sha256:
            raise ValueError(f"{self.path(shard)}: is not the shard that the manifest names: restore it")
        return file, metadata, Lock()


@dataclass(frozen=True)
class RowGroup:
    row_groups: RowGroups
    shard: Shard
    number: int
    num_tokens: int
    vocab_size: int

    @property
    def name(self) -> str:
        return f"{self.row_groups.path(self.shard)} (row group {self.number})"

    def load(self) -> Loaded:
        table = self.row_groups.read(self.shard, self.number, self.num_tokens)
        lists = table.column(COLUMN).combine_chunks()
        tokens = lists.values.to_numpy(zero_copy_only=False).astype(np.int32)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"{self.name}: holds a token outside the vocabulary [0, {self.vocab_size})")
        begins = lists.offsets.to_numpy(zero_copy_only=False)[:-1].astype(np.int64)
        starts = begins[table.column(OFFSET).to_numpy() == 0]
        if self.shard.num_counted is None:
            return Loaded(tokens, starts)
        if COUNTED not in table.column_names:
            raise ValueError(f"{self.name}: has no column {COUNTED!r}, of which the manifest tells")
        masks = table.column(COUNTED).combine_chunks()
        counted = masks.values.to_numpy(zero_copy_only=False)
        if len(counted) != len(tokens) or masks.values.null_count or not masks.offsets.equals(lists.offsets):
            raise ValueError(f"{self.name}: does not say of each of its {len(tokens)} tokens whether it counts")
        return Loaded(tokens, starts, counted)
