"""Layouts: which rank of a ring holds which positions of the global sequence, and in which order.

Plain, hashable data; no patterns, kernels, prices or process groups in this file. Only the helpers that take tensors
import torch, so that schedules can be planned without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.patterns.rules import require

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]
"""A half-open (start, stop) range of positions or of indices into a rank's local slice."""


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as ascending ranges, merged where they touch or overlap."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def covers(ranges: Iterable[Range], size: int) -> bool:
    """Whether every position of [0, size) lies in some range, and none beyond."""
    return union(ranges) == (((0, size),) if size else ())


@dataclass(frozen=True)
class Layout:
    """`segments[cp_rank]` lists the (start, stop) position ranges of one rank, ascending; local order is this order.

    The segments of all ranks partition [0, seq_len). Empty segments are allowed. Raises `ValueError` if a position is
    missing or duplicated, or if a rank's segments do not ascend.
    """

    name: str
    seq_len: int
    segments: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ordered = sorted(segment for own in self.segments for segment in own if segment[0] < segment[1])
        end = 0
        for start, stop in ordered:
            if start != end:
                raise ValueError(f"layout {self.name}: position {min(start, end)} is held by no rank or two")
            end = stop
        if end != self.seq_len:
            raise ValueError(f"layout {self.name}: segments cover {end} of {self.seq_len} positions")
        for cp_rank, own in enumerate(self.segments):
            if list(own) != sorted(own):
                raise ValueError(f"layout {self.name}: segments of cp_rank {cp_rank} must ascend, got {own}")

    @property
    def cp(self) -> int:
        """The number of ranks that share the sequence."""
        return len(self.segments)

    def repeated(self, times: int) -> Layout:
        """The layout of `times` such sequences, one after another: a rank holds its part of the first, then of the
        second, and so on. Documents begin anew with each. Raises `ValueError` for less than one."""
        if times < 1:
            raise ValueError(f"times={times}: a layout has at least one sequence")
        if times == 1:
            return self
        shifts = range(0, times * self.seq_len, self.seq_len)
        segments = tuple(
            tuple((shift + start, shift + stop) for shift in shifts for start, stop in own) for own in self.segments
        )
        return Layout(f"{self.name}-x{times}", times * self.seq_len, segments)

    def num_tokens(self, cp_rank: int) -> int:
        return sum(stop - start for start, stop in self.segments[cp_rank])

    def positions(self, cp_rank: int) -> torch.Tensor:
        """The global position of each local token: int64, shape (S_local,)."""
        import torch

        ranges = [torch.arange(start, stop) for start, stop in self.segments[cp_rank]]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def documents(self, cp_rank: int, starts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(position in its document, tokens of that in this sequence) of each local token; `starts` ascend from 0. Like
        `positions`."""
        import torch

        positions, begins = self.positions(cp_rank), torch.tensor([*starts, self.seq_len])
        number = torch.searchsorted(begins, positions, right=True) - 1
        return positions - begins[number], begins.diff()[number]

    def scatter(self, tensor_global: torch.Tensor, cp_rank: int, dim: int) -> torch.Tensor:
        """Return `cp_rank`'s tokens of `tensor_global`: seq_len along `dim` in, S_local out. Differentiable.

        Raises `ValueError` for a wrong size along `dim` and for an unknown rank.
        """
        import torch

        if not 0 <= cp_rank < self.cp:
            raise ValueError(f"cp_rank={cp_rank}: layout {self.name} has ranks 0 to {self.cp - 1}")
        if tensor_global.size(dim) != self.seq_len:
            raise ValueError(
                f"a tensor of shape {tuple(tensor_global.shape)} has {tensor_global.size(dim)} of the layout's "
                f"{self.seq_len} tokens along dim={dim}: give the whole sequence, or a layout of its length"
            )
        own = self.segments[cp_rank]
        parts = [tensor_global.narrow(dim, start, stop - start) for start, stop in own]
        return torch.cat(parts, dim=dim) if parts else tensor_global.narrow(dim, 0, 0)

    def gather(self, list_of_locals: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The inverse of `scatter`: join the slices of all ranks, given in cp_rank order, along `dim`.

        Raises `ValueError` for a wrong number of slices or a slice of the wrong length.
        """
        import torch

        if len(list_of_locals) != self.cp:
            raise ValueError(f"{len(list_of_locals)} slices: layout {self.name} has cp={self.cp} ranks, one slice each")
        for cp_rank, local in enumerate(list_of_locals):
            if local.size(dim) != self.num_tokens(cp_rank):
                raise ValueError(
                    f"the slice of cp_rank {cp_rank} has shape {tuple(local.shape)}: layout {self.name} gives it "
                    f"{self.num_tokens(cp_rank)} tokens, along dim={dim}"
                )
        placed: list[tuple[int, torch.Tensor]] = []
        for own, local in zip(self.segments, list_of_locals, strict=True):
            offset = 0
            for start, stop in own:
                placed.append((start, local.narrow(dim, offset, stop - start)))
                offset += stop - start
        placed.sort(key=lambda item: (item[0], item[1].size(dim)))
        return torch.cat([part for _, part in placed], dim=dim)


def contiguous(seq_len: int, cp: int) -> Layout:
    """Rank r holds the r-th of `cp` consecutive chunks. Fits full attention and windows."""
    _check(seq_len, cp)
    return Layout("contiguous", seq_len, tuple((chunk,) for chunk in _split(seq_len, cp)))


def zigzag(seq_len: int, cp: int) -> Layout:
    """Rank r holds chunks r and 2cp-1-r of 2cp, so that causal work is equal on all ranks.

    The zigzag variant of Striped Attention (Brandon et al. 2023, arXiv:2311.09431).
    """
    _check(seq_len, cp)
    chunks = _split(seq_len, 2 * cp)
    return Layout("zigzag", seq_len, tuple((chunks[r], chunks[2 * cp - 1 - r]) for r in range(cp)))


def make_layout(name: str, seq_len: int, cp: int) -> Layout:
    """The layout `name`: "contiguous" or "zigzag". Raises `ValueError` for any other name."""
    makers = {"contiguous": contiguous, "zigzag": zigzag}
    if name not in makers:
        raise ValueError(f"layout={name!r}: unknown; choose one of {', '.join(makers)}")
    return makers[name](seq_len, cp)


def _split(seq_len: int, num_chunks: int) -> tuple[Range, ...]:
    """Consecutive chunks whose sizes differ by at most one, the longer ones first, like numpy.array_split."""
    size, longer = divmod(seq_len, num_chunks)
    bounds = [i * size + min(i, longer) for i in range(num_chunks + 1)]
    return tuple(pairwise(bounds))


def _check(seq_len: int, cp: int, unit_tokens: int = 1) -> None:
    require("cp", cp, 1, "a ring has at least one rank")
    require("seq_len", seq_len, 1, "a sequence has at least one token")
    require("unit_tokens", unit_tokens, 1, "1 places single tokens")


# ------------------------------------------------------------ for sparse patterns


def striped(seq_len: int, cp: int, *, unit_tokens: int = 128) -> Layout:
    """Rank u mod cp holds unit u of `unit_tokens` tokens (Striped Attention, Brandon et al. 2023, arXiv:2311.09431)."""
    _check(seq_len, cp, unit_tokens)
    num_units = -(-seq_len // unit_tokens)
    return _from_owners("striped", np.arange(num_units) % cp, seq_len, cp, unit_tokens)


def residue_class(seq_len: int, cp: int, rate: int, *, unit_tokens: int = 1) -> Layout:
    """Group units by index mod `rate`: for dilated patterns of that rate.

    The classes are concatenated and split into `cp` equal parts, so `cp` need not divide `rate`.
    """
    _check(seq_len, cp, unit_tokens)
    require("rate", rate, 1, "1 is the contiguous layout")
    num_units = -(-seq_len // unit_tokens)
    by_class = np.argsort(np.arange(num_units) % rate, kind="stable")
    owners = np.empty(num_units, dtype=np.int64)
    owners[by_class] = np.arange(num_units) * cp // num_units
    return _from_owners(f"residue-class-{rate}", owners, seq_len, cp, unit_tokens)


def balanced(work: NDArray[np.int64], cp: int, *, unit_tokens: int = 128, limit: float = 1.05) -> tuple[Layout, float]:
    """The layout with the longest chunks whose work is balanced, and its work max/mean.

    `work` (seq_len,) is the cost of each row (`SparsePattern.row_pairs`). The sequence is split into `cp` chunks per
    round; in each round every rank gets one chunk, the least loaded rank the heaviest. Token counts therefore differ
    by at most one unit per round. Longer chunks need fewer bytes, so the number of rounds grows from 1 (the contiguous
    layout) until max/mean is at most `limit`; without such a layout the best is returned.
    """
    seq_len = len(work)
    _check(seq_len, cp, unit_tokens)
    most, numbers = max(1, -(-seq_len // unit_tokens) // cp), [1, 2, 3, 4, 6, 8]
    while numbers[-1] < most:
        numbers.append(numbers[-1] * 2)
    best: tuple[float, Layout] | None = None
    for rounds in sorted({min(number, most) for number in numbers}):
        layout = dealt(work, cp, rounds, unit_tokens=unit_tokens)
        spread = work_max_over_mean(layout, work)
        if best is None or spread < best[0]:
            best = (spread, layout)
        if spread <= limit:
            break
    assert best is not None
    return best[1], best[0]


def dealt(work: NDArray[np.int64], cp: int, rounds: int, *, unit_tokens: int = 128) -> Layout:
    """The layout with `rounds` chunks per rank; in each round the least loaded rank gets the heaviest chunk."""
    seq_len = len(work)
    num_units = -(-seq_len // unit_tokens)
    num_chunks = cp * rounds
    bounds = np.minimum(np.arange(num_chunks + 1) * num_units // num_chunks * unit_tokens, seq_len)
    total = np.concatenate([[0], np.cumsum(work)])
    weights = total[bounds[1:]] - total[bounds[:-1]]
    loads = [0] * cp
    segments: list[list[Range]] = [[] for _ in range(cp)]
    by_weight = sorted(range(rounds), key=lambda r: (-int(weights[r * cp : (r + 1) * cp].sum()), r))
    for index in by_weight:
        chunks = sorted(range(index * cp, (index + 1) * cp), key=lambda chunk: (-int(weights[chunk]), chunk))
        ranks = sorted(range(cp), key=lambda rank: (loads[rank], rank))
        for chunk, rank in zip(chunks, ranks, strict=True):
            loads[rank] += int(weights[chunk])
            if bounds[chunk] < bounds[chunk + 1]:
                segments[rank].append((int(bounds[chunk]), int(bounds[chunk + 1])))
    if rounds == 1:
        # One round cannot balance anything. Keep sequence order, so that adjacent chunks lie on adjacent ranks.
        segments = sorted(segments, key=lambda own: own or [(seq_len, seq_len)])
    return Layout(f"balanced-{rounds}", seq_len, tuple(map(union, segments)))


def work_max_over_mean(layout: Layout, work: NDArray[np.int64]) -> float:
    """The work of the most loaded rank over the mean of all ranks; 1 is perfect balance."""
    total = np.concatenate([[0], np.cumsum(work)])
    loads = [sum(int(total[stop] - total[start]) for start, stop in own) for own in layout.segments]
    mean = sum(loads) / layout.cp
    return max(loads) / mean if mean else 1.0


def tokens_max_over_mean(layout: Layout) -> float:
    """The same ratio for token counts, which determine memory and the cost of all other layers."""
    return max(layout.num_tokens(rank) for rank in range(layout.cp)) * layout.cp / layout.seq_len


def _from_owners(name: str, owners: NDArray[np.int64], seq_len: int, cp: int, unit_tokens: int) -> Layout:
    segments: list[list[Range]] = [[] for _ in range(cp)]
    edges = np.flatnonzero(np.diff(owners)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(owners)], strict=True):
        segments[int(owners[first])].append((first * unit_tokens, min(last * unit_tokens, seq_len)))
    return Layout(name, seq_len, tuple(map(tuple, segments)))
