"""Reads final weights tensor by tensor, from one safetensors file or from several with an index, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_ring.errors import StorageFailed
from elastic_ring.state.checkpoints.header import Place, read_places
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_INDEX, read_index
from elastic_ring.state.storage.folder import Storage


@dataclass(frozen=True)
class StoredWeights:
    """Weights by name; each tensor is read on access."""

    storage: Storage
    places: Mapping[str, tuple[str, Place]]
    """The file of each tensor, and where it is in it."""

    @classmethod
    def open(cls, where: str | os.PathLike[str]) -> StoredWeights:
        """`where`: the file, the index, or the folder that has either; a path or a URI. Reads the headers.

        Raises ValueError for weights that are not there, not whole or not safetensors.
        """
        storage, name = _located(os.fspath(where))
        try:
            if not name.endswith(".json"):
                return cls(storage, _places(storage, name))
            weight_map = read_index(storage.read_record(name), storage.at(name))
            found: dict[str, tuple[str, Place]] = {}
            for file in sorted(set(weight_map.values())):
                found |= {key: place for key, place in _places(storage, file).items() if weight_map.get(key) == file}
        except StorageFailed as error:
            raise ValueError(f"weights cannot be read as safetensors: {error.message}") from error
        if missing := sorted(weight_map.keys() - found.keys()):
            raise ValueError(f"{storage.at(name)}: {missing[0]} is not in {weight_map[missing[0]]}, which it names")
        return cls(storage, found)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, (_, place) in self.places.items()}

    def tensor(self, name: str) -> Tensor:
        """Raises ValueError for a file that can no longer be read."""
        file, place = self.places[name]
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        try:
            data = bytearray(self.storage.read(file, place.start, place.num_bytes))
        except StorageFailed as error:
            raise ValueError(f"weights cannot be read: {error.message}") from error
        if len(data) != place.num_bytes:
            raise ValueError(f"{self.storage.at(file)}: is cut off in {name}")
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


def _located(where: str) -> tuple[Storage, str]:
    """(folder, name in it) of a file of weights or an index."""
    if os.path.isfile(where) or where.endswith((".safetensors", ".json")):
        folder, name = os.path.split(where)
        return Storage(folder or "."), name
    storage = Storage(where)
    try:
        name = next((name for name in (WEIGHTS_INDEX, WEIGHTS) if storage.exists(name)), "")
    except StorageFailed as error:
        raise ValueError(f"weights cannot be looked up: {error.message}") from error
    if not name:
        raise ValueError(
            f"{where}: cannot be read as weights: it has neither {WEIGHTS} nor {WEIGHTS_INDEX}; final weights are "
            "written when a run completes"
        )
    return storage, name


def _places(storage: Storage, file: str) -> dict[str, tuple[str, Place]]:
    size = _size(storage, file)
    try:
        found = read_places(lambda start, num_bytes: storage.read(file, start, num_bytes), size)
    except ValueError as error:
        raise ValueError(f"{storage.at(file)}: cannot be read as safetensors ({error})") from error
    return {name: (file, place) for name, place in found.items()}


def _size(storage: Storage, file: str) -> int:
    folder = os.path.dirname(file)
    sizes = dict(storage.names(folder, recursive=False))
    if file not in sizes:
        raise ValueError(f"{storage.at(file)}: cannot be read as safetensors: there is no such file")
    return sizes[file]
