"""The safetensors format: names of types, the header and where it says each tensor's bytes are, and a file in pieces.

The header's length in eight bytes, the header as JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). A header is believed only where its entries cover the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_ring.files import plain_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20
"""As in the library of the format."""


@dataclass(frozen=True)
class Place:
    """The bytes of one tensor in a file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a type that the format has no name for."""
    if dtype not in _NAMES:
        raise ValueError(f"tensors of {dtype} cannot be stored or sent: use one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def read_places(read: Callable[[int, int], bytes | bytearray], size: int) -> dict[str, Place]:
    """The place of each tensor in a file of `size` bytes. `read` gets (start, number of bytes). Raises ValueError."""
    length = int.from_bytes(read(0, 8), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size} bytes, and a header of {length}")
    header = plain_json(bytes(read(8, length)), MAX_HEADER_BYTES)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    header.pop("__metadata__", None)
    places: dict[str, Place] = {}
    for name, entry in header.items():
        try:
            (start, stop), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), DTYPES[entry["dtype"]]
            places[name] = place = Place(8 + length + start, dtype, shape)
            are_counts = all(type(number) is int and number >= 0 for number in (start, stop, *shape))
            fits = are_counts and stop - start == place.num_bytes
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{name[:200]!r} has a malformed entry ({type(error).__name__})") from error
        if not fits:
            raise ValueError(f"{name[:200]!r}: a {entry['dtype']} of shape {list(shape)[:8]} in other than its bytes")
    end = max((place.start + place.num_bytes for place in places.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{size} bytes, and tensors up to {end}")
    return places


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece, without a second copy of the tensors in memory."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from (raw_bytes(tensor) for tensor in tensors.values() if tensor.numel())


def byte_view(tensor: Tensor) -> Tensor:
    """The tensor's bytes (uint8), without a copy where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous and in host memory."""
    return byte_view(tensor.cpu()).numpy().data
