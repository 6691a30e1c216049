"""What a rank sends and receives in a pass, stage by stage, and how many buffers it takes: the exchange's whole plan.

Plain Python, made once for a schedule and read in every call; no tensor, address or wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from elastic_ring.attention.layouts.layout import Range

FETCHED = 2


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

    `kind` is the sender's tensor: 0 for K, 1 for V; 0 where both lie in one buffer; FETCHED for the buffer of keys of
    the stage before. A rank that does not know the other
    end, which packs rows of its own, has its own place in both."""

    kind: int
    source: int
    target: int
    size: int


@dataclass(frozen=True)
class PeerTransfer:
    """The copies between this rank and `peer` in one hop, one way; both ranks have as many, in the same order. Each is
    one message."""

    hop: int
    peer: int
    pieces: tuple[ContiguousCopy, ...]

    @cached_property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Traffic:
    """One stage's traffic on one rank: the keys it fetches and serves, the partials it returns and gets back.

    `num_fetched` are the rows of its buffer of keys, or of partials, `num_served` those of its inbox. `inbox`: the hops
    that fill the inbox with their number of rows, as they lie in it, where that is one part for each hop."""

    keys_in: tuple[PeerTransfer, ...]
    keys_out: tuple[PeerTransfer, ...]
    partials_out: tuple[PeerTransfer, ...]
    partials_in: tuple[PeerTransfer, ...]
    num_fetched: int
    num_served: int
    inbox: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """A rank's traffic after its own keys, and through which buffers it goes. Stages use a buffer's slots in rotation.

    `ahead` stages of keys are posted before the kernels of a stage, or, with `late`, `ahead` - 1 and the next behind
    those kernels, in the slot that they read. `packed`: what is sent is gathered first, into one of `send_slots`
    buffers; else it leaves from where it lies in K and V. `turns`: slots for dK and dV on the way out, and in the
    inbox. `coalesced` posts the messages of one direction as one operation. `far`: the ranks on other
    hosts.
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
        """The rows of each buffer of keys; likewise below."""
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
    """Whether hops carry the `num_numbers` that a token's keys are projected from: they have two halves, and are fewer
    than its K and V."""
    return num_numbers % 2 == 0 and num_numbers < 2 * num_heads * head_dim


def slot_sizes(sizes: Iterable[int], num_slots: int) -> tuple[int, ...]:
    """The largest of the `sizes` that each of `num_slots` slots holds in rotation."""
    listed = tuple(sizes)
    return tuple(max(listed[slot::num_slots], default=0) for slot in range(num_slots))
