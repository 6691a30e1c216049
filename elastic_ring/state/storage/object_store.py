"""Objects of an S3 store, through botocore. Paths are `bucket/key`.

Endpoint, region and credentials are found as by every AWS client. Each request is tried again by itself, so that a long
upload survives an outage of `Retries.limit_s`. Whoever gives up aborts the upload: half an object is never there.
(`pyarrow.fs` completes an upload whose writer fails, so that half a file becomes an object.)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

from elastic_ring.config import environment
from elastic_ring.state.storage.retries import Retries
from elastic_ring.state.storage.stored import PIECE_BYTES, Entry, Upload

T = TypeVar("T")
logger = logging.getLogger(__name__)

NUM_STREAMS = 4
"""Requests at the same time for one file."""
MOST_PARTS = 10_000
"""S3's limit on a multipart upload: 156 GiB in parts of 16 MiB."""
PAGE = 1000
"""Names in one answer; S3 gives no more."""
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
"""What a store answers to credentials that are wrong, have expired, or will be valid again, and to a clock that is
wrong until somebody sets it."""
BUSY = (408, 409, 429)
"""HTTP: too slow, lost to a request beside it, too many. Above 500, any."""


class ObjectStore:
    """`silence_s`: a request without a byte for so long has failed."""

    piece_bytes = PIECE_BYTES
    """Bytes of a part of an upload, and of a read; a failure repeats so much."""

    def __init__(self, root: str, retries: Retries, silence_s: float) -> None:
        self._root, self._retries, self._silence_s = root, retries, silence_s
        self._made: Any = None
        self._making = threading.Lock()

    def connect(self, *, write: bool) -> None:
        bucket, key = _split(self._root)
        self._call("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)

    def advice(self, error: BaseException) -> str | None:
        """What the user can do about an error of the start; None where it is not theirs to mend."""
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
            return None  # somebody was there
        if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError)):
            return "check AWS_ENDPOINT_URL, and that this node reaches it"
        if isinstance(error, (exceptions.BotoCoreError, ValueError)):
            return "check the bucket's name and the AWS variables and profile"
        return None

    # ------------------------------------------------------------ requests

    def _client(self) -> Any:
        """Safe to use from many threads; made at first use, and again after the store refused its credentials."""
        from botocore.config import Config
        from botocore.session import Session

        with self._making:
            if self._made is None:
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
                self._made = Session().create_client("s3", region_name=environment().get("AWS_REGION"), config=config)
            return self._made

    def _renew(self, error: Exception) -> None:
        if _is_about_credentials(error):
            self._made = None

    def _call(self, operation: str, **parameters: Any) -> Any:
        """One request, tried again while it fails for a reason that may pass."""
        return self._tried(lambda: getattr(self._client(), operation)(**parameters))

    def _tried(self, request: Callable[[], T]) -> T:
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

        return self._retries(attempt, _is_final, self._renew)

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
            self._give_up(upload)
            raise

    def _send_parts(self, upload: Upload, pieces: Iterable[bytes | memoryview]) -> tuple[list[dict[str, Any]], int]:
        tags: list[str] = []
        under_way: deque[Future[str]] = deque()
        num_bytes = 0
        with ThreadPoolExecutor(NUM_STREAMS) as senders:
            for number, piece in enumerate(pieces, 1):
                if number > MOST_PARTS:
                    most = MOST_PARTS * self.piece_bytes
                    raise ValueError(f"{upload.path} has more than {most:,} bytes: spread it over more ranks")
                if len(under_way) == NUM_STREAMS:
                    tags.append(under_way.popleft().result())
                num_bytes += len(piece)
                under_way.append(senders.submit(self._send_part, upload, number, bytes(piece)))
            tags += [part.result() for part in under_way]
        return [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)], num_bytes

    def _send_part(self, upload: Upload, number: int, data: bytes) -> str:
        bucket, key = _split(upload.path)
        answer = self._call(
            "upload_part", Bucket=bucket, Key=key, UploadId=upload.upload_id, PartNumber=number, Body=data
        )
        return str(answer["ETag"])

    def _complete(self, upload: Upload, parts: list[dict[str, Any]], num_bytes: int) -> None:
        bucket, key = _split(upload.path)
        try:
            self._call(
                "complete_multipart_upload",
                Bucket=bucket,
                Key=key,
                UploadId=upload.upload_id,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # A request whose answer was lost has ended the upload; the one after it finds none.
            found = self.entry(upload.path)
            if found is None or found.num_bytes != num_bytes:
                raise

    def _give_up(self, upload: Upload) -> None:
        """One attempt: whoever gets here has waited long enough, and `prune` finds what is left."""
        bucket, key = _split(upload.path)
        try:
            self._client().abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.upload_id)
        except Exception as error:
            logger.warning("the upload of %s is left in the store: %s", upload.path, error)

    def create(self, path: str, data: bytes) -> bool:
        bucket, key = _split(path)
        try:
            self._call("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except FileExistsError:
            # A request whose answer was lost has made the object; the one after it finds the name taken.
            return b"".join(self.read(path, 0, len(data) + 1)) == data
        return True

    def replace(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        self.write(path, pieces)

    # ------------------------------------------------------------ removing

    def remove(self, path: str) -> None:
        bucket, key = _split(path)
        self._call("delete_object", Bucket=bucket, Key=key)

    def remove_folder(self, path: str) -> None:
        bucket, _ = _split(path)
        keys = [{"Key": key} for key, _, _ in self._objects(path, "")]
        for start in range(0, len(keys), PAGE):
            batch = {"Objects": keys[start : start + PAGE], "Quiet": True}
            errors = self._call("delete_objects", Bucket=bucket, Delete=batch).get("Errors", [])
            if errors:
                raise OSError(f"{len(errors)} objects cannot be removed, the first for {errors[0]}")

    def remove_empty_folders(self, path: str, unchanged_s: float) -> None:
        """A folder is the beginning of names here."""

    def uploads(self, folder: str) -> list[Upload]:
        """Begun under `folder`, and neither ended nor aborted."""
        bucket, key = _split(folder)
        found: list[Upload] = []
        position: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Bucket=bucket, Prefix=_prefix(key), MaxUploads=PAGE, **position)
            found += [
                Upload(f"{bucket}/{each['Key']}", each["UploadId"], each["Initiated"].timestamp())
                for each in page.get("Uploads", [])
            ]
            if not page.get("IsTruncated"):
                return found
            position = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        bucket, key = _split(upload.path)
        try:
            self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
        except FileNotFoundError:
            logger.info("the upload of %s has ended meanwhile", upload.path)

    # ------------------------------------------------------------ reading

    def read(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes in order, some of them ahead."""
        under_way: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(NUM_STREAMS) as readers:
            for at in range(start, stop, self.piece_bytes):
                if len(under_way) == NUM_STREAMS:
                    yield under_way.popleft().result()
                under_way.append(readers.submit(self._read_part, path, at, min(at + self.piece_bytes, stop)))
            while under_way:
                yield under_way.popleft().result()

    def _read_part(self, path: str, start: int, stop: int) -> bytes:
        bucket, key = _split(path)

        def request() -> bytes:
            answer = self._client().get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
            data: bytes = answer["Body"].read()
            return data

        return self._tried(request)

    def entry(self, path: str) -> Entry | None:
        """An object; None where there is none."""
        bucket, key = _split(path)
        try:
            found = self._call("head_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return None
        return Entry(path, found["ContentLength"], found["LastModified"].timestamp())

    def entries(self, folder: str, *, recursive: bool) -> Iterator[Entry]:
        bucket, _ = _split(folder)
        for key, num_bytes, modified_unix_s in self._objects(folder, "" if recursive else "/"):
            if not key.endswith("/"):
                yield Entry(f"{bucket}/{key}", num_bytes, modified_unix_s)

    def folders(self, folder: str) -> list[str]:
        return [
            prefix["Prefix"].rstrip("/").rsplit("/", 1)[-1]
            for page in self._pages(folder, "/")
            for prefix in page.get("CommonPrefixes", [])
        ]

    def _objects(self, folder: str, delimiter: str) -> Iterator[tuple[str, int, float]]:
        for page in self._pages(folder, delimiter):
            for found in page.get("Contents", []):
                yield found["Key"], found["Size"], found["LastModified"].timestamp()

    def _pages(self, folder: str, delimiter: str) -> Iterator[dict[str, Any]]:
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
    """What the store answered; empty if it did not."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _is_about_credentials(error: BaseException) -> bool:
    return _code(error) in REFUSED or "Credential" in type(error).__name__ or "Token" in type(error).__name__


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError

    if isinstance(error, (FileNotFoundError, FileExistsError)):
        return True
    if _is_about_credentials(error):
        return False
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return not (status in BUSY or status >= 500 or _code(error) == "RequestTimeout")
    return not isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError, OSError))
