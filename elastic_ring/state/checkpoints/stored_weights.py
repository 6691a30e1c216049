"""Reads weights tensor by tensor: final weights from one safetensors file or several with an index, and a run's
weights, final or of its newest checkpoint, as the first values of another run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from elastic_ring.errors import CheckpointDamaged, StorageFailed, WeightsDamaged
from elastic_ring.files import few, shown_url
from elastic_ring.state.checkpoints import zero3
from elastic_ring.state.checkpoints.checkpoint import Reader, committed, wrong_with
from elastic_ring.state.checkpoints.manifest import LINEAGES, age_key, lineage_of_record, located, read_manifest
from elastic_ring.state.checkpoints.retention import kept_checkpoint
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_INDEX, are_there, read_index
from elastic_ring.state.header import PARAMS
from elastic_ring.state.safetensors import Place, read_places
from elastic_ring.state.storage.folder import Storage


@dataclass(frozen=True)
class StoredWeights:
    """Weights by name; each tensor is read on access."""

    storage: Storage
    places: Mapping[str, tuple[str, Place]]
    """(file, place in it) of each tensor."""

    @classmethod
    def open(cls, where: str | os.PathLike[str]) -> StoredWeights:
        """`where`: the file, the index, or the folder that has either; a path or a URI. Reads the headers.

        Raises ValueError for weights that are not there, not whole or not safetensors.
        """
        storage, name = _locate_weights(os.fspath(where))
        try:
            if not name.endswith(".json"):
                return cls(storage, _places(storage, name))
            weight_map = read_index(storage.read_record(name), storage.at(name))
            places: dict[str, tuple[str, Place]] = {}
            for file in sorted(set(weight_map.values())):
                places |= {key: place for key, place in _places(storage, file).items() if weight_map.get(key) == file}
        except StorageFailed as error:
            raise ValueError(f"weights cannot be read as safetensors: {error.message}") from error
        if missing := sorted(weight_map.keys() - places.keys()):
            raise ValueError(f"{storage.at(name)}: {missing[0]} is not in {weight_map[missing[0]]}, which it names")
        return cls(storage, places)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, (_, place) in self.places.items()}

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or its rows [start, stop). Raises ValueError for a file that can no longer be read."""
        file, place = self.places[name]
        if rows is not None and place.shape:
            row_bytes = place.num_bytes // max(1, place.shape[0])
            shape = (rows[1] - rows[0], *place.shape[1:])
            place = Place(place.start + rows[0] * row_bytes, place.dtype, shape)
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        try:
            data = bytearray(self.storage.read(file, place.start, place.num_bytes))
        except StorageFailed as error:
            raise ValueError(f"weights cannot be read: {error.message}") from error
        if len(data) != place.num_bytes:
            raise ValueError(f"{self.storage.at(file)}: is cut off in {name}")
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


