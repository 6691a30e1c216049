"""The files under a source: each is used, or left out with a reason. Nothing is counted twice, and nothing vanishes.

`walk` finds files, `kinds` decides what each is. Here: what happens to each, and how many files are told of in a few
lines.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from fsspec.utils import glob_translate
from pyarrow import fs

from elastic_ring.data.filesystem import located, raise_if_away, read_file
from elastic_ring.data.kinds import hint_of, kind_of
from elastic_ring.data.manifest import MANIFEST, PREPARATION
from elastic_ring.files import MAX_JSON_BYTES, check_links, is_below, name_below, plain_json, shown_url

NAMES = 5
"""How many names of each group are printed."""


@dataclass
class Group:
    """Files of one kind, or left out for one reason."""

    what: str
    num_files: int = 0
    num_bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str, num_bytes: int) -> None:
        self.num_files += 1
        self.num_bytes += num_bytes
        if len(self.names) < NAMES:
            self.names.append(name)


def grouped(entries: Iterable[tuple[str, str, int]]) -> list[Group]:
    found: dict[str, Group] = {}
    for what, name, num_bytes in entries:
        found.setdefault(what, Group(what)).add(name, num_bytes)
    return sorted(found.values(), key=lambda group: -group.num_bytes)


def lines(groups: Iterable[Group]) -> list[str]:
    """A line a group: how many files, how much, the first names."""
    return [
        f"{group.what}: {count(group.num_files)}, {size(group.num_bytes)} "
        f"({', '.join(group.names)}{', ...' if group.num_files > len(group.names) else ''})"
        for group in groups
    ]


def summary(what: str, groups: Sequence[Group]) -> list[str]:
    """How many files were used, or left out, and a line for each kind of them; nothing where there are none."""
    if not groups:
        return []
    num_files, num_bytes = sum(group.num_files for group in groups), sum(group.num_bytes for group in groups)
    return [f"{what}: {count(num_files)}, {size(num_bytes)}", *(f"  {line}" for line in lines(groups))]


def count(num_files: int) -> str:
    return f"{num_files:,} {'file' if num_files == 1 else 'files'}"


def size(num_bytes: int) -> str:
    amount, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


OPENED_AT_ONCE = 16
HIDDEN = "a name that begins with . or _"
BESIDE = "beside a saved dataset"
LEADS_OUT = "a link that leads out of its folder"
NO_LOSS = (HIDDEN, BESIDE)
"""What nobody takes for a part of a corpus, as the folder .git of a clone, which may be larger than its text."""


@dataclass(frozen=True)
class File:
    """An input file: its path in the file system, its name under the source, how it is read.

    `problem`: why it cannot be read as its name promises. `begins_at`: where its text begins, after a byte order mark.
    """

    path: str
    name: str
    kind: str
    num_bytes: int
    compression: str | None = None
    begins_at: int = 0
    problem: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A file that is not read. `num_bytes` is what is lost by that: none where its content is read elsewhere."""

    name: str
    num_bytes: int
    why: str
    detail: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of one source in order, and what lies beside them."""

    uri: str
    filesystem: Any
    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def facts(self) -> list[list[object]]:
        """What identifies the input: names and sizes."""
        return [[file.name, file.kind, file.num_bytes] for file in self.files]


def list_source(
    uri: str,
    *,
    columns: Sequence[str] = ("text",),
    allow_left_out: bool = False,
    flag: str = "--source",
    allow: str = "--allow-left-out",
) -> Listing:
    """The files of a source: one file, a folder (searched through), a pattern, or a saved Hugging Face dataset.

    Raises ValueError for one that has no file to read, for a named file that is no text, and where more is left out
    than is read, unless `allow_left_out`.
    """
    filesystem, path = located(uri)
    told = f"{flag} {shown(uri)}"
    try:
        path.encode()
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.File:
            return Listing(uri, filesystem, (_named(filesystem, path, int(info.size), told, columns),))
        if info.type == fs.FileType.Unknown:
            raise ValueError(f"{told}: is a pipe, a socket or a device, which cannot be read twice: give a file")
        if info.type == fs.FileType.Directory and _is_file(filesystem, f"{path}/{PREPARATION}"):
            raise ValueError(
                f"{told}: is a prepared corpus: train on it with --data {shown(uri).rstrip('/')}/{MANIFEST}"
            )
        if info.type == fs.FileType.Directory and (saved := _saved_dataset(filesystem, path, uri, told)):
            return saved
        if info.type == fs.FileType.Directory:
            base, found = path, list(walk(filesystem, path))
        else:
            base, found = _matching(filesystem, path)
        listing = _sorted_out(uri, filesystem, base, found, columns, hides=info.type == fs.FileType.Directory)
    except UnicodeEncodeError as error:
        raise ValueError(f"{told}: its name is not UTF-8: rename it") from error
    except (OSError, pa.ArrowException) as error:
        raise_if_away(error, told, "cannot be listed")
        raise ValueError(f"{told}: cannot be listed: {error}") from error
    if not allow_left_out or not listing.files:
        _check(listing, told, allow)
    return listing


def shown(name: str) -> str:
    """A name or URI that can be printed: bytes that are not UTF-8 become \\xNN, and no password is in it."""
    return shown_url(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def _named(filesystem: Any, path: str, num_bytes: int, told: str, columns: Sequence[str]) -> File:
    """The file that the user named. Raises ValueError where it is no text."""
    made = _file(filesystem, path, path.rpartition("/")[2], num_bytes, columns)
    if isinstance(made, LeftOut) or made.problem:
        raise ValueError(f"{told}: {made.detail if isinstance(made, LeftOut) else made.problem}")
    return made


def _file(filesystem: Any, path: str, name: str, num_bytes: int, columns: Sequence[str]) -> File | LeftOut:
    """What becomes of a file: left out where it cannot be read and its name does not promise that."""
    if not num_bytes:
        return File(path, name, hint_of(name) or "text", 0)
    try:
        found = kind_of(name, lambda codec: filesystem.open_input_stream(path, compression=codec), columns)
    except (OSError, pa.ArrowException) as error:
        if not isinstance(error, PermissionError):  # one file's, which its owner mends: the others are read
            raise_if_away(error, path)
        return File(path, name, hint_of(name) or "text", num_bytes, problem=f"cannot be read: {error}")
    if found.reader is None:
        return LeftOut(name, num_bytes, f"looks like {found.looks_like}: {found.way_out}", found.problem)
    return File(path, name, found.reader, num_bytes, found.compression, found.begins_at, found.problem)


def _sorted_out(
    uri: str, filesystem: Any, base: str, found: Sequence[Found], columns: Sequence[str], *, hides: bool
) -> Listing:
    """Each file that was found, used or left out, in the order of paths."""
    left_out: list[LeftOut] = []
    candidates: list[tuple[str, str, int]] = []
    for entry in sorted(found, key=lambda entry: entry.path):
        name = entry.path.removeprefix(base).lstrip("/")
        why = entry.why
        if why in ("", LEADS_OUT) and hides and any(part.startswith(HIDING) for part in name.split("/")):
            why = HIDDEN  # what Spark, git and editors leave
        if not why and shown(entry.path) != entry.path:
            why = "a name that is not UTF-8: rename it"
        if not why and not entry.num_bytes and hint_of(name) is None:
            why = "empty"
        if why:
            left_out.append(LeftOut(shown(name), entry.num_bytes, why))
        else:
            candidates.append((entry.path, name, entry.num_bytes))
    with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="elastic-ring-inputs") as threads:
        made = list(threads.map(lambda one: _file(filesystem, one[0], one[1], one[2], columns), candidates))
    files = tuple(one for one in made if isinstance(one, File))
    return Listing(uri, filesystem, files, (*left_out, *(one for one in made if isinstance(one, LeftOut))))


def _check(listing: Listing, told: str, allow: str) -> None:
    """Raises ValueError where nothing is left to read, or less than what is left out and might belong to a corpus; and
    for a link to files of others."""
    for one in listing.left_out:
        if one.why == LEADS_OUT:
            raise ValueError(f"{told}: {one.name}: {LEADS_OUT}: name its target, or go on without it: {allow}")
    if not listing.files:
        told_lost = "; ".join(lines(left_out_groups([listing])))
        beside = f". Left out: {told_lost}" if told_lost else ""
        raise ValueError(f"{told}: there is no such file, or none below it that can be read as text{beside}")
    used_bytes = sum(file.num_bytes for file in listing.files)
    groups = [group for group in left_out_groups([listing]) if group.what not in NO_LOSS]
    lost, lost_bytes = "; ".join(lines(groups)), sum(group.num_bytes for group in groups)
    if lost_bytes > used_bytes:
        raise ValueError(
            f"{told}: more is left out ({size(lost_bytes)}) than is used ({size(used_bytes)} in "
            f"{count(len(listing.files))}). Left out: {lost}. Give the files that are meant, as in 'folder/*.jsonl', "
            f"or go on as it is: {allow}"
        )


def exists(uri: str) -> bool:
    """Whether there is such a file or folder."""
    filesystem, path = located(uri)
    try:
        found = filesystem.get_file_info(path).type != fs.FileType.NotFound
    except (OSError, UnicodeEncodeError, pa.ArrowException) as error:
        raise_if_away(error, shown(uri), "cannot be looked up")
        return False
    return bool(found)


def check_apart(uri: str, out: str) -> None:
    """Raises ValueError where a folder to write to is among what is read: a second preparation would read the first."""
    filesystem, source = located(uri)
    beside, folder = located(out)
    if type(filesystem) is not type(beside):
        return
    at = _first_magic(source)
    if isinstance(filesystem, fs.LocalFileSystem):
        folder = os.path.realpath(folder)
        if at >= 0 and not os.path.exists(source):
            base = source[:at].rpartition("/")[0]
            source, at = f"{os.path.realpath(base)}{source[len(base) :]}", 0
        else:
            source, at = os.path.realpath(source), -1
    if at >= 0:
        matches = re.compile(glob_translate(source))
        inside = any(
            matches.match(f"{folder}/{name}") for name in ("manifest.json", "shards/0.parquet", "pieces/0.json")
        )
    else:
        inside = f"{folder}/".startswith(f"{source}/")
    if inside:
        raise ValueError(
            f"--out {shown(out)}: lies inside --source {shown(uri)}, and a second preparation would read what the "
            "first wrote: give a folder beside it"
        )


# ------------------------------------------------------------ the summary


def used_groups(listings: Iterable[Listing]) -> list[Group]:
    return grouped((file.kind, file.name, file.num_bytes) for file in _files(listings) if not file.problem)


def bad_groups(listings: Iterable[Listing]) -> list[Group]:
    """Files that are not what their names promise; what else is bad shows when it is read."""
    return grouped((file.problem, file.name, file.num_bytes) for file in _files(listings) if file.problem)


def _files(listings: Iterable[Listing]) -> Iterator[File]:
    return (file for listing in listings for file in listing.files)


def left_out_groups(listings: Iterable[Listing]) -> list[Group]:
    return grouped((one.why, one.name, one.num_bytes) for listing in listings for one in listing.left_out)


# ------------------------------------------------------------ patterns and saved datasets


def _matching(filesystem: Any, pattern: str) -> tuple[str, list[Found]]:
    """(the folder above, the files) of a pattern in which `*` stays within a folder and `**` does not."""
    magic = _first_magic(pattern)
    if magic < 0:
        return pattern, []
    base = pattern[:magic].rpartition("/")[0]
    matches = re.compile(glob_translate(pattern))
    found = walk(filesystem, base, enters=partial(_leads_on, pattern), wanted=lambda path: bool(matches.match(path)))
    return base, list(found)


def _leads_on(pattern: str, folder: str) -> bool:
    """Whether files below a folder can match a pattern."""
    parts = pattern.split("/")
    above = parts[: folder.count("/") + 1]
    if "**" in above:
        return True
    return len(above) < len(parts) and bool(re.match(glob_translate("/".join(above)), folder))


def _first_magic(pattern: str) -> int:
    """Where the first sign of a pattern stands; -1 in a plain path."""
    return min((at for sign in "*?[" if (at := pattern.find(sign)) >= 0), default=-1)


def _saved_dataset(filesystem: Any, path: str, uri: str, told: str) -> Listing | None:
    """The files of a folder that `datasets.Dataset.save_to_disk` wrote, in its order; none for other folders."""
    if _is_file(filesystem, f"{path}/dataset_dict.json"):
        splits = _names(filesystem, path, "dataset_dict.json", "splits", told) or ["?"]
        if len(splits) != 1:
            raise ValueError(f"{told}: holds the splits {', '.join(splits)}: name one, {shown(uri)}/{splits[0]}")
        path = f"{path}/{splits[0]}"
    if not _is_file(filesystem, f"{path}/state.json"):
        return None
    listed = _names(filesystem, path, "state.json", "_data_files", told)
    infos = filesystem.get_file_info([f"{path}/{name}" for name in listed])
    files = [
        File(info.path, name, "arrow", max(int(info.size or 0), 0)) for name, info in zip(listed, infos, strict=True)
    ]
    others = {found.path: found.num_bytes for found in walk(filesystem, path)}.items() - {
        (file.path, file.num_bytes) for file in files
    }
    beside = [LeftOut(shown(name.removeprefix(path).lstrip("/")), size, BESIDE) for name, size in sorted(others)]
    return Listing(uri, filesystem, tuple(files), tuple(beside))


def _names(filesystem: Any, folder: str, file: str, key: str, told: str) -> list[str]:
    """The names in a list of a saved dataset's file. Raises ValueError for one that leads out of the folder."""
    parts = _json(filesystem, f"{folder}/{file}", told).get(key)
    parts = parts if isinstance(parts, list) else []
    names = [part.get("filename") if isinstance(part, dict) else part for part in parts]
    below = [name_below(name, f"{told}: {folder}/{file}") for name in names]
    if isinstance(filesystem, fs.LocalFileSystem):
        check_links(folder, (f"{folder}/{name}" for name in below))
    return below


