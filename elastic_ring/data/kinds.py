"""What a file is: the one place that decides, for `elastic-ring data prepare` and `train --data` alike.

Its first bytes decide, and trying to decode them; its name is a hint where they leave a choice. No file systems and no
reading of documents in here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic_ring.files import plain_json

HEAD_BYTES = 1 << 16
MAX_NO_TEXT = 0.1
"""Share of bytes that are no UTF-8, or control characters, above which a file is no text. Latin-1 has about 0.03."""
BOM = b"\xef\xbb\xbf"
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}
"""Endings that say what a file should hold: one that does not is bad input, where others are left out of a folder."""
TABLES = (".csv", ".tsv", ".tab")
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4", ".xz", ".lzma", ".z", ".br", ".zip")
CODECS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    *((b"BZh%d%s" % (level, begins), "bz2") for level in range(1, 10) for begins in (b"1AY&SY", b"\x17rE8P\x90")),
)
"""bz2 begins with a block or, where it is empty, with its end: text may begin with BZh."""
NO_TEXT = "binary data or another encoding"
UNPACK, EXPORT = "unpack it", "write its text out as JSON lines, Parquet or text files"
MAGIC = (
    (0, b"\xfd7zXZ\0", "xz", "decompress it: xz -d"),
    (0, b"\x5d\0\0", "lzma", "decompress it: xz -d"),
    (0, b"\x1f\x9d", "compress (.Z)", "decompress it: gzip -d"),
    (0, b"PK\x03\x04", "a zip archive (so are Office files, EPUB, NumPy's .npz, PyTorch's .pt)", UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"%PDF-", "a PDF", "take its text out, as pdftotext does"),
    (0, b"\xd0\xcf\x11\xe0", "an old Office file", EXPORT),
    (0, b"\x89PNG", "a picture", EXPORT),
    (0, b"\xff\xd8\xff", "a picture", EXPORT),
    (0, b"GIF8", "a picture", EXPORT),
    (0, b"\x7fELF", "a program", EXPORT),
    (0, b"SQLite format 3\0", "a database of SQLite", EXPORT),
    (0, b"\x89HDF", "HDF5", EXPORT),
    (0, b"\x93NUMPY", "an array of NumPy", EXPORT),
    (0, b"Obj\x01", "Avro", EXPORT),
    *((0, bytes((0x80, protocol)), "a pickle of Python", EXPORT) for protocol in range(2, 6)),
    (8, b'{"', "safetensors", EXPORT),
    (0, b"version https://git-lfs", "a pointer of Git LFS in place of the file", "fetch the file: git lfs pull"),
    *((0, magic, f"{codec} twice", "decompress it once") for magic, codec in CODECS),
    (0, b"\xff\xfe\0\0", "UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    (0, b"\0\0\xfe\xff", "UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"),
    (0, b"\xff\xfe", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (0, b"\xfe\xff", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
)
"""(offset, bytes there, what the file is, what to do): files that are no documents as they stand."""
_CONTROL = bytes(sorted({*range(32)} - {*b"\t\n\v\f\r\b\x1b"}))
_LIST_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
_OBJECT = re.compile(rb'\s*\{\s*"')

Reader = Literal["jsonl", "json", "parquet", "arrow", "text"]


@dataclass(frozen=True)
class Kind:
    """How a file is read; or, where `problem` says why it is not, how its name says that it should be, if it does."""

    reader: Reader | None
    compression: str | None = None
    begins_at: int = 0
    """Bytes of plain text before the first character: those of a byte order mark."""
    looks_like: str = ""
    way_out: str = ""
    detail: str = ""

    @property
    def problem(self) -> str:
        return f"looks like {self.looks_like}{self.detail}: {self.way_out}" if self.looks_like else ""


def kind_of(name: str, opened: Callable[[str | None], Any], columns: Sequence[str]) -> Kind:
    """What the file of this name is. `opened` gives its bytes as a stream, decompressed as a codec of pyarrow says.

    Raises OSError where it cannot be read. A damaged compressed file counts as what its name says; reading it fails.
    """
    head = _head(opened(None))
    hint = hint_of(name)
    codec = next((codec for magic, codec in CODECS if head.startswith(magic)), None)
    if codec is None:
        return _plain(name, hint, head, columns)
    try:
        inner = _head(opened(codec))
    except OSError as error:
        if _is_away(error):
            raise
        if "too much memory" in str(error):
            way_out = "decompress it, or compress it anew without --long: zstd -d --long=31"
            return Kind(hint, codec, 0, "zstd with a window of more than 128 MiB", way_out)
        return Kind(hint or "text", codec)
    found = _plain(name, hint, inner, columns)
    if found.reader in ("parquet", "arrow") and not found.problem:
        return Kind(hint, codec, 0, f"{codec} of {found.reader}", "decompress it")
    looks_like = f"{codec} of {found.looks_like}" if found.problem else ""
    return Kind(found.reader, codec, 0, looks_like, found.way_out, found.detail)


def hint_of(name: str) -> Reader | None:
    """What a file's name says that it holds."""
    return ENDINGS.get(_ending(name))  # type: ignore[return-value]


