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
from elastic_ring.attention.lowering.call_plan import Call, CallPlan, Program
from elastic_ring.attention.lowering.ring_plans import RingPlans
from elastic_ring.attention.patterns.rules import Rule
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import BLOCK_TOKENS, blocks_of, check_blocks
from elastic_ring.attention.routing.router import Choice


@dataclass(frozen=True, eq=False)
class PastBlocks:
    """What is known before a call. `always` (H or 1, n, N) bool: the blocks of the sequence that each of a rank's n own
    blocks sees whatever is chosen, `most` of them at most. `of_hops`: the blocks that it fetches in each hop; its own
    in hop 0."""

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
    """Of `schedule`, in which all heads see all past keys, and static `rules`, one for each head. Raises: `ValueError`
    for rules and layouts that cut blocks."""
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
    """The plans of one call, on top of those of all its past keys, which others share. Only the choices are kept for
    backward: their tables are made anew, since those by key have 4 bytes for each pair of blocks and head."""

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
    first = (plan.stages[0].forward[0]._replace(cover=own_tables),)
    stages = [replace(plan.stages[0], forward=first, backward=first)]
    for stage in plan.stages[1:]:
        seen = kept.index_select(2, torch.cat([of_hops[hop] for hop in stage.hops]))
        calls = tuple(_call(call, seen, most) for call in stage.forward)
        stages.append(replace(stage, forward=calls, backward=calls))
    programs = [_program(program, own_tables) for program in (plan.backward, plan.backward_kept)]
    assert programs[0] is not None
    return replace(plan, stages=tuple(stages), backward=programs[0], backward_kept=programs[1])


def _call(call: Call, seen: torch.Tensor, most: int) -> Call:
    """`seen` (H, n, m) bool are all own blocks and the keys of the call's stage."""
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


def _program(program: Program | None, own: BlockTables) -> Program | None:
    if program is None:
        return None
    sharing = own.num_heads // max((part.kv_heads[1] for part in program.own if part.kv_heads), default=own.num_heads)
    parts = []
    for part in program.own:
        tables = own if part.kv_heads is None else own.of_heads(*(head * sharing for head in part.kv_heads))
        parts.append(part._replace(calls=tuple(call._replace(cover=tables) for call in part.calls)))
    return program._replace(own=tuple(parts))


def _tables(full: torch.Tensor, diagonal: torch.Tensor | None, most: int) -> BlockTables:
    """From `full` (H, n, m) bool, queries first, and `diagonal` (H, n) bool, None where there is none."""
    own, own_by_key = (_diagonals(full, diagonal, num) for num in full.shape[1:])
    num_q, num_k = full.shape[1:]
    return BlockTables(own, own_by_key, _listed(full, most), _listed(full.transpose(1, 2), num_q), num_q, num_k)


def _diagonals(full: torch.Tensor, diagonal: torch.Tensor | None, num_rows: int) -> BlockLists:
    if diagonal is None:
        counts = torch.zeros(1, full.size(0), num_rows, dtype=torch.int32, device=full.device)
        return BlockLists(counts, counts.unsqueeze(-1))
    at = torch.arange(num_rows, dtype=torch.int32, device=full.device)
    return BlockLists(diagonal.int().unsqueeze(0), at.view(1, 1, -1, 1).expand(1, full.size(0), -1, 1).contiguous())


def _listed(chosen: torch.Tensor, most: int) -> BlockLists:
    """The chosen columns of each row of (H, n, m) bool, of which a row has at most `most`: the host does not know how
    many there are."""
    order = chosen.contiguous().to(torch.uint8).argsort(dim=-1, descending=True, stable=True)  # kernels want rows
    indices = order[..., : max(1, min(most, chosen.size(-1)))].int()
    return BlockLists(chosen.sum(-1, dtype=torch.int32).unsqueeze(0), indices.contiguous().unsqueeze(0))
