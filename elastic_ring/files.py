"""Files beyond the standard library, and texts to show: durable writes, bounded JSON and TOML, names, URLs.

A file may come from anybody: JSON is bounded in length and depth, a file that is no file is not waited for, and a name
that a file gives becomes a path only after `name_below`.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import pwd
import re
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 1 << 26
"""The most bytes of a record. Lists of millions have limits of their own."""
MAX_JSON_DEPTH = 64
JSON_PARTS = 1 << 23
"""JSON may have so many texts, commas and brackets: Python's objects take up to 64 bytes for each."""
MAX_TOML_BYTES = 1 << 18
MAX_NAME_BYTES = 1024
_JSON_PART = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
_CONTROL = re.compile("(?!^)\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys or cannot show. A progress bar may return to the start of its line; text may not."""
_COLOUR = re.compile("\x1b\\[[0-9;]*m")

_LONG_KEY = re.compile(
    r"""(?<![\w\\-])(?:(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*)"""
    rf"{{{MAX_JSON_DEPTH}}}"
)
"""So many parts of a key of TOML, bare or in quotes, wherever a key may stand. Numbers in a row are none."""
_USER = (
    r"""[^/?#\s'"]*|[^/?#\s'"@:\[]*:(?!\d{1,5}[/?#])[^\s'"]*"""
    r"""|[^/?#\s'"@:\[]*:(?!\d{1,5}\b)(?:(?!://)[^\n@]){0,100}?"""
)
"""Name and password; a password as people type it may hold what ends a host, spaces and quotes, but a port is none."""
_URL = re.compile(rf"""([A-Za-z][A-Za-z0-9+.-]{{0,29}})://(?:({_USER})@)?([^?#\s'"]*)([?#][^\s'"]*)?""")
_AZURE = ("abfs", "abfss", "az", "wasb", "wasbs")  # there the name before the @ is the container's
_PATTERNS = ("file", "gs", "gcs", "local", "s3")  # there a question mark is part of a name or a pattern

_SNAPSHOTS = re.compile(r"/(?:models|datasets|spaces)--[^/]+/snapshots$")


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

    def show(match: re.Match[str]) -> str:
        scheme, rest, query = match[1], match[3], match[4] or ""
        if scheme in _AZURE and (container := (match[2] or "").partition(":")[0]):
            rest = f"{container}@{rest}"
        is_name = scheme in _PATTERNS and not re.match(r"\?[^/]*=", query)
        return f"{scheme}://{rest}{query if is_name else ''}"

    return _URL.sub(show, text)


def shown_plain(value: Any) -> Any:
    """A value as JSON or TOML has it, with each text in it as `shown_url` has it. Before it is written: what is cut out
    of a text in quotes may be half of an escape."""
    if isinstance(value, str):
        return shown_url(value)
    if isinstance(value, dict):
        return {shown_plain(key): shown_plain(part) for key, part in value.items()}
    return [shown_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


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
        by_name = ", or set TMPDIR to a folder of your own" * (Path(tempfile.gettempdir()) in path.parents)
        raise ValueError(
            f"{path}: is not a folder of this user alone (owner {about.st_uid}, {stat.filemode(about.st_mode)}), so "
            f"others may have put files there: remove it, or have its owner or root do so{by_name}"
        )
    return path


def denied(error: PermissionError) -> str:
    """What this user may not read or write, and whose it is: a file, or the first folder on its way that is closed."""
    path = Path(os.path.abspath(error.filename))
    place, about = path, None
    for part in (*reversed(path.parents), path):
        with suppress(OSError):
            place, about = part, part.stat()
    names = {entry.pw_uid: entry.pw_name for entry in pwd.getpwall()}
    owner, user = (names.get(uid, uid) for uid in (about.st_uid if about else 0, os.geteuid()))
    mode = stat.filemode(about.st_mode) if about else "?"
    return (
        f"{path}: permission denied: {place} belongs to {owner} ({mode}), and this user is {user}: ask the owner for "
        "access, or give another folder"
    )


def read_small(path: str | os.PathLike[str], most_bytes: int = MAX_JSON_BYTES, *, is_asked: bool = False) -> bytes:
    """All bytes of a regular file. Raises ValueError for a longer one and for what is no file (a pipe would be waited
    for without end), OSError. `is_asked`: the user has named it for this call, so it may be a pipe or a terminal."""
    flags = 0 if is_asked else os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, default: os.open(name, default | flags)) as file:
            if not is_asked and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{os.fspath(path)} is no regular file")
            data = file.read(most_bytes + 1)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP):
            raise
        raise ValueError(f"{os.fspath(path)} is no regular file") from error
    if len(data) > most_bytes:
        raise ValueError(f"{os.fspath(path)} has more than {most_bytes} bytes")
    return data


