"""The files of final weights: one safetensors file, or several with the index that names them. No tensors in here.

The index is Hugging Face's: `weight_map` has each tensor's file, relative to the index. Several files lie in a folder
whose name is never used twice (`weights/ATTEMPT`), so that no attempt overwrites another; they count once the index,
which is replaced whole, names them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping

from elastic_ring.errors import StorageFailed
from elastic_ring.files import name_below, plain_json
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"
WEIGHTS_INDEX = "weights.safetensors.index.json"
WEIGHTS_FOLDER = "weights"
MAX_FILE_BYTES = 4 << 30


def grouped(sizes: Mapping[str, int], limit_bytes: int) -> Iterator[list[str]]:
    """The names in order, grouped into files of at most `limit_bytes`; a larger tensor has a file of its own."""
    group: list[str] = []
    group_bytes = 0
    for name, num_bytes in sizes.items():
        if group and group_bytes + num_bytes > limit_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += num_bytes
    if group:
        yield group


def file_names(attempt: str, num_files: int) -> list[str]:
    """A single file is always `weights.safetensors`; several have names that no other attempt has."""
    if num_files == 1:
        return [WEIGHTS]
    return [
        f"{WEIGHTS_FOLDER}/{attempt}/weights-{number:05d}-of-{num_files:05d}.safetensors"
        for number in range(1, num_files + 1)
    ]


def index_text(weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> bytes:
    """An index as Hugging Face's libraries write it; `metadata` has at least `total_size`, in bytes."""
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


def read_index(data: bytes, where: str) -> dict[str, str]:
    """The file of each tensor. Raises ValueError for an invalid index."""
    try:
        weight_map = plain_json(data)["weight_map"]
        return {str(name): name_below(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: cannot be read as an index of weights ({type(error).__name__}: {error})") from error


def are_there(storage: Storage) -> bool:
    """Whether a run's folder has final weights: the single file, or all files of the index. Raises StorageFailed."""
    if not storage.exists(WEIGHTS_INDEX):
        return storage.exists(WEIGHTS)
    try:
        files = set(read_index(storage.read_record(WEIGHTS_INDEX), storage.at(WEIGHTS_INDEX)).values())
    except ValueError:
        return False
    return files <= {name for name, _ in storage.names(WEIGHTS_FOLDER)}


def remove_others(storage: Storage, kept: list[str]) -> None:
    """Remove all files of weights that are not in `kept`, with the temporary files and uploads of failed writers.

    Raises nothing: the weights are whole without it.
    """
    try:
        if WEIGHTS_INDEX not in kept:
            storage.remove(WEIGHTS_INDEX)  # before the files that it names
        # The dot: temporary files of `Storage.replace`.
        beside = [name for name, _ in storage.names(recursive=False) if name.startswith((WEIGHTS, f".{WEIGHTS}"))]
        for name in [*beside, *(name for name, _ in storage.names(WEIGHTS_FOLDER))]:
            if name not in kept and name != WEIGHTS_INDEX:
                storage.remove(name)
        storage.remove_empty_folders(WEIGHTS_FOLDER, 0.0)
        for upload in storage.uploads():
            if upload.path.startswith(WEIGHTS_FOLDER):  # the single file's name begins so, too
                storage.abort(upload)
    except StorageFailed as error:
        log.warning("files of earlier attempts to write the weights are left: %s", error)
