"""Attention whose blocks are chosen by content: routing on gathered block summaries, then fetching the union.

After MoBA (Lu et al. 2025, arXiv:2502.13189): each block of queries keeps its own block and the past blocks
whose mean key scores highest with its mean query. Here one choice serves a block of queries, not one token,
so that it is a block pattern like any other: once made, it is a `SparsePattern` and runs as one, exactly and
sending no key that no query chose. The choice itself has no gradient, as in the paper; what was chosen has.
A block's later queries have a say in which past blocks its earlier ones see: no key of the future is read, but
the choice is not strictly causal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from elastic_ring.attention.checks import check_local_length, check_tensors
from elastic_ring.attention.exchange import Group, HopLedger
from elastic_ring.attention.layout import Layout
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.rules import FULL, Kinds, Mask, Positions, Rule, require
from elastic_ring.attention.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention
from elastic_ring.attention.sparse_schedule import Chunk, SparseSchedule, chunks_of, plan_sparse

_SUMMARIES, _CHOICES = 0, 1
_NUM_TAGGED_CALLS = 1024
_FIRST_TAG = 1 << 24
"""Above every tag of the hops themselves."""


@dataclass(frozen=True)
class Chosen(Rule):
    """Blocks that somebody chose: `bits` packs the (num_units, num_units) table by rows, high bit first."""

    num_units: int
    bits: bytes
    unit_tokens: int = DEFAULT_BLOCK_TOKENS

    @property
    def unit(self) -> int:
        return self.unit_tokens

    @property
    def table(self) -> Mask:
        return _table(self)

    def sees(self, q: Positions, k: Positions) -> Mask:
        return self.table[q // self.unit_tokens, k // self.unit_tokens]

    def kinds(self, num_blocks: int, block: int) -> Kinds:
        if block == self.unit_tokens and num_blocks == self.num_units:
            return self.table.astype(np.uint8) * FULL
        return super().kinds(num_blocks, block)

    def __repr__(self) -> str:
        kept = float(np.tril(self.table).sum()) / (self.num_units * (self.num_units + 1) / 2)
        return f"Chosen({kept:.1%} of {self.num_units} blocks of {self.unit_tokens})"


@lru_cache(maxsize=64)
def _table(rule: Chosen) -> Mask:
    flat = np.unpackbits(np.frombuffer(rule.bits, dtype=np.uint8), count=rule.num_units**2)
    table = flat.reshape(rule.num_units, rule.num_units).astype(bool)
    table.setflags(write=False)
    return table


def choose_blocks(mean_q: torch.Tensor, mean_k: torch.Tensor, rows: list[int], top_k: int) -> torch.Tensor:
    """Bool (H, len(rows), n): for each of the query blocks `rows` its own block and the best `top_k` - 1 before it.

    `mean_q` (n, H, D) and `mean_k` (n, Hkv, D). Among equal scores the earlier block wins.
    """
    sharing = mean_q.size(1) // mean_k.size(1)
    own = torch.tensor(rows, dtype=torch.int64, device=mean_q.device)
    scores = torch.einsum("ihd,jhd->hij", mean_q[own], mean_k.repeat_interleave(sharing, dim=1))
    past = torch.arange(mean_k.size(0), device=mean_q.device)[None, :] < own[:, None]
    scores = scores.masked_fill(~past, -math.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., : top_k - 1]
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True) & past
    chosen[:, torch.arange(len(rows), device=own.device), own] = True
    return chosen


class AdaptiveRingAttention:
    """Causal attention of `top_k` chosen blocks for each block of queries and head, over the ranks of a ring.

    Two small exchanges come before the hops: the sums of every block's queries and keys, and the choices,
    made once for each block by the rank that holds its first token, so that ranks cannot disagree. Routing's
    bytes are counted in `routing_bytes` (sent by this rank), the hops' in `ledger`. `schedule` is that of the
    last call. One document and one sequence (B = 1) a call. On the CPU only.

    Raises `ValueError` for a `top_k` or `block` below 1.
    """

    def __init__(
        self,
        layout: Layout,
        cp_rank: int,
        group: Group | None,
        *,
        top_k: int,
        block: int = DEFAULT_BLOCK_TOKENS,
        ahead: int = 1,
        ledger: HopLedger | None = None,
    ) -> None:
        require("top_k", top_k, 1, "1 keeps only the own block")
        require("block", block, 1, "128 suits the kernels")
        if layout.cp > 1 and group is None:
            raise ValueError(f"group=None: a layout for cp={layout.cp} needs a group of as many ranks")
        self.layout, self.cp_rank, self.top_k, self.block = layout, cp_rank, top_k, block
        self.ledger = HopLedger() if ledger is None else ledger
        self.routing_bytes = 0
        self.schedule: SparseSchedule | None = None
        self._group = group
        self._ahead = ahead
        self._next_call_index = 0

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (1, S_local, H, D), k and v (1, S_local, Hkv, D) to out (1, S_local, H, D)."""
        check_tensors(q, k, v)
        check_local_length(q, self.layout, self.cp_rank)
        if q.size(0) != 1:
            raise ValueError(f"B={q.size(0)}: content chooses for one sequence at a time; call once for each")
        call_index = self._next_call_index
        self._next_call_index += 1
        rules = self._route(q.detach(), k.detach(), call_index)
        self.schedule = plan_sparse(SparsePattern(rules, self.block), self.layout, q.size(2), k.size(2))
        ring = SparseRingAttention(
            self.schedule, self.cp_rank, self._group,
            ahead=self._ahead, ledger=self.ledger, first_call_index=call_index,
        )  # fmt: skip
        return ring(q, k, v, scale=scale)

    def reset_calls(self) -> None:
        """Start counting calls from 0 again; all ranks do so at the same place (once a step)."""
        self._next_call_index = 0

    def _route(self, q: torch.Tensor, k: torch.Tensor, call_index: int) -> tuple[Rule, ...]:
        """The rule of each query head, the same on every rank."""
        num_blocks = -(-self.layout.seq_len // self.block)
        chunks = [self._chunks(rank) for rank in range(self.layout.cp)]
        both = torch.cat([q[0], k[0]], dim=1).to(accumulate_dtype(q.dtype))
        own = [both[start:stop].sum(0) for start, stop in (chunk.local for chunk in chunks[self.cp_rank])]
        empty = both.new_zeros(0, *both.shape[1:])
        sizes = [(len(held), *both.shape[1:]) for held in chunks]
        parts = self._gather(torch.stack(own) if own else empty, sizes, call_index, _SUMMARIES)
        means = self._means(chunks, parts, num_blocks)
        mean_q, mean_k = means[:, : q.size(2)], means[:, q.size(2) :]
        owned = self._owned_blocks(chunks)
        mine = choose_blocks(mean_q, mean_k, owned[self.cp_rank], self.top_k)
        choices = self._gather(
            mine.to(torch.uint8), [(q.size(2), len(rows), num_blocks) for rows in owned], call_index, _CHOICES
        )
        table = np.zeros((q.size(2), num_blocks, num_blocks), dtype=np.uint8)
        for rows, chosen in zip(owned, choices, strict=True):
            table[:, rows] = chosen.numpy()
        return tuple(Chosen(num_blocks, np.packbits(of_head).tobytes(), self.block) for of_head in table)

    def _chunks(self, cp_rank: int) -> tuple[Chunk, ...]:
        return chunks_of(self.layout, cp_rank, ((0, self.layout.seq_len),), self.block)

    def _owned_blocks(self, chunks: list[tuple[Chunk, ...]]) -> list[list[int]]:
        """The blocks that each rank chooses for: those whose first token it holds."""
        return [[c.block for c in held if c.positions[0] == c.block * self.block] for held in chunks]

    def _means(self, chunks: list[tuple[Chunk, ...]], parts: list[torch.Tensor], num_blocks: int) -> torch.Tensor:
        """(n, H + Hkv, D): parts of a block that lies on several ranks are added in the order of positions."""
        found: dict[int, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
        for held, sums in zip(chunks, parts, strict=True):
            for chunk, part in zip(held, sums, strict=True):
                start, stop = chunk.positions
                found[chunk.block].append((start, stop - start, part))
        means = []
        for block in range(num_blocks):
            ordered = sorted(found[block], key=lambda item: item[0])
            total = torch.stack([part for *_, part in ordered]).sum(0)
            means.append(total / sum(length for _, length, _ in ordered))
        return torch.stack(means)

    def _gather(
        self, own: torch.Tensor, sizes: list[tuple[int, ...]], call_index: int, kind: int
    ) -> list[torch.Tensor]:
        """Every rank's tensor, by cp_rank, of the shapes `sizes`."""
        gathered = [own if rank == self.cp_rank else own.new_empty(size) for rank, size in enumerate(sizes)]
        if self._group is None:
            return gathered
        tag = _FIRST_TAG + (call_index % _NUM_TAGGED_CALLS) * 2 + kind
        own = own.contiguous()
        works = []
        for rank, part in enumerate(gathered):
            if rank != self.cp_rank and part.numel():
                works.append(self._group.recv([part], rank, tag))
        for hop in range(1, self.layout.cp):
            if own.numel():
                works.append(self._group.send([own], (self.cp_rank + hop) % self.layout.cp, tag))
                self.routing_bytes += own.nbytes
        for work in works:
            assert work is not None, "this rank is not in the group"
            work.wait()
        return gathered
