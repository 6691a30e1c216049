"""COMMIT.json, the manifest of a checkpoint: its tensors, its files, and what a resume reads.

A run's folder may come from anybody. Names, numbers and sizes of a manifest are validated here, once, before any of
them becomes a path, a shape or a setting. No tensors in here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import name_below, plain_json
from elastic_ring.state.checkpoints import FOLDER as FOLDER
from elastic_ring.state.header import OPTIMIZER, PARAMS, Count, ShardMeta
from elastic_ring.state.safetensors import DTYPES, Place
from elastic_ring.state.storage.backend import StoredFile
from elastic_ring.state.storage.folder import Storage

FORMAT = 1
COMMIT = "COMMIT.json"
REJECTED = "REJECTED.json"
MAX_BYTES = 1 << 28
"""The most bytes of a manifest: a kilobyte a tensor. A record of rejection holds one."""
NO_DIGEST = 64 * "0"
_ATTEMPT = re.compile(r"attempt-[\w.-]+")
_TENSOR = re.compile(rf"{PARAMS}/.+|{OPTIMIZER}/.+/.+")  # a parameter's name may have a slash
_Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class Described:
    """A stored tensor: its unsharded shape; `whole` if it is not cut by rows, so that every `cp_rank` has its own."""

    dtype: str
    shape: tuple[Count, ...]
    whole: bool
    part: Count

    @property
    def num_bytes(self) -> int:
        return Place(0, DTYPES[self.dtype], self.shape).num_bytes


@dataclass(frozen=True)
class Manifest:
    """The content of COMMIT.json: `cp` ranks of `num_parts` files each, and every tensor by name.

    Which rows of a tensor a file has follows from its full shape and `cp`, as torch.chunk cuts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count
    lineage: Count
    term: Count
    identity: str
    folder: str
    cp: _Ranks
    num_parts: _Ranks
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, Described]
    meta: ShardMeta
    run: Mapping[str, Any] = field(default_factory=dict)
    format: Annotated[int, Field(ge=1)] = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> bytes:
        """With the digest of the whole text, taken with zeros in the digest's place."""
        text = json.dumps({"sha256": NO_DIGEST, **asdict(self)}, indent=1).encode()
        return text.replace(NO_DIGEST.encode(), hashlib.sha256(text).hexdigest().encode(), 1)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Raises CheckpointDamaged if it is no manifest, has a wrong byte or contradicts itself; ValueError for a newer
        format."""
        try:
            values = plain_json(data, MAX_BYTES)
            digest = values.pop("sha256")
            right = hashlib.sha256(data.replace(digest.encode(), NO_DIGEST.encode(), 1)).hexdigest() == digest
            newer = values["format"] > FORMAT
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{where} is no manifest: {type(error).__name__}: {error}", path=where) from error
        if not right:
            raise CheckpointDamaged(f"{where} is not what was written: it has another digest", path=where)
        if newer:
            raise ValueError(
                f"{where} has format {values['format']}, this version reads up to {FORMAT}: use a newer elastic_ring"
            )
        try:
            manifest = _MANIFEST.validate_json(json.dumps(values), strict=True)
            manifest._check()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}"
            raise CheckpointDamaged(f"{where} is no manifest: {problem}", path=where) from error
        except (ValueError, TypeError) as error:
            raise CheckpointDamaged(f"{where} is no manifest: {error}", path=where) from error
        return manifest

    def _check(self) -> None:
        """Raises ValueError where names, numbers and sizes contradict each other."""
        folder = step_folder(self.step, self.lineage)
        if attempt_in(folder, self.folder) is None:
            raise ValueError(f"its folder {self.folder[:200]!r} is none of {folder}")
        if len(self.files) != self.cp * self.num_parts:
            raise ValueError(f"cp={self.cp} and num_parts={self.num_parts} have {len(self.files)} files")
        expected = {file_name(self.folder, rank, part) for rank in range(self.cp) for part in range(self.num_parts)}
        if odd := expected.symmetric_difference(file.name for file in self.files):
            raise ValueError(f"{min(odd)[:200]!r} is in its files or in its folder only")
        if any(file.num_bytes < 0 or re.fullmatch(r"[0-9a-f]{64}", file.sha256) is None for file in self.files):
            raise ValueError("a file without a size or a digest")
        total = 0
        for name, tensor in self.tensors.items():
            if not _TENSOR.fullmatch(name) or tensor.dtype not in DTYPES or tensor.part >= self.num_parts:
                raise ValueError(
                    f"{name[:200]!r} of type {tensor.dtype[:20]!r} in part {tensor.part} is no tensor of it"
                )
            if not tensor.whole and not tensor.shape:
                raise ValueError(f"{name[:200]!r} has no rows to cut")
            total += tensor.num_bytes * (self.cp if tensor.whole else 1)
        if total > self.num_bytes:
            raise ValueError(f"tensors of {total} bytes in files of {self.num_bytes}")
        _RUN.validate_json(json.dumps(self.run), strict=True)


class RunRecord(TypedDict, total=False):
    """The entries of `run` that a resume reads; it may have others."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    settings: dict[str, JsonValue]
    places: dict[str, str]
    resumed_from: tuple[dict[str, JsonValue], ...]
    corpus: tuple[CorpusVersion, ...]
    skips: tuple[BatchSkip, ...]


