"""Chunks of a token stream, and a cache that loads them once, also ahead of their use on threads of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Starts = NDArray[np.int64]
Counted = NDArray[np.bool_]
TOKEN_BYTES = 4
THREADS, NAME = 4, "elastic-ring-read-ahead"


class Loaded(NamedTuple):
    """A chunk's tokens, the offsets at which documents start in them, and which count in the loss; None: all."""

    tokens: Tokens
    starts: Starts
    counted: Counted | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


class Chunk(Protocol):
    """A part of the stream that is read in one piece."""

    @property
    def name(self) -> str:
        """For messages: the file, and which part of it."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens with end-of-document tokens; known without reading them."""

    def load(self) -> Loaded: ...


class Chunks(Protocol):
    """Chunks in the order of the stream."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Chunk: ...


class ChunkCache:
    """Loads each chunk once at a time and keeps the latest, at most `cache_bytes` of them, but always the last one."""

    def __init__(self, chunks: Chunks, cache_bytes: int) -> None:
        self.chunks = chunks
        self.limit_bytes = cache_bytes
        self._loaded: OrderedDict[int, Future[Loaded]] = OrderedDict()
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def get(self, index: int) -> Loaded:
        """A chunk, loaded by this thread unless another has begun. Raises what its `load` raises."""
        with self._lock:
            found = self._loaded.get(index)
            if found is None:
                found = self._loaded[index] = Future()
                mine = True
            else:
                self._loaded.move_to_end(index)
                mine = False
        if mine:
            self._fill(index, found)
        return found.result()

    def load_ahead(self, indices: Iterable[int]) -> None:
        """Begin to load chunks, as many as half of the cache holds. What one raises, `get` raises."""
        left_bytes = self.limit_bytes // 2
        for index in indices:
            left_bytes -= self.chunks[index].num_tokens * TOKEN_BYTES
            if left_bytes < 0:
                return
            with self._lock:
                if index not in self._loaded:
                    found = self._loaded[index] = Future()
                    self._threads = self._threads or ThreadPoolExecutor(THREADS, thread_name_prefix=NAME)
                    self._threads.submit(self._fill, index, found)

    def _fill(self, index: int, found: Future[Loaded]) -> None:
        try:
            found.set_result(self._load(index))
        except BaseException as error:
            with self._lock:
                self._loaded.pop(index, None)  # the next one tries again
            found.set_exception(error)
        else:
            with self._lock:
                self._drop_oldest(index)

    def _load(self, index: int) -> Loaded:
        chunk = self.chunks[index]
        loaded = chunk.load()
        if len(loaded.tokens) != chunk.num_tokens:
            raise ValueError(
                f"{chunk.name}: holds {len(loaded.tokens)} tokens, {chunk.num_tokens} when it was opened "
                "or by its metadata; a corpus must not change during a run: restore it, or start a new run"
            )
        return loaded

    def _drop_oldest(self, latest: int) -> None:
        """Forget chunks that were used longest ago, as many as are over the limit."""
        sizes = self._sizes()
        total = sum(sizes.values())
        for index, num_bytes in sizes.items():
            if total > self.limit_bytes and index != latest:
                del self._loaded[index]
                total -= num_bytes

    @property
    def num_bytes(self) -> int:
        """The size of the loaded chunks."""
        with self._lock:
            return sum(self._sizes().values())

    def _sizes(self) -> dict[int, int]:
        return {i: f.result().num_bytes for i, f in self._loaded.items() if _has_result(f)}


def _has_result(future: Future[Loaded]) -> bool:
    return future.done() and future.exception() is None
