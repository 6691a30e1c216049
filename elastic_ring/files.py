"""What files need beyond the standard library, in every room."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_URL = re.compile(r"""(\b[A-Za-z][A-Za-z0-9+.-]*)://(?:[^/?#\s'"]*@)?([^?#\s'"]*)([?#][^\s'"]*)?""")
_PATTERNS = ("file", "gs", "gcs", "local", "s3")  # there a question mark is part of a name or a pattern


def sync_directory(folder: str | os.PathLike[str]) -> None:
    """Make a new or renamed name in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str | os.PathLike[str], data: bytes, *, durable: bool = False) -> None:
    """Write a file beside `path` and rename it, so that a reader sees either the old or the new content.

    With `durable` it is on disk when this returns. Raises OSError, and leaves nothing behind then.
    """
    path = Path(path)
    # Unique per writer: an old coordinator and its successor may write at the same time.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def absolute(uri: str) -> str:
    """The same place for every process: other ones have other working directories. URIs stay as they are."""
    return uri if not uri or "://" in uri else str(Path(uri).expanduser().absolute())


def shown_url(text: str) -> str:
    """A URI, or a text with some, as it may be stored or shown: without name and password, and without the query, which
    may hold a signature. Everything else stays as it is."""

    def shown(found: re.Match[str]) -> str:
        scheme, rest, query = found[1], found[2], found[3] or ""
        is_name = scheme in _PATTERNS and not re.match(r"\?\w+=", query)
        return f"{scheme}://{rest}{query if is_name else ''}"

    return _URL.sub(shown, text)


def with_access(uri: str, like: str) -> str:
    """`uri`, as `shown_url` left it, with the name and password of `like` if it is in the same folder."""
    folder, _, name = uri.rpartition("/")
    of_like = like.rpartition("/")[0]
    return f"{of_like}/{name}" if shown_url(of_like) == folder else uri


def user_folder(parent: str | os.PathLike[str] | None = None) -> Path:
    """This user's own folder in one that all users of the host share: by default the one for temporary files.

    Its name can be foreseen, so somebody else may have made it. Raises as `private_folder`.
    """
    return private_folder(Path(tempfile.gettempdir() if parent is None else parent, f"elastic_ring-{os.geteuid()}"))


def private_folder(path: Path) -> Path:
    """A folder that only this user reads and changes, made if need be; no link is followed. Raises ValueError for one
    that is another's, or open to others: what lies in it may be theirs."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ValueError(
            f"{path}: is not a folder of this user alone (owner {about.st_uid}, {stat.filemode(about.st_mode)}), so "
            "others may have put files there: remove it, or set TMPDIR to a folder of your own"
        )
    return path