def no_text_share(data: bytes) -> float:
    """The share of bytes that are no part of UTF-8 text: undecodable ones and control characters."""
    decodable = len(data.decode("utf-8", "ignore").encode())
    control = len(data) - len(data.translate(None, _CONTROL))
    return (len(data) - decodable + control) / max(len(data), 1)


def no_text(data: bytes) -> str:
    """How much of these bytes is no text; empty where they are text."""
    share = no_text_share(data)
    return f" ({share:.0%} of {len(data):,} bytes are no UTF-8 text)" if share > MAX_NO_TEXT else ""


def _is_away(error: OSError) -> bool:
    """As `filesystem.is_away`, which needs libraries that `--help` does without."""
    from elastic_ring.data.filesystem import is_away

    return is_away(error)


def _head(stream: Any) -> bytes:
    """Up to HEAD_BYTES. Raises OSError only where nothing can be read."""
    data = b""
    with stream:
        while len(data) < HEAD_BYTES:
            try:
                part = stream.read(HEAD_BYTES - len(data))
            except OSError as error:
                if data and not _is_away(error):
                    break
                raise
            if not part:
                break
            data += part
    return data


def _ending(name: str) -> str:
    """The ending in lower case, without a compression's."""
    last = name.rpartition("/")[2].lower()
    for compression in COMPRESSED:
        last = last.removesuffix(compression)
    return f".{last.rpartition('.')[2]}" if "." in last else ""


def _plain(name: str, hint: Reader | None, head: bytes, columns: Sequence[str]) -> Kind:
    """What uncompressed bytes are."""
    for offset, magic, looks_like, way_out in MAGIC:
        if head.startswith(magic, offset) and not (offset == 8 and head[4:8] != bytes(4)):
            return Kind(hint, None, 0, looks_like, way_out)
    for start, order in ((0, "LE"), (1, "BE")):  # letters beside zeros, where no mark says so
        if len(head) > 7 and all(head[start:8:2]) and not any(head[1 - start : 8 : 2]):
            return Kind(hint, None, 0, "UTF-16", f"convert it: iconv -f UTF-16{order} -t UTF-8")
    if head.startswith((b"PAR1", b"PARE")) and head[4:8].translate(None, _CONTROL) != head[4:8]:  # text has none there
        return Kind("parquet") if head[3:4] == b"1" else Kind(hint, None, 0, "encrypted Parquet", "decrypt it")
    if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")):
        return Kind("arrow")
    if hint in ("parquet", "arrow") or not head:
        return Kind(hint or "text")  # its reader says what is wrong
    if _ending(name) in TABLES:
        return Kind(None, None, 0, "a table of separated values", EXPORT)
    start = len(BOM) if head.startswith(BOM) else 0
    as_json = _json_kind(hint, head[start:], columns)
    if as_json is not None:
        return as_json
    detail = no_text(head)
    if detail:
        return Kind(hint, None, 0, NO_TEXT, f"convert it with iconv, or {EXPORT}", detail)
    return Kind("text", None, start)


def _json_kind(hint: Reader | None, head: bytes, columns: Sequence[str]) -> Kind | None:
    """JSON lines, a list of objects, or one object that is a document; None for what is no JSON."""
    begins = head.lstrip()[:1]
    if hint == "jsonl":
        return Kind("jsonl") if begins in (b"{", b"[") or not no_text(head) else None
    if _LIST_OF_OBJECTS.match(head):
        return Kind("json")
    if not _OBJECT.match(head):
        return Kind("json") if hint == "json" and not no_text(head) else None
    first, _, rest = head.lstrip().partition(b"\n")
    cut = len(head) == HEAD_BYTES
    is_line = (cut and not rest) or _object(first) is not None or bool(_OBJECT.match(rest))
    if is_line and (cut or rest.strip()):
        return Kind("jsonl")
    if hint == "text":
        return None
    # One object: a document where it has a column, else what lies beside documents, as dataset_info.json does.
    found = _object(head)
    if found is None and not cut:
        return Kind("json") if hint == "json" else None
    has_column = any(name in found if found is not None else json.dumps(name).encode() in head for name in columns)
    return Kind("json") if has_column else _metadata(columns)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = plain_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _metadata(columns: Sequence[str]) -> Kind:
    names = " or ".join(map(repr, columns))
    way_out = f"give records with text in {names}, or name their key: --text-column"
    return Kind(None, None, 0, f"one JSON object without {names}", way_out)