def _is_file(filesystem: Any, path: str) -> bool:
    found: bool = filesystem.get_file_info(path).is_file
    return found


def _json(filesystem: Any, path: str, told: str) -> dict[str, Any]:
    """Raises ValueError that names the file."""
    try:
        found = plain_json(read_file(filesystem, path, told, MAX_JSON_BYTES))
    except ValueError as error:
        raise ValueError(f"{told}: {path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{told}: {path} is damaged: it holds no object")
    return found


HIDING = (".", "_")


@dataclass(frozen=True)
class Found:
    """An entry of a walk. `why`: it is no file to read."""

    path: str
    num_bytes: int
    why: str = ""


def _all(path: str) -> bool:
    return True


def walk(
    filesystem: Any, path: str, *, enters: Callable[[str], bool] = _all, wanted: Callable[[str], bool] = _all
) -> Iterator[Found]:
    """Every file below a folder that is `wanted`. Local folders and files come once, whatever links lead to them;
    `enters` says which local folders below it are looked into."""
    if isinstance(filesystem, fs.LocalFileSystem):
        yield from _walk_local(path, enters, wanted)
        return
    for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True)):
        if info.is_file and wanted(info.path):
            yield Found(info.path, int(info.size))


def _walk_local(root: str, enters: Callable[[str], bool], wanted: Callable[[str], bool]) -> Iterator[Found]:
    """Real folders and files first, then those that only links lead to, last hidden ones: so names do not depend on
    links, and what is left out hides nothing that is read. Links that leave `root` are not followed."""
    seen: set[tuple[int, int]] = set()
    waiting = [(False, False, root)] if os.path.isdir(root) else []
    while waiting:
        hidden, linked, path = heapq.heappop(waiting)
        try:
            status = os.stat(path)
        except OSError:
            if not linked:
                raise
            if wanted(path):
                yield Found(path, 0, "a link to nothing")
            continue
        is_folder = stat.S_ISDIR(status.st_mode)
        if linked and not is_below(path, root):
            if (enters if is_folder else wanted)(path):
                yield Found(path, 0, LEADS_OUT)
        elif not is_folder:
            if wanted(path):  # else a file that is not read would hide its link that is
                yield _entry(path, status, seen)
        elif path != root and not enters(path):
            continue
        elif not _is_new(status, seen):
            yield Found(path, 0, "a link to a folder that is read under another name")
        else:
            with os.scandir(path) as entries:
                for entry in entries:
                    part = (hidden or entry.name.startswith(HIDING), linked or entry.is_symlink(), entry.path)
                    heapq.heappush(waiting, part)


def _entry(path: str, status: os.stat_result, seen: set[tuple[int, int]]) -> Found:
    if not stat.S_ISREG(status.st_mode):
        return Found(path, 0, "a pipe, a socket or a device")
    if not _is_new(status, seen):
        return Found(path, 0, "another name of a file that is read already")
    return Found(path, status.st_size)


def _is_new(status: os.stat_result, seen: set[tuple[int, int]]) -> bool:
    """Whether this file or folder was not seen before; file systems without inodes have new ones only."""
    key = (status.st_dev, status.st_ino)
    if key in seen and status.st_ino:
        return False
    seen.add(key)
    return True
