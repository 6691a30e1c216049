"""Block means over the ranks of a ring, with gradients, and the selection of blocks by them.

A rank sends one sum per block, so the volume is 1 / block of that of gathering all keys, and only for blocks that the
receiver can use: those before its last block. Attention must not enter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from elastic_ring.attention.comm.all_to_all import AllToAll
from elastic_ring.attention.layouts.layout import Layout, Range
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.patterns.content import Choices, Chosen
from elastic_ring.attention.patterns.rules import Rule
from elastic_ring.attention.plan.schedule import chunks_of
from elastic_ring.attention.routing.router import best_blocks

_SUMS, _SHARES, _CHOICES = range(3)
_NUM_KINDS = 3
_NUM_TAGGED_CALLS = 1024
_FIRST_TAG = 1 << 25
"""Larger than all tags of hops, smaller than those of `router`."""


@dataclass(frozen=True)
class Part:
    """One rank's part of one block: the local range `local`, and whether it contains the block's first token."""

    block: int
    local: Range
    first: bool


@dataclass(frozen=True)
class BlockMap:
    """`parts[cp_rank]`, by ascending block: a rank's slice ascends, so it holds a single range of each block."""

    layout: Layout
    block: int
    parts: tuple[tuple[Part, ...], ...] = field(compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        return -(-self.layout.seq_len // self.block)

    def owned(self, cp_rank: int) -> list[int]:
        """The blocks that a rank selects for: those whose first token it holds."""
        return [part.block for part in self.parts[cp_rank] if part.first]

    def num_past(self, cp_rank: int) -> int:
        """Number of leading blocks that end before some query of the rank."""
        own = self.parts[cp_rank]
        return own[-1].block if own else 0

    def num_served(self, source: int, reader: int) -> int:
        """Number of leading parts of `source` that belong to blocks that `reader` can see."""
        past = self.num_past(reader)
        return sum(part.block < past for part in self.parts[source])

    def lent(self, source: int, reader: int) -> list[int]:
        """Indices of the parts of `source` whose block `reader` selects for."""
        owned = set(self.owned(reader))
        return [i for i, part in enumerate(self.parts[source]) if part.block in owned]

    def lengths(self, blocks: list[int]) -> torch.Tensor:
        """Tokens of each of `blocks`, int64; the last block of the sequence may be shorter."""
        found = [min(self.block, self.layout.seq_len - at * self.block) for at in blocks]
        return torch.tensor(found, dtype=torch.int64)

    def part_of_token(self, cp_rank: int) -> torch.Tensor:
        """The part of each local token, int64 (S_local,)."""
        lengths = [part.local[1] - part.local[0] for part in self.parts[cp_rank]]
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))

    def block_of_token(self, cp_rank: int) -> torch.Tensor:
        """The block of each local token, int64 (S_local,)."""
        blocks = torch.tensor([part.block for part in self.parts[cp_rank]], dtype=torch.int64)
        return blocks[self.part_of_token(cp_rank)]


@lru_cache(maxsize=16)
def block_map(layout: Layout, block: int) -> BlockMap:
    """The location of blocks of `block` tokens, for one document. Pure, hence cached."""
    of_ranks = []
    for rank in range(layout.cp):
        own: list[Part] = []
        for chunk in chunks_of(layout, rank, ((0, layout.seq_len),), block):
            if own and own[-1].block == chunk.block:
                own[-1] = Part(chunk.block, (own[-1].local[0], chunk.local[1]), own[-1].first)
            else:
                own.append(Part(chunk.block, chunk.local, chunk.positions[0] == chunk.block * block))
        of_ranks.append(tuple(own))
    return BlockMap(layout, block, tuple(of_ranks))


