"""In which parts rows come to the ranks of a ring, where tokens crowd at the experts of one: from the loads alone, so
that all ranks cut alike. No groups in here.

A part has whole experts where these fit into it, so their products and gradients have the bits of a pass in one part,
where the kernel is the same: on GPUs torch chooses it by the rows an expert has on average. The cut follows from the
data, so a step that is repeated has the same bits in any case.
An expert with more rows than a part is cut after so many rows: its gradient is a sum over its cuts, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """Rows [start, stop) of an expert, in the order of their sources."""

    expert: int
    start: int
    stop: int


def parts_of(loads: Sequence[int], most_rows: int) -> list[list[Cut]]:
    """The parts of a rank whose experts have these loads; none has more than `most_rows`."""
    parts: list[list[Cut]] = [[]]
    room = most_rows
    for expert, load in enumerate(loads):
        for start in range(0, load, most_rows):
            cut = Cut(expert, start, min(load, start + most_rows))
            if cut.stop - cut.start > room:
                parts.append([])
                room = most_rows
            parts[-1].append(cut)
            room -= cut.stop - cut.start
    return parts


def all_parts(counts: Tensor, cp: int, most_rows: int) -> list[list[list[Cut]]]:
    """By part and rank, the cuts of its own experts. `counts`: int64 (source, expert), with as many experts a rank.
    All ranks have as many parts, some with nothing in them."""
    by_rank = [parts_of(loads, most_rows) for loads in counts.sum(0).view(cp, -1).tolist()]
    number = max(map(len, by_rank))
    filled = [parts + [[]] * (number - len(parts)) for parts in by_rank]
    return [[parts[index] for parts in filled] for index in range(number)]


def rows_of(counts: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """int64 (source, cut): how many rows of each cut a source has. `counts` (source, expert)."""
    experts = torch.tensor([cut.expert for cut in cuts], dtype=torch.int64)
    start, stop = (torch.tensor([cut[end] for cut in cuts], dtype=torch.int64) for end in (1, 2))
    last = counts.cumsum(0)[:, experts]
    first = last - counts[:, experts]
    return (last.minimum(stop) - first.maximum(start)).clamp_min(0)


def spans_of(cuts: Sequence[Cut]) -> tuple[int, int]:
    """The experts of a part, from one to before another."""
    return (cuts[0].expert, cuts[-1].expert + 1) if cuts else (0, 0)


def sliced(weight: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The experts of each part. The gradient of an expert in several is summed in the order of the parts, and that of
    one in one part is what it is there."""
    found: tuple[Tensor, ...] = _Sliced.apply(weight, spans)
    return found


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, weight.shape
        return tuple(weight[first:stop] for first, stop in spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, done = grads[0].new_zeros(ctx.shape), 0
        for (first, stop), grad in zip(ctx.spans, grads, strict=True):
            again = max(0, min(done, stop) - first)
            total[first : first + again] += grad[:again]
            total[first + again : stop] = grad[again:]
            done = max(done, stop)
        return total, None
