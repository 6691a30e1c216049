"""Which checkpoint is whole, what was set aside, and what writers that died have left behind.

How checkpoints are written, read and pruned is `elastic_ring.state.checkpoints.checkpoint`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import plain_json
from elastic_ring.state.checkpoints.manifest import (
    COMMIT,
    FOLDER,
    MAX_BYTES,
    REJECTED,
    age_key,
    attempt_in,
    read_manifest,
)
from elastic_ring.state.storage.backend import Entry, Upload
from elastic_ring.state.storage.folder import PROBE, Storage

UNFINISHED_AFTER_S = 3600.0
"""No writer takes so long between two files of one checkpoint."""


# ---------------------------------------------------------------- what nobody will finish


@dataclass(frozen=True)
class Leftovers:
    """Files and uploads of checkpoints that never counted and never will."""

    files: tuple[Entry, ...] = ()
    uploads: tuple[Upload, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that failed its verification: its files stay until somebody removes them."""

    folder: str
    reasons: tuple[str, ...]
    num_bytes: int


def leftovers(storage: Storage, unfinished_after_s: float = UNFINISHED_AFTER_S) -> Leftovers:
    """What belongs to no checkpoint: of a step that another attempt committed, older than the newest checkpoint, or
    without a new file for `unfinished_after_s` (0 where no run writes)."""
    entries = storage.entries(FOLDER)
    kept = _kept_folders(storage, entries)
    newest = max((age_key(name) for name in committed_folders(entries)), default=(-1, -1))
    last_s: dict[str, float] = defaultdict(float)
    for entry in entries:
        last_s[_attempt(entry.path)] = max(last_s[_attempt(entry.path)], entry.modified_unix_s)
    now_s = time.time()

    def is_left(path: str, touched_unix_s: float) -> bool:
        parts = path.split("/")
        if len(parts) < 4 or not parts[3].startswith(("attempt-", ".")) or _attempt(path) in kept:
            return False
        has_commit = "/".join(parts[:3]) in kept
        return has_commit or age_key(path) < newest or now_s - touched_unix_s >= unfinished_after_s

    cut = len(storage.root) + 1
    files = [entry for entry in entries if is_left(entry.path, last_s[_attempt(entry.path)])]
    files += [
        entry
        for entry in storage.entries(recursive=False)
        if entry.path.startswith(PROBE) and now_s - entry.modified_unix_s >= unfinished_after_s
    ]
    uploads = [
        upload
        for upload in storage.uploads(FOLDER)
        if is_left(path := upload.path[cut:], max(upload.begun_unix_s, last_s.get(_attempt(path), 0.0)))
    ]
    return Leftovers(tuple(files), tuple(uploads))


def remove_leftovers(storage: Storage, found: Leftovers, unfinished_after_s: float = UNFINISHED_AFTER_S) -> None:
    """Uploads first: one that ends meanwhile would leave a file."""
    for upload in found.uploads:
        storage.abort(upload)
    for file in found.files:
        storage.remove(file.path)
    storage.remove_empty_folders(FOLDER, unfinished_after_s)


def set_aside_checkpoints(storage: Storage) -> list[SetAside]:
    """Those that `checkpoint.set_aside` has put there, newest first."""
    entries = storage.entries(FOLDER)
    found = []
    for entry in entries:
        if entry.path.endswith(REJECTED):
            folder = entry.path.rsplit("/", 1)[0]
            reasons, attempt = _record(storage, entry.path)
            num_bytes = sum(other.num_bytes for other in entries if attempt and _attempt(other.path) == attempt)
            found.append(SetAside(folder, reasons, num_bytes))
    return sorted(found, key=lambda each: age_key(each.folder), reverse=True)


def remove_set_aside(storage: Storage) -> int:
    """Remove what was set aside; how many checkpoints."""
    entries = storage.entries(FOLDER)
    rejected = [entry for entry in entries if entry.path.endswith(REJECTED)]
    for entry in rejected:
        if attempt := _record(storage, entry.path)[1]:
            storage.remove_folder(attempt)
        storage.remove(entry.path)
    storage.remove_empty_folders(FOLDER, 0.0)
    return len(rejected)


def committed_folders(entries: Sequence[Entry]) -> Iterator[str]:
    suffix = f"/{COMMIT}"
    return (entry.path.removesuffix(suffix) for entry in entries if entry.path.endswith(suffix))


def _kept_folders(storage: Storage, entries: Sequence[Entry]) -> set[str]:
    """Folders of steps that have a manifest, and the attempts that a manifest or a rejected one names."""
    kept: set[str] = set()
    for folder in committed_folders(entries):
        kept.add(folder)
        try:
            kept.add(read_manifest(storage, folder).folder)
        except (CheckpointDamaged, ValueError):  # whose files they are is not known: all of the step stay
            kept |= {_attempt(entry.path) for entry in entries if entry.path.startswith(f"{folder}/")}
    for entry in entries:
        if entry.path.endswith(REJECTED):
            if attempt := _record(storage, entry.path)[1]:
                kept.add(attempt)
            else:
                folder = entry.path.rsplit("/", 1)[0]
                kept |= {_attempt(other.path) for other in entries if other.path.startswith(f"{folder}/")}
    return kept


def _record(storage: Storage, name: str) -> tuple[tuple[str, ...], str]:
    """(why a checkpoint was set aside, the folder that its manifest names; empty where that cannot be read)."""
    try:
        record = plain_json(storage.read_record(name, 2 * MAX_BYTES), 2 * MAX_BYTES)
        reasons, manifest = tuple(map(str, record["reasons"])), record["manifest"]
    except (ValueError, LookupError, TypeError) as error:
        return (f"its record cannot be read ({type(error).__name__}: {error})",), ""
    try:
        attempt = plain_json(manifest)["folder"]
    except (ValueError, LookupError, TypeError):
        return reasons, ""
    # A stranger's manifest may name files of a checkpoint that counts, or of nobody's.
    return reasons, attempt_in(name.rsplit("/", 1)[0], attempt) or ""


def _attempt(path: str) -> str:
    """`checkpoints/step-N/lineage-L/attempt-ID` of a file in it."""
    return "/".join(path.split("/")[:4])
