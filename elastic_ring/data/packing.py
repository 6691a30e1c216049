"""Documents packed end to end into sequences of a fixed length, with random access.

The corpus is one token stream: each document followed by an end-of-document token. Sequence i is the `context_tokens +
1` tokens from token `i * context_tokens` on: every token of the stream is an input once, and a sequence's last token
is only a target there. The remainder, less than one sequence, is unused. With `align_tokens`, documents are padded
with end-of-document tokens to a multiple of it, so that each starts at such a multiple; padding is an input and never
a target. `whole` packs documents whole instead, by their index.

A stream consists of chunks that each fit in memory; `text`, `shards` and `row_groups` provide them. No order, no mesh
and no torch in here.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Starts = NDArray[np.int64]
Counted = NDArray[np.bool_]
TOKEN_BYTES = 4
THREADS, THREAD_NAME = 4, "elastic-ring-read-ahead"
END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257
MAX_VOCAB_SIZE = 2**31

Files = tuple[tuple[str, str], ...]
"""(name below the given folder, digest of the content) of each file."""


# ------------------------------------------------------------ chunks


class Loaded(NamedTuple):
    """A chunk's tokens, the offsets at which documents start in them, and which count in the loss; None: all."""

    tokens: Tokens
    starts: Starts
    counted: Counted | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


class Chunk(Protocol):
    """A part of the stream that is read in one piece. `name`, for messages: the file, and which part of it.
    `num_tokens`: with end-of-document tokens, known without reading them."""

    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    def load(self) -> Loaded: ...


