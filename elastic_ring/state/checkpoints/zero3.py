"""Checkpoints of ZeRO-3 in Ray Train: which there are, and which are whole. Their format is DeepSpeed's, and Ray Train
removes old ones.

A folder of a run's folder has the files of all ranks. STATE comes last, from one rank once all others are stored, and
names them: without it a checkpoint is unfinished, and does not count.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import field

from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import few, plain_json
from elastic_ring.state.storage.folder import Storage
from elastic_ring.validation import NonNegativeInt, PositiveInt, from_plain, settings

log = logging.getLogger(__name__)

STATE, UNFINISHED = "elastic_ring.json", "unfinished"
_FOLDER = re.compile(r"checkpoint-([0-9]{9,12})-([0-9]{1,9})")


@settings
class SavedState:
    """The content of STATE. `files`: bytes of every other file by its name; older versions named none."""

    step: NonNegativeInt
    num_workers: PositiveInt
    skipped_in_a_row: NonNegativeInt = 0  # older versions did not count them
    files: Mapping[str, int] = field(default_factory=dict)


def age_key(folder: str) -> tuple[int, int]:
    """(generation, step) by a folder's name, the larger the newer; (-1, -1) for other names."""
    match = _FOLDER.fullmatch(folder)
    return (int(match[2]), int(match[1])) if match else (-1, -1)


def saved(storage: Storage) -> dict[str, SavedState | str]:
    """By folder, newest first, what each checkpoint is, or why it does not count."""
    folders = sorted(filter(_FOLDER.fullmatch, storage.folders()), key=age_key, reverse=True)
    return {folder: _state_of(storage, folder) for folder in folders}


def _state_of(storage: Storage, folder: str) -> SavedState | str:
    sizes = {name.removeprefix(f"{folder}/"): num_bytes for name, num_bytes in storage.names(folder)}
    if STATE not in sizes:
        return UNFINISHED
    try:
        state = from_plain(SavedState, plain_json(storage.read_record(f"{folder}/{STATE}")))
    except ValueError as error:
        return f"{STATE} does not say what it is: {error}"
    wrong = [f"{name!r} of {size} bytes" for name, size in state.files.items() if sizes.get(name) != size]
    return f"lacks {few(wrong, 3)}" if wrong else state


def newest_whole(storage: Storage, reported: Collection[str]) -> tuple[str, SavedState] | None:
    """The newest checkpoint that counts, or None. `reported`: the folders that Ray Train has, of an older version's the
    only ones that count. Raises CheckpointDamaged where none counts, but one is damaged or reported."""
    damaged = list[str]()
    for folder, state in saved(storage).items():
        if isinstance(state, SavedState) and (state.files or folder in reported):
            if damaged:
                log.warning("%s is taken, as newer ones are not whole: %s", folder, few(damaged, 3))
            return folder, state
        if isinstance(state, str) and (state != UNFINISHED or folder in reported):
            damaged.append(f"{storage.at(folder)} {state}")
    if wrong := few(damaged or [f"{storage.at(name)} is gone" for name in filter(_FOLDER.fullmatch, reported)], 3):
        raise CheckpointDamaged(f"no checkpoint is whole: {wrong}", path=storage.uri)
    return None
