"""Blocks that content chose, as tables made on the device: the host never reads a choice.

The fetch of all past keys is planned once, as for a pattern in which all heads see all of them. Each pass then runs
that plan with tables of the blocks that were chosen. Choosing and communication must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from elastic_ring.attention.kernels.block_tables import BlockLists, BlockTables, kept_between
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import OneGroup
from elastic_ring.attention.lowering.call_plan import Call, CallPlan, Program, RingPlans
from elastic_ring.attention.patterns.rules import Rule
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import BLOCK_TOKENS, blocks_of, check_blocks
from elastic_ring.attention.routing.router import Choice


@dataclass(frozen=True, eq=False)
class PastBlocks:
    """The static part of a content-chosen call. `always` (H or 1, n, N) bool: the blocks of the sequence that each of a
    rank's n own blocks sees in any case, `most` of them at most. `of_hops`: the blocks that it fetches in each hop; its
    own in hop 0."""

    always: torch.Tensor
    most: int
    of_hops: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Device memory, in bytes."""
        return sum(each.nbytes for each in (self.always, *self.of_hops))


def past_blocks(
    schedule: Schedule, cp_rank: int, rules: tuple[Rule, ...], documents: tuple[Range, ...], device: torch.device
) -> PastBlocks:
    """The static part of `schedule`, in which all heads see all past keys, and static `rules`, one for each head.
    Raises `ValueError` for rules and layouts that cut blocks."""
    check_blocks(schedule.sparse, schedule.layout)
    own, layout = blocks_of(schedule.layout, cp_rank), schedule.layout
    always = kept_between(rules, documents, own, np.arange(-(-layout.seq_len // BLOCK_TOKENS)))
    of_hops = [own]
    for hop in schedule.hops[cp_rank][1:]:
        there = blocks_of(layout, hop.source)
        parts = [there[start // BLOCK_TOKENS : stop // BLOCK_TOKENS] for start, stop in hop.fetch[0]]
        of_hops.append(np.concatenate([own[:0], *parts]))
    return PastBlocks(
        torch.from_numpy(always).to(device),
        int(always.sum(-1).max(initial=0)),
        tuple(torch.from_numpy(each).to(device) for each in of_hops),
    )


@dataclass(eq=False)
class ChosenPlans(RingPlans):
    """The plans of one call, on top of the shared plans of all its past keys. Only the choices are kept for backward:
    their tables are made anew, since tables by key take 4 bytes for each pair of blocks and head."""

    past: PastBlocks = field(kw_only=True)
    choices: tuple[Choice, ...] = field(kw_only=True)

    def of_call(self, plan: CallPlan) -> CallPlan:
        kept = self.past.always.expand(self.schedule.num_heads, -1, -1).clone()
        for each in self.choices:
            at = (each.heads[:, None, None], each.rows[None, :, None], each.blocks.long())
            kept.index_put_(at, kept.new_ones(()))
        most = self.past.most + sum(each.blocks.size(-1) for each in self.choices)
        return narrowed(plan, kept, most, self.past.of_hops)


def narrowed(plan: CallPlan, kept: torch.Tensor, most: int, of_hops: tuple[torch.Tensor, ...]) -> CallPlan:
    """`plan` with tables of the blocks `kept` (H, n, N) bool, at most `most` in a row."""
    own = kept.index_select(2, of_hops[0])
    diagonal = own.diagonal(dim1=1, dim2=2).clone()
    own.diagonal(dim1=1, dim2=2).zero_()
    own_tables = _tables(own, diagonal, most)

    def call_on(call: Call, seen: torch.Tensor) -> Call:
        """`seen` (H, n, m) bool: all own blocks and the keys of the call's stage."""
        assert isinstance(call.rows, OneGroup), call.rows
        assert isinstance(call.cover, BlockTables)
        tokens = call.rows.tokens
        if isinstance(tokens, slice):
            some = seen[:, tokens.start // BLOCK_TOKENS : tokens.stop // BLOCK_TOKENS]
        else:
            some = seen.index_select(1, tokens[::BLOCK_TOKENS] // BLOCK_TOKENS)
        tables = _tables(some, None, most)
        # As planned: kernels are compiled for each number of blocks, and round those that vary.
        return call._replace(cover=replace(tables, all_rows=call.cover.all_rows, all_keys=call.cover.all_keys))

    def program_on(program: Program) -> Program:
        num_heads = own_tables.num_heads
        sharing = num_heads // max((part.kv_heads[1] for part in program.own if part.kv_heads), default=num_heads)
        parts = []
        for part in program.own:
            heads = part.kv_heads
            tables = own_tables if heads is None else own_tables.of_heads(heads[0] * sharing, heads[1] * sharing)
            parts.append(part._replace(calls=tuple(call._replace(cover=tables) for call in part.calls)))
        return program._replace(own=tuple(parts))

    first = (plan.stages[0].forward[0]._replace(cover=own_tables),)
    stages = [replace(plan.stages[0], forward=first, backward=first)]
    for stage in plan.stages[1:]:
        seen = kept.index_select(2, torch.cat([of_hops[hop] for hop in stage.hops]))
        calls = tuple(call_on(call, seen) for call in stage.forward)
        stages.append(replace(stage, forward=calls, backward=calls))
    backward_kept = None if plan.backward_kept is None else program_on(plan.backward_kept)
    return replace(plan, stages=tuple(stages), backward=program_on(plan.backward), backward_kept=backward_kept)


def _tables(full: torch.Tensor, diagonal: torch.Tensor | None, most: int) -> BlockTables:
    """From `full` (H, n, m) bool, queries first, and `diagonal` (H, n) bool, None if there is none."""

    def diagonals(num_rows: int) -> BlockLists:
        if diagonal is None:
            counts = torch.zeros(1, full.size(0), num_rows, dtype=torch.int32, device=full.device)
            return BlockLists(counts, counts.unsqueeze(-1))
        at = torch.arange(num_rows, dtype=torch.int32, device=full.device).view(1, 1, -1, 1)
        return BlockLists(diagonal.int().unsqueeze(0), at.expand(1, full.size(0), -1, 1).contiguous())

    num_q, num_k = full.shape[1:]
    by_query, by_key = _listed(full, most), _listed(full.transpose(1, 2), num_q)
    return BlockTables(diagonals(num_q), diagonals(num_k), by_query, by_key, num_q, num_k)


def _listed(chosen: torch.Tensor, most: int) -> BlockLists:
    """The chosen columns of each row of (H, n, m) bool, of which a row has at most `most`: the host does not know how
    many there are."""
    order = chosen.contiguous().to(torch.uint8).argsort(dim=-1, descending=True, stable=True)  # kernels want rows
    indices = order[..., : max(1, min(most, chosen.size(-1)))].int()
    return BlockLists(chosen.sum(-1, dtype=torch.int32).unsqueeze(0), indices.contiguous().unsqueeze(0))
