"""The header of a shard, sent before its tensors: JSON, so that reading it runs no code.

Tensors are named by their index, dtypes by names from a fixed table, and containers are tagged. A header that is
not exactly of this form is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_ring.errors import DigestMismatch
from elastic_ring.files import plain_json

MAX_HEADER_BYTES = 1 << 28
MAX_DEPTH = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NO_DIGEST = 64 * "0"
"""The digest of a shard whose bytes another digest proves (`state.sealed`)."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Counters:
    """`applied`: steps whose result is in the shard, i.e. the next step to run. Skips are results too."""

    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Slot:
    """Stands for tensor `index` in a skeleton."""

    index: int


@dataclass(frozen=True)
class TensorSpec:
    """What is allocated for a tensor before it arrives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_cuda: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.is_cuda)


@dataclass(frozen=True)
class Header:
    """What a shard's tensors are. `skeleton` is the state with a `Slot` for each tensor; `digest` as of `digest_of`."""

    cp_rank: int
    counters: Counters
    skeleton: Any
    layout: tuple[TensorSpec, ...]
    digest: str

    def to_bytes(self) -> bytes:
        """Raises ValueError, which names the value, for state that is neither tensors nor plain data."""
        return json.dumps(
            {
                "cp_rank": self.cp_rank,
                "counters": asdict(self.counters),
                "skeleton": encode(self.skeleton),
                "layout": [[_name_of(spec.dtype), list(spec.shape), spec.is_cuda] for spec in self.layout],
                "digest": self.digest,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Raises DigestMismatch for anything that `to_bytes` does not write."""
        try:
            found = plain_json(data, MAX_HEADER_BYTES, 4 * MAX_DEPTH)
            layout = tuple(_tensor_spec(*entry) for entry in found["layout"])
            counters = Counters(**{name: _count(value) for name, value in found["counters"].items()})
            skeleton = decode(found["skeleton"], len(layout))
            header = cls(_count(found["cp_rank"]), counters, skeleton, layout, found["digest"])
            if not _DIGEST.fullmatch(header.digest) or len(found) != len(cls.__dataclass_fields__):
                raise ValueError("no digest, or other fields")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DigestMismatch(f"the header of a healed shard is malformed: {error!r}") from error
        return header


def encode(tree: Any, path: str = "", depth: int = 0) -> Any:
    """A skeleton as JSON data: scalars as they are, containers as {"list" | "tuple" | "dict": items}."""
    if tree is None or isinstance(tree, (bool, str)):
        return tree
    if isinstance(tree, int):
        return int(tree)
    if isinstance(tree, float):
        return float(tree)  # JSON has the shortest text that reads back as the same number
    if isinstance(tree, Slot):
        return {"tensor": tree.index}
    if isinstance(tree, torch.dtype):
        return {"dtype": _name_of(tree)}
    if depth >= MAX_DEPTH:
        raise ValueError(f"the optimizer's state cannot be healed: {path} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(tree, dict):
        items = [
            [encode(key, f"a key of {path}", depth + 1), encode(value, f"{path}[{key!r}]", depth + 1)]
            for key, value in tree.items()
        ]
        return {"dict": items}
    if isinstance(tree, (list, tuple)):
        items = [encode(value, f"{path}[{index}]", depth + 1) for index, value in enumerate(tree)]
        return {"list" if isinstance(tree, list) else "tuple": items}
    raise ValueError(
        f"the optimizer's state cannot be healed: {path or 'it'} is a {type(tree).__module__}."
        f"{type(tree).__qualname__}. A state_dict may hold tensors, numbers, strings, None, lists, tuples and dicts: "
        "keep anything else outside of it, or as a tensor"
    )


def decode(data: Any, num_tensors: int) -> Any:
    """The skeleton that `encode` was given. Raises ValueError, TypeError."""
    if not isinstance(data, dict):
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        raise ValueError(f"a bare {type(data).__name__}")
    [(kind, content)] = data.items()
    match kind:
        case "tensor" if _count(content) < num_tensors:
            return Slot(content)
        case "dtype":
            return DTYPES[content]
        case "list":
            return [decode(item, num_tensors) for item in content]
        case "tuple":
            return tuple(decode(item, num_tensors) for item in content)
        case "dict":
            return {decode(key, num_tensors): decode(value, num_tensors) for key, value in content}
    raise ValueError(f"a tag {kind!r}")


def take_tensors(tree: Any, out: list[Tensor]) -> Any:
    """`tree` with a `Slot` for each tensor; the tensors are appended to `out`."""
    if isinstance(tree, Tensor):
        out.append(tree)
        return Slot(len(out) - 1)
    if isinstance(tree, dict):
        return {key: take_tensors(value, out) for key, value in tree.items()}
    if isinstance(tree, list):
        return [take_tensors(value, out) for value in tree]
    if isinstance(tree, tuple):
        return tuple(take_tensors(value, out) for value in tree)
    return tree


def put_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The reverse of `take_tensors`."""
    if isinstance(tree, Slot):
        return tensors[tree.index]
    if isinstance(tree, Mapping):
        return {key: put_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(put_tensors(value, tensors) for value in tree)
    return tree


def matching(tree: Any, own: Any, found: dict[int, Tensor]) -> None:
    """Adds to `found`, by the index of `tree`'s slots, the tensors that lie at the same places of `own`."""
    if isinstance(tree, Slot):
        if isinstance(own, Tensor):
            found[tree.index] = own
    elif isinstance(tree, Mapping) and isinstance(own, Mapping):
        for key, value in tree.items():
            matching(value, own.get(key), found)
    elif isinstance(tree, (list, tuple)) and isinstance(own, (list, tuple)):
        for value, mine in zip(tree, own, strict=False):
            matching(value, mine, found)


def _name_of(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"tensors of {dtype} cannot be healed; known are {', '.join(DTYPES)}")
    return _NAMES[dtype]


def _tensor_spec(name: Any, shape: Any, is_cuda: Any) -> TensorSpec:
    if not isinstance(is_cuda, bool) or not isinstance(shape, list):
        raise ValueError("a layout of other types")
    return TensorSpec(DTYPES[name], tuple(_count(size) for size in shape), is_cuda)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value
