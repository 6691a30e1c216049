"""Stages: groups of hops whose kernels run together, so that short slices need fewer kernel calls.

A stage concatenates the keys of one or more hops in one buffer and holds the tiles over them. Forward tiles
minimise the tiles per query row, whose partial results must be merged; backward tiles minimise the tiles per
key, whose dK and dV must be summed before they are sent. The schedule decides what each hop transfers.
Plain, hashable Python; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from elastic_ring.attention.layouts.layout import Range, covers
from elastic_ring.attention.plan.schedule import Schedule, Tile


@dataclass(frozen=True)
class Stage:
    """The keys of `hops[i]` begin at `offsets[i]` in the stage's buffer of `num_tokens` keys.

    `by_rows` are the forward tiles, `by_keys` the backward tiles. A tile indexes local query rows and keys in the
    buffer (stage 0: keys in the rank's own slice).
    """

    hops: tuple[int, ...]
    offsets: tuple[int, ...]
    num_tokens: int
    by_rows: tuple[Tile, ...]
    by_keys: tuple[Tile, ...]

    @cached_property
    def keys_once(self) -> bool:
        """Whether every key of the buffer lies in exactly one tile of `by_keys`."""
        num_covered = sum(tile.k[1] - tile.k[0] for tile in self.by_keys)
        return num_covered == self.num_tokens and covers((tile.k for tile in self.by_keys), num_covered)


def stages(schedule: Schedule, cp_rank: int, hops_per_stage: int) -> tuple[Stage, ...]:
    """Hop 0 alone, then `hops_per_stage` hops at a time; the same grouping on every rank."""
    own = schedule.hops[cp_rank]
    groups = [range(i, min(i + hops_per_stage, schedule.cp)) for i in range(1, schedule.cp, hops_per_stage)]
    first = Stage((0,), (0,), schedule.layout.num_tokens(cp_rank), own[0].tiles, own[0].tiles)
    return first, *(_gather(schedule, cp_rank, tuple(group)) for group in groups)


def choose_hops_per_stage(schedule: Schedule, bytes_per_token: int, limit_bytes: int) -> int:
    """The largest number of hops per stage whose keys fit into `limit_bytes` on every rank; at least 1."""
    for hops_per_stage in range(schedule.cp - 1, 1, -1):
        most = max(
            stage.num_tokens
            for cp_rank in range(schedule.cp)
            for stage in stages(schedule, cp_rank, hops_per_stage)[1:]
        )
        if most * bytes_per_token <= limit_bytes:
            return hops_per_stage
    return 1


def num_row_visits(plan: tuple[Stage, ...], *, backward: bool) -> int:
    """The largest number of tiles over any query row: how often its result is rounded in a 16-bit accumulator."""
    tiles = [tile for stage in plan for tile in (stage.by_keys if backward else stage.by_rows)]
    cuts = sorted({edge for tile in tiles for edge in tile.q})
    return max((sum(tile.q[0] <= start < tile.q[1] for tile in tiles) for start in cuts), default=0)


def _gather(schedule: Schedule, cp_rank: int, group: tuple[int, ...]) -> Stage:
    offsets: list[int] = []
    tiles: list[Tile] = []
    total = 0
    for index in group:
        hop = schedule.hops[cp_rank][index]
        offsets.append(total)
        for tile in hop.tiles:
            start, stop = hop.in_buffer(tile.k)
            tiles.append(Tile(tile.q, (total + start, total + stop), tile.causal))
        total += hop.num_fetched_tokens()
    if len(group) == 1:
        return Stage(group, tuple(offsets), total, tuple(tiles), tuple(tiles))
    return Stage(group, tuple(offsets), total, _by_rows(tiles), _by_keys(tiles))


def _by_rows(tiles: list[Tile]) -> tuple[Tile, ...]:
    """The same (query, key) pairs with one tile per row and contiguous run of keys."""
    found = _regroup([(tile.q, tile.k) for tile in tiles])
    return tuple(Tile(q, k, causal=False) for q, k in found)


def _by_keys(tiles: list[Tile]) -> tuple[Tile, ...]:
    found = _regroup([(tile.k, tile.q) for tile in tiles])
    return tuple(Tile(q, k, causal=False) for k, q in found)


def _regroup(rectangles: list[tuple[Range, Range]]) -> list[tuple[Range, Range]]:
    """Cut rectangles along the first axis, join them along the second, then join equal neighbours along the first."""
    cuts = sorted({edge for first, _ in rectangles for edge in first})
    strips: list[tuple[Range, Range]] = []
    for strip in pairwise(cuts):
        runs: list[Range] = []
        for start, stop in sorted(second for first, second in rectangles if first[0] <= strip[0] < first[1]):
            if runs and start == runs[-1][1]:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        for run in runs:
            at = next((i for i, (q, k) in enumerate(strips) if k == run and q[1] == strip[0]), None)
            if at is None:
                strips.append((strip, run))
            else:
                strips[at] = ((strips[at][0][0], strip[1]), run)
    return strips