class BlockMeans:
    """The block means of one ring and block size. All ranks pass the same `call_index` for a call."""

    def __init__(self, blocks: BlockMap, all_to_all: AllToAll) -> None:
        self.blocks, self.all_to_all = blocks, all_to_all
        self.cp_rank = all_to_all.cp_rank

    def means(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call_index: int, *, first_query: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """mean_q (B, R, H, D) of the R blocks that this rank selects for, and mean_k, mean_v (B, n, Hkv, D) of the n
        blocks before its last one, from q (B, S_local, H, D), k and v (B, S_local, Hkv, D), all in the accumulation
        dtype.

        With `first_query` mean_q is the first query of each block. mean_k and mean_v are differentiable: their
        gradients return to the ranks that hold the tokens and are added in rank order, as are the sums of a block on
        several ranks. mean_q is not differentiable.
        """
        mean_k, mean_v, mean_q = _Means.apply(k, v, q.detach(), self, call_index, first_query)
        return mean_q, mean_k, mean_v

    def choose(self, mean_q: torch.Tensor, mean_k: torch.Tensor, top_k: int, call_index: int) -> list[tuple[Rule, ...]]:
        """For each sequence the rule of each query head, equal on all ranks: each query block sees its own block and
        the best `top_k` - 1 past blocks, selected by the rank that holds the block's first token.

        `mean_q` and `mean_k` are those of `means`. Ranks exchange block numbers, not masks.
        """
        owned = [self.blocks.owned(rank) for rank in range(self.all_to_all.cp)]
        rows, num_blocks = owned[self.cp_rank], self.blocks.num_blocks
        batch, _, num_heads, _ = mean_q.shape
        wide_q, wide_k = (x.new_zeros(batch, num_blocks, *x.shape[2:]) for x in (mean_q, mean_k))
        wide_q[:, torch.tensor(rows, dtype=torch.int64)] = mean_q.detach()
        wide_k[:, : mean_k.size(1)] = mean_k.detach()
        num_chosen = min(top_k - 1, num_blocks)
        mine = torch.stack(
            [_numbers(choose_blocks(a, b, rows, top_k), rows, num_chosen) for a, b in zip(wide_q, wide_k, strict=True)]
        )
        choices = [
            mine if rank == self.cp_rank else mine.new_empty(batch, num_heads, len(held), num_chosen)
            for rank, held in enumerate(owned)
        ]
        self.all_to_all.swap([mine] * self.all_to_all.cp, choices, _tag(call_index, _CHOICES), "forward")
        past: Choices = np.full((batch, num_heads, num_blocks, num_chosen), -1, dtype=np.int32)
        for held, numbers in zip(owned, choices, strict=True):
            past[:, :, held] = numbers.numpy()
        return [tuple(Chosen(num_blocks, of_head.tobytes(), self.blocks.block) for of_head in heads) for heads in past]

    def _collect(self, sums: torch.Tensor, sums_q: torch.Tensor, call_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of blocks, (n, B, 2 Hkv, D) and (R, B, H, D), from the sums of own parts, (P, B, 2 Hkv, D), and of their
        queries, (P, B, H, D), or (0, B, H, D) where queries are not exchanged."""
        blocks, me, ranks = self.blocks, self.cp_rank, range(self.all_to_all.cp)
        served = [blocks.num_served(rank, me) for rank in ranks]
        lent = [blocks.lent(rank, me) if len(sums_q) else [] for rank in ranks]
        outgoing, incoming = [], []
        for rank in ranks:
            whose = blocks.lent(me, rank) if len(sums_q) else []
            outgoing.append(torch.cat([sums[: blocks.num_served(me, rank)].flatten(), sums_q[whose].flatten()]))
            size = served[rank] * _row(sums) + len(lent[rank]) * _row(sums_q)
            incoming.append(outgoing[me] if rank == me else sums.new_empty(size))
        self.all_to_all.swap(outgoing, incoming, _tag(call_index, _SUMS), "forward")
        rows = {block: row for row, block in enumerate(blocks.owned(me))}
        total = sums.new_zeros(blocks.num_past(me), *sums.shape[1:])
        total_q = sums_q.new_zeros(len(rows), *sums_q.shape[1:])
        for rank, message in zip(ranks, incoming, strict=True):
            cut = served[rank] * _row(sums)
            parts = blocks.parts[rank]
            total[[part.block for part in parts[: served[rank]]]] += message[:cut].view(served[rank], *sums.shape[1:])
            places = [rows[parts[i].block] for i in lent[rank]]
            total_q[places] += message[cut:].view(len(places), *sums_q.shape[1:])
        return total, total_q

    def _return_gradients(self, shares: torch.Tensor, call_index: int) -> torch.Tensor:
        """Gradients of own parts over all ranks, (P, B, 2 Hkv, D), from this rank's gradients of block sums,
        (n, B, 2 Hkv, D)."""
        blocks, me, ranks = self.blocks, self.cp_rank, range(self.all_to_all.cp)
        outgoing, incoming = [], []
        for rank in ranks:
            parts = blocks.parts[rank][: blocks.num_served(rank, me)]
            outgoing.append(shares[[part.block for part in parts]])
            empty = shares.new_empty(blocks.num_served(me, rank), *shares.shape[1:])
            incoming.append(outgoing[me] if rank == me else empty)
        self.all_to_all.swap(outgoing, incoming, _tag(call_index, _SHARES), "backward")
        total = shares.new_zeros(len(blocks.parts[me]), *shares.shape[1:])
        for found in incoming:
            total[: len(found)] += found
        return total


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        block_means: BlockMeans,
        call_index: int,
        first_query: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.block_means, ctx.call_index, ctx.dtype = block_means, call_index, k.dtype
        blocks, rank = block_means.blocks, block_means.cp_rank
        parts, exact = blocks.parts[rank], accumulate_dtype(k.dtype)
        sums = torch.cat([_sums(k.detach(), parts, exact), _sums(v.detach(), parts, exact)], dim=2)
        total, total_q = block_means._collect(sums, _sums(q, () if first_query else parts, exact), call_index)
        ctx.lengths = blocks.lengths(list(range(len(total))))[:, None, None, None]
        mean_k, mean_v = (total / ctx.lengths).transpose(0, 1).chunk(2, dim=2)
        if first_query:
            mean_q = q[:, [part.local[0] for part in parts if part.first]].to(exact)
        else:
            mean_q = (total_q / blocks.lengths(blocks.owned(rank))[:, None, None, None]).transpose(0, 1)
        ctx.mark_non_differentiable(mean_q)
        return mean_k.contiguous(), mean_v.contiguous(), mean_q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmean_k: torch.Tensor, dmean_v: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        block_means: BlockMeans = ctx.block_means
        shares = torch.cat([dmean_k, dmean_v], dim=2).transpose(0, 1) / ctx.lengths
        total = block_means._return_gradients(shares, ctx.call_index)
        of_tokens = total[block_means.blocks.part_of_token(block_means.cp_rank)].transpose(0, 1).to(ctx.dtype)
        dk, dv = of_tokens.chunk(2, dim=2)
        return dk, dv, None, None, None, None


def means_of_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Block means (B, n, H, D) of a whole sequence x (B, S, H, D), in the accumulation dtype; the last block may be
    shorter."""
    exact = accumulate_dtype(x.dtype)
    num_whole = x.size(1) // block
    means = x[:, : num_whole * block].unflatten(1, (num_whole, block)).mean(2, dtype=exact)
    rest = x[:, num_whole * block :]
    return torch.cat([means, rest.mean(1, keepdim=True, dtype=exact)], dim=1) if rest.size(1) else means


def _sums(x: torch.Tensor, parts: tuple[Part, ...], dtype: torch.dtype) -> torch.Tensor:
    """(P, B, H, D): the sum over each part's tokens of x (B, S_local, H, D)."""
    found = [x[:, part.local[0] : part.local[1]].sum(1, dtype=dtype) for part in parts]
    return torch.stack(found) if found else x.new_empty(0, x.size(0), *x.shape[2:], dtype=dtype)


def _numbers(chosen: torch.Tensor, rows: list[int], num_chosen: int) -> torch.Tensor:
    """int32 (H, R, num_chosen): the past blocks of `chosen` (H, R, n) bool, in the format of `content.Choices`."""
    past = chosen.to(torch.int8)
    past[:, torch.arange(len(rows)), torch.tensor(rows, dtype=torch.int64)] = 0
    first = past.argsort(dim=-1, descending=True, stable=True)[..., :num_chosen]
    return first.masked_fill(past.gather(-1, first) == 0, -1).to(torch.int32)


def _row(x: torch.Tensor) -> int:
    """Number of elements per entry of the first dimension."""
    return math.prod(x.shape[1:])


def _tag(call_index: int, kind: int) -> int:
    return _FIRST_TAG + (call_index % _NUM_TAGGED_CALLS) * _NUM_KINDS + kind


def choose_blocks(mean_q: torch.Tensor, mean_k: torch.Tensor, rows: list[int], top_k: int) -> torch.Tensor:
    """Bool (H, len(rows), n): for each query block in `rows` its own block and the best `top_k` - 1 past blocks.

    `mean_q` (n, H, D) are the blocks' routing queries, `mean_k` (n, Hkv, D) their mean keys. The same choice as
    `Router`, on one process.
    """
    sharing, num_blocks = mean_q.size(1) // mean_k.size(1), mean_k.size(0)
    own = torch.tensor(rows, dtype=torch.int64, device=mean_q.device)
    keys = mean_k.double().repeat_interleave(sharing, dim=1)
    width = min(top_k - 1, num_blocks)
    best = best_blocks(mean_q[own].double(), keys, torch.zeros_like(own), own, width)
    chosen = torch.zeros(mean_q.size(1), len(rows), num_blocks, dtype=torch.bool, device=own.device)
    chosen = chosen.scatter_(-1, best, True) & (torch.arange(num_blocks, device=own.device) < own[:, None])
    chosen[:, torch.arange(len(rows), device=own.device), own] = True
    return chosen
