"""Objects of an S3 store, through botocore. Paths are `bucket/key`.

Endpoint, region and credentials are found as by every AWS client. Each request is retried by itself, so that a long
upload survives an outage of `Retries.limit_s`. A writer that fails aborts its upload: half an object never appears.
(`pyarrow.fs` completes the upload of a writer that fails. obstore, 0.12, lists no uploads, so `prune` could not abort
those of killed writers, reads no profiles of `~/.aws`, and has one error for timeouts, refused connections and 503s.)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

from elastic_ring.config import environment
from elastic_ring.state.storage.backend import PIECE_BYTES, Entry, Retries, Upload

logger = logging.getLogger(__name__)

NUM_STREAMS = 4
"""Concurrent requests for one file."""
MOST_PARTS = 10_000
"""S3's limit on a multipart upload: 156 GiB in parts of 16 MiB."""
PAGE = 1000
"""Names of one listing request; S3 gives no more."""
TAKEN = ("PreconditionFailed", "412")
GONE = ("NoSuchKey", "NoSuchUpload", "404", "NotFound")
REFUSED = (
    "AccessDenied",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "403",
    "Forbidden",
)
"""Error codes for wrong or expired credentials and for a wrong clock. All may pass."""
BUSY = (408, 409, 429)
"""HTTP statuses that may pass: timeout, conflict with a concurrent request, too many. So may all from 500 on."""


