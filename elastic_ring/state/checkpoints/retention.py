"""How often checkpoints are taken, which of them stay, and removal of rejected ones and of files of dead writers.

How checkpoints are written and read is `elastic_ring.state.checkpoints.checkpoint`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import plain_json
from elastic_ring.state.checkpoints.checkpoint import committed, wrong_with
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
from elastic_ring.state.storage.folder import PROBE, Storage, unchanged_before

UNFINISHED_AFTER_S = 3600.0
"""No writer takes so long between two files of one checkpoint."""
KEPT_NAME, MAX_KEPT_BYTES = "kept.json", 4096
"""In the run's folder: lineage and step of the checkpoint that retention leaves."""


# ---------------------------------------------------------------- leftovers and rejected checkpoints


@dataclass(frozen=True)
class Leftovers:
    """Files and uploads of checkpoints that were never committed and never will be."""

    files: tuple[Entry, ...] = ()
    uploads: tuple[Upload, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that failed its verification; its files stay until `remove_set_aside`."""

    folder: str
    reasons: tuple[str, ...]
    num_bytes: int


def leftovers(storage: Storage, unfinished_after_s: float = UNFINISHED_AFTER_S) -> Leftovers:
    """Files and uploads of attempts that no checkpoint uses, if their step was committed by another attempt, is older
    than the newest checkpoint, or has had no new file for `unfinished_after_s` by the storage's own clock (0 where no
    run writes: whatever the time)."""
    entries = storage.entries(FOLDER)
    kept = _kept_folders(storage, entries)
    newest = max((age_key(name) for name in _committed_folders(entries)), default=(-1, -1))
    last_s: dict[str, float] = defaultdict(float)
    for entry in entries:
        last_s[_attempt(entry.path)] = max(last_s[_attempt(entry.path)], entry.modified_unix_s)
    ended_s = unchanged_before(storage, unfinished_after_s)

    def is_left(path: str, touched_unix_s: float) -> bool:
        parts = path.split("/")
        if len(parts) < 4 or not parts[3].startswith(("attempt-", ".")) or _attempt(path) in kept:
            return False
        has_commit = "/".join(parts[:3]) in kept
        return has_commit or age_key(path) < newest or touched_unix_s <= ended_s

    files = [entry for entry in entries if is_left(entry.path, last_s[_attempt(entry.path)])]
    files += [
        entry
        for entry in storage.entries(recursive=False)
        if entry.path.startswith(PROBE) and entry.modified_unix_s <= ended_s
    ]
    uploads = [
        upload
        for upload in storage.uploads(FOLDER)
        if is_left(upload.path, max(upload.begun_unix_s, last_s.get(_attempt(upload.path), 0.0)))
    ]
    return Leftovers(tuple(files), tuple(uploads))


def remove_leftovers(storage: Storage, left: Leftovers, unfinished_after_s: float = UNFINISHED_AFTER_S) -> None:
    """Uploads first: one that is completed meanwhile would leave a file."""
    for upload in left.uploads:
        storage.abort(upload)
    for file in left.files:
        storage.remove(file.path)
    storage.remove_empty_folders(FOLDER, unfinished_after_s)


def set_aside_checkpoints(storage: Storage) -> list[SetAside]:
    """The checkpoints that `checkpoint.set_aside` rejected, newest first."""
    entries = storage.entries(FOLDER)
    rejected = []
    for entry in entries:
        if entry.path.endswith(REJECTED):
            folder = entry.path.rsplit("/", 1)[0]
            reasons, attempt, _ = _record(storage, entry.path)
            num_bytes = sum(other.num_bytes for other in entries if attempt and _attempt(other.path) == attempt)
            rejected.append(SetAside(folder, reasons, num_bytes))
    return sorted(rejected, key=lambda checkpoint: age_key(checkpoint.folder), reverse=True)


def remove_set_aside(storage: Storage) -> int:
    """Remove all rejected checkpoints; returns how many."""
    entries = storage.entries(FOLDER)
    rejected = [entry for entry in entries if entry.path.endswith(REJECTED)]
    for entry in rejected:
        if attempt := _record(storage, entry.path)[1]:
            storage.remove_folder(attempt)
        storage.remove(entry.path)
    storage.remove_empty_folders(FOLDER, 0.0)
    return len(rejected)


def _committed_folders(entries: Sequence[Entry]) -> list[str]:
    suffix = f"/{COMMIT}"
    return [entry.path.removesuffix(suffix) for entry in entries if entry.path.endswith(suffix)]


def _kept_folders(storage: Storage, entries: Sequence[Entry]) -> set[str]:
    """Folders of steps that have a manifest, and the attempts that a manifest or a rejected one names."""
    kept: set[str] = set()
    for folder in _committed_folders(entries):
        kept.add(folder)
        try:
            kept.add(read_manifest(storage, folder).folder)
        except (CheckpointDamaged, ValueError):  # which files it uses is unknown: all of the step stay
            kept |= {_attempt(entry.path) for entry in entries if entry.path.startswith(f"{folder}/")}
    for entry in entries:
        if entry.path.endswith(REJECTED):
            if attempt := _record(storage, entry.path)[1]:
                kept.add(attempt)
            else:
                folder = entry.path.rsplit("/", 1)[0]
                kept |= {_attempt(other.path) for other in entries if other.path.startswith(f"{folder}/")}
    return kept


def _record(storage: Storage, name: str) -> tuple[tuple[str, ...], str, bool]:
    """(why a checkpoint was set aside, the folder that its manifest names, whether its steps were undone); an empty
    folder where that cannot be read."""
    try:
        record = plain_json(storage.read_record(name, 2 * MAX_BYTES), 2 * MAX_BYTES)
        reasons, manifest = tuple(map(str, record["reasons"])), record["manifest"]
        is_undone = bool(record.get("undone"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return (f"its record cannot be read ({type(error).__name__}: {error})",), "", False
    try:
        attempt = plain_json(manifest)["folder"]
    except (ValueError, LookupError, TypeError):
        return reasons, "", is_undone
    # A foreign manifest may name files of another checkpoint, or outside of all.
    return reasons, attempt_in(name.rsplit("/", 1)[0], attempt) or "", is_undone


def _attempt(path: str) -> str:
    """`checkpoints/step-N/lineage-L/attempt-ID` of a file in it."""
    return "/".join(path.split("/")[:4])


# ---------------------------------------------------------------- retention


def interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """How often to save, after Young (CACM 1974) and Daly (FGCS 2006): sqrt(2 * cost * MTBF), at least the cost."""
    return max(cost_s, math.sqrt(2.0 * cost_s * mean_time_between_failures_s) - cost_s)


def keep(storage: Storage, step: int, lineage: int) -> None:
    """Exempt the checkpoint of `step` from retention, in place of the one that was kept before."""
    storage.replace(KEPT_NAME, json.dumps({"step": step, "lineage": lineage}).encode())


def kept_checkpoint(storage: Storage) -> tuple[int | None, int] | None:
    """(lineage, step) of the last `keep`; None if there is none. The lineage is None in records of older versions.
    Raises CheckpointDamaged, StorageFailed."""
    if not storage.exists(KEPT_NAME):
        return None
    try:
        record = plain_json(storage.read_record(KEPT_NAME, MAX_KEPT_BYTES), MAX_KEPT_BYTES)
        step, lineage = record["step"], record.get("lineage")
        if type(step) is not int or type(lineage) not in (int, type(None)):
            raise ValueError("it names no step")
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointDamaged(
            f"{KEPT_NAME} cannot be read ({error}): remove it, or have a checkpoint kept"
        ) from error
    return lineage, step


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int, kept: int | None = None) -> list[int]:
    """The steps whose checkpoints retention removes: all but the newest `keep_last`, multiples of `keep_every` (if not
    0), and `kept`."""
    ordered = sorted(steps)
    stays = set(ordered[-keep_last:]) | {step for step in ordered if keep_every and step % keep_every == 0} | {kept}
    return [step for step in ordered if step not in stays]


def prune(
    storage: Storage,
    keep_last: int,
    keep_every: int,
    lineage: int | None = None,
    *,
    read_bytes: bool = False,
    read_back: int | None = None,
) -> list[int]:
    """Remove superfluous checkpoints of one lineage or of each; returns their steps. The step of `keep` stays.

    If no checkpoint that stays is whole (by its files' sizes or, with `read_bytes`, by every byte), the newest that is
    whole stays, too. So does `read_back`, the newest step of which every byte was verified.
    """
    assert keep_last >= 1
    kept = kept_checkpoint(storage)
    by_lineage: dict[int, dict[int, str]] = {}
    for folder in committed(storage):
        of_lineage, step = age_key(folder)
        by_lineage.setdefault(of_lineage, {})[step] = folder
    removed = []
    for of_lineage, folders in by_lineage.items():
        if of_lineage < 0 or lineage not in (None, of_lineage):
            continue
        kept_step = kept[1] if kept is not None and kept[0] in (None, of_lineage) else None
        going = superfluous(folders, keep_last, keep_every, kept_step)
        if not going:
            continue
        newest_first = sorted(folders, key=lambda step: (step not in going, step), reverse=True)
        whole = next(
            (step for step in newest_first if not wrong_with(storage, folders[step], read_bytes=read_bytes)), None
        )
        for step in going:
            if step not in (whole, read_back):
                _remove_checkpoint(storage, folders[step])
                removed.append(step)
    return removed


def _remove_checkpoint(storage: Storage, folder: str) -> None:
    """Remove a checkpoint. Checkpoints that were set aside in its folder stay, unless all of them were undone."""
    rejected = [name for name, _ in storage.names(folder, recursive=False) if name.endswith(REJECTED)]
    try:
        are_undone = all(_record(storage, name)[2] for name in rejected)
        own = folder if are_undone else read_manifest(storage, folder).folder
    except CheckpointDamaged:  # which files are its own is unknown
        own = ""
    storage.remove(f"{folder}/{COMMIT}")  # first: without a manifest it does not count
    if own:
        storage.remove_folder(own)
