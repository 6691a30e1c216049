"""One folder on a file system or in an object store: bulk files, small files replaced whole, exclusive names.

`pyarrow.fs` moves the bytes. What it has no word for goes through s3fs: the conditional PUT (`If-None-Match: *`) and
the list of unfinished multipart uploads. What is stored, and when it counts, must not enter this module.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow
from pyarrow import fs

from elastic_ring.config import environment
from elastic_ring.errors import StorageFailed
from elastic_ring.files import sync_directory

CHUNK_BYTES = 16 << 20
PROBE = ".write-test"
TAKEN = (409, 412)
"""HTTP: a conditional request that lost to one beside it, a condition that does not hold."""


@dataclass(frozen=True)
class StoredFile:
    """A file by its name under the storage's root. `sha256` is of the bytes that were handed to the store."""

    name: str
    num_bytes: int
    sha256: str


@dataclass
class Storage:
    """The files under one URI: a local path, `file://`, or `s3://bucket/prefix`.

    Credentials, region and endpoint of S3 come from the environment, as for every AWS client (`AWS_ENDPOINT_URL` names
    a store that is not Amazon's). Names are relative, with `/` between their parts.
    """

    uri: str
    excludes: bool = True
    """Whether `create` excludes a second writer; tried by `open`. File systems do, some object stores do not."""
    _fs: Any = field(default=None, repr=False)
    _s3: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        if parts.scheme not in ("", "file", "s3"):
            raise ValueError(f"storage_path={self.uri!r}: use a folder, file:///folder or s3://bucket/prefix")
        if parts.scheme == "s3" and not parts.netloc:
            raise ValueError(f"storage_path={self.uri!r}: name the bucket, as in s3://bucket/prefix")

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
        """Where `name` is, as the file system calls it."""
        return f"{self.root}/{name}" if name else self.root

    # ------------------------------------------------------------ opening

    def open(self, *, write: bool = True) -> Storage:
        """Connect, and with `write` try a small file and the exclusive create. Raises StorageFailed."""
        with _named(self.uri, "cannot be reached"):
            self._fs = fs.LocalFileSystem() if self.is_local else s3_filesystem()
            if not self.is_local:
                bucket = self.root.split("/")[0]
                if self._fs.get_file_info(bucket).type == fs.FileType.NotFound:
                    raise OSError(f"there is no bucket {bucket}")
        if write:
            name = f"{PROBE}-{secrets.token_hex(4)}"
            won = [self.create(name, b"first"), self.create(name, b"second")]
            self.excludes = won == [True, False]
            self.remove(name)
        return self

    # ------------------------------------------------------------ writing

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        """A bulk file under a name that nobody used before; on disk, folder entry included, when this returns.

        Raises StorageFailed. What an error leaves has no meaning: nothing names it.
        """
        total, num_bytes = hashlib.sha256(), 0
        with _named(self.at(name), "cannot be written"):
            if self.is_local:
                os.makedirs(os.path.dirname(self.at(name)), exist_ok=True)
            with self._fs.open_output_stream(self.at(name), buffer_size=None) as stream:
                for chunk in chunks:
                    stream.write(pyarrow.py_buffer(chunk))
                    total.update(chunk)
                    num_bytes += len(chunk)
            if self.is_local:
                self._sync(name)
        return StoredFile(name, num_bytes, total.hexdigest())

    def create(self, name: str, data: bytes) -> bool:
        """A small file, unless the name is taken; whether this call made it. Atomic where `excludes`.

        No two writers may give the same `data`.
        """
        with _named(self.at(name), "cannot be created"):
            if not self.is_local:
                try:
                    self._conditional().pipe_file(self.at(name), data, mode="create")
                except OSError as error:
                    if _http_status(error) not in TAKEN:
                        raise
                    # The client sends a request again whose answer was lost: then it was this call that won.
                    return self.read(name) == data
                return True
            partial = self._partial(name, data)
            try:
                os.link(partial, self.at(name))  # fails where the name is taken, and then changes nothing
            except FileExistsError:
                return False
            finally:
                os.unlink(partial)
            sync_directory(os.path.dirname(self.at(name)))
            return True

    def replace(self, name: str, data: bytes) -> None:
        """A small file, whole, in place of what was there."""
        with _named(self.at(name), "cannot be written"):
            if not self.is_local:
                self._conditional().pipe_file(self.at(name), data)
                return
            os.replace(self._partial(name, data), self.at(name))
            sync_directory(os.path.dirname(self.at(name)))

    def remove(self, name: str) -> None:
        """A file, if it is there."""
        with _named(self.at(name), "cannot be removed"):
            if self._fs.get_file_info(self.at(name)).type == fs.FileType.File:
                self._fs.delete_file(self.at(name))

    def remove_folder(self, name: str) -> None:
        """All that is under a folder, and the folder."""
        with _named(self.at(name), "cannot be removed"):
            if self._fs.get_file_info(self.at(name)).type == fs.FileType.Directory:
                self._fs.delete_dir(self.at(name))

    def abort_uploads(self, prefix: str) -> int:
        """End multipart uploads under `prefix` that their writer left; how many there were. 0 on file systems."""
        if self.is_local:
            return 0
        bucket, _, key = self.at(prefix).partition("/")
        client = self._conditional()
        with _named(self.at(prefix), "has uploads that cannot be listed"):
            found = client.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", [])
            for upload in found:
                client.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(found)

    # ------------------------------------------------------------ reading

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """The bytes of a file, or of a part of it. Raises StorageFailed, also for one that is not there."""
        with _named(self.at(name), "cannot be read"), self._fs.open_input_file(self.at(name)) as file:
            file.seek(start)
            data: bytes = file.read(num_bytes)
        return data

    def exists(self, name: str) -> bool:
        with _named(self.at(name), "cannot be looked up"):
            return bool(self._fs.get_file_info(self.at(name)).type != fs.FileType.NotFound)

    def names(self, folder: str = "", *, recursive: bool = True) -> Iterator[tuple[str, int]]:
        """(name, bytes) of the files under `folder`, sorted; none where there is no such folder."""
        with _named(self.at(folder), "cannot be listed"):
            selector = fs.FileSelector(self.at(folder), allow_not_found=True, recursive=recursive)
            found = [info for info in self._fs.get_file_info(selector) if info.type == fs.FileType.File]
        for info in sorted(found, key=lambda info: info.path):
            yield info.path.removeprefix(self.root).lstrip("/"), int(info.size)

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in `folder`, sorted."""
        with _named(self.at(folder), "cannot be listed"):
            selector = fs.FileSelector(self.at(folder), allow_not_found=True)
            found = [info.path for info in self._fs.get_file_info(selector) if info.type == fs.FileType.Directory]
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def digest(self, name: str) -> StoredFile:
        """Read a whole file and digest it. Raises StorageFailed."""
        total, num_bytes = hashlib.sha256(), 0
        with _named(self.at(name), "cannot be read"), self._fs.open_input_stream(self.at(name)) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                total.update(chunk)
                num_bytes += len(chunk)
        return StoredFile(name, num_bytes, total.hexdigest())

    # ------------------------------------------------------------ details

    def _partial(self, name: str, data: bytes) -> str:
        """The data in a file beside `name`, on disk. A full disk leaves no such file."""
        path = self.at(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
        return partial

    def _sync(self, name: str) -> None:
        """A file and the entries of all folders up to the root survive a power cut."""
        descriptor = os.open(self.at(name), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        folder = os.path.dirname(self.at(name))
        while len(folder) >= len(self.root):
            sync_directory(folder)
            folder = os.path.dirname(folder)

    def _conditional(self) -> Any:
        """s3fs, made at first use: it keeps an event loop of its own."""
        if self._s3 is None:
            import s3fs

            endpoint = _endpoint()
            # Instances of s3fs are shared by their arguments; one of our own is not skewed by somebody else's cache.
            self._s3 = s3fs.S3FileSystem(
                use_listings_cache=False, skip_instance_cache=True, client_kwargs={"endpoint_url": endpoint}
            )
        return self._s3


def _http_status(error: BaseException) -> int:
    """What the store answered, from under s3fs's own error; 0 if it did not."""
    response = getattr(error.__cause__, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _endpoint() -> str | None:
    found = environment()
    return found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")


def s3_filesystem() -> Any:
    """The pyarrow file system of S3, or of the store that `AWS_ENDPOINT_URL` names."""
    # Stores other than Amazon's answer 411 to the streamed checksums that the client would send by itself.
    environment().setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_REQUIRED")
    endpoint = _endpoint()
    if endpoint is None:
        return fs.S3FileSystem()
    parts = urlsplit(endpoint)
    return fs.S3FileSystem(
        endpoint_override=parts.netloc, scheme=parts.scheme, region=environment().get("AWS_REGION", "us-east-1")
    )


@contextmanager
def _named(where: str, what: str) -> Iterator[None]:
    """Errors of any storage library come out as StorageFailed that names the place."""
    try:
        yield
    except StorageFailed:
        raise
    except Exception as error:
        shown = error.__cause__ if _http_status(error) else error
        raise StorageFailed(f"{where} {what}: {type(shown).__name__}: {shown}", path=where) from error
