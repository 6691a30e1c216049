"""The exchange's plan: what a rank sends and receives in a pass, stage by stage, and through how many buffers.

Plain Python, made once for a schedule and read in every call; no tensor, address or wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.plan.schedule import Schedule

FETCHED = 2
Hosts = tuple[str, ...]
"""The host of each rank of a ring."""


class Frame(NamedTuple):
    """A buffer of n rows has the shape (*before, n, *after); pieces count in units of `unit` elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    unit: int

    @property
    def row(self) -> int:
        return math.prod(self.before) * math.prod(self.after)

    def shape(self, num_rows: int) -> tuple[int, ...]:
        return (*self.before, num_rows, *self.after)


@dataclass(frozen=True)
class ContiguousCopy:
    """One contiguous copy: sender[source:+size] to receiver[target:+size], in the plan's units.

    `kind` is the sender's tensor: 0 for K, 1 for V; 0 if both lie in one buffer; FETCHED for the buffer of keys of the
    stage before. A rank that does not know the other end, which packs rows of its own, has its own place in both."""

    kind: int
    source: int
    target: int
    size: int


@dataclass(frozen=True)
class PeerTransfer:
    """The messages between this rank and `peer` in one hop, one way; both ranks have the same number and order."""

    hop: int
    peer: int
    pieces: tuple[ContiguousCopy, ...]

    @cached_property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Traffic:
    """One stage's traffic on one rank: the keys it fetches and serves, the partials it returns and gets back.

    `num_fetched`: rows of its buffer of keys, or of partials; `num_served`: of its inbox. `inbox`: (hop, rows) in the
    order of the inbox, if each hop has one part of it."""

    keys_in: tuple[PeerTransfer, ...]
    keys_out: tuple[PeerTransfer, ...]
    partials_out: tuple[PeerTransfer, ...]
    partials_in: tuple[PeerTransfer, ...]
    num_fetched: int
    num_served: int
    inbox: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """A rank's traffic after its own keys, and its buffers, whose slots the stages use in rotation.

    `ahead` stages of keys are posted before the kernels of a stage, or, with `late`, `ahead` - 1 and the next behind
    those kernels, in the slot that they read. `packed`: rows are gathered into one of `send_slots` buffers; else they
    leave from K and V in place. `turns`: slots for dK and dV on the way out, and in the inbox. `coalesced` posts the
    messages of one direction as one operation. `far`: the ranks on other hosts.
    """

    cp: int
    stages: tuple[Traffic, ...]
    ahead: int = 1
    late: bool = False
    packed: bool = False
    send_slots: int = 2
    turns: int = 2
    coalesced: bool = False
    far: frozenset[int] = frozenset()

    @cached_property
    def key_slots(self) -> tuple[int, ...]:
        return slot_sizes((stage.num_fetched for stage in self.stages), self.ahead + (not self.late))

    @cached_property
    def partial_slots(self) -> tuple[int, ...]:
        return slot_sizes((stage.num_fetched for stage in self.stages), self.turns)

    @cached_property
    def served_slots(self) -> tuple[int, ...]:
        return slot_sizes((stage.num_served for stage in self.stages), self.send_slots)

    @cached_property
    def inbox_slots(self) -> tuple[int, ...]:
        return slot_sizes((stage.num_served for stage in self.stages), self.turns)

    def inbox_rows(self, index: int) -> Range:
        """The rows of the inbox that receive the dK and dV of stage `index`."""
        start = sum(self.inbox_slots[: index % self.turns])
        return start, start + self.stages[index].num_served


def carries_latents(num_heads: int, head_dim: int, num_numbers: int) -> bool:
    """Whether hops carry latents of `num_numbers` a token: in two halves, and fewer numbers than its K and V."""
    return num_numbers % 2 == 0 and num_numbers < 2 * num_heads * head_dim


def slot_sizes(sizes: Iterable[int], num_slots: int) -> tuple[int, ...]:
    """For each of `num_slots` slots the largest of the `sizes` that it holds in rotation."""
    listed = tuple(sizes)
    return tuple(max(listed[slot::num_slots], default=0) for slot in range(num_slots))


def two_level(
    exchange: ExchangePlan, hops: Sequence[tuple[int, ...]], schedule: Schedule, cp_rank: int, hosts: Hosts
) -> ExchangePlan:
    """`exchange`, whose stages have these `hops`, with keys that cross between hosts once, not once for each reader.

    In hop t rank r reads rank r - t, and in hop t - 1 rank r - 1 read the same rank. If both are on one host, the owner
    is on another, and both fetch the same keys, rank r gets them from its neighbour, out of the buffer of the stage
    before: the classical ring inside a host (Liu et al. 2023, arXiv:2310.01889), direct messages between hosts. The
    first rank of a host fetches for all of it, so that a link between hosts carries a host's keys once, and no hop
    waits longer. That rank's own card still carries all it did; the gain is in links that the ranks of a host share.
    Stages of several hops fetch directly, since the neighbour has their keys no sooner. Bytes and their order in every
    buffer are the same, and so are all bits: a run may move to other hosts. dK and dV go back directly: a sum inside a
    host would be another order of sums.
    """
    far = frozenset(rank for rank, host in enumerate(hosts) if host != hosts[cp_rank])
    if not far:
        return exchange

    def whole(hop: int, peer: int, fetched: tuple[PeerTransfer, ...]) -> PeerTransfer:
        """All keys that a stage of one hop fetched, as they lie in its buffer."""
        return PeerTransfer(hop, peer, (ContiguousCopy(FETCHED, 0, 0, sum(leg.size for leg in fetched)),))

    stages, cp = list(exchange.stages), schedule.cp
    for index in range(1, len(stages)):
        if len(hops[index - 1]) != 1 or len(hops[index]) != 1:
            continue
        hop, following = hops[index][0], (cp_rank + 1) % cp
        keys_in, keys_out = exchange.stages[index].keys_in, exchange.stages[index].keys_out
        if is_forwarded(schedule, cp_rank, hop, hosts):
            keys_in = (whole(hop, (cp_rank - 1) % cp, keys_in),)
        if is_forwarded(schedule, schedule.reader(cp_rank, hop), hop, hosts):
            keys_out = ()
        if is_forwarded(schedule, following, hop, hosts):
            keys_out = (*keys_out, whole(hop, following, exchange.stages[index - 1].keys_in))
        stages[index] = replace(exchange.stages[index], keys_in=keys_in, keys_out=keys_out)
    return replace(exchange, stages=tuple(stages), far=far)


def is_forwarded(schedule: Schedule, cp_rank: int, hop: int, hosts: Hosts) -> bool:
    """Whether the keys that `cp_rank` fetches in `hop` come from its neighbour."""
    own = schedule.hops[cp_rank][hop]
    before, host = schedule.hops[cp_rank - 1][hop - 1], hosts[cp_rank]
    same = own.source == before.source and own.fetch == before.fetch and any(own.fetch)
    return hop > 1 and same and hosts[cp_rank - 1] == host != hosts[own.source]
