"""Writes documents' tokens as Parquet shards with row groups of a fixed number of tokens.

Each row is a document with its end, or a part of one where a row group ends inside it: `offset` counts the document's
tokens before the row. Where not all tokens count in the loss, `counted` says of each whether it does. The same
documents give the same tokens in the same rows, on any machine.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elastic_ring.data.chunks import Counted, Starts, Tokens
from elastic_ring.data.manifest import COLUMN, COUNTED, OFFSET, TOKENS_KEY, Shard
from elastic_ring.state.storage.folder import Storage

SHARD_ROW_GROUPS = 256


@dataclass
class ShardWriter:
    """Takes documents in order; `close` gives the records of all shards. `name`: of the files, without ending.
    `masked`: not all tokens count."""

    storage: Storage
    name: str
    vocab_size: int
    end_of_document: int
    row_group_tokens: int
    align_tokens: int = 1
    masked: bool = False
    longest_tokens: int = 0
    tokens_by_length: Counter[int] = field(default_factory=Counter)
    _shards: list[Shard] = field(default_factory=list)
    _documents: deque[tuple[Tokens, Counted]] = field(default_factory=deque)
    _num_tokens: int = 0
    _offset: int = 0  # tokens of the first document that are in an earlier shard

    def add(self, document: Tokens, counted: Counted | None = None) -> None:
        """The tokens of one document, without its end; if `masked`, which of them and of its end count. Raises
        ValueError for one outside the vocabulary."""
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < self.vocab_size:
            raise ValueError(f"{self.name}: the tokenizer gave a token outside its vocabulary [0, {self.vocab_size})")
        num_tokens = -(-(len(document) + 1) // self.align_tokens) * self.align_tokens
        ended = np.full(num_tokens, self.end_of_document, dtype=np.int32)
        ended[: len(document)] = document
        counts = np.zeros(num_tokens if self.masked else 0, dtype=np.bool_)
        if counted is not None:
            counts[: len(document) + 1] = counted
        self._documents.append((ended, counts))
        self._num_tokens += num_tokens
        self.longest_tokens = max(self.longest_tokens, num_tokens)
        self.tokens_by_length[num_tokens.bit_length() - 1] += num_tokens
        while self._num_tokens >= SHARD_ROW_GROUPS * self.row_group_tokens:
            self._write(SHARD_ROW_GROUPS * self.row_group_tokens)

    def close(self) -> tuple[Shard, ...]:
        if self._num_tokens:
            self._write(self._num_tokens)
        return tuple(self._shards)

    def _write(self, num_tokens: int) -> None:
        """A shard of the first `num_tokens`; the rest is kept."""
        parts: list[Tokens] = []
        counts: list[Counted] = []
        starts: list[int] = []
        filled = 0
        while filled < num_tokens:
            document, counted = self._documents.popleft()
            part = document[: num_tokens - filled]
            parts.append(part)
            counts.append(counted[: len(part)])
            starts.append(filled - self._offset)
            filled += len(part)
            self._offset = 0 if len(part) == len(document) else self._offset + len(part)
            if self._offset:
                self._documents.appendleft((document[len(part) :], counted[len(part) :]))
        self._num_tokens -= num_tokens
        kind = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        name = f"{self.name}-{len(self._shards):03d}.parquet"
        tokens = np.concatenate(parts).astype(kind)
        masks = np.concatenate(counts) if self.masked else None
        shard = stored(self.storage, name, tokens, np.array(starts, np.int64), self.row_group_tokens, masks)
        self._shards.append(shard)


def stored(
    storage: Storage,
    name: str,
    tokens: NDArray[Any],
    starts: Starts,
    row_group_tokens: int,
    counted: Counted | None,
) -> Shard:
    """Write one shard. `starts` are the documents' first tokens; the first may lie before the shard."""
    little = tokens.dtype.newbyteorder("<")
    total = hashlib.sha256(starts.astype("<i8").tobytes() + tokens.astype(little, copy=False).tobytes())
    if counted is not None:
        total.update(b"counted" + np.packbits(counted).tobytes())
    digest = total.hexdigest()
    cuts = np.arange(0, len(tokens), row_group_tokens)
    rows = np.unique(np.concatenate([cuts, starts[starts >= 0]]))
    owner = np.searchsorted(starts, rows, side="right") - 1
    ends = pa.array(np.append(rows, len(tokens)).astype(np.int32))
    columns = {COLUMN: pa.ListArray.from_arrays(ends, pa.array(tokens)), OFFSET: pa.array(rows - starts[owner])}
    if counted is not None:
        columns[COUNTED] = pa.ListArray.from_arrays(ends, pa.array(counted))
    table = pa.table(columns)
    table = table.replace_schema_metadata({TOKENS_KEY: digest.encode()})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        firsts = np.searchsorted(rows, np.append(cuts, len(tokens)))
        for first, last in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            writer.write_table(table.slice(first, last - first), row_group_size=last - first)
    data = sink.getvalue().to_pybytes()
    storage.replace(name, data)
    return Shard(
        name.rpartition("/")[2],
        int((starts >= 0).sum()),
        len(tokens),
        digest,
        len(data),
        hashlib.sha256(data).hexdigest(),
        None if counted is None else int(counted.sum()),
    )
