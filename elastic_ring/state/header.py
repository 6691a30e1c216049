"""The header of a shard, which goes before its tensors in heals and copies: JSON, so that reading it runs no code.

Tensors have the names and types of a checkpoint's; everything else of the state is plain JSON values. A header that
is not exactly of this form is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter
from torch import Tensor

from elastic_ring.errors import DigestMismatch
from elastic_ring.files import MAX_JSON_DEPTH, plain_json
from elastic_ring.state.safetensors import DTYPES, Place, dtype_name

PARAMS, OPTIMIZER = "params", "optimizer"
"""Tensors are named `params/NAME` and `optimizer/NAME/FIELD`."""
MAX_HEADER_BYTES = 1 << 28
MAX_DEPTH = MAX_JSON_DEPTH // 2
NO_DIGEST = 64 * "0"
"""The digest of a shard whose bytes another digest proves (`state.sealed`)."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]


@dataclass(frozen=True)
class Counters:
    """`applied`: steps whose result is in the shard, i.e. the next step to run. Skips are results too."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    applied: Count = 0
    skipped: Count = 0
    skipped_in_a_row: Count = 0


@dataclass(frozen=True)
class ShardMeta:
    """The part of a shard's state that is no tensor. `groups`: the optimizer's, with the names of their `params`;
    `plain`: values of the optimizer's state by parameter."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    counters: Counters
    groups: tuple[dict[str, JsonValue], ...]
    plain: dict[str, dict[str, JsonValue]]

    def __post_init__(self) -> None:
        for group in self.groups:
            names = group.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("a group of the optimizer without the names of its parameters")

    @classmethod
    def from_plain(cls, value: object) -> ShardMeta:
        """From `dataclasses.asdict`, or JSON of it. Raises ValueError."""
        return _META.validate_json(json.dumps(value), strict=True)


class TensorSpec(NamedTuple):
    """How to allocate a tensor before it arrives. `dtype`: a name of `DTYPES`."""

    dtype: str
    shape: tuple[Count, ...]
    is_cuda: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.is_cuda)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return Place(0, self.torch_dtype, self.shape).num_bytes


@dataclass(frozen=True)
class Header:
    """A shard without its tensors: `layout` has their names, types and shapes in order; `digest` as of `digest_of`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    cp_rank: Count
    meta: ShardMeta
    layout: Mapping[str, TensorSpec]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def to_bytes(self) -> bytes:
        return json.dumps(self, default=vars).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Raises DigestMismatch for anything that `to_bytes` does not write."""
        try:
            plain_json(data, MAX_HEADER_BYTES)  # bounds its length and depth
            header = _HEADER.validate_json(data, strict=True)
            if unknown := {spec.dtype for spec in header.layout.values()} - DTYPES.keys():
                raise ValueError(f"tensors of type {min(unknown)[:20]!r}")
        except ValueError as error:
            raise DigestMismatch(f"the header of a healed shard is malformed: {str(error)[:1000]}") from error
        return header


def plain_value(value: object, where: str, depth: int = 0) -> JsonValue:
    """A value as JSON can hold it: tuples become lists, tensors of one element numbers. Raises ValueError, which names
    `where`, for other tensors and objects, keys that are no text, and more than MAX_DEPTH levels."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return plain_value(value.item(), where)
    if isinstance(value, dict) and depth < MAX_DEPTH and all(isinstance(key, str) for key in value):
        return {key: plain_value(part, f"{where}[{key!r}]", depth + 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        return [plain_value(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(value)]
    raise ValueError(
        f"{where[:200]} is a {type(value).__module__}.{type(value).__qualname__}, which no checkpoint, copy or heal "
        "holds: an optimizer may keep tensors by parameter, and beside them numbers, texts, None, lists and dicts by "
        f"text, of at most {MAX_DEPTH} levels"
    )


_META, _HEADER = TypeAdapter(ShardMeta), TypeAdapter(Header)
