"""Keys and values that cross a ring in 8 bits: e4m3 numbers with one fp32 scale for each head's vector.

A vector of D elements is D + 4 bytes on the wire, beside 2 D in bfloat16. A scale maps the vector's largest element to
448, the largest number of e4m3; elements that e4m3 holds as normal numbers, from `amax` / 28672 on, are off by at most
`RELATIVE_BOUND` of themselves, smaller ones by at most `ABSOLUTE_BOUND` of the largest. The same vector gives the same
bytes on every pass, so forward, backward and recomputation compute on the same keys. No messages in this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastic_ring.attention.plan.traffic import Frame

LARGEST = 448.0
RELATIVE_BOUND = 2.0**-4
ABSOLUTE_BOUND = 2.0**-10 / LARGEST
SCALE_BYTES = 4
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: of a vector whose largest element is below 5.3e-36, each is off by at most 1.2e-41."""


def row_bytes(head_dim: int) -> int:
    """Bytes of one head's vector on the wire."""
    return head_dim + SCALE_BYTES


def wire_frame(frame: Frame) -> Frame:
    """The uint8 buffers of what `frame` shapes; its unit is a number of whole vectors."""
    head_dim = frame.after[-1]
    assert frame.unit % head_dim == 0, frame
    return Frame(frame.before, (*frame.after[:-1], row_bytes(head_dim)), frame.unit // head_dim * row_bytes(head_dim))


def encode_(wire: torch.Tensor, x: torch.Tensor) -> None:
    """In place: `wire` (..., D + 4) uint8 becomes x (..., D), both contiguous."""
    for part, own in _pieces(wire, x):
        _encode(part, own)


def decode_(x: torch.Tensor, wire: torch.Tensor) -> None:
    """In place: x (..., D) becomes what `wire` (..., D + 4) holds, both contiguous."""
    for own, part in _pieces(x, wire):
        _decode(own, part)


VECTORS_AT_ONCE = 1 << 18
"""Temporaries are of so many vectors, not of a whole stage."""


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(x.flatten(0, -2).split(VECTORS_AT_ONCE) for x in tensors), strict=True)


def _encode(wire: torch.Tensor, x: torch.Tensor) -> None:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    payload = (x / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    wire[..., : x.size(-1)] = payload.view(torch.uint8)
    wire[..., x.size(-1) :] = scale.view(torch.uint8)


def _decode(x: torch.Tensor, wire: torch.Tensor) -> None:
    payload = wire[..., : x.size(-1)].contiguous().view(torch.float8_e4m3fn)
    scale = wire[..., x.size(-1) :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    x.copy_(payload.float() * scale)


@dataclass(frozen=True)
class WireError:
    """What crossing changed: the largest difference as a share of its vector's largest element, and the root of the
    squared differences' sum as a share of the elements'."""

    worst: float
    rms: float


def measured(x: torch.Tensor, wire: torch.Tensor) -> WireError:
    """The error of all vectors x (..., D) as `wire` encodes them. Waits for a GPU."""
    crossed = torch.empty_like(x, dtype=torch.float32)
    decode_(crossed, wire)
    difference, own = crossed.double() - x.double(), x.double()
    worst = (difference.abs().amax(-1) / own.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)).max()
    return WireError(float(worst), math.sqrt(float(difference.square().sum() / own.square().sum().clamp_min(1e-300))))