class Chunks(Protocol):
    """Chunks in the order of the stream."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Chunk: ...


class ChunkCache:
    """Loads each chunk once at a time and keeps the latest, at most `limit_bytes` of them, but always the last one."""

    def __init__(self, chunks: Chunks, limit_bytes: int) -> None:
        self.chunks, self.limit_bytes = chunks, limit_bytes
        self._loaded: OrderedDict[int, Future[Loaded]] = OrderedDict()
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def get(self, index: int) -> Loaded:
        """A chunk, loaded by this thread unless another has begun. Raises what its `load` raises."""
        with self._lock:
            future, is_new = self._loaded.get(index) or Future(), index not in self._loaded
            self._loaded[index] = future
            self._loaded.move_to_end(index)
        if is_new:
            self._fill(index, future)
        return future.result()

    def load_ahead(self, indices: Iterable[int]) -> None:
        """Begin to load chunks, as many as half of the cache holds. What one raises, `get` raises."""
        left_bytes = self.limit_bytes // 2
        for index in indices:
            left_bytes -= self.chunks[index].num_tokens * TOKEN_BYTES
            if left_bytes < 0:
                return
            with self._lock:
                if index not in self._loaded:
                    self._threads = self._threads or ThreadPoolExecutor(THREADS, thread_name_prefix=THREAD_NAME)
                    self._loaded[index] = Future()
                    self._threads.submit(self._fill, index, self._loaded[index])

    def _fill(self, index: int, future: Future[Loaded]) -> None:
        """Load a chunk, then drop those that were used longest ago, as many as are over the limit."""
        try:
            chunk = self.chunks[index]
            loaded = chunk.load()
            if len(loaded.tokens) != chunk.num_tokens:
                raise ValueError(
                    f"{chunk.name}: holds {len(loaded.tokens)} tokens, {chunk.num_tokens} when it was opened "
                    "or by its metadata; a corpus must not change during a run: restore it, or start a new run"
                )
            future.set_result(loaded)
        except BaseException as error:
            with self._lock:
                self._loaded.pop(index, None)  # the next one tries again
            future.set_exception(error)
            return
        with self._lock:
            ready = {i: f for i, f in self._loaded.items() if f.done() and f.exception() is None}
            sizes = {i: f.result().num_bytes for i, f in ready.items()}
            total = sum(sizes.values())
            for older, num_bytes in sizes.items():
                if total > self.limit_bytes and older != index:
                    del self._loaded[older]
                    total -= num_bytes


# ------------------------------------------------------------ sequences


@dataclass(frozen=True)
class Sample:
    """One packed sequence.

    tokens: int64 (context_tokens + 1,). document_starts: the positions in [0, context_tokens) where a document starts,
    ascending; the first is 0 even if that document began in the previous sequence. ends_document: whether the last
    target, `tokens[context_tokens]`, belongs to the next document. padding: the padding token; where it follows itself
    it is not a target. None: no padding. counted: of each token, whether it is a target at all; None: all are.
    """

    tokens: NDArray[np.int64]
    document_starts: tuple[int, ...]
    ends_document: bool = False
    padding: int | None = None
    counted: Counted | None = None


@dataclass(kw_only=True, eq=False)
class PackedSource:
    """Sequences of `context_tokens + 1` tokens over a list of chunks.

    Caches at most `cache_bytes` of chunks, but always the last one. `read` and `read_ahead` are thread-safe. `ends`:
    the stream's tokens up to the end of each chunk, where they are known without asking every chunk. `how`: what
    decides about sequences beside the files, for the fingerprint; `digests` gives the files. `notes`: which files are
    used, for the console.
    """

    chunks: Chunks
    context_tokens: int
    vocab_size: int
    describe: str
    how: Sequence[object]
    digests: Callable[[], Files]
    ends: Starts | None = None
    padding: int | None = None
    cache_bytes: int = 128 * 2**20
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        sizes = (self.chunks[index].num_tokens for index in range(len(self.chunks)))
        self._ends = np.cumsum(list(sizes), dtype=np.int64) if self.ends is None else self.ends
        self._cache = ChunkCache(self.chunks, self.cache_bytes)

    @property
    def num_tokens(self) -> int:
        """All tokens of the stream, with the unused remainder."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_sequences(self) -> int:
        return max(self.num_tokens - 1, 0) // self.context_tokens

    @cached_property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal samples; the config that opened the source documents what it covers."""
        return hashlib.sha256(json.dumps([*self.how, [digest for _, digest in self.files]]).encode()).hexdigest()

    @cached_property
    def files(self) -> Files:
        """The files in the order of the stream, as the fingerprint covers them."""
        return self.digests()

    def read(self, sample_id: int) -> Sample:
        """One sequence. Raises ValueError for an id out of range, or if the corpus changed since it was opened."""
        self._check(sample_id)
        tokens = np.empty(self.context_tokens + 1, dtype=np.int64)
        counted = np.empty(self.context_tokens + 1, dtype=np.bool_)
        starts, is_masked = self._fill(sample_id * self.context_tokens, tokens, counted)
        ends_document = self.context_tokens in starts[-1:]
        inside = tuple(sorted({0, *starts} - {self.context_tokens}))
        return Sample(tokens, inside, ends_document, self.padding, counted if is_masked else None)

    def read_ahead(self, sample_ids: Sequence[int]) -> None:
        """Begin to load the chunks of these sequences in the background, as far as half of the cache holds them."""
        chunks = dict.fromkeys(index for sample_id in sample_ids for index in self._chunks_of(sample_id))
        self._cache.load_ahead(chunks)

    def _fill(self, begin: int, tokens: NDArray[np.int64], counted: Counted) -> tuple[list[int], bool]:
        """Put the stream's tokens from `begin` on into `tokens`, and which count into `counted`. Gives where documents
        start in `tokens`, and whether a mask says what counts."""
        starts, filled, is_masked = list[int](), 0, False
        counted[:] = True
        for index in self._chunks_between(begin, begin + len(tokens)):
            chunk_tokens, chunk_starts, chunk_counted = self._cache.get(index)
            offset = begin + filled - (int(self._ends[index]) - len(chunk_tokens))
            piece = chunk_tokens[offset : offset + len(tokens) - filled]
            tokens[filled : filled + len(piece)] = piece
            if chunk_counted is not None:
                is_masked = True
                counted[filled : filled + len(piece)] = chunk_counted[offset : offset + len(piece)]
            first, last = np.searchsorted(chunk_starts, (offset, offset + len(piece)))
            starts.extend((chunk_starts[first:last] - offset + filled).tolist())
            filled += len(piece)
        return starts, is_masked

    def _chunks_of(self, sample_id: int) -> Sequence[int]:
        self._check(sample_id)
        return self._chunks_between(sample_id * self.context_tokens, (sample_id + 1) * self.context_tokens + 1)

    def _chunks_between(self, begin: int, end: int) -> range:
        """The chunks with the tokens [begin, end) of the stream."""
        first, last = np.searchsorted(self._ends, (begin, end - 1), side="right")
        return range(int(first), int(last) + 1)

    def _check(self, sample_id: int) -> None:
        if not 0 <= sample_id < self.num_sequences:
            raise ValueError(f"sample_id={sample_id}: {self.describe} has sequences 0 to {self.num_sequences - 1}")


def check_context(context_tokens: int, align_tokens: int = 1) -> None:
    """Raises ValueError for a context below 1 token, or one that is not a multiple of `align_tokens`."""
    if context_tokens < 1:
        raise ValueError(f"context_tokens={context_tokens}: a sequence needs at least 1 token")
    if align_tokens < 1:
        raise ValueError(f"align_tokens={align_tokens}: 1 fills nothing up, 128 suits block-sparse kernels")
    if context_tokens % align_tokens:
        raise ValueError(
            f"align_tokens={align_tokens} with context_tokens={context_tokens}: the second must be a multiple of the "
            "first, or sequences begin between documents' places"
        )


def aligned(num_tokens: Starts, align_tokens: int) -> Starts:
    """Documents' lengths in tokens, with padding."""
    return -(-num_tokens // align_tokens) * align_tokens
