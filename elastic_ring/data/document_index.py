"""The lengths of a prepared corpus's documents, and where they count: what packing whole documents goes by.

Beside each shard lies one Parquet file with a row for each document that begins in it. A document may be a
conversation; then its row also says which of its tokens count in the loss. No sequence and no context in here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_ring.data.filesystem import located, read_file, reading
from elastic_ring.data.manifest import PreparedSource, Shard
from elastic_ring.data.packing import Counted, Starts

INDEX, LENGTH, EDGES = "index", "length", "edges"
"""The folder of an index, and its columns."""
READ_AT_ONCE = 16
MAX_INDEX_BYTES = 1 << 30


class DocumentIndex(NamedTuple):
    """Of all documents of a source in stored order, int64 (N,): their tokens with end and padding. `edges`: by
    document, of the longest ones: where runs of counted tokens begin and end in it, by turns. `by_shard`: documents up
    to the end of each shard."""

    lengths: Starts
    edges: Mapping[int, Starts]
    by_shard: Starts


def edges_of(counted: Counted) -> Starts:
    """Where runs of counted tokens begin and end, by turns."""
    return np.flatnonzero(np.diff(counted, prepend=np.False_, append=np.False_))


def index_file(lengths: Sequence[int], edges: Sequence[Starts] | None) -> bytes:
    """The index of documents of these lengths; `edges`: of each, as `edges_of` has them; None where all tokens
    count."""
    table, sink = pa.table({LENGTH: pa.array(lengths, pa.int64())}), pa.BufferOutputStream()
    if edges is not None:
        table = table.append_column(EDGES, pa.array([each.tolist() for each in edges], pa.list_(pa.int64())))
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _table(data: bytes, shard: Shard, most_tokens: int) -> pa.Table:
    """The rows of a shard's index; a document has at most `most_tokens`. Raises ArrowInvalid for other columns, values,
    or another number of them."""
    file, own = pq.ParquetFile(pa.BufferReader(data)), {LENGTH: pa.int64()}
    if shard.num_counted is not None:
        own[EDGES] = pa.list_(pa.int64())
    columns = {field.name: field.type for field in file.schema_arrow}
    plain = {name: pa.list_(kind.value_type) if pa.types.is_list(kind) else kind for name, kind in columns.items()}
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    num_values = sum(group.column(column).num_values for group in groups for column in range(group.num_columns))
    most_values = 2 * shard.num_documents + 2 * most_tokens
    if not own.items() <= plain.items() or file.metadata.num_rows != shard.num_documents or num_values > most_values:
        raise pa.ArrowInvalid(
            f"it has {file.metadata.num_rows:,} rows and {num_values:,} values of {columns}, not "
            f"{shard.num_documents:,} of {own}"
        )
    table = file.read(columns=list(own))
    lengths = table.column(LENGTH)
    bounds = pc.min_max(lengths).as_py()
    if lengths.null_count or (len(lengths) and not 1 <= bounds["min"] <= bounds["max"] <= most_tokens):
        raise pa.ArrowInvalid("a length cannot be")
    return table


def read_index(uri: str, source: PreparedSource, longest_tokens: int) -> DocumentIndex:
    """The index of a source of the manifest `uri`, with the edges of documents of more than `longest_tokens`. Raises
    ValueError for a file that is absent or another one; StorageFailed."""
    filesystem, path = located(uri)
    above, folder = uri.rpartition("/")[0], path.rpartition("/")[0]

    def read(shard: Shard) -> tuple[Starts, dict[int, Starts]]:
        name = f"{above}/{INDEX}/{shard.name}"
        data = read_file(filesystem, f"{folder}/{INDEX}/{shard.name}", name, MAX_INDEX_BYTES)
        if hashlib.sha256(data).hexdigest() != shard.index_sha256:
            raise ValueError(f"{name}: is not the index that the manifest names: restore it")
        table = reading(name, lambda: _table(data, shard, source.num_tokens), problem="cannot be read as an index")
        lengths = table.column(LENGTH).to_numpy()
        long = np.flatnonzero(lengths > longest_tokens)
        edges = table.column(EDGES).take(pa.array(long)).to_pylist() if shard.num_counted is not None else []
        for number, of_document in zip(long.tolist(), edges, strict=False):
            bounds = [-1, *of_document, int(lengths[number]) + 1]
            if len(of_document) % 2 or any(earlier >= later for earlier, later in pairwise(bounds)):
                raise ValueError(f"{name}: the counted tokens of document {number} are no rising pairs within it")
        return lengths, dict(zip(long.tolist(), map(np.asarray, edges), strict=False))

    with ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="elastic-ring-index") as threads:
        parts = list(threads.map(read, source.shards))
    by_shard = np.cumsum([len(lengths) for lengths, _ in parts], dtype=np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *(lengths for lengths, _ in parts)])
    counts = [shard.num_documents for shard in source.shards]
    if int(lengths.sum()) != source.num_tokens or np.diff(by_shard, prepend=0).tolist() != counts:
        raise ValueError(f"{above}/{INDEX}: has not the documents of its shards: prepare the corpus anew")
    firsts = (by_shard - np.asarray(counts, dtype=np.int64)).tolist()
    edges = {
        first + number: each for first, (_, part) in zip(firsts, parts, strict=True) for number, each in part.items()
    }
    return DocumentIndex(lengths, edges, by_shard)
