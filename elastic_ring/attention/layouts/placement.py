"""Layouts for sparse patterns: striped, by residue class, and balanced by the work of each row.

Constructs `Layout`s only. `choice` prices layouts and selects one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elastic_ring.attention.layouts.layout import Layout, Range, union
from elastic_ring.attention.patterns.rules import require


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
    layout) until max/mean is at most `limit`; if it never is, the best layout found is returned.
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


def _check(seq_len: int, cp: int, unit_tokens: int) -> None:
    require("cp", cp, 1, "a ring has at least one rank")
    require("seq_len", seq_len, 1, "a sequence has at least one token")
    require("unit_tokens", unit_tokens, 1, "1 places single tokens")
