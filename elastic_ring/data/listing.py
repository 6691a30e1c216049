"""The files under a source: each is used, or left out with a reason. Nothing is counted twice, and nothing vanishes.

A file's name says how it is read. No content is looked at here: a file that does not parse is an error of its reader.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

import pyarrow as pa
from fsspec.utils import glob_translate
from pyarrow import fs

from elastic_ring.data.filesystem import located, raise_if_away, read_file
from elastic_ring.data.manifest import MANIFEST, PREPARATION
from elastic_ring.files import MAX_JSON_BYTES, check_links, is_below, name_below, plain_json, shown_url

# ------------------------------------------------------------ what a file is

Reader = Literal["jsonl", "json", "parquet", "arrow", "text"]
READERS: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
"""The reader for each ending; files of other endings are text, but for those of `REFUSED`."""
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
EXPORT = "write its text out as JSON lines, Parquet or text files"
REFUSED = {
    ending: f"is {format_name} by its ending {ending}: {way_out}"
    for format_name, way_out, endings in (
        ("compressed in a format that is not read", "decompress it", ".xz .lzma .z .br"),
        ("an archive", "unpack it", ".zip .tar .tgz .tbz2 .txz .7z .rar .jar .whl .epub"),
        ("a PDF", "take its text out, as pdftotext does", ".pdf"),
        ("an Office file", EXPORT, ".doc .docx .ppt .pptx .xls .xlsx .odt .ods .odp"),
        ("a picture", EXPORT, ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico"),
        ("a recording", EXPORT, ".mp3 .mp4 .wav .flac .ogg .avi .mkv .mov .webm"),
        ("a table of separated values", EXPORT, ".csv .tsv .tab"),
        ("HDF5", EXPORT, ".h5 .hdf5"),
        ("Avro or ORC", EXPORT, ".avro .orc"),
        ("arrays or weights", EXPORT, ".npy .npz .pt .pth .ckpt .gguf .safetensors"),
        ("a pickle of Python", EXPORT, ".pkl .pickle"),
        ("a database", EXPORT, ".db .sqlite .sqlite3"),
        ("a program or other binary data", EXPORT, ".bin .exe .dll .so .o .a .class .pyc"),
    )
    for ending in endings.split()
}
"""Why files of these endings are not read, and what to do instead."""
HIDDEN = "a name that begins with . or _"
BESIDE = "beside a saved dataset"
LEADS_OUT = "a link that leads out of its folder"
IGNORED = (HIDDEN, BESIDE)
"""Reasons that no check counts: the folder .git of a clone may be larger than its text."""
NAMES = 5
"""How many names of each group are printed."""


@dataclass(frozen=True)
class File:
    """An input file: its path in the file system, its name under the source, its reader and its compression."""

    path: str
    name: str
    kind: Reader
    num_bytes: int
    compression: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """A file that is not read. `num_bytes` is what is lost by that: none where its content is read elsewhere."""

    name: str
    num_bytes: int
    reason: str


def file_of(path: str, name: str, num_bytes: int) -> File | LeftOut:
    """How the file of this name is read, or why it is not."""
    stem, ending = os.path.splitext(path.lower())
    codec = CODECS.get(ending)
    if codec is not None:
        ending = os.path.splitext(stem)[1]
    reader = READERS.get(ending, "text")
    if ending in REFUSED:
        return LeftOut(name, num_bytes, REFUSED[ending])
    if codec is not None and reader in ("parquet", "arrow"):
        return LeftOut(name, num_bytes, f"is {codec} of {reader}: decompress it")
    if not num_bytes and ending not in READERS:
        return LeftOut(name, 0, "empty")
    return File(path, name, reader, num_bytes, codec)


# ------------------------------------------------------------ the files of a source


@dataclass(frozen=True)
class Listing:
    """The files of one source in order, and what lies beside them."""

    uri: str
    filesystem: Any
    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...] = ()


def list_source(
    uri: str, *, allow_left_out: bool = False, flag: str = "--source", allow: str = "--allow-left-out"
) -> Listing:
    """The files of a source: one file, a folder (searched through), a pattern, or a saved Hugging Face dataset.

    Raises ValueError for a source without a file to read, for a named file that is not read, and where more is left out
    than is read, unless `allow_left_out`.
    """
    filesystem, path = located(uri)
    source = f"{flag} {shown(uri)}"
    try:
        path.encode()
        info = filesystem.get_file_info(path)
        is_folder = info.type == fs.FileType.Directory
        if info.type == fs.FileType.File:
            name = path.rpartition("/")[2]
            file = file_of(path, name, int(info.size)) if info.size else File(path, name, "text", 0)
            if isinstance(file, LeftOut):
                raise ValueError(f"{source}: {file.reason}")
            return Listing(uri, filesystem, (file,))
        if info.type == fs.FileType.Unknown:
            raise ValueError(f"{source}: is a pipe, a socket or a device, which cannot be read twice: give a file")
        if is_folder and filesystem.get_file_info(f"{path}/{PREPARATION}").is_file:
            raise ValueError(
                f"{source}: is a prepared corpus: train on it with --data {shown(uri).rstrip('/')}/{MANIFEST}"
            )
        if is_folder and (saved := _saved_dataset(filesystem, path, uri, source)):
            return saved
        base, entries = (path, walk(filesystem, path)) if is_folder else _matching(filesystem, path)
        listing = _sorted_out(uri, filesystem, base, entries, hides=is_folder)
    except UnicodeEncodeError as error:
        raise ValueError(f"{source}: its name is not UTF-8: rename it") from error
    except (OSError, pa.ArrowException) as error:
        raise_if_away(error, source, "cannot be listed")
        raise ValueError(f"{source}: cannot be listed: {error}") from error
    if not allow_left_out or not listing.files:
        _check(listing, source, allow)
    return listing


def shown(name: str) -> str:
    """A name or URI that can be printed: bytes that are not UTF-8 become \\xNN, and no password is in it."""
    return shown_url(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def _sorted_out(
    uri: str, filesystem: Any, base: str, entries: Iterable[tuple[str, int, str]], *, hides: bool
) -> Listing:
    """Each file of a walk, used or left out, in the order of paths."""
    files: list[File] = []
    left_out: list[LeftOut] = []
    for path, num_bytes, reason in sorted(entries):
        name = path.removeprefix(base).lstrip("/")
        if reason in ("", LEADS_OUT) and hides and any(part.startswith(HIDING) for part in name.split("/")):
            reason = HIDDEN  # what Spark, git and editors leave
        if not reason and shown(path) != path:
            reason = "a name that is not UTF-8: rename it"
        file = LeftOut(shown(name), num_bytes, reason) if reason else file_of(path, name, num_bytes)
        if isinstance(file, File):
            files.append(file)
        else:
            left_out.append(file)
    return Listing(uri, filesystem, tuple(files), tuple(left_out))


def _check(listing: Listing, source: str, allow: str) -> None:
    """Raises ValueError where nothing is left to read, or less than what is left out and might belong to a corpus; and
    for a link out of the folder."""
    for file in listing.left_out:
        if file.reason == LEADS_OUT:
            raise ValueError(f"{source}: {file.name}: {LEADS_OUT}: name its target, or go on without it: {allow}")
    groups = left_out_groups([listing])
    if not listing.files:
        beside = f". Left out: {'; '.join(lines(groups))}" if groups else ""
        raise ValueError(f"{source}: there is no such file, or none below it that can be read as text{beside}")
    used_bytes = sum(file.num_bytes for file in listing.files)
    groups = [group for group in groups if group["what"] not in IGNORED]
    lost_bytes = sum(group["num_bytes"] for group in groups)
    if lost_bytes > used_bytes:
        raise ValueError(
            f"{source}: more is left out ({size(lost_bytes)}) than is used ({size(used_bytes)} in "
            f"{count(len(listing.files))}). Left out: {'; '.join(lines(groups))}. Give the files that are meant, as in "
            f"'folder/*.jsonl', or go on as it is: {allow}"
        )


def exists(uri: str) -> bool:
    """Whether there is such a file or folder."""
    filesystem, path = located(uri)
    try:
        return bool(filesystem.get_file_info(path).type != fs.FileType.NotFound)
    except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
        raise_if_away(error, shown(uri), "cannot be looked up")
        return False


def check_apart(uri: str, out: str) -> None:
    """Raises ValueError where the folder `out` is among what is read: a second preparation would read the first."""
    filesystem, source = located(uri)
    out_filesystem, folder = located(out)
    if type(filesystem) is not type(out_filesystem):
        return
    at = _first_magic(source)
    if isinstance(filesystem, fs.LocalFileSystem):
        folder = os.path.realpath(folder)
        if at >= 0 and not os.path.exists(source):
            base = source[:at].rpartition("/")[0]
            source, at = f"{os.path.realpath(base)}{source[len(base) :]}", 0
        else:
            source, at = os.path.realpath(source), -1
    if at < 0:
        is_inside = f"{folder}/".startswith(f"{source}/")
    else:
        written = ("manifest.json", "shards/0.parquet", "pieces/0.json")
        is_inside = any(re.match(glob_translate(source), f"{folder}/{name}") for name in written)
    if is_inside:
        raise ValueError(
            f"--out {shown(out)}: lies inside --source {shown(uri)}, and a second preparation would read what the "
            "first wrote: give a folder beside it"
        )


# ------------------------------------------------------------ the summary


Group = TypedDict(  # noqa: UP013 (the key `what` is on disk)
    "Group", {"what": str, "num_files": int, "num_bytes": int, "names": list[str]}
)
"""Files of one kind, or left out for one reason, as a manifest has them: how many, and the first names."""


def used_groups(listings: Iterable[Listing]) -> list[Group]:
    return _grouped((file.kind, file.name, file.num_bytes) for listing in listings for file in listing.files)


def left_out_groups(listings: Iterable[Listing]) -> list[Group]:
    return _grouped((file.reason, file.name, file.num_bytes) for listing in listings for file in listing.left_out)


def _grouped(entries: Iterable[tuple[str, str, int]]) -> list[Group]:
    groups: dict[str, Group] = {}
    for label, name, num_bytes in entries:
        group = groups.setdefault(label, {"what": label, "num_files": 0, "num_bytes": 0, "names": []})
        group["num_files"] += 1
        group["num_bytes"] += num_bytes
        if len(group["names"]) < NAMES:
            group["names"].append(name)
    return sorted(groups.values(), key=lambda group: -group["num_bytes"])


def lines(groups: Iterable[Group]) -> list[str]:
    """A line a group: how many files, how much, the first names."""
    return [
        f"{group['what']}: {count(group['num_files'])}, {size(group['num_bytes'])} "
        f"({', '.join(group['names'])}{', ...' if group['num_files'] > len(group['names']) else ''})"
        for group in groups
    ]


def summary(title: str, groups: Sequence[Group]) -> list[str]:
    """How many files were used, or left out, and a line for each group; nothing where there are none."""
    if not groups:
        return []
    num_files, num_bytes = (sum(group[key] for group in groups) for key in ("num_files", "num_bytes"))
    return [f"{title}: {count(num_files)}, {size(num_bytes)}", *(f"  {line}" for line in lines(groups))]


def count(num_files: int) -> str:
    return f"{num_files:,} {'file' if num_files == 1 else 'files'}"


def size(num_bytes: int) -> str:
    amount, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


# ------------------------------------------------------------ patterns, saved datasets and folders


def _matching(filesystem: Any, pattern: str) -> tuple[str, Iterable[tuple[str, int, str]]]:
    """(the folder above, the files) of a pattern in which `*` stays within a folder and `**` does not."""
    magic = _first_magic(pattern)
    if magic < 0:
        return pattern, []
    base, parts = pattern[:magic].rpartition("/")[0], pattern.split("/")
    matches = re.compile(glob_translate(pattern)).match

    def leads_on(folder: str) -> bool:
        """Whether files below a folder can match."""
        above = parts[: folder.count("/") + 1]
        is_above = len(above) < len(parts) and bool(re.match(glob_translate("/".join(above)), folder))
        return "**" in above or is_above

    return base, walk(filesystem, base, enters=leads_on, takes=lambda path: bool(matches(path)))


def _first_magic(pattern: str) -> int:
    """Where the first sign of a pattern stands; -1 in a plain path."""
    return min((at for sign in "*?[" if (at := pattern.find(sign)) >= 0), default=-1)


def _saved_dataset(filesystem: Any, path: str, uri: str, source: str) -> Listing | None:
    """The files of a folder that `datasets.Dataset.save_to_disk` wrote, in its order; None for other folders."""
    names_in = partial(_names_in, filesystem, source)
    if filesystem.get_file_info(f"{path}/dataset_dict.json").is_file:
        splits = names_in(path, "dataset_dict.json", "splits") or ["?"]
        if len(splits) != 1:
            raise ValueError(f"{source}: holds the splits {', '.join(splits)}: name one, {shown(uri)}/{splits[0]}")
        path = f"{path}/{splits[0]}"
    if not filesystem.get_file_info(f"{path}/state.json").is_file:
        return None
    names = names_in(path, "state.json", "_data_files")
    infos = filesystem.get_file_info([f"{path}/{name}" for name in names])
    files = tuple(
        File(info.path, name, "arrow", max(int(info.size or 0), 0)) for name, info in zip(names, infos, strict=True)
    )
    used = {(file.path, file.num_bytes) for file in files}
    beside = sorted({(name, num_bytes) for name, num_bytes, _ in walk(filesystem, path)} - used)
    left_out = (LeftOut(shown(name.removeprefix(path).lstrip("/")), num_bytes, BESIDE) for name, num_bytes in beside)
    return Listing(uri, filesystem, files, tuple(left_out))


def _names_in(filesystem: Any, source: str, folder: str, file: str, key: str) -> list[str]:
    """The names in a list of a saved dataset's file. Raises ValueError for one that leads out of the folder."""
    path = f"{folder}/{file}"
    try:
        content = plain_json(read_file(filesystem, path, source, MAX_JSON_BYTES))
    except ValueError as error:
        raise ValueError(f"{source}: {path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source}: {path} is damaged: it holds no object")
    parts = content.get(key)
    parts = parts if isinstance(parts, list) else []
    names = [part.get("filename") if isinstance(part, dict) else part for part in parts]
    below = [name_below(name, f"{source}: {path}") for name in names]
    if isinstance(filesystem, fs.LocalFileSystem):
        check_links(folder, (f"{folder}/{name}" for name in below))
    return below


