"""Objects of an S3 store, through botocore. Paths are `bucket/key`.

Endpoint, region and credentials are found as by every AWS client. Each request is retried by itself, so that a long
upload survives an outage of `Retries.limit_s`. A writer that fails aborts its upload: half an object never appears.
(`pyarrow.fs` completes the upload of a writer that fails. obstore lists no uploads, so `prune` could not abort those of
killed writers, and reads no profiles of `~/.aws`.)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, TypedDict, TypeVar

from elastic_ring.config import environment
from elastic_ring.state.storage.backend import PIECE_BYTES, Entry, Retries, Upload

T = TypeVar("T")
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


class Part(TypedDict):
    PartNumber: int
    ETag: str


class ObjectStore:
    """`silence_s`: a request that receives no byte for so long has failed."""

    piece_bytes = PIECE_BYTES
    """Bytes of a part of an upload, and of a read: what a retry repeats."""

    def __init__(self, root: str, retries: Retries, silence_s: float) -> None:
        self._root, self._retries, self._silence_s = root, retries, silence_s
        self._session_client: Any = None
        self._connecting = threading.Lock()

    def connect(self, *, write: bool) -> None:
        bucket, key = _split(self._root)
        self._call("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)

    def advice(self, error: BaseException) -> str | None:
        """How the user can mend an error at start-up; None if the user cannot."""
        from botocore import exceptions

        code = _code(error)
        bucket, _ = _split(self._root)
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

    def _call(self, operation: str, **parameters: Any) -> Any:
        """One request, retried while it fails for a reason that may pass."""
        return self._retry(lambda: getattr(self._client(), operation)(**parameters))

    def _retry(self, request: Callable[[], T]) -> T:
        from botocore.exceptions import ClientError

        def attempt() -> T:
            try:
                return request()
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
        bucket, key = _split(path)
        rest = iter(pieces)
        first, second = bytes(next(rest, b"")), next(rest, None)
        if second is None:
            self._call("put_object", Bucket=bucket, Key=key, Body=first)
            return
        upload = Upload(path, self._call("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"], 0.0)
        try:
            parts, num_bytes = self._send_parts(upload, chain((first, second), rest))
            self._complete(upload, parts, num_bytes)
        except BaseException:
            try:  # once: the retries are over, and `prune` aborts what is left
                self._client().abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload_id)
            except Exception as error:
                logger.warning("the upload of %s is left in the store: %s", path, error)
            raise

    def _send_parts(self, upload: Upload, pieces: Iterable[bytes | memoryview]) -> tuple[list[Part], int]:
        bucket, key = _split(upload.path)

        def send(number: int, data: bytes) -> Part:
            place = {"Bucket": bucket, "Key": key, "UploadId": upload.upload_id}
            reply = self._call("upload_part", **place, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": str(reply["ETag"])}

        parts: list[Part] = []
        under_way: deque[Future[Part]] = deque()
        num_bytes = 0
        with ThreadPoolExecutor(NUM_STREAMS) as senders:
            for number, piece in enumerate(pieces, 1):
                if number > MOST_PARTS:
                    most = MOST_PARTS * self.piece_bytes
                    raise ValueError(f"{upload.path} has more than {most:,} bytes: spread it over more ranks")
                if len(under_way) == NUM_STREAMS:
                    parts.append(under_way.popleft().result())
                num_bytes += len(piece)
                under_way.append(senders.submit(send, number, bytes(piece)))
            parts += [part.result() for part in under_way]
        return parts, num_bytes

    def _complete(self, upload: Upload, parts: list[Part], num_bytes: int) -> None:
        bucket, key = _split(upload.path)
        place = {"Bucket": bucket, "Key": key, "UploadId": upload.upload_id}
        try:
            self._call("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # A request whose reply was lost has completed the upload; its retry finds none.
            entry = self.entry(upload.path)
            if entry is None or entry.num_bytes != num_bytes:
                raise

    def create(self, path: str, data: bytes) -> bool:
        bucket, key = _split(path)
        try:
            self._call("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except FileExistsError:
            # A request whose reply was lost has made the object; its retry finds the name taken.
            return b"".join(self.read(path, 0, len(data) + 1)) == data
        return True

    replace = write
    """A PUT is atomic."""

    # ------------------------------------------------------------ removing

    def remove(self, path: str) -> None:
        bucket, key = _split(path)
        self._call("delete_object", Bucket=bucket, Key=key)

    def remove_folder(self, path: str) -> None:
        bucket, _ = _split(path)
        keys = [{"Key": entry["Key"]} for page in self._pages(path, "") for entry in page.get("Contents", [])]
        for start in range(0, len(keys), PAGE):
            batch = {"Objects": keys[start : start + PAGE], "Quiet": True}
            errors = self._call("delete_objects", Bucket=bucket, Delete=batch).get("Errors", [])
            if errors:
                raise OSError(f"{len(errors)} objects cannot be removed, the first for {errors[0]}")

    def remove_empty_folders(self, path: str, unchanged_s: float) -> None:
        """Nothing: here folders are prefixes of names."""

    def uploads(self, folder: str) -> list[Upload]:
        bucket, key = _split(folder)
        uploads: list[Upload] = []
        position: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Bucket=bucket, Prefix=_prefix(key), MaxUploads=PAGE, **position)
            uploads += [
                Upload(f"{bucket}/{upload['Key']}", upload["UploadId"], upload["Initiated"].timestamp())
                for upload in page.get("Uploads", [])
            ]
            if not page.get("IsTruncated"):
                return uploads
            position = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        bucket, key = _split(upload.path)
        try:
            self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
        except FileNotFoundError:
            logger.info("the upload of %s has ended meanwhile", upload.path)

    # ------------------------------------------------------------ reading

    def read(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes in order; NUM_STREAMS requests read ahead."""
        bucket, key = _split(path)

        def read_part(at: int) -> bytes:
            bounds = f"bytes={at}-{min(at + self.piece_bytes, stop) - 1}"

            def request() -> bytes:
                data: bytes = self._client().get_object(Bucket=bucket, Key=key, Range=bounds)["Body"].read()
                return data

            return self._retry(request)

        under_way: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(NUM_STREAMS) as readers:
            for at in range(start, stop, self.piece_bytes):
                if len(under_way) == NUM_STREAMS:
                    yield under_way.popleft().result()
                under_way.append(readers.submit(read_part, at))
            while under_way:
                yield under_way.popleft().result()

    def entry(self, path: str) -> Entry | None:
        bucket, key = _split(path)
        try:
            head = self._call("head_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return None
        return Entry(path, head["ContentLength"], head["LastModified"].timestamp())

    def entries(self, folder: str, *, recursive: bool) -> Iterator[Entry]:
        bucket, _ = _split(folder)
        for page in self._pages(folder, "" if recursive else "/"):
            for entry in page.get("Contents", []):
                if not entry["Key"].endswith("/"):
                    yield Entry(f"{bucket}/{entry['Key']}", entry["Size"], entry["LastModified"].timestamp())

    def folders(self, folder: str) -> list[str]:
        return [
            prefix["Prefix"].rstrip("/").rsplit("/", 1)[-1]
            for page in self._pages(folder, "/")
            for prefix in page.get("CommonPrefixes", [])
        ]

    def _pages(self, folder: str, delimiter: str) -> Iterator[Any]:
        bucket, key = _split(folder)
        position: dict[str, str] = {}
        while True:
            page = self._call(
                "list_objects_v2", Bucket=bucket, Prefix=_prefix(key), Delimiter=delimiter, MaxKeys=PAGE, **position
            )
            yield page
            if not page.get("IsTruncated"):
                return
            position = {"ContinuationToken": page["NextContinuationToken"]}


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def _prefix(key: str) -> str:
    return f"{key}/" if key else ""


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
