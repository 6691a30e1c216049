"""One rank's plan, derived from the schedule once: stages, messages with their offsets, and the order of sums.

With short slices a pass is bound by the host, and hashing a schedule of a thousand documents takes longer than a kernel
launch, so nothing here is computed per call or message. Offsets are in elements. Plain Python; no tensor or address.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from elastic_ring.attention.layouts.layout import Range, covers
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_tiles import num_tokens as tokens_in
from elastic_ring.attention.plan.stages import Stage, num_row_visits, stages
from elastic_ring.attention.plan.traffic import ContiguousCopy, PeerTransfer, Traffic

Sum = tuple[Range, tuple[tuple[int, int], ...]]
"""A range of own keys, and where its partials are: (hop, offset in that hop's tokens), in hop order."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The stages of one rank and what follows from them."""

    schedule: Schedule
    cp_rank: int
    hops_per_stage: int
    stages: tuple[Stage, ...]

    @cached_property
    def row_visits(self) -> tuple[int, int]:
        """In how many tiles the most visited query row lies, forward and backward."""
        return num_row_visits(self.stages, backward=False), num_row_visits(self.stages, backward=True)

    @cached_property
    def every_row_sees(self) -> bool:
        """Whether every query lies in some tile, of which each shows every row of it at least one key."""
        rows = (tile.q for stage in self.stages for tile in stage.by_rows if tile.k[0] < tile.k[1])
        return covers(rows, self.schedule.layout.num_tokens(self.cp_rank))

    @cached_property
    def sums(self) -> tuple[tuple[Sum, ...], ...]:
        """For each stage, how returned partials are added to own keys: each key once, all its parts in hop order."""
        return tuple(self._sums(stage) for stage in self.stages)

    def _sums(self, stage: Stage) -> tuple[Sum, ...]:
        asked = [(hop, self.schedule.requested(self.cp_rank, hop)[0]) for hop in stage.hops if hop > 0]
        cuts = sorted({edge for _, ranges in asked for span in ranges for edge in span})
        sizes = [[stop - start for start, stop in ranges] for _, ranges in asked]
        places = [
            (hop, ranges, [start for start, _ in ranges], list(accumulate(size, initial=0)))
            for (hop, ranges), size in zip(asked, sizes, strict=True)
        ]
        sums: list[Sum] = []
        for start, stop in pairwise(cuts):
            shares: list[tuple[int, int]] = []
            for hop, ranges, starts, offsets in places:
                at = bisect_right(starts, start) - 1
                if at >= 0 and stop <= ranges[at][1]:
                    shares.append((hop, offsets[at] + start - starts[at]))
            if shares:
                sums.append(((start, stop), tuple(shares)))
        return tuple(sums)


def rank_plan(schedule: Schedule, cp_rank: int, hops_per_stage: int) -> RankPlan:
    """Made once for each schedule and shape of tensors: call plans keep what they need of it."""
    return RankPlan(schedule, cp_rank, hops_per_stage, stages(schedule, cp_rank, hops_per_stage))


def traffic(plan: RankPlan, batch: int, row: int, packed: bool) -> tuple[Traffic, ...]:
    """For each stage after the own keys, the messages for `batch` sequences with `row` elements to a token's K.

    `packed`: a sender copies the keys of a stage into one buffer before, leg after leg; else they leave from where they
    lie in K and V (B, S_local, Hkv, D). A piece is one run of memory at both ends: at least a range of one sequence's K
    or V, at most all of a leg."""
    schedule, own_rank = plan.schedule, plan.cp_rank

    def partials(reader: int, hop: int, hops: tuple[int, ...]) -> tuple[ContiguousCopy, ...]:
        fetched = schedule.hops[reader][hop]
        before = sum(tokens_in(schedule.requested(fetched.source, other)[0]) for other in hops[: hops.index(hop)])
        return _partial_pieces(fetched.num_fetched_tokens(), *_room(schedule, reader, hop, hops), before, batch, row)

    def keys(reader: int, hop: int, hops: tuple[int, ...]) -> tuple[ContiguousCopy, ...]:
        if packed:  # as partials, the other way
            return tuple(ContiguousCopy(0, p.target, p.source, p.size) for p in partials(reader, hop, hops))
        fetched = schedule.hops[reader][hop]
        length = schedule.layout.num_tokens(fetched.source)
        return _key_pieces(fetched.fetch[0], length, *_room(schedule, reader, hop, hops), batch, row)

    found: list[Traffic] = []
    for stage in plan.stages[1:]:
        hops = stage.hops
        inbox = [(hop, tokens_in(schedule.requested(own_rank, hop)[0])) for hop in hops]
        fetch = [(hop, schedule.hops[own_rank][hop].source) for hop in hops if schedule.hops[own_rank][hop].fetch[0]]
        serve = [(hop, schedule.reader(own_rank, hop)) for hop, num_tokens in inbox if num_tokens]
        found.append(
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
    return tuple(found)


def _key_pieces(
    ranges: tuple[Range, ...], length: int, num_tokens: int, place: int, batch: int, row: int
) -> tuple[ContiguousCopy, ...]:
    """`ranges` of `length` tokens into a stage's `num_tokens`, from token `place` on."""
    pieces: list[ContiguousCopy] = []
    for kind in range(2):
        for sequence in range(batch):
            at = (kind * batch + sequence) * num_tokens + place
            begin = sequence * length
            for start, stop in ranges:
                pieces.append(ContiguousCopy(kind, (begin + start) * row, at * row, (stop - start) * row))
                at += stop - start
    return _joined(pieces)


def _partial_pieces(
    num_tokens: int, num_stage_tokens: int, place: int, before: int, batch: int, row: int
) -> tuple[ContiguousCopy, ...]:
    """A hop's `num_tokens` out of its reader's stage into its owner's inbox, behind `before` tokens of other hops."""
    pieces: list[ContiguousCopy] = []
    for number in range(2 * batch):
        source, target = number * num_stage_tokens + place, 2 * batch * before + number * num_tokens
        pieces.append(ContiguousCopy(0, source * row, target * row, num_tokens * row))
    return _joined(pieces)


def _room(schedule: Schedule, cp_rank: int, hop: int, hops: tuple[int, ...]) -> tuple[int, int]:
    """How many tokens `cp_rank` fetches in a stage of `hops`, and how many of them lie before those of `hop`."""
    sizes = [schedule.hops[cp_rank][other].num_fetched_tokens() for other in hops]
    return sum(sizes), sum(sizes[: hops.index(hop)])


def _joined(pieces: Iterable[ContiguousCopy]) -> tuple[ContiguousCopy, ...]:
    """Neighbours at both ends are one."""
    joined: list[ContiguousCopy] = []
    for piece in pieces:
        if joined:
            last = joined[-1]
            ends = (last.kind, last.source + last.size, last.target + last.size)
            if ends == (piece.kind, piece.source, piece.target):
                joined[-1] = ContiguousCopy(last.kind, last.source, last.target, last.size + piece.size)
                continue
        joined.append(piece)
    return tuple(joined)
