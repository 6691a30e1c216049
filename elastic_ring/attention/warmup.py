"""Warm-up before step 1: runs attention once for every place on a ring, and kernels for each class of lengths.

The ring's own code runs over a null process group; the results are discarded.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import torch

from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.kernel import Documents, Kernel
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.layouts.rows import MOST_AT_ONCE
from elastic_ring.attention.merge import accumulate_dtype, add_, merge_all_

logger = logging.getLogger(__name__)


class NullProcessGroup:
    """A process group without peers: sends are discarded, receives give zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> _Done:
        return _Done(tensors[0].device)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> _Done:
        for tensor in tensors:
            tensor.zero_()
        return _Done(tensors[0].device)

    def _start_coalescing(self) -> None:
        pass

    def _end_coalescing(self) -> _Done:
        return _Done(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class _Done:
    """A completed work; `wait` orders the current stream after the stream that posted it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)


def warm_up_sums(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Every kernel of `merge.merge_all_` and `merge.add_` that dense attention of this `shape` (query heads, K/V heads,
    head dim) may need: totals in `dtype` and in fp32, and each number of parts."""
    num_heads, num_kv_heads, head_dim = shape
    for total_dtype in dict.fromkeys((dtype, accumulate_dtype(dtype))):
        for num_parts in range(1, MOST_AT_ONCE + 1):
            for heads in dict.fromkeys((num_heads, num_kv_heads)):
                size = (1, 16, heads, head_dim)
                parts = [torch.zeros(size, dtype=dtype, device=device) for _ in range(num_parts)]
                add_(torch.zeros(size, dtype=total_dtype, device=device), parts)
            out, part = (torch.zeros(1, 16, num_heads, head_dim, dtype=x, device=device) for x in (total_dtype, dtype))
            # Heads before rows in memory, as the GPU's kernels leave it.
            lse = torch.zeros(1, num_heads, 16, dtype=accumulate_dtype(dtype), device=device).transpose(1, 2)
            merge_all_(out, lse, [(part, lse.clone())] * num_parts)


def warm_up_lengths(
    attentions: Callable[[int, Group | None], list[Any]],
    layout: Layout,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Forward and backward of `attentions(cp_rank, group)`, one for each kind of layer, on every rank's slice (1,
    S_local) of `layout`; shape: query heads, K/V heads, head dim. Returns how many ranks ran.

    Covers every kernel call of a sequence that is one document, in the ring's own cutting. Documents cut slices at
    places unknown before the sequence is read.
    """
    num_heads, num_kv_heads, head_dim = shape
    seen: set[Any] = set()
    num_ran = 0
    for cp_rank in range(layout.cp):
        num_tokens = layout.num_tokens(cp_rank)
        group = NullProcessGroup(cp_rank, layout.cp) if layout.cp > 1 else None
        q = torch.zeros(1, num_tokens, num_heads, head_dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (
            torch.zeros(1, num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device, requires_grad=True)
            for _ in range(2)
        )
        layers = attentions(cp_rank, group)
        shapes = {shape for each in layers for shape in (each.shapes(k) if hasattr(each, "shapes") else (cp_rank,))}
        if num_tokens == 0 or shapes <= seen:
            continue
        seen |= shapes
        num_ran += 1
        for attention in layers:
            out = attention(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    return num_ran


def length_classes(tile_tokens: tuple[int, ...], group: int) -> tuple[int, ...]:
    """One length, in tokens, for each class that kernels with these tile sizes compile separately, ascending.

    A tile's rows may be tokens, or tokens times the `group` query heads of a K/V head.
    """
    edges = {tokens // rows for tokens in tile_tokens for rows in (1, group) if tokens >= rows}
    return (*sorted(edges), max(edges) + 64) if edges else ()


NUM_DOCUMENTS = (2, 300)
"""Few and many: kernels look documents up in two ways."""


def tiles_that_occur(kernel: Kernel, group: int, cp: int, num_tokens: int) -> list[tuple[int, int, bool]]:
    """(queries, keys, causal) of one tile for each variant that packed documents may need on a ring of `cp` ranks (0:
    of any ring): on a ring of one there are no full tiles. A kernel that takes documents in one call has a causal tile
    of its own only where a slice is one document."""
    lengths = length_classes(kernel.tile_tokens, group)
    full = [] if cp == 1 else [(rows, keys, False) for rows in lengths for keys in lengths]
    whole = cp > 0 and bool(lengths) and num_tokens // (2 * cp) >= lengths[-1]
    alone = lengths[-1:] if "documents" in kernel.covers and whole else lengths
    return full + [(rows, rows, True) for rows in alone]


def warm_up_variants(
    kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, group: int, cp: int = 0, num_tokens: int = 0
) -> int:
    """Compile the kernels for documents of any length: run forward and backward of each of `tiles_that_occur`. Returns
    the number of tiles.

    The order is random per process, so that processes of a node compile different variants first and load the others
    from the cache on disk. A failed tile is only logged, because the run may not need it. Raises
    torch.OutOfMemoryError.
    """
    tiles = tiles_that_occur(kernel, group, cp, num_tokens)
    random.Random(os.getpid()).shuffle(tiles)
    if "documents" in kernel.covers:
        for number in NUM_DOCUMENTS:
            cuts = torch.arange(number + 1, dtype=torch.int32, device=device) * 16
            q = torch.zeros(1, number * 16, 2 * group, head_dim, dtype=dtype, device=device)
            k = q[:, :, :2].contiguous()
            out, lse = kernel.attend(q, k, k, Documents(cuts, 16), 1.0)
            kernel.gradients(q, q, k, k, out.to(dtype), lse, Documents(cuts, 16), 1.0)
    for num_rows, num_keys, causal in tiles:
        shapes = ((2, num_rows, 2 * group, head_dim), (2, num_keys, 2, head_dim))
        q, k = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        try:
            out, lse = kernel.forward(q, k, k, causal=causal, scale=1.0)
            kernel.backward(q, q, k, k, out.to(dtype), lse, causal=causal, scale=1.0)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            kind = "causal" if causal else "full"
            logger.warning("%s fails for %s tiles of %d x %d: %s", kernel.name, kind, num_rows, num_keys, error)
    return len(tiles)