def plain_json(data: bytes | str, most_bytes: int = MAX_JSON_BYTES, most_parts: int = JSON_PARTS) -> Any:
    """Parse JSON. Raises ValueError, also for JSON that is longer, of more values or nested deeper than it may be."""
    if len(data) > most_bytes:
        raise ValueError(f"JSON of {len(data)} bytes: there may be {most_bytes}")
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    is_many = sum(map(text.count, ",[{")) > most_parts
    if is_many and next(itertools.islice(_JSON_PART.finditer(text), most_parts, None), None):
        raise ValueError(f"has more than {most_parts:,} values (texts, commas and brackets of JSON)")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels") from None
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return content
    raise ValueError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels")


def plain_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML, with or without a byte order mark. Raises ValueError, also for TOML that is too long or nested too
    deeply."""
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(f"TOML of {len(data)} bytes: there may be {MAX_TOML_BYTES}")
    text = data.decode("utf-8-sig")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of TOML has more than {MAX_JSON_DEPTH} parts")  # which take hours to read
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("TOML is nested too deeply") from None


def name_below(name: object, where: str = "") -> str:
    """`name`, which a file gives, if it is a plain name below that file's folder: `a` or `a/b`. Raises ValueError, with
    `where` it stands."""
    text = name if isinstance(name, str) else ""
    is_plain = all(part not in ("", ".", "..") for part in text.split("/")) and text.isprintable()
    if not is_plain or "\\" in text or len(text.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"{where + ': ' if where else ''}names {cut(ascii(name), MAX_NAME_BYTES)}, which is not in its folder"
        )
    return text


def is_below(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether `path` stays in `folder`, where links lead; or in the blobs of its repository in Hugging Face's cache."""
    base, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = (above.parent / "blobs" for above in (base, *base.parents) if _SNAPSHOTS.search(str(above)))
    return any(target.is_relative_to(root) for root in (base, *blobs))


def check_links(folder: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> None:
    """Raises ValueError for a path of which a link leads out of `folder`, and for a pipe or device, which its reader
    would wait for."""
    for path in paths:
        if not is_below(path, folder):
            raise ValueError(f"{path}: is a link to {os.path.realpath(path)}, out of its folder: copy that there")
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ValueError(f"{path}: is no regular file: remove it")


def check_model_links(folder: Path) -> None:
    """Raises ValueError for a file of a model's or tokenizer's folder that is a link out of it."""
    files = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    check_links(folder, (path for path in files if not path.is_dir()))


def printable(text: str) -> str:
    """`text` for a terminal: without colours; what else would control it is shown as `\\x1b`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), _COLOUR.sub("", text))


def few(parts: Iterable[object], most: int, between: str = ", ") -> str:
    """The first `most` of the parts, and how many more there are."""
    shown = list(map(str, parts))
    return between.join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def cut(text: str, most: int) -> str:
    """At most so many characters of a text, and a mark where some are left out."""
    return text if len(text) <= most else f"{text[:most]}..."
