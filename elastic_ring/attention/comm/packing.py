"""Gathers what a rank sends into one packed buffer, and cuts such buffers into the tensors that they hold.

Rows of (token, K/V head): the eager form is the reference and the CPU's path; on a GPU, where torch's `index_select` of
rows this short reaches a fifth of the speed of memory, `fused_merge` takes K and V in one kernel. Token ranges, of all
heads or of groups of heads, are for CPUs. Knows nothing of peers or messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elastic_ring.attention.comm.exchange import Frame
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import select_heads
from elastic_ring.attention.merge import fused_for
from elastic_ring.attention.plan.sparse_schedule import HeadGroup
from elastic_ring.attention.plan.sparse_tiles import num_tokens

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""For each head group its K and V, or dK and dV, each (B, n, heads of the group, D)."""


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
    found: dict[int, torch.Tensor] = {}
    flat, at = packed.view(-1), 0
    for hop, num_rows in parts:
        found[hop] = flat[at : at + num_rows * frame.row].view(frame.shape(num_rows))
        at += num_rows * frame.row
    return found


def parts_of_groups(
    packed: torch.Tensor, groups: tuple[HeadGroup, ...], ranges: tuple[tuple[Range, ...], ...], like: torch.Tensor
) -> Pairs:
    """The parts of a contiguous buffer that holds, for each head group, its token ranges of K, then of V."""
    found: Pairs = []
    flat, at = packed.view(-1), 0
    for group, own in zip(groups, ranges, strict=True):
        shape = (2, like.size(0), num_tokens(own), len(group.kv_heads), like.size(3))
        length = 2 * shape[1] * shape[2] * shape[3] * shape[4]
        both = flat[at : at + length].view(shape)
        found.append((both[0], both[1]))
        at += length
    assert at == flat.numel(), (at, flat.numel())
    return found


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
