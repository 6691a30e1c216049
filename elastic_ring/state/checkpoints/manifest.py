"""COMMIT.json, the manifest of a checkpoint: what it holds, where its files lie, and what of it is believed.

A run's folder may come from anybody. What a manifest says of names, numbers and sizes is validated here, once, before
any of it becomes a path, a shape or a setting. No tensors in here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import name_below, plain_json
from elastic_ring.state.checkpoints import FOLDER as FOLDER
from elastic_ring.state.header import Counters
from elastic_ring.state.storage.backend import StoredFile
from elastic_ring.state.storage.folder import Storage

FORMAT = 1
COMMIT = "COMMIT.json"
REJECTED = "REJECTED.json"
MAX_BYTES = 1 << 28
"""The most bytes of a manifest: a kilobyte a tensor. A record of rejection holds one."""
NO_DIGEST = 64 * "0"
PARAMS, OPTIMIZER = "params", "optimizer"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ATTEMPT = re.compile(r"attempt-[\w.-]+")
_TENSOR = re.compile(rf"{PARAMS}/.+|{OPTIMIZER}/.+/.+")  # a parameter's name may have a slash
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class Described:
    """A stored tensor: its unsharded shape; `whole` if it is not cut by rows, so that every `cp_rank` has its own."""

    dtype: str
    shape: tuple[_Count, ...]
    whole: bool
    part: _Count

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(DTYPES[self.dtype].itemsize)


@dataclass(frozen=True)
class Manifest:
    """What COMMIT.json holds: `cp` ranks of `num_parts` files each, and every tensor by name.

    Which rows of a tensor a file has follows from its full shape and `cp`, as torch.chunk cuts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: _Count
    lineage: _Count
    term: _Count
    identity: str
    folder: str
    cp: _Ranks
    num_parts: _Ranks
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, Described]
    meta: Mapping[str, Any]
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
            kind: Any = cls
            found: Manifest = _adapter(kind).validate_json(json.dumps(values), strict=True)
            found._check()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            told = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}"
            raise CheckpointDamaged(f"{where} is no manifest: {told}", path=where) from error
        except (ValueError, TypeError) as error:
            raise CheckpointDamaged(f"{where} is no manifest: {error}", path=where) from error
        return found

    def _check(self) -> None:
        """Raises ValueError where names, numbers and sizes do not go together."""
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
        for name, one in self.tensors.items():
            if not _TENSOR.fullmatch(name) or one.dtype not in DTYPES or one.part >= self.num_parts:
                raise ValueError(f"{name[:200]!r} of type {one.dtype[:20]!r} in part {one.part} is no tensor of it")
            if not one.whole and not one.shape:
                raise ValueError(f"{name[:200]!r} has no rows to cut")
            total += one.num_bytes * (self.cp if one.whole else 1)
        if total > self.num_bytes:
            raise ValueError(f"tensors of {total} bytes in files of {self.num_bytes}")
        for key, kind in _META.items():
            _adapter(kind).validate_json(json.dumps(self.meta.get(key)), strict=True)
        for key, kind in _RUN.items():
            if key in self.run:
                _adapter(kind).validate_json(json.dumps(self.run[key]), strict=True)
        Counters(**self.meta["counters"])
        for group in self.meta["groups"]:
            _adapter(tuple[str, ...]).validate_json(json.dumps(group.get("params")), strict=True)


_META: dict[str, Any] = {
    "counters": dict[str, _Count],
    "groups": tuple[dict[str, Any], ...],
    "plain": dict[str, dict[str, Any]],
}
_RUN: dict[str, Any] = {
    "settings": dict[str, Any],
    "places": dict[str, str],
    "resumed_from": tuple[dict[str, Any], ...],
    "corpus": tuple[CorpusVersion, ...],
    "skips": tuple[BatchSkip, ...],
}
"""What of `meta` must be there, and of `run` may be: what a resume reads."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# ---------------------------------------------------------------- names


def step_folder(step: int, lineage: int) -> str:
    return f"{FOLDER}/step-{step:08d}/lineage-{lineage:03d}"


def attempt_folder(step: int, lineage: int, name: str) -> str:
    """The folder of one attempt to write a checkpoint; `name` must never be used twice."""
    return f"{step_folder(step, lineage)}/attempt-{name}"


def attempt_in(folder: str, name: object) -> str | None:
    """`name`, which a record gives, if it is the folder of an attempt directly in `folder`; else None."""
    try:
        before, _, last = name_below(name).rpartition("/")
    except ValueError:
        return None
    return f"{folder}/{last}" if before == folder and _ATTEMPT.fullmatch(last) else None


def file_name(folder: str, cp_rank: int, part: int) -> str:
    return f"{folder}/shard-{cp_rank:05d}-part-{part:05d}.safetensors"


def located(uri: str, folder: str) -> tuple[str, str]:
    """(storage, folder in it) of a checkpoint: in the storage `uri`, or in another that a whole path names."""
    before, found, after = folder.rpartition(f"/{FOLDER}/")
    return (before, f"{FOLDER}/{after}") if found else (uri, folder)


def age_key(path: str) -> tuple[int, int]:
    """(lineage, step) of a path in or under `checkpoints/step-N/lineage-L`; (-1, -1) of one that has none."""
    found = re.match(rf"{FOLDER}/step-(\d+)/lineage-(\d+)(/|$)", path)
    return (int(found[2]), int(found[1])) if found else (-1, -1)


# ---------------------------------------------------------------- reading


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Raises CheckpointDamaged, also where the manifest is not of this folder, as its name says; StorageFailed;
    ValueError (a newer format)."""
    name = f"{folder}/{COMMIT}"
    found = Manifest.from_json(storage.read_record(name, MAX_BYTES), storage.at(name))
    if (says := step_folder(found.step, found.lineage)) != folder:
        raise CheckpointDamaged(f"{storage.at(name)} is not of this folder: it is the manifest of {says}", path=name)
    return found


def rows_of(shape: tuple[int, ...], cp_rank: int, cp: int) -> tuple[int, int]:
    """[start, stop) of the first dimension on `cp_rank`, as torch.chunk and FSDP2 cut it."""
    per_rank = -(-shape[0] // cp)
    return min(shape[0], cp_rank * per_rank), min(shape[0], (cp_rank + 1) * per_rank)
