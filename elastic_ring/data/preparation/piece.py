"""One piece of a preparation: its documents become token shards and a record. What a worker does, in any process.

All files are written whole under names that follow from the piece, so a piece that runs twice changes nothing. Shards
are Parquet files with row groups of a fixed number of tokens. Each row is a document with its end, or a part of one
where a row group ends inside it: `offset` counts the document's tokens before the row. Where not all tokens count in
the loss, `counted` has a mask. Beside each shard lies its index of documents. The same documents give the same tokens
in the same rows, on any machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elastic_ring.data.document_index import INDEX, edges_of, index_file
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.manifest import COLUMN, COUNTED, MAX_MANIFEST_BYTES, OFFSET, TOKENS_KEY, Dropped, Shard
from elastic_ring.data.packing import Counted, Starts, Tokens
from elastic_ring.data.preparation import PrepareConfig, chat_columns
from elastic_ring.data.preparation.chat import ChatTokenizer, Conversations
from elastic_ring.data.preparation.documents import Content, Tally, TextIn, read_documents
from elastic_ring.data.preparation.inputs import Piece
from elastic_ring.data.tokenizer import Tokenizer, open_tokenizer
from elastic_ring.files import plain_json
from elastic_ring.state.storage.folder import Storage
from elastic_ring.validation import NonNegativeInt, from_plain, settings

SHARDS, PIECES, DUPLICATES = "shards", "pieces", "duplicates"
"""Folders of a preparation: token shards, records of complete pieces, digests and numbers of repeated documents."""
BATCH_BYTES = 1 << 20
DIGEST_BYTES = 16
SHARD_ROW_GROUPS = 256
Placed = tuple[bytes, str]
"""A document, and where it was read."""


@dataclass(frozen=True)
class Job:
    """What every worker of a preparation needs; picklable. `chat_sha256`: of the chat template, where documents are
    conversations."""

    config: PrepareConfig
    tokenizer_sha256: str
    chat_sha256: str | None = None


@settings
class PieceRecord:
    """What has become of a piece."""

    name: str
    shards: tuple[Shard, ...]
    longest_document_tokens: NonNegativeInt
    dropped: Dropped = field(default_factory=Dropped)
    tokens_by_length: tuple[NonNegativeInt, ...] = ()
    missing_columns: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


class PieceWorker:
    """Runs pieces of a job. Constructing it opens nothing."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError where this machine's tokenizer is not the one of the job."""
        tokenizer = open_tokenizer(self.config.tokenizer, self.config.end_of_document)
        if tokenizer.sha256 != self.job.tokenizer_sha256:
            raise ValueError(
                f"tokenizer={self.config.tokenizer!r}: is another one on this machine; give all nodes the same"
            )
        return tokenizer

    @cached_property
    def chat(self) -> ChatTokenizer | None:
        """Raises ValueError where this machine's chat template is not the one of the job."""
        if self.job.chat_sha256 is None:
            return None
        chat = ChatTokenizer(self.config.tokenizer, self.config.end_of_document)
        if chat.sha256 != self.job.chat_sha256:
            raise ValueError(
                f"tokenizer={self.config.tokenizer!r}: has another chat template on this machine; give all nodes the "
                "same"
            )
        return chat

    @cached_property
    def storage(self) -> Storage:
        return Storage(self.config.out).open(write=False)

    def digest(self, piece: Piece) -> None:
        """Write the digests of the piece's documents, in order; read again while the input's storage is away."""
        digests = patiently(
            lambda: b"".join(
                hashlib.blake2b(document, digest_size=DIGEST_BYTES).digest()
                for document in read_documents(piece, self._content(), Tally(self.config.on_bad_input))
            )
        )
        self.storage.replace(digests_name(piece.name), digests)

    def prepare(self, piece: Piece) -> PieceRecord:
        """Write the piece's shards, then its record; anew while the input's storage is away. Raises ValueError for bad
        input that is not to be left out, StorageFailed."""
        return patiently(lambda: self._prepare(piece))

    def _prepare(self, piece: Piece) -> PieceRecord:
        config, tally = self.config, Tally(self.config.on_bad_input)
        masked = self.chat is not None
        sizes = config.row_group_tokens, config.align_tokens
        writer = ShardWriter(self.storage, piece.name, self.tokenizer, *sizes, masked)
        repeats = self.storage.read(repeated_name(piece.name)) if config.drop_duplicates else b""
        repeated = set(np.frombuffer(repeats, dtype="<i8").tolist())  # numbers of documents that came before
        content = self._content()
        for batch in batches(self._kept_documents(read_documents(piece, content, tally), tally, repeated)):
            for tokens, counted in self._encoded(batch, tally):
                writer.add(tokens, counted)
        shards, lengths = writer.close(), writer.tokens_by_length
        by_length = tuple(lengths[power] for power in range(max(lengths, default=-1) + 1))
        missing, dropped = tuple(sorted(content.missing_columns)), tally.dropped(len(repeated))
        record = PieceRecord(piece.name, shards, writer.longest_tokens, dropped, by_length, missing)
        self.storage.replace(record_name(piece.name), record.to_json())
        return record

    def _encoded(self, batch: list[Placed], tally: Tally) -> Sequence[tuple[Tokens, Counted | None]]:
        """The tokens of each document, and which count; one that the tokenizer refuses is a bad record."""
        try:
            documents = [document for document, _ in batch]
            if self.chat is not None:
                return self.chat.encode(documents)
            return [(tokens, None) for tokens in self.tokenizer.encode(documents)]
        except Exception as error:
            if len(batch) > 1:
                return [each for placed in batch for each in self._encoded([placed], tally)]
            tally.place = batch[0][1]
            tally.leave_out_record(f"cannot be tokenised: {type(error).__name__}: {error}")
            return []

    def _content(self) -> Content:
        config = self.config
        return Conversations(chat_columns(config.columns)) if config.chat else TextIn(config.text_column)

    def _kept_documents(self, documents: Iterator[bytes], tally: Tally, repeated: set[int]) -> Iterator[Placed]:
        for number, document in enumerate(documents):
            if number in repeated:
                continue
            try:
                if self.tokenizer.encode_texts is not None:
                    document.decode()
            except UnicodeDecodeError:
                tally.leave_out_record("is no UTF-8")
            else:
                yield document, tally.place