@dataclass(frozen=True)
class CheckpointWeights:
    """The fp32 weights of a run's checkpoint by name, as `StoredWeights`."""

    reader: Reader
    newest_lineage: int
    """Of the run: a checkpoint of another one is of a branch that the run may have left."""

    @classmethod
    def open(cls, where: str, step: int | None) -> CheckpointWeights:
        """The checkpoint of `step` of the run in the folder `where`, of its newest lineage that has one; None: the one
        that retention keeps as the best. Reads and verifies every byte: files may be removed while others are exported.
        Raises ValueError without one, CheckpointDamaged, StorageFailed."""
        storage, _ = _locate_run(where)
        if saved := next(iter(zero3.saved(storage)), None):
            raise ValueError(
                f"{storage.at(saved)} is in DeepSpeed's format: train to the last step, then export without a step"
            )
        folders = [folder for folder in committed(storage) if age_key(folder) >= (0, 0)]
        begun = [lineage_of_record(name) for name, _ in storage.names(LINEAGES)]
        newest_lineage, key = max([*begun, *(age_key(folder)[0] for folder in folders)], default=0), f"step={step}"
        if step is None:
            kept = kept_checkpoint(storage)
            if kept is None:
                raise ValueError(f"best=True: {storage.uri} keeps none: train with --keep-best (KeepBest)")
            key, (lineage, step) = "best=True", kept
            if lineage not in (None, newest_lineage):
                raise ValueError(
                    f"best=True: {storage.uri} keeps step {step} of lineage {lineage}, and the run has begun lineage "
                    f"{newest_lineage} since: give a step"
                )
            folders = [folder for folder in folders if age_key(folder)[0] == newest_lineage]
        folder = next((folder for folder in folders if age_key(folder)[1] == step), None)
        if folder is None:
            steps = few(sorted({age_key(folder)[1] for folder in folders}), 20)
            raise ValueError(f"{key}: {storage.uri} has no checkpoint of step {step}; there are {steps or 'none'}")
        manifest = read_manifest(storage, folder)
        if wrong := wrong_with(storage, folder):
            raise CheckpointDamaged(f"{storage.at(folder)}: {'; '.join(wrong)}", path=folder)
        return cls(Reader(storage, manifest, whole_files=False), newest_lineage)

    @property
    def branch(self) -> str:
        """What tells that the run may have left this checkpoint's branch; empty where it has not."""
        own = self.reader.manifest.lineage
        return "" if own == self.newest_lineage else f"lineage {own}; the run went on in lineage {self.newest_lineage}"

    @property
    def step(self) -> int:
        return self.reader.manifest.step

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        tensors, prefix = self.reader.manifest.tensors.items(), f"{PARAMS}/"
        return {name.removeprefix(prefix): tensor.shape for name, tensor in tensors if name.startswith(prefix)}

    def tensor(self, name: str) -> Tensor:
        return self.reader.tensor(f"{PARAMS}/{name}", 0, 1)


