"""A folder of odd files, as corpora have them: `python -m tests.unit.data.odd_files FOLDER`."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import sqlite3
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.data.corpora import write_table

RECORDS = b'{"text": "one"}\n{"text": "two"}\n'
LIST = json.dumps([{"text": "one"}, {"text": "two"}], indent=1).encode()
BOM = b"\xef\xbb\xbf"


def zstd_frame(content: bytes, window_log: int) -> bytes:
    """A frame of one uncompressed block whose header asks for a window of 2**window_log bytes."""
    block = struct.pack("<I", len(content) << 3 | 1)[:3]
    return b"\x28\xb5\x2f\xfd\x00" + bytes(((window_log - 10) << 3,)) + block + content


def compressed(codec: str, content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return bytes(sink.getvalue().to_pybytes())


def archive(kind: str) -> bytes:
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as archive_file:
            archive_file.writestr("a.txt", "text " * 50)
    else:
        with tarfile.open(fileobj=data, mode="w") as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 9
            tar.addfile(info, io.BytesIO(b"some text"))
    return data.getvalue()


def parquet(column: pa.Array, name: str = "text") -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({name: column}), sink)
    return sink.getvalue()


GOOD: dict[str, bytes] = {
    "plain.txt": b"plain text",
    "bom.txt": BOM + b"after a mark",
    "latin.txt": "Straße, Füße und ein längerer deutscher Satz dazu".encode("latin-1"),
    "noending": b"a file without an ending",
    "code.py": b"print('x')\n",
    "page.html": b"<p>text</p>",
    "records.json": RECORDS,
    "list.json": LIST,
    "minified.json": json.dumps(json.loads(LIST)).encode(),
    "one.json": b'{\n "text": "one record over lines"\n}\n',
    "records.jsonl": RECORDS,
    "records.ndjson": RECORDS,
    "bom.jsonl": BOM + RECORDS,
    "records.json.gz": gzip.compress(RECORDS),
    "members.jsonl.gz": gzip.compress(RECORDS) + gzip.compress(RECORDS),
    "records.jsonl.bz2": bz2.compress(RECORDS),
    "records.jsonl.zst": compressed("zstd", RECORDS),
    "records.jsonl.lz4": compressed("lz4", RECORDS),
    "plain.txt.gz": gzip.compress(b"compressed text"),
    "large.parquet": parquet(pa.array(["one", None, "two", ""], pa.large_string())),
    "dictionary.pq": parquet(pa.array(["one", "one"]).dictionary_encode()),
    "crlf.jsonl": RECORDS.replace(b"\n", b"\r\n"),
    "noend.jsonl": RECORDS.rstrip(),
    "comma, and space.txt": b"a comma",
    "a[1].txt": b"brackets",
}
"""Files that have documents."""

BAD: dict[str, bytes] = {
    "nested.jsonl": b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
    "broken.json": b'[{"text": "one"}, {"text": ',
    "cut.jsonl.gz": gzip.compress(os.urandom(9000).hex().encode())[:-2000],
    "utf16.txt": "text in UTF-16".encode("utf-16"),
    "utf16.jsonl": RECORDS.decode().encode("utf-16-le"),
    "utf32.txt": "text".encode("utf-32"),
    "koi8.txt": bytes(range(0xC0, 0xE0)) * 9,
    "lfs.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "lfs.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "tokens.parquet": parquet(pa.array([[1, 2], [3]]), "tokens"),
    "numbers.parquet": parquet(pa.array([1, 2])),
    "text.parquet": b"this is no Parquet",
    "text.ARROW": b"this is no Arrow",
    "cut.parquet": parquet(pa.array(["text"] * 99))[:-50],
    "twice.txt.gz": gzip.compress(gzip.compress(b"x" * 99)),
    "window.txt.zst": zstd_frame(b"text of a file with a long window", 31),
    "zip.txt": archive("zip"),
    "unnamed": gzip.compress(RECORDS),
    "unpacked.jsonl.gz": RECORDS,
    "dataset_info.json": json.dumps({"features": {"text": {"dtype": "string"}}}, indent=2).encode(),
    "config.json": b'{"hidden_size": 8}',
    "noise": np.random.default_rng(0).bytes(4096),
    "zeros.dat": bytes(999),
}
"""Files whose names promise documents, and that have none or other ones."""

OTHER: dict[str, bytes] = {
    "archive.zip": archive("zip"),
    "archive.tar": archive("tar"),
    "archive.tgz": gzip.compress(archive("tar")),
    "text.xz": lzma.compress(b"text"),
    "records.jsonl.xz": lzma.compress(RECORDS),
    "table.parquet.gz": gzip.compress(parquet(pa.array(["one"]))),
    "noise.bin": np.random.default_rng(0).bytes(4096),
    "table.csv": b"a,b\n1,2\n",
    "table.tsv.gz": gzip.compress(b"a\tb\n1\t2\n"),
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "paper.pdf": b"%PDF-1.7\n1 0 obj\n",
    "model.safetensors": struct.pack("<Q", 60) + b'{"__metadata__":{"format":"pt"}' + b" " * 29,
    "array.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}",
    "words.pkl": pickle.dumps(["many words"] * 50 + ["x"]),
    ".hidden.txt": b"hidden",
    "_SUCCESS": b"",
}
"""Files that are not read, by their names."""

LINKED = ("loop", "dangling.txt", "same.txt")


def make(folder: Path) -> Path:
    """All of them, an empty file, a saved table, a database, a name that is not UTF-8, a pipe, and links."""
    folder.mkdir(parents=True)
    for name, content in {**GOOD, **BAD, **OTHER, "empty.txt": b"", "empty.dat": b""}.items():
        (folder / name).write_bytes(content)
    write_table(folder / "batches.arrow", ["one", "two"])
    write_table(folder / "stream.ipc", ["one", "two"])
    with sqlite3.connect(folder / "base.db") as base:
        base.execute("create table t (x)")
    base.close()
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_bytes(b"named in Latin-1")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop").symlink_to(".")
    (folder / "dangling.txt").symlink_to("nowhere.txt")
    (folder / "same.txt").symlink_to("plain.txt")
    (folder / "hard.txt").hardlink_to(folder / "bom.txt")
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.txt").write_bytes(b"deep")
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