def batches(documents: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Documents in groups of about BATCH_BYTES."""
    batch: list[Placed] = []
    num_bytes = 0
    for placed in documents:
        batch.append(placed)
        num_bytes += len(placed[0])
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def record_name(piece: str) -> str:
    return f"{PIECES}/{piece}.json"


def digests_name(piece: str) -> str:
    return f"{DUPLICATES}/{piece}.digests"


def repeated_name(piece: str) -> str:
    return f"{DUPLICATES}/{piece}.repeated"


def read_record(storage: Storage, piece: str) -> PieceRecord:
    data = storage.read_record(record_name(piece), MAX_MANIFEST_BYTES)
    return from_plain(PieceRecord, plain_json(data, MAX_MANIFEST_BYTES))


# ------------------------------------------------------------ shards


@dataclass
class ShardWriter:
    """Takes documents in order; `close` gives the records of all shards. `name`: the piece's.
    `masked`: not all tokens count."""

    storage: Storage
    name: str
    tokenizer: Tokenizer
    row_group_tokens: int
    align_tokens: int = 1
    masked: bool = False
    longest_tokens: int = 0
    tokens_by_length: Counter[int] = field(default_factory=Counter)
    _shards: list[Shard] = field(default_factory=list)
    _tokens: list[Tokens] = field(default_factory=list)
    _counted: list[Counted] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # of documents; negative for one that began in an earlier shard
    _lengths: list[int] = field(default_factory=list)  # of those that begin in no shard yet
    _edges: list[Starts] = field(default_factory=list)
    _num_tokens: int = 0

    def add(self, document: Tokens, counted: Counted | None = None) -> None:
        """The tokens of one document, without its end; if `masked`, which of them and of its end count. Raises
        ValueError for one outside the vocabulary."""
        vocab_size = self.tokenizer.vocab_size
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < vocab_size:
            raise ValueError(f"{self.name}: the tokenizer gave a token outside its vocabulary [0, {vocab_size})")
        num_tokens = -(-(len(document) + 1) // self.align_tokens) * self.align_tokens
        ended = np.full(num_tokens, self.tokenizer.end_of_document, dtype=np.int32)
        ended[: len(document)] = document
        counts = np.zeros(num_tokens if self.masked else 0, dtype=np.bool_)
        if counted is not None:
            counts[: len(document) + 1] = counted
        self._tokens.append(ended)
        self._counted.append(counts)
        self._starts.append(self._num_tokens)
        self._lengths.append(num_tokens)
        self._edges.append(edges_of(counts))
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
        # What is left of a very long document is not copied for each shard.
        tokens = np.concatenate(self._tokens) if len(self._tokens) > 1 else self._tokens[0]
        counted = np.concatenate(self._counted) if len(self._counted) > 1 else self._counted[0]
        starts = np.array(self._starts, np.int64)
        name = f"{self.name}-{len(self._shards):03d}.parquet"
        beginning = int(((starts >= 0) & (starts < num_tokens)).sum())
        shard, data = shard_file(
            name,
            tokens[:num_tokens].astype(np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.int32, copy=False),
            starts[starts < num_tokens],
            self.row_group_tokens,
            counted[:num_tokens] if self.masked else None,
        )
        self.storage.replace(f"{SHARDS}/{name}", data)
        index = index_file(self._lengths[:beginning], self._edges[:beginning] if self.masked else None)
        self.storage.replace(f"{INDEX}/{name}", index)
        self._shards.append(dataclasses.replace(shard, index_sha256=hashlib.sha256(index).hexdigest()))
        del self._lengths[:beginning], self._edges[:beginning]
        self._num_tokens -= num_tokens
        self._tokens, self._counted = [tokens[num_tokens:]], [counted[num_tokens:]]
        first = np.searchsorted(starts, num_tokens, side="right") - 1  # the document that goes on or begins here
        self._starts = (starts[first:] - num_tokens).tolist() if self._num_tokens else []


def shard_file(
    name: str, tokens: NDArray[np.integer], starts: Starts, row_group_tokens: int, counted: Counted | None
) -> tuple[Shard, bytes]:
    """One shard and its file. `starts` are the documents' first tokens; the first may lie before the shard."""
    total = hashlib.sha256(starts.astype("<i8").tobytes())
    total.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
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
    table = pa.table(columns).replace_schema_metadata({TOKENS_KEY: digest.encode()})
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        firsts = np.searchsorted(rows, np.append(cuts, len(tokens)))
        for first, last in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            writer.write_table(table.slice(first, last - first), row_group_size=last - first)
    data: bytes = sink.getvalue().to_pybytes()
    shard = Shard(
        name,
        int((starts >= 0).sum()),
        len(tokens),
        digest,
        len(data),
        hashlib.sha256(data).hexdigest(),
        None if counted is None else int(counted.sum()),
    )
    return shard, data
