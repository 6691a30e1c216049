"""Finds the longer manifests that a preparation writes beside the one with which a run began."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pyarrow import fs

from elastic_ring.control.messages import CorpusVersion
from elastic_ring.data.filesystem import located, reading
from elastic_ring.data.manifest import MANIFEST, Manifest, read_manifest
from elastic_ring.data.prepared import Later, PreparedTokens, check_grown
from elastic_ring.files import shown_url, with_access

_NUMBERED = re.compile(r"^manifest-(\d+)\.json$")


def may_grow(data: Any) -> bool:
    """Whether a run may take longer manifests over: its own is a beginning's, and `later` does not say what follows."""
    if not isinstance(data, PreparedTokens) or data.later:
        return False
    return _NUMBERED.match(data.uri.rpartition("/")[2]) is not None


def grown(data: Any, versions: Iterable[CorpusVersion]) -> Any:
    """The data of a run once it has taken these manifests over; `data` themselves where there are none."""
    known = list(versions)
    if not known:
        return data
    assert isinstance(data, PreparedTokens), "no other data grow"
    later = tuple(Later(one.first_step, with_access(one.uri, data.uri), one.digest) for one in known)
    return replace(data, later=later)


def beside(data: Any, versions: Iterable[CorpusVersion]) -> tuple[CorpusVersion, ...]:
    """The versions in the folder of the data's own manifest, where a preparation writes them all."""
    folder = data.uri.rpartition("/")[0]
    return tuple(replace(one, uri=shown_url(f"{folder}/{one.uri.rpartition('/')[2]}")) for one in versions)


def longer_manifest(uri: str, now: Manifest) -> tuple[str, Manifest] | None:
    """(URI, manifest) of the longest manifest in the folder of `uri`, if it is longer than `now`, which `uri` names.

    None if there is none, or if the manifest is complete. Raises ValueError that names a manifest which lacks
    shards of `now`, has others in their place, or cannot be read; and for a folder that cannot be listed; StorageFailed
    where the store is away. The first reads
    "FILE: what is wrong: details; expected ...", where the details may be others at each look.
    """
    if now.is_complete:
        return None
    folder, _, name = uri.rpartition("/")
    newest = max(_names(folder), key=_length, default=name)
    if _length(newest) <= _length(name):
        return None
    found = f"{folder}/{newest}"
    try:
        manifest = read_manifest(found)
        check_grown(now, manifest, found)
    except ValueError as error:
        raise ValueError(f"{error}; expected one that begins with the {now.num_shards} shard(s) of {name}") from error
    return found, manifest


def _names(folder: str) -> list[str]:
    filesystem, path = located(folder)
    try:
        files: list[Any] = reading(
            folder, lambda: filesystem.get_file_info(fs.FileSelector(path, recursive=False)), what="cannot be listed"
        )
    except ValueError as error:
        raise ValueError(f"{error}; expected the manifests of the run's corpus") from error
    return [file.base_name for file in files if file.base_name == MANIFEST or _NUMBERED.match(file.base_name)]


def _length(name: str) -> float:
    """How many pieces a manifest has by its name; the complete one has all."""
    numbered = _NUMBERED.match(name)
    return int(numbered[1]) if numbered else float("inf")
