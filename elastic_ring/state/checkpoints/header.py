"""The header of a safetensors file, as far as it is believed: where each tensor's bytes are, all of them in the file.

The format: the header's length in eight bytes, the header as JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ring.files import plain_json
from elastic_ring.state.checkpoints.manifest import DTYPES

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


def read_places(read: Callable[[int, int], bytes | bytearray], size: int) -> dict[str, Place]:
    """The place of each tensor in a file of `size` bytes. `read` gets (start, number of bytes). Raises ValueError."""
    length = int.from_bytes(read(0, 8), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size} bytes, and a header of {length}")
    header = plain_json(bytes(read(8, length)), MAX_HEADER_BYTES)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    header.pop("__metadata__", None)
    found = {name: _place(name, 8 + length, entry) for name, entry in header.items()}
    end = max((place.start + place.num_bytes for place in found.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{size} bytes, and tensors up to {end}")
    return found


def _place(name: str, begin: int, entry: Any) -> Place:
    try:
        (start, stop), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), DTYPES[entry["dtype"]]
        place = Place(begin + start, dtype, shape)
        right = all(type(one) is int and one >= 0 for one in (start, stop, *shape)) and stop - start == place.num_bytes
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"an entry {name[:200]!r} that is none ({type(error).__name__})") from error
    if not right:
        raise ValueError(f"{name[:200]!r}: a {entry['dtype']} of shape {list(shape)[:8]} in other than its bytes")
    return place
