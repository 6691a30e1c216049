"""Means of blocks from all ranks of a ring, with their gradients on the way back, and a choice of blocks by them.

What a rank sends of its keys here is one sum for each block, so it costs a share 1 / block of a gather of all of them;
and only what the receiver can use goes there, the blocks before its last one. Attending is done elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from elastic_ring.attention.content import Choices, Chosen
from elastic_ring.attention.layout import Layout, Range
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.routing import choose_blocks
from elastic_ring.attention.rules import Rule
from elastic_ring.attention.sparse_schedule import chunks_of
from elastic_ring.attention.swaps import Swaps

_SUMS, _SHARES, _CHOICES = range(3)
_NUM_KINDS = 3
_NUM_TAGGED_CALLS = 1024
_FIRST_TAG = 1 << 25
"""Above every tag of hops, below those of `routing_exchange`."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of one block: the local range `local`, and whether the block's first token is in it."""

    block: int
    local: Range
    first: bool


@dataclass(frozen=True)
class BlockMap:
    """`parts[cp_rank]`, blocks ascending: since a rank's slice ascends, it holds one range of each of its blocks."""

    layout: Layout
    block: int
    parts: tuple[tuple[Part, ...], ...] = field(compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        return -(-self.layout.seq_len // self.block)

    def owned(self, cp_rank: int) -> list[int]:
        """The blocks that a rank chooses for: those whose first token it holds."""
        return [part.block for part in self.parts[cp_rank] if part.first]

    def num_past(self, cp_rank: int) -> int:
        """How many blocks, from the first one on, lie wholly before some query of the rank's."""
        own = self.parts[cp_rank]
        return own[-1].block if own else 0

    def num_served(self, source: int, reader: int) -> int:
        """How many parts of `source`, from its first one on, are of blocks that `reader` can see."""
        past = self.num_past(reader)
        return sum(part.block < past for part in self.parts[source])

    def lent(self, source: int, reader: int) -> list[int]:
        """The parts of `source` whose block `reader` chooses for."""
        owned = set(self.owned(reader))
        return [i for i, part in enumerate(self.parts[source]) if part.block in owned]

    def lengths(self, blocks: list[int]) -> torch.Tensor:
        """Tokens of each of `blocks`, int64: the sequence's last one may be ragged."""
        found = [min(self.block, self.layout.seq_len - at * self.block) for at in blocks]
        return torch.tensor(found, dtype=torch.int64)

    def part_of_token(self, cp_rank: int) -> torch.Tensor:
        """For each local token the index of its part, int64 (S_local,)."""
        lengths = [part.local[1] - part.local[0] for part in self.parts[cp_rank]]
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))

    def block_of_token(self, cp_rank: int) -> torch.Tensor:
        """The block of each local token, int64 (S_local,)."""
        blocks = torch.tensor([part.block for part in self.parts[cp_rank]], dtype=torch.int64)
        return blocks[self.part_of_token(cp_rank)]


@lru_cache(maxsize=16)
def block_map(layout: Layout, block: int) -> BlockMap:
    """Where the blocks of `block` tokens lie, for one document. Pure, so cached."""
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