class ObjectStore:
    """`silence_s`: a request that receives no byte for so long has failed."""

    piece_bytes = PIECE_BYTES
    """Bytes of a part of an upload, and of a read: what a retry repeats."""

    def __init__(self, root: str, retries: Retries, silence_s: float) -> None:
        self._bucket, self._root_key = root.partition("/")[::2]
        self._retries, self._silence_s = retries, silence_s
        self._session_client: Any = None
        self._connecting = threading.Lock()

    def connect(self, *, write: bool) -> None:
        self._call("list_objects_v2", Prefix=self._root_key, MaxKeys=1)

    def advice(self, error: BaseException) -> str | None:
        """How the user can mend an error at start-up; None if the user cannot."""
        from botocore import exceptions

        code, bucket = _code(error), self._bucket
        if code == "NoSuchBucket":
            return f"there is no bucket {bucket}; create it or name another"
        if code == "AccessDenied":
            return f"grant list, get, put, delete and multipart uploads on {bucket}, or use other credentials"
        if code == "RequestTimeTooSkewed":
            return "set this node's clock: the store's differs by more than it allows"
        if code in REFUSED:
            return "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile or role"
        if code.startswith("4") or code in ("InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed"):
            return "check the bucket's name, AWS_REGION and AWS_ENDPOINT_URL"
        if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
            return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or role"
        broken = (exceptions.ReadTimeoutError, exceptions.ConnectionClosedError, exceptions.ResponseStreamingError)
        if isinstance(error, broken):
            return None  # the store was there
        if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError)):
            return "check AWS_ENDPOINT_URL, and that this node reaches it"
        if isinstance(error, (exceptions.BotoCoreError, ValueError)):
            return "check the bucket's name and the AWS variables and profile"
        return None

    # ------------------------------------------------------------ requests

    def _client(self) -> Any:
        """The client, which threads may share; made at first use, and anew after the store refused its credentials."""
        from botocore.config import Config
        from botocore.session import Session

        with self._connecting:
            if self._session_client is None:
                config = Config(
                    connect_timeout=min(5.0, self._silence_s),
                    read_timeout=self._silence_s,
                    retries={"total_max_attempts": 1},
                    max_pool_connections=2 * NUM_STREAMS,
                    # Stores other than Amazon's refuse the checksums that the client would add by itself.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
                # botocore itself knows AWS_DEFAULT_REGION only.
                region = environment().get("AWS_REGION")
                self._session_client = Session().create_client("s3", region_name=region, config=config)
            return self._session_client

    def _call(
        self, operation: str, path: str = "", finish: Callable[[Any], Any] = lambda reply: reply, **parameters: Any
    ) -> Any:
        """One request, of an object or of the bucket, retried while it fails for a reason that may pass. Returns
        `finish(reply)`."""
        from botocore.exceptions import ClientError

        if path:
            parameters["Key"] = _key(path)

        def attempt() -> Any:
            try:
                return finish(getattr(self._client(), operation)(Bucket=self._bucket, **parameters))
            except ClientError as error:
                if _code(error) in GONE:
                    raise FileNotFoundError(str(error)) from error
                if _code(error) in TAKEN:
                    raise FileExistsError(str(error)) from error
                raise

        def renew_client(error: Exception) -> None:
            if _is_about_credentials(error):
                self._session_client = None

        return self._retries(attempt, _is_final, renew_client)

    # ------------------------------------------------------------ writing

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """An object of one piece is one PUT, others are multipart uploads of equal parts."""
        rest = iter(pieces)
        first, second = bytes(next(rest, b"")), next(rest, None)
        if second is None:
            self._call("put_object", path, Body=first)
            return
        upload_id = str(self._call("create_multipart_upload", path)["UploadId"])
        try:
            parts, num_bytes = self._send_parts(path, upload_id, chain((first, second), rest))
            try:
                self._call("complete_multipart_upload", path, UploadId=upload_id, MultipartUpload={"Parts": parts})
            except FileNotFoundError:
                # A request whose reply was lost has completed the upload; its retry finds none.
                entry = self.entry(path)
                if entry is None or entry.num_bytes != num_bytes:
                    raise
        except BaseException:
            try:  # once: the retries are over, and `prune` aborts what is left
                self._client().abort_multipart_upload(Bucket=self._bucket, Key=_key(path), UploadId=upload_id)
            except Exception as error:
                logger.warning("the upload of %s is left in the store: %s", path, error)
            raise

    def _send_parts(
        self, path: str, upload_id: str, pieces: Iterable[bytes | memoryview]
    ) -> tuple[list[dict[str, object]], int]:
        """(parts as their upload's completion names them, bytes in all)."""
        tags: list[str] = []
        under_way: deque[Future[str]] = deque()
        num_bytes = 0
        with ThreadPoolExecutor(NUM_STREAMS) as senders:
            for number, piece in enumerate(pieces, 1):
                if number > MOST_PARTS:
                    most = MOST_PARTS * self.piece_bytes
                    raise ValueError(f"{path} has more than {most:,} bytes: spread it over more ranks")
                if len(under_way) == NUM_STREAMS:
                    tags.append(under_way.popleft().result())
                num_bytes += len(piece)
                send = partial(self._call, "upload_part", path, itemgetter("ETag"), UploadId=upload_id)
                under_way.append(senders.submit(send, PartNumber=number, Body=bytes(piece)))
            tags += [tag.result() for tag in under_way]
        return [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)], num_bytes

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._call("put_object", path, Body=data, IfNoneMatch="*")
        except FileExistsError:
            # A request whose reply was lost has made the object; its retry finds the name taken.
            return b"".join(self.read(path, 0, len(data) + 1)) == data
        return True

    replace = write
    """A PUT is atomic."""

    # ------------------------------------------------------------ removing

    def remove(self, path: str) -> None:
        self._call("delete_object", path)

    def remove_folder(self, path: str) -> None:
        keys = [{"Key": entry["Key"]} for page in self._objects(path, "") for entry in page.get("Contents", [])]
        for start in range(0, len(keys), PAGE):
            batch = {"Objects": keys[start : start + PAGE], "Quiet": True}
            errors = self._call("delete_objects", Delete=batch).get("Errors", [])
            if errors:
                raise OSError(f"{len(errors)} objects cannot be removed, the first for {errors[0]}")

    def remove_empty_folders(self, path: str, before_unix_s: float) -> None:
        """Nothing: here folders are prefixes of names."""

    def uploads(self, folder: str) -> list[Upload]:
        return [
            Upload(f"{self._bucket}/{upload['Key']}", upload["UploadId"], upload["Initiated"].timestamp())
            for page in self._pages("list_multipart_uploads", folder, ("KeyMarker", "UploadIdMarker"), MaxUploads=PAGE)
            for upload in page.get("Uploads", [])
        ]

    def abort(self, upload: Upload) -> None:
        try:
            self._call("abort_multipart_upload", upload.path, UploadId=upload.upload_id)
        except FileNotFoundError:
            logger.info("the upload of %s has ended meanwhile", upload.path)

    # ------------------------------------------------------------ reading

    def read(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes in order; NUM_STREAMS requests read ahead."""

        def read_part(at: int) -> bytes:
            bounds = f"bytes={at}-{min(at + self.piece_bytes, stop) - 1}"
            data: bytes = self._call("get_object", path, lambda reply: reply["Body"].read(), Range=bounds)
            return data

        under_way: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(NUM_STREAMS) as readers:
            for at in range(start, stop, self.piece_bytes):
                if len(under_way) == NUM_STREAMS:
                    yield under_way.popleft().result()
                under_way.append(readers.submit(read_part, at))
            while under_way:
                yield under_way.popleft().result()

    def entry(self, path: str) -> Entry | None:
        try:
            head = self._call("head_object", path)
        except FileNotFoundError:
            return None
        return Entry(path, head["ContentLength"], head["LastModified"].timestamp())

    def entries(self, folder: str, *, recursive: bool) -> Iterator[Entry]:
        for page in self._objects(folder, "" if recursive else "/"):
            for entry in page.get("Contents", []):
                if not entry["Key"].endswith("/"):
                    yield Entry(f"{self._bucket}/{entry['Key']}", entry["Size"], entry["LastModified"].timestamp())

    def folders(self, folder: str) -> list[str]:
        return [
            prefix["Prefix"].rstrip("/").rsplit("/", 1)[-1]
            for page in self._objects(folder, "/")
            for prefix in page.get("CommonPrefixes", [])
        ]

    def _objects(self, folder: str, delimiter: str) -> Iterator[Any]:
        return self._pages("list_objects_v2", folder, ("ContinuationToken",), Delimiter=delimiter, MaxKeys=PAGE)

    def _pages(self, operation: str, folder: str, markers: Sequence[str], **parameters: Any) -> Iterator[Any]:
        """The pages of a list of what is in `folder`. `markers`: parameters that say where the next page begins."""
        key = _key(folder)
        parameters["Prefix"] = f"{key}/" if key else ""
        while True:
            page = self._call(operation, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            parameters |= {marker: page[f"Next{marker}"] for marker in markers}


def _key(path: str) -> str:
    return path.partition("/")[2]


def _code(error: BaseException) -> str:
    """The store's error code; empty if there was no reply."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _is_about_credentials(error: BaseException) -> bool:
    return _code(error) in REFUSED or "Credential" in type(error).__name__ or "Token" in type(error).__name__


def _is_final(error: Exception) -> bool:
    """Whether a retry cannot help."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError

    if isinstance(error, (FileNotFoundError, FileExistsError)):
        return True
    if _is_about_credentials(error):
        return False
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return not (status in BUSY or status >= 500 or _code(error) == "RequestTimeout")
    return not isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError, OSError))