@dataclass(frozen=True)
class RunWeights:
    """First values for a run: the final weights of another run or, before it has ended, of its newest checkpoint.
    `folder`: of the checkpoint; empty for final weights. `digest`: of the files' digests, wherever they lie."""

    uri: str
    folder: str
    digest: str

    def __repr__(self) -> str:
        """Part of the run's identity, which is the same wherever the files lie."""
        return f"RunWeights({self.digest})"

    @classmethod
    def open(cls, where: str) -> RunWeights:
        """`where`: a run's folder, or one of its checkpoints. Reads manifests and headers; a checkpoint's file is
        verified when it is first read. Raises ValueError where there are no weights."""
        storage, folder = _locate_run(where)
        try:
            if not folder and are_there(storage):
                return cls(storage.uri, "", _digest(storage))
            folder = folder or next(iter(committed(storage)), "")
            if not folder:
                raise ValueError(f"from={where!r}: has neither final weights nor a checkpoint: give a run's folder")
            manifest = read_manifest(storage, folder)
            if wrong := wrong_with(storage, folder, read_bytes=False):
                raise ValueError(f"from={where!r}: {folder} is damaged ({wrong[0]}): give another checkpoint")
            files = sorted(f"{file.name} {file.sha256}" for file in manifest.files)
        except (StorageFailed, CheckpointDamaged) as error:
            raise ValueError(f"from={where!r}: {error.message}") from error
        return cls(storage.uri, folder, hashlib.sha256("\n".join(files).encode()).hexdigest()[:16])

    @property
    def record(self) -> dict[str, str]:
        """For the run's config.json, from which a later submission takes the same weights."""
        return {"uri": shown_url(self.uri), "folder": self.folder, "digest": self.digest}

    @classmethod
    def of_record(cls, where: str, record: object) -> RunWeights | None:
        """The weights that `record` names, if it names weights of `where`; nothing is read."""
        storage, folder = _locate_run(where)
        if not isinstance(record, dict) or record.get("uri") != shown_url(storage.uri):
            return None
        there, digest = str(record.get("folder", "")), str(record.get("digest", ""))
        is_checkpoint = age_key(there) != (-1, -1) and ".." not in there
        if (folder and folder != there) or (there and not is_checkpoint):
            return None
        return cls(storage.uri, there, digest)

    def check_unchanged(self) -> None:
        """Raises ValueError if they are gone or changed."""
        now = RunWeights.open(f"{self.uri}/{self.folder}".rstrip("/"))
        if now != self:
            raise ValueError(
                f"from={self.uri!r}: has other weights than those with which this run began, and the run has no "
                "checkpoint yet: give it another name, or resume=never to begin anew"
            )

    @cached_property
    def _stored(self) -> StoredWeights | Reader:
        storage = Storage(self.uri)
        if not self.folder:
            return StoredWeights.open(self.uri)
        return Reader(storage, read_manifest(storage, self.folder), whole_files=False, digests=True)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        if isinstance(self._stored, StoredWeights):
            return self._stored.shapes
        return CheckpointWeights(self._stored, 0).shapes

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError if the run has other parameters than these."""
        own = self._shapes
        for name in [*shapes, *own]:
            if own.get(name) != shapes.get(name):
                there, here = (f"has {name} of shape {model.get(name)}" for model in (own, shapes))
                raise ValueError(
                    f"from={self.uri!r} is of another model: it {there}, this one {here}; give the run's own sizes or "
                    "--model-folder"
                )

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        """As `train.task.Initial` says. Raises WeightsDamaged, StorageFailed."""
        place = f"{PARAMS}/{name}"
        try:
            stored = self._stored
            if isinstance(stored, StoredWeights):
                return stored.tensor(name, rows).to(torch.float32)
            if rows is not None and not stored.described(place).whole:
                return stored.rows(place, *rows).to(torch.float32)
            whole = stored.tensor(place, 0, 1).to(torch.float32)
        except (CheckpointDamaged, ValueError) as error:
            if isinstance(error.__cause__, StorageFailed):
                raise error.__cause__ from error
            message = getattr(error, "message", str(error))
            raise WeightsDamaged(f"from={self.uri!r}: {message}: give another checkpoint") from error
        return whole if rows is None or not whole.dim() else whole[rows[0] : rows[1]]


def _locate_run(where: str) -> tuple[Storage, str]:
    """(a run's storage, folder of the named checkpoint or "")."""
    uri, folder = located("", where.rstrip("/"))
    storage = Storage(uri or where.rstrip("/"))
    if storage.is_local:  # workers have folders of their own
        storage = Storage(os.path.abspath(storage.uri))
    return storage, folder if uri else ""


def _digest(storage: Storage) -> str:
    """The digest of the index, or of the single file's header: both hold the digest of the weights."""
    if storage.exists(WEIGHTS_INDEX):
        return hashlib.sha256(storage.read_record(WEIGHTS_INDEX)).hexdigest()[:16]
    length = int.from_bytes(storage.read(WEIGHTS, 0, 8), "little")
    return hashlib.sha256(storage.read(WEIGHTS, 8, length)).hexdigest()[:16]


def _locate_weights(where: str) -> tuple[Storage, str]:
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
            "written when a run completes, and elastic-ring export --step or --best writes those of a checkpoint"
        )
    return storage, name


def _places(storage: Storage, file: str) -> dict[str, tuple[str, Place]]:
    sizes = dict(storage.names(os.path.dirname(file), recursive=False))
    if file not in sizes:
        raise ValueError(f"{storage.at(file)}: cannot be read as safetensors: there is no such file")
    try:
        places = read_places(lambda start, num_bytes: storage.read(file, start, num_bytes), sizes[file])
    except ValueError as error:
        raise ValueError(f"{storage.at(file)}: cannot be read as safetensors ({error})") from error
    return {name: (file, place) for name, place in places.items()}