_MANIFEST, _RUN = TypeAdapter(Manifest), TypeAdapter(RunRecord)


# ---------------------------------------------------------------- names


def step_folder(step: int, lineage: int) -> str:
    return f"{FOLDER}/step-{step:08d}/lineage-{lineage:03d}"


def attempt_folder(step: int, lineage: int, name: str) -> str:
    """The folder of one attempt to write a checkpoint; `name` must never be used twice."""
    return f"{step_folder(step, lineage)}/attempt-{name}"


def attempt_in(folder: str, name: object) -> str | None:
    """`name`, from a record, if it is the folder of an attempt directly in `folder`; else None."""
    try:
        before, _, last = name_below(name).rpartition("/")
    except ValueError:
        return None
    return f"{folder}/{last}" if before == folder and _ATTEMPT.fullmatch(last) else None


def file_name(folder: str, cp_rank: int, part: int) -> str:
    return f"{folder}/shard-{cp_rank:05d}-part-{part:05d}.safetensors"


def located(uri: str, folder: str) -> tuple[str, str]:
    """(storage, folder in it) of a checkpoint: in the storage `uri`, or in the one that a whole path names."""
    storage, separator, rest = folder.rpartition(f"/{FOLDER}/")
    return (storage, f"{FOLDER}/{rest}") if separator else (uri, folder)


def age_key(path: str) -> tuple[int, int]:
    """(lineage, step) of a path in or under `checkpoints/step-N/lineage-L`; (-1, -1) for other paths."""
    match = re.match(rf"{FOLDER}/step-(\d+)/lineage-(\d+)(/|$)", path)
    return (int(match[2]), int(match[1])) if match else (-1, -1)


LINEAGES = "lineages"


def lineage_name(lineage: int) -> str:
    """The record of where a lineage began."""
    return f"{LINEAGES}/{lineage:03d}.json"


def lineage_of_record(name: str) -> int:
    """-1 if the name is not that of a lineage's record."""
    match = re.fullmatch(rf"{LINEAGES}/(\d+)\.json", name)
    return int(match[1]) if match else -1


# ---------------------------------------------------------------- reading


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Raises CheckpointDamaged, also for a manifest of another folder; StorageFailed; ValueError (a newer format)."""
    name = f"{folder}/{COMMIT}"
    manifest = Manifest.from_json(storage.read_record(name, MAX_BYTES), storage.at(name))
    if (own := step_folder(manifest.step, manifest.lineage)) != folder:
        raise CheckpointDamaged(f"{storage.at(name)} is not of this folder: it is the manifest of {own}", path=name)
    return manifest


def rows_of(shape: tuple[int, ...], cp_rank: int, cp: int) -> tuple[int, int]:
    """[start, stop) of the first dimension on `cp_rank`, as torch.chunk and FSDP2 cut it."""
    per_rank = -(-shape[0] // cp)
    return min(shape[0], cp_rank * per_rank), min(shape[0], (cp_rank + 1) * per_rank)