HIDING = (".", "_")


def walk(
    filesystem: Any,
    path: str,
    *,
    enters: Callable[[str], bool] = lambda folder: True,
    takes: Callable[[str], bool] = lambda file: True,
) -> Iterator[tuple[str, int, str]]:
    """(path, bytes, why it is not read) of every file below a folder that `takes` chooses. Local folders and files come
    once, whatever links lead to them; `enters` chooses the local folders to look into."""
    if isinstance(filesystem, fs.LocalFileSystem):
        yield from _walk_local(path, enters, takes)
        return
    for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True)):
        if info.is_file and takes(info.path):
            yield info.path, int(info.size), ""


def _walk_local(
    root: str, enters: Callable[[str], bool], takes: Callable[[str], bool]
) -> Iterator[tuple[str, int, str]]:
    """Real folders and files first, then those that only links lead to, last hidden ones: so names do not depend on
    links, and what is left out hides nothing that is read. Links that leave `root` are not followed."""
    seen: set[tuple[int, int]] = set()

    def is_new(status: os.stat_result) -> bool:
        """Whether this file or folder was not seen before; file systems without inodes have new ones only."""
        key = (status.st_dev, status.st_ino)
        is_known = key in seen and bool(status.st_ino)
        seen.add(key)
        return not is_known

    waiting = [(False, False, root)] if os.path.isdir(root) else []
    while waiting:
        hidden, linked, path = heapq.heappop(waiting)
        try:
            status = os.stat(path)
        except OSError:
            if not linked:
                raise
            if takes(path):
                yield path, 0, "a link to nothing"
            continue
        is_folder = stat.S_ISDIR(status.st_mode)
        if path != root and not (enters if is_folder else takes)(path):
            continue  # a file that is not taken must not hide its link that is
        if linked and not is_below(path, root):
            yield path, 0, LEADS_OUT
        elif not is_folder and not stat.S_ISREG(status.st_mode):
            yield path, 0, "a pipe, a socket or a device"
        elif not is_new(status):
            kind = "a link to a folder that is read under another name"
            yield path, 0, kind if is_folder else "another name of a file that is read already"
        elif not is_folder:
            yield path, status.st_size, ""
        else:
            with os.scandir(path) as entries:
                for entry in entries:
                    is_hidden = hidden or entry.name.startswith(HIDING)
                    heapq.heappush(waiting, (is_hidden, linked or entry.is_symlink(), entry.path))
