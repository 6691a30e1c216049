"""Attention of every place on a ring with nobody else on it: so that kernels which are compiled for each length are
compiled before a step needs them.

The ring's own code runs, over a group that moves nothing; what it computes is of no use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_ring.attention.exchange import Group
from elastic_ring.attention.layout import Layout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Silence:
    """A process group in which all peers are silent: what is sent goes nowhere, what is received is zeros."""

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
    """What was posted may have run on a stream of its own: whoever waits, waits for that."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)


def rehearse_lengths(
    attentions: Callable[[int, Group | None], list[Any]],
    layout: Layout,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Forward and backward of `attentions(cp_rank, group)`, one for each kind of layer, on every rank's slice (1,
    S_local) of `layout`; shape: query heads, K/V heads, head dim. Returns how many ranks ran.

    Covers every kernel call of a sequence that is one document, in the ring's own cutting. Documents cut slices at
    places that nobody knows before the sequence is read.
    """
    num_heads, num_kv_heads, head_dim = shape
    seen: set[Any] = set()
    num_ran = 0
    for cp_rank in range(layout.cp):
        num_tokens = layout.num_tokens(cp_rank)
        group = Silence(cp_rank, layout.cp) if layout.cp > 1 else None
        q = torch.zeros(1, num_tokens, num_heads, head_dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (
            torch.zeros(1, num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device, requires_grad=True)
            for _ in range(2)
        )
        made = attentions(cp_rank, group)
        shapes = {shape for each in made for shape in (each.shapes(k) if hasattr(each, "shapes") else (cp_rank,))}
        if num_tokens == 0 or shapes <= seen:
            continue
        seen |= shapes
        num_ran += 1
        for attention in made:
            out = attention(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    return num_ran
