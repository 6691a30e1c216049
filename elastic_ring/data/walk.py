"""Every file below a folder, once, whatever links lead to it. What a file is, and whether it is read, is not decided
here."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

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
    links, and what is left out hides nothing that is read."""
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
        if not stat.S_ISDIR(status.st_mode):
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
