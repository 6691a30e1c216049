"""Patterns for the tests, each with its meaning spelled out once more, pair by pair, without the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical, Profile
from elastic_ring.attention.patterns.rules import Dense, Rule, Sinks, Strided, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from experiments.block_function import BlockFunction
from experiments.head_rules import longnet
from tests.unit.attention.attention_rings import in_threads

Sees = Callable[[int, int], bool]


def dilated(segments: tuple[int, ...], rates: tuple[int, ...], offset: int, unit: int) -> Sees:
    def sees(q: int, k: int) -> bool:
        for segment, rate in zip(segments, rates, strict=True):
            kept = [at for at in range(q // segment * segment, q + 1) if (at % segment // unit) % rate == offset % rate]
            if q in kept and k in kept:
                return True
        return False

    return sees


def hierarchical(base: int, unit: int) -> Sees:
    def sees(q: int, k: int) -> bool:
        back = q // unit - k // unit
        if back < base:
            return True
        level = int(math.log2(back // base)) + 1
        return (k // unit + 1) % 2**level == 0

    return sees


DILATED_SEGMENTS, DILATED_RATES = (8, 16, 48), (1, 2, 4)

RULES: dict[str, tuple[Rule, Sees | None]] = {
    "dense": (Dense(), lambda q, k: True),
    "window of blocks": (Window(8), lambda q, k: q - k < 8),
    "window across blocks": (Window(7), lambda q, k: q - k < 7),
    "sinks and window": (Sinks(3) | Window(5), lambda q, k: k < 3 or q - k < 5),
    "strided blocks": (Strided(3, 2, 4), lambda q, k: (q // 4 - k // 4) % 3 == 0 or q // 4 - k // 4 < 2),
    "strided tokens": (Strided(5, 3, 1), lambda q, k: (q - k) % 5 == 0 or q - k < 3),
    "dilated blocks": (Dilated(DILATED_SEGMENTS, DILATED_RATES, 1, 4), dilated(DILATED_SEGMENTS, DILATED_RATES, 1, 4)),
    "dilated tokens": (Dilated(DILATED_SEGMENTS, DILATED_RATES, 3, 1), dilated(DILATED_SEGMENTS, DILATED_RATES, 3, 1)),
    "dilated with empty rows": (Dilated((16,), (4,), 2, 1), dilated((16,), (4,), 2, 1)),
    "bigbird": (BigBird(2, 1, 2, seed=5, unit_tokens=4), None),
    "hierarchical": (Hierarchical(2, 4), hierarchical(2, 4)),
    "profile": (Profile((0, 1, 5), 4), lambda q, k: q // 4 - k // 4 in (0, 1, 5)),
    "own function": (
        BlockFunction(lambda i, j: (i * j % 3 == 0) & (j <= i), 4),
        lambda q, k: (q // 4) * (k // 4) % 3 == 0,
    ),
    "union": (
        Dilated((16, 48), (2, 4), 0, 1) | Window(3) | Sinks(2),
        lambda q, k: dilated((16, 48), (2, 4), 0, 1)(q, k) or q - k < 3 or k < 2,
    ),
}

AHEAD: dict[str, tuple[Rule, Sees]] = {
    "dense": (Dense(), lambda q, k: True),
    "window on both sides": (Window(7, 9), lambda q, k: q - k < 7 and k - q <= 9),
    "sinks and window": (Sinks(3) | Window(5, 4), lambda q, k: k < 3 or (q - k < 5 and k - q <= 4)),
    "dilated tokens": (
        Dilated(DILATED_SEGMENTS, DILATED_RATES, 1, 1),
        lambda q, k: any(
            q // s == k // s and q % s % r == 1 % r == k % s % r
            for s, r in zip(DILATED_SEGMENTS, DILATED_RATES, strict=True)
        ),
    ),
    "own function": (BlockFunction(lambda i, j: (i + j) % 3 == 0, 4), lambda q, k: (q // 4 + k // 4) % 3 == 0),
}
"""Rules that say which later keys they keep, for attention that is not causal."""


@dataclass(frozen=True)
class SparseCase:
    """A pattern on a layout, with global tensors. `sees[h]` spells out query head h's rule."""

    rules: tuple[Rule, ...]
    sees: tuple[Sees, ...] = field(repr=False)
    layout: Layout
    document_starts: tuple[int, ...] = (0,)
    block: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    causal: bool = True

    @property
    def schedule(self) -> Schedule:
        pattern = SparsePattern(self.rules, self.block, self.document_starts, self.causal)
        return plan_sparse(pattern, self.layout, self.num_heads, self.num_kv_heads)

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, over the whole sequence."""
        generator = torch.Generator().manual_seed(0)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        shapes = [(2, self.layout.seq_len, num, self.head_dim) for num in heads]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def mask(self) -> torch.Tensor:
        """(H, S, S) pair by pair; positions count from the start of their document."""
        seq_len = self.layout.seq_len
        masks: dict[Sees, torch.Tensor] = {}
        for sees in self.sees:
            if sees in masks:
                continue
            mask = torch.zeros(seq_len, seq_len, dtype=torch.bool)
            for start, stop in zip(self.document_starts, (*self.document_starts[1:], seq_len), strict=True):
                for q in range(stop - start):
                    last = q + 1 if self.causal else stop - start
                    mask[start + q, start : start + last] = torch.tensor([sees(q, k) for k in range(last)])
            masks[sees] = mask
        chosen = [masks[sees] for sees in self.sees]
        return torch.stack(chosen if len(chosen) > 1 else chosen * self.num_heads)


def bigbird_sees(rule: BigBird, length: int) -> Sees:
    """What it draws is checked in its own test; here it is read off, one pair of blocks at a time."""
    import numpy as np

    cells = [
        [bool(rule.sees(np.array([[i * 4]]), np.array([[j * 4]]))[0, 0]) for j in range(i + 1)]
        for i in range(-(-length // 4))
    ]
    return lambda q, k: cells[q // 4][k // 4]


def sees_of(name: str, length: int) -> Sees:
    rule, sees = RULES[name]
    if sees is None:
        assert isinstance(rule, BigBird)
        return bigbird_sees(rule, length)
    return sees


def longnet_case(
    layout: Layout, num_heads: int, num_kv_heads: int, heads_per_offset: int = 1, **more: Any
) -> SparseCase:
    rules = longnet(num_heads, DILATED_SEGMENTS, DILATED_RATES, heads_per_offset=heads_per_offset)
    sees = tuple(dilated(rule.segments, rule.rates, rule.offset, 1) for rule in rules)
    return SparseCase(rules, sees, layout, num_heads=num_heads, num_kv_heads=num_kv_heads, **more)


def run_sparse(case: SparseCase, groups: list[Any], **options: Any) -> tuple[list[torch.Tensor], list[HopLedger]]:
    """out, dq, dk, dv over the whole sequence and each rank's ledger, on a thread for each rank."""
    layout, schedule, tensors = case.layout, case.schedule, case.tensors()

    def work(cp_rank: int) -> tuple[list[torch.Tensor], HopLedger]:
        q, k, v, dout = (layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        ring = RingAttention(schedule, cp_rank, groups[cp_rank], RingOptions(**options))
        out = ring(*leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], ring.ledger

    results = in_threads(layout.cp, work)
    gathered = [layout.gather([locals_[i] for locals_, _ in results], 1) for i in range(4)]
    return gathered, [ledger for _, ledger in results]


def masked_attention(case: SparseCase) -> list[torch.Tensor]:
    """out, dq, dk, dv by autograd through a masked fp64 softmax; rows that see nothing are 0."""
    q, k, v, dout = (tensor.double() for tensor in case.tensors())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    sharing = case.num_heads // case.num_kv_heads
    wide_k, wide_v = (x.repeat_interleave(sharing, dim=2) for x in (k, v))
    mask = case.mask()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / math.sqrt(case.head_dim)
    empty = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~(mask | empty), -math.inf).softmax(-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
