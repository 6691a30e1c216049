"""The lengths of a prepared corpus's documents, and where they count: what packing whole documents goes by.

Beside each shard lies one Parquet file with a row for each document that begins in it. A document may be a
conversation; then its row also says which of its tokens count in the loss. No sequence and no context in here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
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
        table = reading(name, lambda: pq.read_table(pa.BufferReader(data)), problem="cannot be read as an index")
        lengths = table.column(LENGTH).to_numpy()
        long = np.flatnonzero(lengths > longest_tokens)
        edges = table.column(EDGES).take(pa.array(long)).to_pylist() if EDGES in table.column_names else []
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
