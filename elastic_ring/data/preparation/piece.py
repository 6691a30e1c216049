"""One piece of a preparation: its documents become token shards and a record. What a worker does, in any process.

All files are written whole under names that follow from the piece, so a piece that runs twice changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elastic_ring.data.chunks import Counted, Tokens
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.manifest import MAX_MANIFEST_BYTES, Dropped, Shard
from elastic_ring.data.preparation.chat import ChatTokenizer, Conversations
from elastic_ring.data.preparation.documents import OnBadInput, Tally, TextIn, read_documents
from elastic_ring.data.preparation.inputs import Piece
from elastic_ring.data.preparation.shard_writer import ShardWriter
from elastic_ring.data.tokenizer import Tokenizer, open_tokenizer
from elastic_ring.files import plain_json
from elastic_ring.state.storage.folder import Storage
from elastic_ring.validation import NonNegativeInt, from_plain, settings

SHARDS, PIECES, DUPLICATES = "shards", "pieces", "duplicates"
"""Folders of a preparation: token shards, records of complete pieces, digests and numbers of repeated documents."""
BATCH_BYTES = 1 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Job:
    """What every worker of a preparation needs; picklable. Opens tokenizer and storage at first use.

    `chat_sha256`: of the chat template, where documents are conversations.
    """

    out: str
    tokenizer: str
    end_of_document: str | None
    tokenizer_sha256: str
    text_column: str
    on_bad_input: OnBadInput
    row_group_tokens: int
    align_tokens: int
    drop_duplicates: bool
    chat_sha256: str | None = None


@settings
class PieceRecord:
    """What has become of a piece."""

    name: str
    shards: tuple[Shard, ...]
    longest_document_tokens: NonNegativeInt
    dropped: Dropped = field(default_factory=Dropped)
    tokens_by_length: tuple[NonNegativeInt, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


class PieceWorker:
    """Runs pieces of a job. Constructing it opens nothing."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError where this machine's tokenizer is not the one of the job."""
        found = open_tokenizer(self.job.tokenizer, self.job.end_of_document)
        if found.sha256 != self.job.tokenizer_sha256:
            raise ValueError(
                f"tokenizer={self.job.tokenizer!r}: is another one on this machine; give all nodes the same"
            )
        return found

    @cached_property
    def chat(self) -> ChatTokenizer | None:
        """Raises ValueError where this machine's chat template is not the one of the job."""
        if self.job.chat_sha256 is None:
            return None
        found = ChatTokenizer(self.job.tokenizer, self.job.end_of_document)
        if found.sha256 != self.job.chat_sha256:
            raise ValueError(
                f"tokenizer={self.job.tokenizer!r}: has another chat template on this machine; give all nodes the same"
            )
        return found

    @cached_property
    def storage(self) -> Storage:
        return Storage(self.job.out).open(write=False)

    def digest(self, piece: Piece) -> None:
        """Write the digests of the piece's documents, in order; read again while the input's storage is away."""
        digests = patiently(
            lambda: b"".join(document_digest(document) for document in self._documents(piece, self._tally()))
        )
        self.storage.replace(digests_name(piece.name), digests)

    def prepare(self, piece: Piece) -> PieceRecord:
        """Write the piece's shards, then its record; anew while the input's storage is away. Raises ValueError for bad
        input that is not to be left out, StorageFailed."""
        return patiently(lambda: self._prepare(piece))

    def _prepare(self, piece: Piece) -> PieceRecord:
        job, tokenizer, tally = self.job, self.tokenizer, self._tally()
        writer = ShardWriter(
            self.storage,
            f"{SHARDS}/{piece.name}",
            tokenizer.vocab_size,
            tokenizer.end_of_document,
            job.row_group_tokens,
            job.align_tokens,
            masked=self.chat is not None,
        )
        repeated = self._repeated(piece)
        for batch in batches(self._kept(piece, tally, repeated)):
            for tokens, counted in self._encoded(batch, piece, tally):
                writer.add(tokens, counted)
        dropped = Dropped(
            len(repeated),
            tally.num_empty_documents,
            tally.num_empty_files,
            tuple(tally.bad),
            tally.num_records,
            tally.num_bad_records,
            tally.num_bad,
            tally.bad_bytes,
        )
        shards, lengths = writer.close(), writer.tokens_by_length
        by_length = tuple(lengths[power] for power in range(max(lengths, default=-1) + 1))
        record = PieceRecord(piece.name, shards, writer.longest_tokens, dropped, by_length)
        self.storage.replace(record_name(piece.name), record.to_json())
        return record

    def _encoded(self, batch: list[bytes], piece: Piece, tally: Tally) -> Sequence[tuple[Tokens, Counted | None]]:
        """The tokens of each document, and which count; one that the tokenizer refuses is a bad record."""
        try:
            if self.chat is not None:
                return self.chat.encode(batch)
            return [(tokens, None) for tokens in self.tokenizer.encode(batch)]
        except Exception as error:
            if len(batch) > 1:
                return [each for document in batch for each in self._encoded([document], piece, tally)]
            begins = batch[0][:40].decode(errors="replace")
            tally.leave_out_record(
                f"{piece.spans[0].name}: the document {begins!r}... at or after its beginning cannot be tokenised: "
                f"{type(error).__name__}: {error}"
            )
            return []

    def _tally(self) -> Tally:
        return Tally(self.job.on_bad_input)

    def _documents(self, piece: Piece, tally: Tally) -> Iterator[bytes]:
        content = TextIn(self.job.text_column) if self.job.chat_sha256 is None else Conversations()
        return read_documents(piece, content, tally)

    def _repeated(self, piece: Piece) -> NDArray[np.int64]:
        """The numbers of the piece's documents that came before."""
        data = self.storage.read(repeated_name(piece.name)) if self.job.drop_duplicates else b""
        return np.frombuffer(data, dtype="<i8")

    def _kept(self, piece: Piece, tally: Tally, repeated: NDArray[np.int64]) -> Iterator[bytes]:
        left_out = set(repeated.tolist())
        for number, document in enumerate(self._documents(piece, tally)):
            if number in left_out:
                continue
            if self.tokenizer.needs_text and not _is_utf8(document):
                tally.leave_out_record(f"{piece.spans[0].name}: document {number} from its beginning on is no UTF-8")
                continue
            yield document


def batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Documents in groups of about BATCH_BYTES."""
    batch: list[bytes] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def document_digest(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=DIGEST_BYTES).digest()


def record_name(piece: str) -> str:
    return f"{PIECES}/{piece}.json"


def digests_name(piece: str) -> str:
    return f"{DUPLICATES}/{piece}.digests"


def repeated_name(piece: str) -> str:
    return f"{DUPLICATES}/{piece}.repeated"


def read_record(storage: Storage, piece: str) -> PieceRecord:
    data = storage.read_record(record_name(piece), MAX_MANIFEST_BYTES)
    return from_plain(PieceRecord, plain_json(data, MAX_MANIFEST_BYTES))


def _is_utf8(document: bytes) -> bool:
    try:
        document.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
