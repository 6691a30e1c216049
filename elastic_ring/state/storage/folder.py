"""One folder on a file system or in an object store: bulk files, small files replaced whole, exclusive names.

Everything that a run keeps goes through here. What fails is tried again for `timeout_s`; then it is a StorageFailed
that names the place. What is stored, and when it counts, must not enter this module.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_ring.config import Timeouts
from elastic_ring.errors import StorageFailed
from elastic_ring.files import MAX_JSON_BYTES
from elastic_ring.state.storage.local_files import LocalFiles
from elastic_ring.state.storage.object_store import ObjectStore
from elastic_ring.state.storage.retries import Retries, ignore
from elastic_ring.state.storage.stored import Entry, StoredFile, Upload, pieces

__all__ = ["Storage", "StoredFile", "open_or_refuse"]

logger = logging.getLogger(__name__)

PROBE = ".write-test"
LONGEST_SILENCE_S = 15.0
SUBMIT_S = 15.0
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
    """How long each request is tried again while it fails; 0 for one attempt."""
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
            LocalFiles(self.root, retries) if self.is_local else ObjectStore(self.root, retries, silence_s)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process connects by itself."""
        return Storage, (self.uri, self.excludes, self.timeout_s)

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
        """Where `name` is, as the file system or the store calls it."""
        return f"{self.root}/{name}" if name else self.root

    def _shown(self, name: str = "") -> str:
        return self.at(name) if self.is_local else f"s3://{self.at(name)}"

    # ------------------------------------------------------------ opening

    def open(self, *, write: bool = True) -> Storage:
        """Ask whether it is there, and with `write` try a small file and the exclusive create. Raises StorageFailed."""
        with _named(self._shown(), "cannot be reached"):
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
        """A bulk file under a name that nobody used before; on disk, folder entry included, when this returns.

        Raises StorageFailed. What a killed process leaves has no meaning: nothing names it.
        """
        digest = _Digest()
        with _named(self._shown(name), "cannot be written"):
            self._files.write(self.at(name), digest.of(pieces(chunks, self._files.piece_bytes)))
        return StoredFile(name, digest.num_bytes, digest.sha256)

    def create(self, name: str, data: bytes) -> bool:
        """A small file, unless the name is taken; whether this call made it. Atomic where `excludes`.

        No two writers may give the same `data`. In a store that does not exclude, of writers within SETTLE_S the last
        one wins, and the others see that when they read back.
        """
        with _named(self._shown(name), "cannot be created"):
            if self.excludes:
                return self._files.create(self.at(name), data)
            if self._files.entry(self.at(name)) is not None:
                return False
            self._files.replace(self.at(name), [data])
            time.sleep(SETTLE_S)
            return b"".join(self._stream(name)) == data

    def replace(self, name: str, data: bytes) -> None:
        """A small file, whole, in place of what was there."""
        with _named(self._shown(name), "cannot be written"):
            self._files.replace(self.at(name), pieces([data], self._files.piece_bytes))

    def replace_bulk(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """A bulk file, whole, in place of what was there, without a digest, which takes longer than a disk. Two writers
        of one name at a time: either may win."""
        with _named(self._shown(name), "cannot be written"):
            self._files.replace(self.at(name), pieces(chunks, self._files.piece_bytes))

    def remove(self, name: str) -> None:
        """A file, if it is there."""
        with _named(self._shown(name), "cannot be removed"):
            self._files.remove(self.at(name))

    def remove_folder(self, name: str) -> None:
        """All that is under a folder, and the folder."""
        with _named(self._shown(name), "cannot be removed"):
            self._files.remove_folder(self.at(name))

    def remove_empty_folders(self, name: str, unchanged_s: float) -> None:
        """Under a folder, those without a file that nobody has changed for so long; object stores have none."""
        with _named(self._shown(name), "cannot be removed"):
            self._files.remove_empty_folders(self.at(name), unchanged_s)

    def uploads(self, folder: str = "") -> list[Upload]:
        """Multipart uploads under `folder` that were begun and not ended; none on file systems."""
        with _named(self._shown(folder), "has uploads that cannot be listed"):
            return self._files.uploads(self.at(folder))

    def name_of(self, upload: Upload) -> str:
        """The name under the root of the file that an upload would make."""
        return upload.path[len(self.root) + 1 :]

    def abort(self, upload: Upload) -> None:
        """End a multipart upload and free what it holds."""
        with _named(f"s3://{upload.path}", "has an upload that cannot be aborted"):
            self._files.abort(upload)

    # ------------------------------------------------------------ reading

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """The bytes of a file, or of a part of it. Raises StorageFailed, also for one that is not there."""
        with _named(self._shown(name), "cannot be read"):
            return b"".join(self._stream(name, start, num_bytes))

    def read_record(self, name: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        """The bytes of a small file; of one that is too long to be one, so many that `plain_json` refuses it."""
        return self.read(name, 0, most_bytes + 1)

    def size(self, name: str) -> int:
        """Bytes of a file. Raises StorageFailed, also for one that is not there."""
        with _named(self._shown(name), "cannot be looked up"):
            return self._entry(name).num_bytes

    def load(self, name: str) -> tuple[bytearray, StoredFile]:
        """A whole file, and its size and digest as they were read. Raises StorageFailed."""
        digest = _Digest()
        with _named(self._shown(name), "cannot be read"):
            data = bytearray(self._entry(name).num_bytes)
            for piece in digest.of(self._stream(name)):
                data[digest.num_bytes - len(piece) : digest.num_bytes] = piece
        return data, StoredFile(name, digest.num_bytes, digest.sha256)

    def digest(self, name: str) -> StoredFile:
        """Read a whole file and digest it. Raises StorageFailed."""
        digest = _Digest()
        with _named(self._shown(name), "cannot be read"):
            for _ in digest.of(self._stream(name)):
                pass
        return StoredFile(name, digest.num_bytes, digest.sha256)

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name, or one under a folder of that name."""
        with _named(self._shown(name), "cannot be looked up"):
            if self._files.entry(self.at(name)) is not None:
                return True
            return next(self._files.entries(self.at(name), recursive=True), None) is not None

    def names(self, folder: str = "", *, recursive: bool = True) -> Iterator[tuple[str, int]]:
        """(name, bytes) of the files under `folder`, sorted; none where there is no such folder."""
        for entry in self.entries(folder, recursive=recursive):
            yield entry.path, entry.num_bytes

    def entries(self, folder: str = "", *, recursive: bool = True) -> list[Entry]:
        """The files under `folder` with size and time, sorted; their `path` is the name under the root."""
        with _named(self._shown(folder), "cannot be listed"):
            found = list(self._files.entries(self.at(folder), recursive=recursive))
        cut = len(self.root) + 1
        return [Entry(each.path[cut:], each.num_bytes, each.modified_unix_s) for each in sorted(found, key=_path)]

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        with _named(self._shown(folder), "cannot be listed"):
            return sorted(self._files.folders(self.at(folder)))

    def _entry(self, name: str) -> Entry:
        found = self._files.entry(self.at(name))
        if found is None:
            raise FileNotFoundError("there is no such file")
        return found

    def _stream(self, name: str, start: int = 0, num_bytes: int | None = None) -> Iterator[bytes]:
        found = self._entry(name)
        stop = found.num_bytes if num_bytes is None else min(found.num_bytes, start + num_bytes)
        return self._files.read(self.at(name), start, stop)


def open_or_refuse(
    uri: str, *, write: bool = True, timeout_s: float = Timeouts.storage_s, setting: str = "storage_path"
) -> Storage:
    """Before anything starts: like `open`, but what the user can mend is a ValueError at once, and what may pass, as a
    503, is waited for SUBMIT_S at most: a person waits, too."""
    asked = Storage(uri, timeout_s=0.0)

    def advice_on(error: Exception) -> str | None:
        return asked._files.advice(error.__cause__ or error)

    try:
        Retries(min(timeout_s, SUBMIT_S))(
            lambda: asked.open(write=write),
            lambda error: not isinstance(error, StorageFailed) or advice_on(error) is not None,
        )
    except StorageFailed as error:
        advice = advice_on(error)
        if advice is None:
            raise
        raise ValueError(f"{setting}={uri!r}: {error.message}: {advice}") from error
    return Storage(uri, asked.excludes, timeout_s)


class _Digest:
    """Counts bytes on their way, and digests each piece while it is being written."""

    def __init__(self) -> None:
        self._sha256, self.num_bytes = hashlib.sha256(), 0

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def of(self, given: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Hands the pieces on."""
        digested: Future[None] | None = None
        has_thread = True
        with ThreadPoolExecutor(1) as beside:
            for piece in given:
                if digested is not None:
                    digested.result()
                try:
                    digested = beside.submit(self._sha256.update, piece) if has_thread else None
                except RuntimeError:  # the interpreter ends, and starts no threads
                    digested, has_thread = None, False
                if digested is None:
                    self._sha256.update(piece)
                self.num_bytes += len(piece)
                yield piece


def _path(entry: Entry) -> str:
    return entry.path


@contextmanager
def _named(where: str, what: str) -> Iterator[None]:
    """Errors of any storage come out as StorageFailed that names the place."""
    try:
        yield
    except StorageFailed:
        raise
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        raise StorageFailed(f"{where} {what}: {type(error).__name__}: {error}{notes}", path=where) from error
