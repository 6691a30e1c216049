"""Layouts for sparse patterns: striped, by residue class, and placed by the work that a pattern gives its rows.

Makes `Layout`s and nothing else: what a layout costs is `sparse_schedule`'s to say, which to take `choice`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.layout import Layout, Range
from elastic_ring.attention.rules import require


def striped(seq_len: int, cp: int, *, unit_tokens: int = 128) -> Layout:
    """Unit u of `unit_tokens` lies on rank u mod cp (Striped Attention, Brandon et al. 2023, arXiv:2311.09431)."""
    _check(seq_len, cp, unit_tokens)
    num_units = -(-seq_len // unit_tokens)
    return _from_owners("striped", np.arange(num_units) % cp, seq_len, cp, unit_tokens)


def residue_class(seq_len: int, cp: int, rate: int, *, unit_tokens: int = 1) -> Layout:
    """Units with the same index mod `rate` lie together: for dilated patterns of that rate.

    The classes are laid one after another and cut into `cp` equal parts, so `cp` need not divide `rate`.
    """
    _check(seq_len, cp, unit_tokens)
    require("rate", rate, 1, "1 is the contiguous layout")
    num_units = -(-seq_len // unit_tokens)
    by_class = np.argsort(np.arange(num_units) % rate, kind="stable")
    owners = np.empty(num_units, dtype=np.int64)
    owners[by_class] = np.arange(num_units) * cp // num_units
    return _from_owners(f"residue-class-{rate}", owners, seq_len, cp, unit_tokens)


def balanced(
    work: NDArray[np.int64], cp: int, *, unit_tokens: int = 128, limit: float = 1.05
) -> tuple[Layout, float]:
    """The coarsest placement in rounds whose work is balanced, and its work max/mean.

    `work` (seq_len,) is what each row costs (`SparsePattern.row_pairs`). The sequence is cut into `cp` chunks
    a round, and each round deals one chunk to each rank, the heaviest to the least loaded, so ranks hold
    equally many tokens to within a unit a round. The fewer rounds the longer the chunks and the fewer the
    bytes; rounds are added until max/mean is at most `limit`. One round is the contiguous layout. Where no
    number of rounds reaches the limit, the best found is returned.
    """
    seq_len = len(work)
    _check(seq_len, cp, unit_tokens)
    best: tuple[float, Layout] | None = None
    for rounds in _numbers_of_rounds(seq_len, cp, unit_tokens):
        layout = dealt(work, cp, rounds, unit_tokens=unit_tokens)
        spread = work_max_over_mean(layout, work)
        if best is None or spread < best[0]:
            best = (spread, layout)
        if spread <= limit:
            break
    assert best is not None
    return best[1], best[0]


def dealt(work: NDArray[np.int64], cp: int, rounds: int, *, unit_tokens: int = 128) -> Layout:
    """`rounds` chunks for each rank, those of a round dealt heaviest first to the least loaded rank."""
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
        # Nothing was weighed against anything: in order, so that neighbours are neighbours.
        segments = sorted(segments, key=lambda own: own or [(seq_len, seq_len)])
    return Layout(f"balanced-{rounds}", seq_len, tuple(_joined(sorted(own)) for own in segments))


def work_max_over_mean(layout: Layout, work: NDArray[np.int64]) -> float:
    """The most loaded rank's work over the mean; 1 is perfect balance."""
    total = np.concatenate([[0], np.cumsum(work)])
    loads = [sum(int(total[stop] - total[start]) for start, stop in own) for own in layout.segments]
    mean = sum(loads) / layout.cp
    return max(loads) / mean if mean else 1.0


def tokens_max_over_mean(layout: Layout) -> float:
    """The same for tokens held, which is what the layers beside attention and the memory see."""
    return max(layout.num_tokens(rank) for rank in range(layout.cp)) * layout.cp / layout.seq_len


def _numbers_of_rounds(seq_len: int, cp: int, unit_tokens: int) -> list[int]:
    most = max(1, -(-seq_len // unit_tokens) // cp)
    rounds = [1, 2, 3, 4, 6, 8]
    while rounds[-1] < most:
        rounds.append(rounds[-1] * 2)
    return sorted({min(number, most) for number in rounds})


def _from_owners(name: str, owners: NDArray[np.int64], seq_len: int, cp: int, unit_tokens: int) -> Layout:
    segments: list[list[Range]] = [[] for _ in range(cp)]
    edges = np.flatnonzero(np.diff(owners)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(owners)], strict=True):
        segments[int(owners[first])].append((first * unit_tokens, min(last * unit_tokens, seq_len)))
    return Layout(name, seq_len, tuple(map(tuple, segments)))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _check(seq_len: int, cp: int, unit_tokens: int) -> None:
    require("cp", cp, 1, "a ring has at least one rank")
    require("seq_len", seq_len, 1, "a sequence has at least one token")
    require("unit_tokens", unit_tokens, 1, "1 places single tokens")
