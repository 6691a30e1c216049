"""Multi-objective measures: Pareto fronts, ranks, hypervolume, rank correlation. All objectives are minimised.

Pure functions of numbers. No trials and no optimisation library in here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Point = Sequence[float]


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is at least as good as `b` in every objective and better in one."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def ranks(points: Sequence[Point]) -> list[int]:
    """For each point the index of its front: 0 is dominated by none, 1 only by front 0, and so on.

    Raises: ValueError for a value that is not finite.
    """
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a point has an objective that is not finite: leave such points out, as diverged")
    found = [-1] * len(points)
    front = 0
    while -1 in found:
        open_ = [i for i, rank in enumerate(found) if rank == -1]
        best = [i for i in open_ if not any(dominates(points[j], points[i]) for j in open_)]
        for i in best:
            found[i] = front
        front += 1
    return found


def front(points: Sequence[Point]) -> list[int]:
    """The indices of the non-dominated points."""
    return [i for i, rank in enumerate(ranks(points)) if rank == 0]


def is_behind(name: str, seen: Mapping[str, Point], keep: int = 2, least: int = 6) -> bool:
    """Whether the point of `name` lies behind `keep` fronts of `seen`, which has it; false below `least` points."""
    return len(seen) >= least and dict(zip(seen, ranks(list(seen.values())), strict=True))[name] >= keep


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The volume that `points` dominate up to `reference`; exact, by slices along the last objective."""
    inside = [tuple(p) for p in points if all(x < r for x, r in zip(p, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return float(reference[0]) - min(p[0] for p in inside)
    levels = sorted({p[-1] for p in inside})
    volume = 0.0
    for level, above in zip(levels, [*levels[1:], reference[-1]], strict=True):
        slice_ = [p[:-1] for p in inside if p[-1] <= level]
        volume += (above - level) * hypervolume(slice_, reference[:-1])
    return volume
