"""Files of a local or shared file system: whole or absent after a power cut. Paths are absolute."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from elastic_ring.files import sync_directory
from elastic_ring.state.storage.retries import Retries
from elastic_ring.state.storage.stored import Entry, Upload

# What trying again does not change. A disk that is full or read-only and a permission that was taken are not among
# them: whoever runs the cluster mends those while the run waits.
FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)

FLUSH_BYTES = 64 << 20
"""After so many bytes of a file the disk begins to write them."""


class LocalFiles:
    """`root`: the folder that is made if it is missing, and whose parents are not removed."""

    piece_bytes = 1 << 20

    def __init__(self, root: str, retries: Retries) -> None:
        self._root, self._retries = root, retries

    def connect(self, *, write: bool) -> None:
        if write:
            self._retries(lambda: os.makedirs(self._root, exist_ok=True), _is_final)

    def advice(self, error: BaseException) -> str | None:
        """What the user can do about an error of the start; None where it is not theirs to mend."""
        if isinstance(error, OSError):
            return "give a folder that every node can write to and that has room"
        return None

    # ------------------------------------------------------------ writing

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        file = os.fdopen(self._retries(lambda: _open_new(path), _is_final_for_new), "wb", buffering=0)
        try:
            with file:
                start = 0
                begun = 0
                for piece in pieces:
                    self._put(file.fileno(), piece, start)
                    start += len(piece)
                    if start - begun >= FLUSH_BYTES:  # or all of it waits for the fsync
                        with suppress(OSError):  # a file system need not take advice
                            os.posix_fadvise(file.fileno(), begun, start - begun, os.POSIX_FADV_DONTNEED)
                        begun = start
                os.fsync(file.fileno())  # not tried again: the kernel may have dropped what it could not write
            self._sync_folders(path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def _put(self, descriptor: int, piece: bytes | memoryview, start: int) -> None:
        def attempt() -> None:
            view, done = memoryview(piece), 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], start + done)

        self._retries(attempt, _is_final)

    def create(self, path: str, data: bytes) -> bool:
        partial = self._partial(path, [data])
        try:
            # Fails where the name is taken, and then changes nothing.
            self._retries(lambda: os.link(partial, path), _is_final)
        except FileExistsError:
            return False
        finally:
            os.unlink(partial)
        sync_directory(os.path.dirname(path))
        return True

    def replace(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        partial = self._partial(path, pieces)
        self._retries(lambda: os.replace(partial, path), _is_final)
        sync_directory(os.path.dirname(path))

    def _partial(self, path: str, pieces: Iterable[bytes | memoryview]) -> str:
        """The data in a file beside `path`, on disk. An error leaves no such file, a killed process may."""
        partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
        self.write(partial, pieces)
        return partial

    def _sync_folders(self, path: str) -> None:
        """The entries of a file and of all folders up to the root survive a power cut."""
        folder = os.path.dirname(path)
        while len(folder) >= len(self._root):
            sync_directory(folder)
            folder = os.path.dirname(folder)

    # ------------------------------------------------------------ removing

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._retries(lambda: os.unlink(path), _is_final)

    def remove_folder(self, path: str) -> None:
        """Also the folders above it that are empty then."""
        with suppress(FileNotFoundError):
            self._retries(lambda: shutil.rmtree(path), _is_final)
        self._remove_empty(os.path.dirname(path))

    def _remove_empty(self, folder: str) -> None:
        """A folder and those above it, as far as they are empty."""
        with suppress(OSError):  # it is not empty, or somebody else removed it
            while len(folder) > len(self._root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def remove_empty_folders(self, path: str, unchanged_s: float) -> None:
        for folder, below, files in os.walk(path, topdown=False, onerror=_unless_missing):
            if not below and not files and time.time() - os.stat(folder).st_mtime >= unchanged_s:
                self._remove_empty(folder)

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
        """A file; None where there is none."""
        try:
            found = self._retries(lambda: os.stat(path), _is_final)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(path, found.st_size, found.st_mtime) if os.path.isfile(path) else None

    def entries(self, folder: str, *, recursive: bool) -> Iterator[Entry]:
        for where, names in self._retries(lambda: _walked(folder, recursive=recursive), _is_final):
            for name in names:
                if (found := self.entry(os.path.join(where, name))) is not None:  # None: removed meanwhile
                    yield found

    def folders(self, folder: str) -> list[str]:
        def look() -> list[str]:
            return next(os.walk(folder, onerror=_unless_missing), ("", [], []))[1]

        return self._retries(look, _is_final)


def _walked(folder: str, *, recursive: bool) -> list[tuple[str, list[str]]]:
    """(folder, names of its files)."""
    found = []
    for where, below, names in os.walk(folder, onerror=_unless_missing):
        found.append((where, names))
        if not recursive:
            below.clear()
    return found


def _open_new(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_final(error: Exception) -> bool:
    return isinstance(error, FINAL) or not isinstance(error, OSError)


def _is_final_for_new(error: Exception) -> bool:
    """Somebody may have removed the folder, empty as it was, before the file was in it."""
    return _is_final(error) and not isinstance(error, FileNotFoundError)
