"""One rank's plan of dense attention, derived from the schedule once: stages, messages with offsets, order of sums.

A stage concatenates the keys of one or more hops in one buffer and runs their kernels together, so that short slices
need fewer kernel calls. Forward tiles minimise the tiles per query row, whose partial results must be merged; backward
tiles the tiles per key, whose dK and dV must be summed before they are sent. With short slices a pass is bound by the
host, and hashing a schedule of a thousand documents takes longer than a kernel launch, so nothing here is computed per
call or message. Offsets are in elements. Plain Python; no tensor or address.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from elastic_ring.attention.layouts.layout import Range, covers
from elastic_ring.attention.plan.schedule import Schedule, Tile
from elastic_ring.attention.plan.sparse_tiles import num_tokens as tokens_in
from elastic_ring.attention.plan.traffic import ContiguousCopy, PeerTransfer, Traffic

Sum = tuple[Range, tuple[tuple[int, int], ...]]
"""A range of own keys, and its partials: (hop, offset in that hop's tokens), in hop order."""


@dataclass(frozen=True)
class Stage:
    """The keys of `hops` one after another in a buffer of `num_tokens` keys.

    `by_rows` are the forward tiles, `by_keys` the backward tiles. A tile indexes local query rows and keys in the
    buffer (stage 0: keys in the rank's own slice).
    """

    hops: tuple[int, ...]
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
    planned = [Stage((0,), schedule.layout.num_tokens(cp_rank), own[0].tiles, own[0].tiles)]
    for first in range(1, schedule.cp, hops_per_stage):
        hops = tuple(range(first, min(first + hops_per_stage, schedule.cp)))
        tiles: list[Tile] = []
        total = 0
        for hop in hops:
            for tile in own[hop].tiles:
                start, stop = own[hop].in_buffer(tile.k)
                tiles.append(Tile(tile.q, (total + start, total + stop), tile.causal))
            total += own[hop].num_fetched_tokens()
        by_rows = by_keys = tuple(tiles)
        if len(hops) > 1:
            by_rows = tuple(Tile(q, k, False) for q, k in _regroup([(tile.q, tile.k) for tile in tiles]))
            by_keys = tuple(Tile(q, k, False) for k, q in _regroup([(tile.k, tile.q) for tile in tiles]))
        planned.append(Stage(hops, total, by_rows, by_keys))
    return tuple(planned)


def choose_hops_per_stage(schedule: Schedule, bytes_per_token: int, limit_bytes: int) -> int:
    """The largest number of hops per stage whose keys fit into `limit_bytes` on every rank; at least 1."""
    for hops_per_stage in range(schedule.cp - 1, 1, -1):
        plans = (stages(schedule, cp_rank, hops_per_stage)[1:] for cp_rank in range(schedule.cp))
        if max(stage.num_tokens for plan in plans for stage in plan) * bytes_per_token <= limit_bytes:
            return hops_per_stage
    return 1


def num_row_visits(plan: tuple[Stage, ...], *, backward: bool) -> int:
    """The largest number of tiles over any query row: how often its result is rounded in a 16-bit accumulator."""
    tiles = [tile for stage in plan for tile in (stage.by_keys if backward else stage.by_rows)]
    cuts = sorted({edge for tile in tiles for edge in tile.q})
    return max((sum(tile.q[0] <= start < tile.q[1] for tile in tiles) for start in cuts), default=0)


def _regroup(rectangles: list[tuple[Range, Range]]) -> list[tuple[Range, Range]]:
    """The same pairs with one rectangle for each row of the first axis and contiguous run of the second: cut along the
    first axis, joined along the second, then equal neighbours joined along the first."""
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


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The stages of one rank, with sums and checks derived from them."""

    schedule: Schedule
    cp_rank: int
    stages: tuple[Stage, ...]

    @cached_property
    def row_visits(self) -> tuple[int, int]:
        """`num_row_visits`, forward and backward."""
        return num_row_visits(self.stages, backward=False), num_row_visits(self.stages, backward=True)

    @cached_property
    def every_row_sees(self) -> bool:
        """Whether every query sees a key."""
        rows = (tile.q for stage in self.stages for tile in stage.by_rows if tile.k[0] < tile.k[1])
        return covers(rows, self.schedule.layout.num_tokens(self.cp_rank))

    @cached_property
    def sums(self) -> tuple[tuple[Sum, ...], ...]:
        """For each stage, how returned partials are added to own keys: each key once, all its parts in hop order."""
        return tuple(self._sums(stage) for stage in self.stages)

    def _sums(self, stage: Stage) -> tuple[Sum, ...]:
        parts = []
        for hop in (hop for hop in stage.hops if hop > 0):
            ranges = self.schedule.requested(self.cp_rank, hop)[0]
            offsets = list(accumulate((stop - start for start, stop in ranges), initial=0))
            parts.append((hop, ranges, [start for start, _ in ranges], offsets))
        sums: list[Sum] = []
        for start, stop in pairwise(sorted({edge for _, ranges, _, _ in parts for span in ranges for edge in span})):
            shares: list[tuple[int, int]] = []
            for hop, ranges, starts, offsets in parts:
                at = bisect_right(starts, start) - 1
                if at >= 0 and stop <= ranges[at][1]:
                    shares.append((hop, offsets[at] + start - starts[at]))
            if shares:
                sums.append(((start, stop), tuple(shares)))
        return tuple(sums)


def rank_plan(schedule: Schedule, cp_rank: int, hops_per_stage: int) -> RankPlan:
    """The plan of a rank; called once for each schedule and shape of tensors."""
    return RankPlan(schedule, cp_rank, stages(schedule, cp_rank, hops_per_stage))


def traffic(plan: RankPlan, batch: int, row: int, packed: bool) -> tuple[Traffic, ...]:
    """For each stage after the own keys, the messages for `batch` sequences with `row` elements to a token's K.

    `packed`: a sender copies the keys of a stage into one buffer before, leg after leg; else they leave in place from K
    and V (B, S_local, Hkv, D). A piece is one run of memory at both ends: at least a range of one sequence's K or V, at
    most all of a leg."""
    schedule, own_rank = plan.schedule, plan.cp_rank

    def room(reader: int, hop: int, hops: tuple[int, ...]) -> tuple[int, int]:
        """Tokens that `reader` fetches in a stage of `hops`, and tokens before `hop`'s."""
        sizes = [schedule.hops[reader][each].num_fetched_tokens() for each in hops]
        return sum(sizes), sum(sizes[: hops.index(hop)])

    def partials(reader: int, hop: int, hops: tuple[int, ...]) -> tuple[ContiguousCopy, ...]:
        """Out of the reader's stage into its owner's inbox, behind the tokens of earlier hops."""
        fetched, (total, place) = schedule.hops[reader][hop], room(reader, hop, hops)
        before = sum(tokens_in(schedule.requested(fetched.source, each)[0]) for each in hops[: hops.index(hop)])
        pieces, size = [], fetched.num_fetched_tokens()
        for number in range(2 * batch):
            source, target = number * total + place, 2 * batch * before + number * size
            pieces.append(ContiguousCopy(0, source * row, target * row, size * row))
        return _joined(pieces)

    def keys(reader: int, hop: int, hops: tuple[int, ...]) -> tuple[ContiguousCopy, ...]:
        if packed:  # as partials, the other way
            return tuple(ContiguousCopy(0, p.target, p.source, p.size) for p in partials(reader, hop, hops))
        fetched, (total, place) = schedule.hops[reader][hop], room(reader, hop, hops)
        length, pieces = schedule.layout.num_tokens(fetched.source), []
        for kind in range(2):
            for sequence in range(batch):
                at = (kind * batch + sequence) * total + place
                for start, stop in fetched.fetch[0]:
                    source = sequence * length + start
                    pieces.append(ContiguousCopy(kind, source * row, at * row, (stop - start) * row))
                    at += stop - start
        return _joined(pieces)

    plans: list[Traffic] = []
    for stage in plan.stages[1:]:
        hops = stage.hops
        inbox = [(hop, tokens_in(schedule.requested(own_rank, hop)[0])) for hop in hops]
        fetch = [(hop, schedule.hops[own_rank][hop].source) for hop in hops if schedule.hops[own_rank][hop].fetch[0]]
        serve = [(hop, schedule.reader(own_rank, hop)) for hop, num_tokens in inbox if num_tokens]
        plans.append(
            Traffic(
                tuple(PeerTransfer(hop, source, keys(own_rank, hop, hops)) for hop, source in fetch),
                tuple(PeerTransfer(hop, reader, keys(reader, hop, hops)) for hop, reader in serve),
                tuple(PeerTransfer(hop, source, partials(own_rank, hop, hops)) for hop, source in fetch),
                tuple(PeerTransfer(hop, reader, partials(reader, hop, hops)) for hop, reader in serve),
                stage.num_tokens,
                sum(num_tokens for _, num_tokens in inbox),
                tuple((hop, num_tokens) for hop, num_tokens in inbox if num_tokens),
            )
        )
    return tuple(plans)


def _joined(pieces: list[ContiguousCopy]) -> tuple[ContiguousCopy, ...]:
    """`pieces`, neighbours at both ends joined."""
    joined: list[ContiguousCopy] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (piece.kind, piece.source, piece.target) == (
            last.kind,
            last.source + last.size,
            last.target + last.size,
        ):
            joined[-1] = ContiguousCopy(last.kind, last.source, last.target, last.size + piece.size)
        else:
            joined.append(piece)
    return tuple(joined)
