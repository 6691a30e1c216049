"""Files of a local or shared file system: whole or absent after a power cut. Paths are absolute."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from elastic_ring.errors import StorageFailed
from elastic_ring.files import sync_directory
from elastic_ring.state.storage.backend import PROBE, Entry, Retries, Upload

FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""Errors that a retry does not mend. A full or read-only disk and a lost permission are not among them: an operator
mends those while the run waits."""
NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG)
MISSING = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)
OTHER_FILE_SYSTEM = "give a folder on a file system that has them, or an object store"
FLUSH_BYTES = 64 << 20
"""Written bytes after which the disk starts to write a file back."""


class LocalFiles:
    """`root`: the folder of the storage; made if missing. Its parents are never removed. `anchor` as in `Storage`."""

    piece_bytes = 1 << 20

    def __init__(self, root: str, retries: Retries, anchor: str = "") -> None:
        self._root, self._retries, self._anchor = root, retries, anchor

    def connect(self, *, write: bool) -> None:
        if write:
            self._retries(lambda: os.makedirs(self._root, exist_ok=True), _is_final)
            self._retries(lambda: try_calls(self._root), _is_final)

    def advice(self, error: BaseException) -> str | None:
        """How the user can mend an error at start-up; None if the user cannot."""
        if isinstance(error, StorageFailed):
            return OTHER_FILE_SYSTEM
        return "give a folder that every node can write to and that has room" if isinstance(error, OSError) else None

    # ------------------------------------------------------------ writing

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        def open_new() -> int:
            if self._anchor and not os.path.exists(os.path.join(self._root, self._anchor)):
                raise FileNotFoundError(f"{self._root} was moved, removed or unmounted: it has no {self._anchor}")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

        # FileNotFoundError is not final here: another process may remove the empty folder before the file is in it.
        descriptor = self._retries(
            open_new, lambda error: _is_final(error) and not isinstance(error, FileNotFoundError)
        )
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                start = begun = 0
                for piece in pieces:
                    self._retries(partial(_write_at, file.fileno(), piece, start), _is_final)
                    start += len(piece)
                    if start - begun >= FLUSH_BYTES:  # or all of it waits for the fsync
                        with suppress(OSError):  # a file system need not take advice
                            os.posix_fadvise(file.fileno(), begun, start - begun, os.POSIX_FADV_DONTNEED)
                        begun = start
                # Not tried again: the kernel may have dropped what it could not write.
                with _named("fsync", path):
                    os.fsync(file.fileno())
            folder = os.path.dirname(path)
            while len(folder) >= len(self._root):  # the entries of all folders survive a power cut, too
                sync_directory(folder)
                folder = os.path.dirname(folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def create(self, path: str, data: bytes) -> bool:
        written = self._write_partial(path, [data])
        try:
            self._retries(partial(_link, written, path), _is_final)
        except FileExistsError:
            return False
        finally:
            os.unlink(written)
        sync_directory(os.path.dirname(path))
        return True

    def replace(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        partial = self._write_partial(path, pieces)
        self._retries(lambda: os.replace(partial, path), _is_final)
        sync_directory(os.path.dirname(path))

    def _write_partial(self, path: str, pieces: Iterable[bytes | memoryview]) -> str:
        """Write a hidden file beside `path`. An error leaves no such file, a killed process may."""
        partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
        self.write(partial, pieces)
        return partial

    # ------------------------------------------------------------ removing

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._retries(lambda: os.unlink(path), _is_final)

    def remove_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._retries(lambda: shutil.rmtree(path), _is_final)
        self._remove_empty_parents(os.path.dirname(path))

    def _remove_empty_parents(self, folder: str) -> None:
        with suppress(OSError):  # it is not empty, or another process removed it
            while len(folder) > len(self._root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def remove_empty_folders(self, path: str, before_unix_s: float) -> None:
        for folder, below, files in os.walk(path, topdown=False, onerror=_raise_unless_missing):
            if not below and not files and os.stat(folder).st_mtime <= before_unix_s:
                self._remove_empty_parents(folder)

    def uploads(self, folder: str) -> list[Upload]:
        return []

    def abort(self, upload: Upload) -> None:
        raise AssertionError("a file system has no uploads")

    # ------------------------------------------------------------ reading

    def read(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        with self._retries(lambda: open(path, "rb", buffering=0), _is_final) as file:
            for at in range(start, stop, self.piece_bytes):
                yield self._retries(
                    lambda at=at: os.pread(file.fileno(), min(self.piece_bytes, stop - at), at),  # type: ignore[misc]
                    _is_final,
                )

    def entry(self, path: str) -> Entry | None:
        try:
            status = self._retries(lambda: os.stat(path), _is_final)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)) and error.errno not in NO_PATH:
                raise
            return None
        return Entry(path, status.st_size, status.st_mtime) if os.path.isfile(path) else None

    def entries(self, folder: str, *, recursive: bool) -> Iterator[Entry]:
        def walk() -> list[str]:
            paths = []
            for parent, below, names in os.walk(folder, onerror=_raise_unless_missing):
                paths += [os.path.join(parent, name) for name in names]
                if not recursive:
                    below.clear()
            return paths

        return filter(None, map(self.entry, self._retries(walk, _is_final)))  # None: removed meanwhile

    def folders(self, folder: str) -> list[str]:
        return self._retries(
            lambda: next(os.walk(folder, onerror=_raise_unless_missing), ("", [], []))[1],
            _is_final,
        )


def try_calls(folder: str | os.PathLike[str]) -> None:
    """Make each call in `folder` that a run makes in its own. Raises OSError; StorageFailed, which names a call
    that its file system does not have."""
    where = os.fspath(folder)
    own = os.path.join(folder, f"{PROBE}-{secrets.token_hex(4)}")
    names = [own, f"{own}-linked", f"{own}-renamed"]
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with _named("fsync", where):
            os.fsync(descriptor)
        _link(*names[:2])
        with _named("rename", where):
            os.replace(*names[1:])
        with _named("fsync of a folder", where):
            sync_directory(folder)
    finally:
        os.close(descriptor)
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name)


def has_locks(descriptor: int) -> bool:
    """Lock an open file for this process alone, or not, where its file system has no locks (flock): then False. Raises
    BlockingIOError where another process has it, OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return False
    return True


def _link(source: str, target: str) -> None:
    """Unlike a rename it fails if the name is taken."""
    with _named("hard links (link)", os.path.dirname(target)):
        os.link(source, target)


@contextmanager
def _named(call: str, path: str) -> Iterator[None]:
    """Raises StorageFailed where the file system of `path` refuses the call as one that it does not have."""
    try:
        yield
    except OSError as error:
        if error.errno not in MISSING:
            raise
        raise StorageFailed(f"{path}: its file system has no {call}: {error.strerror}", path=path) from None


def _write_at(descriptor: int, piece: bytes | memoryview, start: int) -> None:
    view, done = memoryview(piece), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_final(error: Exception) -> bool:
    return isinstance(error, FINAL) or not isinstance(error, OSError) or error.errno in NO_PATH
