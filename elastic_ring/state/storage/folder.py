"""One folder on a file system or in an object store: bulk files, small files replaced whole, exclusive names.

A run stores everything through here. A failing request is retried for `timeout_s`; then StorageFailed names the place.
What is stored, and when it counts, must not enter this module.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from elastic_ring.config import Timeouts
from elastic_ring.errors import StorageFailed
from elastic_ring.files import MAX_JSON_BYTES
from elastic_ring.state.storage.backend import PROBE, Entry, Retries, StoredFile, Upload, ignore, pieces
from elastic_ring.state.storage.local_files import LocalFiles
from elastic_ring.state.storage.object_store import ObjectStore

logger = logging.getLogger(__name__)

LONGEST_SILENCE_S = 15.0
SUBMIT_S = 15.0
"""The most that a submission waits for storage: a person waits, too."""
SETTLE_S = 2.0
"""Between writing a name and reading it back, in a store that does not exclude: longer than a small write takes."""


@dataclass
class Storage:
    """The files under one URI: a local path, `file://`, or `s3://bucket/prefix`.

    Credentials, region and endpoint of S3 come from where every AWS client has them (`AWS_ENDPOINT_URL` names a store
    that is not Amazon's). Names are relative, with `/` between their parts. Threads may share one.
    """

    uri: str
    excludes: bool = True
    """Whether `create` excludes a second writer; tried by `open`. File systems do, some object stores do not."""
    timeout_s: float = Timeouts.storage_s
    """How long each failing request is retried; 0 for one attempt."""
    anchor: str = ""
    """A file of a folder without which nothing is written there: the folder was then moved, removed or unmounted."""
    tell: Callable[[str], None] = field(default=ignore, compare=False, repr=False)
    """Gets a line for a person when a request has failed for some seconds; not sent to other processes."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        if parts.scheme not in ("", "file", "s3"):
            raise ValueError(f"storage_path={self.uri!r}: use a folder, file:///folder or s3://bucket/prefix")
        if parts.scheme == "s3" and not parts.netloc:
            raise ValueError(f"storage_path={self.uri!r}: name the bucket, as in s3://bucket/prefix")
        retries = Retries(self.timeout_s, lambda text: self.tell(f"{text} ({self._shown()})"))
        # Four silent requests fit into the time.
        silence_s = min(LONGEST_SILENCE_S, self.timeout_s / 4) or LONGEST_SILENCE_S
        self._files: LocalFiles | ObjectStore = (
            LocalFiles(self.root, retries, self.anchor) if self.is_local else ObjectStore(self.root, retries, silence_s)
        )

    def __reduce__(self) -> tuple[type[Storage], tuple[str, bool, float, str]]:
        """Another process connects by itself."""
        return Storage, (self.uri, self.excludes, self.timeout_s, self.anchor)

    @property
    def is_local(self) -> bool:
        return urlsplit(self.uri).scheme != "s3"

    @property
    def root(self) -> str:
        parts = urlsplit(self.uri)
        if self.is_local:
            return str(Path(parts.path if parts.scheme else self.uri).expanduser().absolute())
        return f"{parts.netloc}{parts.path}".rstrip("/")

    def at(self, name: str) -> str:
        """The path of `name` in the file system or the store."""
        return f"{self.root}/{name}" if name else self.root

    def _shown(self, name: str = "") -> str:
        return self.at(name) if self.is_local else f"s3://{self.at(name)}"

    # ------------------------------------------------------------ opening

    def open(self, *, write: bool = True) -> Storage:
        """Check that it is there, and with `write` try a small file and the exclusive create. Raises StorageFailed."""
        with _failing(self, "cannot be reached"):
            self._files.connect(write=write)
        if write:
            name = f"{PROBE}-{secrets.token_hex(4)}"
            self.excludes = True  # so that `create` itself does not look whether the name is taken
            won = [self.create(name, b"first"), self.create(name, b"second")]
            self.excludes = won == [True, False]
            self.remove(name)
        if write and not self.excludes:
            logger.warning(
                "%s ignores conditional requests (If-None-Match): a coordinator reads back what it claims after %g s, "
                "and asks for a higher term before each commit; a writer that is slower than that is not kept apart",
                self._shown(),
                SETTLE_S,
            )
        return self

    # ------------------------------------------------------------ writing

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        """Write a bulk file under a name that nobody used before; on disk, folder entry included, when this returns.

        Raises StorageFailed. The rest of a killed process has no meaning: nothing names it.
        """
        digest = _Digest()
        with _failing(self, "cannot be written", name):
            self._files.write(self.at(name), digest.update(pieces(chunks, self._files.piece_bytes)))
        return digest.stored_file(name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless the name is taken; True if this call made it. Atomic where `excludes`.

        No two writers may give the same `data`. In a store that does not exclude, of writers within SETTLE_S the last
        one wins, and the others see that when they read back.
        """
        with _failing(self, "cannot be created", name):
            if self.excludes:
                return self._files.create(self.at(name), data)
            if self._files.entry(self.at(name)) is not None:
                return False
            self._files.replace(self.at(name), [data])
            time.sleep(SETTLE_S)
            return b"".join(self._stream(name)) == data

    def replace(self, name: str, data: bytes | Iterable[bytes | memoryview]) -> None:
        """Replace a file whole, without a digest, which takes longer than a disk. Of two writers either may win."""
        with _failing(self, "cannot be written", name):
            chunks = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
            self._files.replace(self.at(name), pieces(chunks, self._files.piece_bytes))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _failing(self, "cannot be removed", name):
            self._files.remove(self.at(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it, and the folders above that are empty then."""
        with _failing(self, "cannot be removed", name):
            self._files.remove_folder(self.at(name))

    def remove_empty_folders(self, name: str, unchanged_s: float) -> None:
        """Remove the empty folders below `name` that were not changed for `unchanged_s`; object stores have none."""
        before_unix_s = unchanged_before(self, unchanged_s)
        with _failing(self, "cannot be removed", name):
            self._files.remove_empty_folders(self.at(name), before_unix_s)

    def uploads(self, folder: str = "") -> list[Upload]:
        """Multipart uploads under `folder` that are neither completed nor aborted; none on file systems."""
        with _failing(self, "has uploads that cannot be listed", folder):
            uploads, cut = self._files.uploads(self.at(folder)), len(self.root) + 1
            return [replace(upload, path=upload.path[cut:]) for upload in uploads]

    def abort(self, upload: Upload) -> None:
        """Abort a multipart upload, which frees what it holds."""
        with _failing(self, "has an upload that cannot be aborted", upload.path):
            self._files.abort(replace(upload, path=self.at(upload.path)))

    # ------------------------------------------------------------ reading

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """The bytes of a file, or of a part of it. Raises StorageFailed, also for a missing file."""
        with _failing(self, "cannot be read", name):
            return b"".join(self._stream(name, start, num_bytes))

    def read_record(self, name: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The bytes of a small file; of a longer one so many that `plain_json` refuses them."""
        return self.read(name, 0, most_bytes + 1)

    def size(self, name: str) -> int:
        """Bytes of a file. Raises StorageFailed, also for a missing file."""
        with _failing(self, "cannot be looked up", name):
            return _entry(self, name).num_bytes

    def load(self, name: str) -> tuple[bytearray, StoredFile]:
        """A whole file, and its size and digest as they were read. Raises StorageFailed."""
        digest = _Digest()
        with _failing(self, "cannot be read", name):
            data = bytearray(_entry(self, name).num_bytes)
            for piece in digest.update(self._stream(name)):
                data[digest.num_bytes - len(piece) : digest.num_bytes] = piece
        return data, digest.stored_file(name)

    def digest(self, name: str) -> StoredFile:
        """Size and digest of a whole file, read piece by piece. Raises StorageFailed."""
        digest = _Digest()
        with _failing(self, "cannot be read", name):
            for _ in digest.update(self._stream(name)):
                pass
        return digest.stored_file(name)

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name, or one under a folder of that name."""
        with _failing(self, "cannot be looked up", name):
            if self._files.entry(self.at(name)) is not None:
                return True
            return next(self._files.entries(self.at(name), recursive=True), None) is not None

    def names(self, folder: str = "", *, recursive: bool = True) -> Iterator[tuple[str, int]]:
        """(name, bytes) of the files under `folder`, sorted; none where there is no such folder."""
        return ((entry.path, entry.num_bytes) for entry in self.entries(folder, recursive=recursive))

    def entries(self, folder: str = "", *, recursive: bool = True) -> list[Entry]:
        """The files under `folder` with size and time, sorted; `path` is the name under the root."""
        with _failing(self, "cannot be listed", folder):
            entries, cut = self._files.entries(self.at(folder), recursive=recursive), len(self.root) + 1
            return sorted((replace(entry, path=entry.path[cut:]) for entry in entries), key=lambda entry: entry.path)

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        with _failing(self, "cannot be listed", folder):
            return sorted(self._files.folders(self.at(folder)))

    def _stream(self, name: str, start: int = 0, num_bytes: int | None = None) -> Iterator[bytes]:
        size = _entry(self, name).num_bytes
        return self._files.read(self.at(name), start, size if num_bytes is None else min(size, start + num_bytes))


def unchanged_before(storage: Storage, for_s: float) -> float:
    """What was changed before this moment, by the storage's clock, was not changed for `for_s`; 0: whatever the time. A
    full storage tells no time, and nothing counts as old then."""
    if not for_s:
        return math.inf
    try:
        return now_unix_s(storage) - for_s
    except StorageFailed as error:
        logger.warning("%s tells no time: only what newer checkpoints replace is removed (%s)", storage.uri, error)
        return -math.inf


def now_unix_s(storage: Storage) -> float:
    """The time by the clock that dates a storage's files, from a file written now: clocks of hosts differ."""
    name = f"{PROBE}-{secrets.token_hex(4)}"
    storage.replace(name, b"now")
    try:
        with _failing(storage, "cannot be looked up", name):
            return _entry(storage, name).modified_unix_s
    finally:
        storage.remove(name)


def open_or_refuse(
    uri: str, *, write: bool = True, timeout_s: float = Timeouts.storage_s, setting: str = "storage_path"
) -> Storage:
    """Open a storage for a submission. Raises ValueError at once for errors that the user can mend, and StorageFailed
    for others, as a 503, after SUBMIT_S at most."""
    storage = Storage(uri, timeout_s=0.0)

    def advice_on(error: Exception) -> str | None:
        return storage._files.advice(error.__cause__ or error)

    try:
        Retries(min(timeout_s, SUBMIT_S))(
            lambda: storage.open(write=write),
            lambda error: not isinstance(error, StorageFailed) or advice_on(error) is not None,
        )
    except StorageFailed as error:
        advice = advice_on(error)
        if advice is None:
            raise
        raise ValueError(f"{setting}={uri!r}: {error.message}: {advice}") from error
    return Storage(uri, storage.excludes, timeout_s)


class _Digest:
    """sha256 and size of pieces on their way; each piece is digested while it is being written."""

    def __init__(self) -> None:
        self._sha256, self.num_bytes = hashlib.sha256(), 0

    def stored_file(self, name: str) -> StoredFile:
        return StoredFile(name, self.num_bytes, self._sha256.hexdigest())

    def update(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yields the pieces unchanged."""
        digested: Future[None] | None = None
        has_thread = True
        with ThreadPoolExecutor(1) as pool:
            for piece in chunks:
                if digested is not None:
                    digested.result()
                try:
                    digested = pool.submit(self._sha256.update, piece) if has_thread else None
                except RuntimeError:  # the interpreter ends, and starts no threads
                    digested, has_thread = None, False
                if digested is None:
                    self._sha256.update(piece)
                self.num_bytes += len(piece)
                yield piece


def _entry(storage: Storage, name: str) -> Entry:
    entry = storage._files.entry(storage.at(name))
    if entry is None:
        raise FileNotFoundError("there is no such file")
    return entry


@contextmanager
def _failing(storage: Storage, problem: str, name: str = "") -> Iterator[None]:
    """Turns any error into a StorageFailed: `name`, `problem` and the cause."""
    try:
        yield
    except StorageFailed:
        raise
    except Exception as error:
        where, notes = storage._shown(name), "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        raise StorageFailed(f"{where} {problem}: {type(error).__name__}: {error}{notes}", path=where) from error