class BlockSummaries:
    """The block means of one ring and block size. `call_index` numbers the calls alike on all ranks."""

    def __init__(self, blocks: BlockMap, swaps: Swaps) -> None:
        self.blocks, self.swaps = blocks, swaps
        self.cp_rank = swaps.cp_rank

    def means(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call_index: int, *, first_query: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From q (B, S_local, H, D), k and v (B, S_local, Hkv, D): mean_q (B, R, H, D) of the R blocks that this rank
        chooses for (with `first_query` the first query of each), and mean_k, mean_v (B, n, Hkv, D) of the n blocks
        before its last one, all in the accumulation type.

        mean_k and mean_v are differentiable: what any rank finds for them goes back to those that hold the tokens
        and is added in the order of ranks, as are the sums of a block that lies on several. mean_q is not.
        """
        mean_k, mean_v, mean_q = _Means.apply(k, v, q.detach(), self, call_index, first_query)
        return mean_q, mean_k, mean_v

    def choose(self, mean_q: torch.Tensor, mean_k: torch.Tensor, top_k: int, call_index: int) -> list[tuple[Rule, ...]]:
        """For each sequence the rule of each query head, the same on every rank: for every block of queries its own
        block and the best `top_k` - 1 before it, chosen by the rank that holds the block's first token.

        `mean_q` and `mean_k` are what `means` gives. Numbers of blocks travel, not a table.
        """
        owned = [self.blocks.owned(rank) for rank in range(self.swaps.cp)]
        rows, num_blocks = owned[self.cp_rank], self.blocks.num_blocks
        batch, _, num_heads, _ = mean_q.shape
        wide_q, wide_k = (x.new_zeros(batch, num_blocks, *x.shape[2:]) for x in (mean_q, mean_k))
        wide_q[:, torch.tensor(rows, dtype=torch.int64)] = mean_q.detach()
        wide_k[:, : mean_k.size(1)] = mean_k.detach()
        num_chosen = min(top_k - 1, num_blocks)
        mine = torch.stack([
            _numbers(choose_blocks(a, b, rows, top_k), rows, num_chosen) for a, b in zip(wide_q, wide_k, strict=True)
        ])  # fmt: skip
        choices = [
            mine if rank == self.cp_rank else mine.new_empty(batch, num_heads, len(held), num_chosen)
            for rank, held in enumerate(owned)
        ]
        self.swaps.swap([mine] * self.swaps.cp, choices, "forward", _tag(call_index, _CHOICES))
        past: Choices = np.full((batch, num_heads, num_blocks, num_chosen), -1, dtype=np.int32)
        for held, numbers in zip(owned, choices, strict=True):
            past[:, :, held] = numbers.numpy()
        return [tuple(Chosen(num_blocks, of_head.tobytes(), self.blocks.block) for of_head in heads) for heads in past]

    def _collect(
        self, sums: torch.Tensor, sums_q: torch.Tensor, call_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From sums of own parts, (P, B, 2 Hkv, D), and of their queries, (P, B, H, D) or (0, B, H, D) where those
        stay here, to sums of blocks: (n, B, 2 Hkv, D) and (R, B, H, D)."""
        blocks, me, ranks = self.blocks, self.cp_rank, range(self.swaps.cp)
        served = [blocks.num_served(rank, me) for rank in ranks]
        lent = [blocks.lent(rank, me) if len(sums_q) else [] for rank in ranks]
        outgoing, incoming = [], []
        for rank in ranks:
            whose = blocks.lent(me, rank) if len(sums_q) else []
            outgoing.append(torch.cat([sums[: blocks.num_served(me, rank)].flatten(), sums_q[whose].flatten()]))
            size = served[rank] * _row(sums) + len(lent[rank]) * _row(sums_q)
            incoming.append(outgoing[me] if rank == me else sums.new_empty(size))
        self.swaps.swap(outgoing, incoming, "forward", _tag(call_index, _SUMS))
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

    def _give_back(self, shares: torch.Tensor, call_index: int) -> torch.Tensor:
        """From what this rank found for the sums of blocks, (n, B, 2 Hkv, D), to what all ranks found for own parts,
        (P, B, 2 Hkv, D)."""
        blocks, me, ranks = self.blocks, self.cp_rank, range(self.swaps.cp)
        outgoing, incoming = [], []
        for rank in ranks:
            parts = blocks.parts[rank][: blocks.num_served(rank, me)]
            outgoing.append(shares[[part.block for part in parts]])
            empty = shares.new_empty(blocks.num_served(me, rank), *shares.shape[1:])
            incoming.append(outgoing[me] if rank == me else empty)
        self.swaps.swap(outgoing, incoming, "backward", _tag(call_index, _SHARES))
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
        summaries: BlockSummaries,
        call_index: int,
        first_query: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.summaries, ctx.call_index, ctx.dtype = summaries, call_index, k.dtype
        blocks, rank = summaries.blocks, summaries.cp_rank
        parts, exact = blocks.parts[rank], accumulate_dtype(k.dtype)
        sums = torch.cat([_sums(k.detach(), parts, exact), _sums(v.detach(), parts, exact)], dim=2)
        total, total_q = summaries._collect(sums, _sums(q, () if first_query else parts, exact), call_index)
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
        summaries: BlockSummaries = ctx.summaries
        shares = torch.cat([dmean_k, dmean_v], dim=2).transpose(0, 1) / ctx.lengths
        total = summaries._give_back(shares, ctx.call_index)
        of_tokens = total[summaries.blocks.part_of_token(summaries.cp_rank)].transpose(0, 1).to(ctx.dtype)
        dk, dv = of_tokens.chunk(2, dim=2)
        return dk, dv, None, None, None, None


def means_of_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """(B, n, H, D) in the accumulation type, of a whole sequence x (B, S, H, D); the last block may be ragged."""
    exact = accumulate_dtype(x.dtype)
    num_whole = x.size(1) // block
    means = x[:, : num_whole * block].unflatten(1, (num_whole, block)).mean(2, dtype=exact)
    rest = x[:, num_whole * block :]
    return torch.cat([means, rest.mean(1, keepdim=True, dtype=exact)], dim=1) if rest.size(1) else means


def _sums(x: torch.Tensor, parts: tuple[Part, ...], dtype: torch.dtype) -> torch.Tensor:
    """(P, B, H, D): the sum of the tokens of each part, for x (B, S_local, H, D)."""
    found = [x[:, part.local[0] : part.local[1]].sum(1, dtype=dtype) for part in parts]
    return torch.stack(found) if found else x.new_empty(0, x.size(0), *x.shape[2:], dtype=dtype)


def _numbers(chosen: torch.Tensor, rows: list[int], num_chosen: int) -> torch.Tensor:
    """int32 (H, R, num_chosen): the past blocks of `chosen` (H, R, n) bool as `content.Choices` has them."""
    past = chosen.to(torch.int8)
    past[:, torch.arange(len(rows)), torch.tensor(rows, dtype=torch.int64)] = 0
    first = past.argsort(dim=-1, descending=True, stable=True)[..., :num_chosen]
    return first.masked_fill(past.gather(-1, first) == 0, -1).to(torch.int32)


def _row(x: torch.Tensor) -> int:
    """Elements of one entry of the first dimension."""
    return math.prod(x.shape[1:])


def _tag(call_index: int, kind: int) -> int:
    return _FIRST_TAG + (call_index % _NUM_TAGGED_CALLS) * _NUM_KINDS + kind
