"""Early stopping of dominated trials. Pure functions, so that a replay stops the same trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ring.tuning.pareto import front, ranks


def objectives_in_layouts(found: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """A trial's objectives, one point per layout of its pattern."""
    return [(float(found["gap"]), *map(float, place)) for place in found["places"].values()]


def is_behind(name: str, seen: Mapping[str, Sequence[tuple[float, ...]]], keep: int = 2, least: int = 6) -> bool:
    """Whether all points of `name` lie behind `keep` fronts of `seen`, which has it; false below `least` trials."""
    if len(seen) < least:
        return False
    # A layout that another one of the same pattern beats would take up a front of its own.
    best = {other: [points[i] for i in front(points)] for other, points in seen.items()}
    names = [other for other, points in best.items() for _ in points]
    placed = ranks([point for points in best.values() for point in points])
    return min(rank for other, rank in zip(names, placed, strict=True) if other == name) >= keep
