"""Packs and encodes what a rank sends: gathers rows into one buffer, cuts such buffers, and maps keys to 8 bits.

Rows of (token, K/V head): the eager form is the reference and the CPU's path; on a GPU, where torch's `index_select` of
rows this short reaches a fifth of the speed of memory, `fused_merge` takes K and V in one kernel. Token ranges, of all
heads or of groups of heads, are for CPUs.

In 8 bits a head's vector of D elements is e4m3 numbers with one fp32 scale, D + 4 bytes on the wire beside 2 D in
bfloat16. A scale maps the vector's largest element to 448, the largest number of e4m3; elements that e4m3 holds as
normal numbers, from `amax` / 28672 on, are off by at most `RELATIVE_BOUND` of themselves, smaller ones by at most
`ABSOLUTE_BOUND` of the largest. The same vector gives the same bytes on every pass, so forward, backward and
recomputation compute on the same keys. Knows nothing of peers or messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import select_heads
from elastic_ring.attention.merge import fused_for
from elastic_ring.attention.plan.schedule import HeadGroup
from elastic_ring.attention.plan.sparse_tiles import num_tokens
from elastic_ring.attention.plan.traffic import Frame

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""For each head group its K and V, or dK and dV, each (B, n, heads of the group, D)."""
LARGEST = 448.0
RELATIVE_BOUND = 2.0**-4
ABSOLUTE_BOUND = 2.0**-10 / LARGEST
SCALE_BYTES = 4
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: of a vector whose largest element is below 5.3e-36, each is off by at most 1.2e-41."""
VECTORS_AT_ONCE = 1 << 18
"""Vectors whose temporaries are held at a time, instead of a whole stage's."""


def gather_rows_(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """In place: `packed` (n, B, 2, D) becomes, for each of `rows` (n,) int32, that row of k and of v side by side.

    k and v (B, S, Hkv, D) are contiguous; row `token * Hkv + head` is a token's vector of one head.
    """
    fused = fused_for(packed)
    (eager_gather_rows_ if fused is None else fused.gather_rows_)(packed, k, v, rows)


def eager_gather_rows_(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    for kind, x in enumerate((k, v)):
        for number, sequence in enumerate(x.flatten(1, 2)):
            torch.index_select(sequence, 0, rows, out=packed[:, number, kind])


def gather_ranges_(both: Iterable[torch.Tensor], k: torch.Tensor, v: torch.Tensor, ranges: tuple[Range, ...]) -> None:
    """In place: `both`, each (B, n, heads, D), become the tokens `ranges` of k and of v, one range after another."""
    for target, x in zip(both, (k, v), strict=True):
        offset = 0
        for start, stop in ranges:
            target[:, offset : offset + stop - start] = x[:, start:stop]
            offset += stop - start


def parts_of_hops(packed: torch.Tensor, parts: tuple[tuple[int, int], ...], frame: Frame) -> dict[int, torch.Tensor]:
    """Each hop's part of a contiguous buffer in which hops of (hop, rows) lie one after another, shaped by `frame`."""
    if len(parts) == 1:
        return {parts[0][0]: packed}
    cut = packed.view(-1).split([num_rows * frame.row for _, num_rows in parts])
    return {hop: part.view(frame.shape(num_rows)) for (hop, num_rows), part in zip(parts, cut, strict=True)}


def parts_of_groups(
    packed: torch.Tensor, groups: tuple[HeadGroup, ...], ranges: tuple[tuple[Range, ...], ...], like: torch.Tensor
) -> Pairs:
    """The parts of a contiguous buffer that holds, for each head group, its token ranges of K, then of V."""
    batch, head_dim = like.size(0), like.size(3)
    pairs = zip(groups, ranges, strict=True)
    shapes = [(2, batch, num_tokens(own), len(group.kv_heads), head_dim) for group, own in pairs]
    cut = packed.view(-1).split([math.prod(shape) for shape in shapes])
    both = [part.view(shape) for part, shape in zip(cut, shapes, strict=True)]
    return [(each[0], each[1]) for each in both]


def gather_groups_(
    packed: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: tuple[HeadGroup, ...],
    ranges: tuple[tuple[Range, ...], ...],
) -> None:
    """In place: `packed` becomes, for each head group, its token ranges of K, then of V."""
    for group, own, parts in zip(groups, ranges, parts_of_groups(packed, groups, ranges, k), strict=True):
        if own:
            of_k, of_v = (select_heads(x, group.kv_heads) for x in (k, v))
            gather_ranges_(parts, of_k, of_v, own)


def row_bytes(head_dim: int) -> int:
    """Bytes of one head's encoded vector."""
    return head_dim + SCALE_BYTES


def wire_frame(frame: Frame) -> Frame:
    """The uint8 buffers of the encoded rows of `frame`, whose unit is a number of whole vectors."""
    head_dim = frame.after[-1]
    assert frame.unit % head_dim == 0, frame
    return Frame(frame.before, (*frame.after[:-1], row_bytes(head_dim)), frame.unit // head_dim * row_bytes(head_dim))


def encode_(wire: torch.Tensor, x: torch.Tensor) -> None:
    """In place: `wire` (..., D + 4) uint8 becomes x (..., D), both contiguous."""
    head_dim = x.size(-1)
    for part, own in zip(*(y.flatten(0, -2).split(VECTORS_AT_ONCE) for y in (wire, x)), strict=True):
        own = own.float()
        scale = (own.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
        payload = (own / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        part[..., :head_dim] = payload.view(torch.uint8)
        part[..., head_dim:] = scale.view(torch.uint8)


def decode_(x: torch.Tensor, wire: torch.Tensor) -> None:
    """In place: x (..., D) becomes the decoded `wire` (..., D + 4), both contiguous."""
    head_dim = x.size(-1)
    for own, part in zip(*(y.flatten(0, -2).split(VECTORS_AT_ONCE) for y in (x, wire)), strict=True):
        payload = part[..., :head_dim].contiguous().view(torch.float8_e4m3fn)
        scale = part[..., head_dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        own.copy_(payload.float() * scale)


@dataclass(frozen=True)
class WireError:
    """The error of encoding: the largest difference as a share of its vector's largest element, and the root of the
    squared differences' sum as a share of the elements'."""

    worst: float
    rms: float


def measure_wire_error(x: torch.Tensor, wire: torch.Tensor) -> WireError:
    """The error of all vectors x (..., D) as `wire` encodes them. Waits for a GPU."""
    crossed = torch.empty_like(x, dtype=torch.float32)
    decode_(crossed, wire)
    difference, own = crossed.double() - x.double(), x.double()
    worst = (difference.abs().amax(-1) / own.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)).max()
    return WireError(float(worst), math.sqrt(float(difference.square().sum() / own.square().sum().clamp_min(1e-300))))
