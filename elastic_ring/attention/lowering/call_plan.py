"""Call plans: one rank's part of an attention call as data (kernel calls by stage, order of sums, traffic), and caches.

`ring` runs a plan; `rectangles` and `blocks` make it from a schedule. The order in which partial results are added
decides the bits of a result, so it is part of the plan and of nothing else. Caches are bounded and belong to an object
that a worker's generation, a group or a single ring owns and drops; no plan for one sequence's documents outlives it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch

from elastic_ring.attention.comm.exchange import HopExchange, Pack
from elastic_ring.attention.kernels.kernel import Cover, Kernel
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Places, Rows
from elastic_ring.attention.lowering.keys import Keys
from elastic_ring.attention.patterns.caches import LRUCache
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import cut_blocks
from elastic_ring.attention.plan.traffic import ExchangePlan, Frame
from elastic_ring.attention.routing.router import NUM_ROUTES

logger = logging.getLogger(__name__)

NUM_CALL_PLANS = 16
"""Shapes of tensors whose call plans are cached for each schedule."""
NUM_PLANS = 8
"""Schedules whose plans an owner caches in any case."""
MOST_PLANS = 32
"""Schedules whose plans an owner caches while their tables fit into `KEPT_BYTES`."""
KEPT_BYTES = 1 << 29
"""Device memory, in bytes, that the tables of more than `NUM_PLANS` schedules may take together."""


class Call(NamedTuple):
    """One kernel call."""

    rows: Rows
    keys: Keys
    cover: Cover


@dataclass(frozen=True, eq=False)
class StageCalls:
    """The calls on the keys of `hops`. `once`: backward's calls cover each key of the stage exactly once, so that their
    dK and dV are written, not added."""

    hops: tuple[int, ...]
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    once: bool


class OwnPart(NamedTuple):
    """Backward calls on some K/V heads of the own keys (None: all of them)."""

    kv_heads: Range | None
    calls: tuple[Call, ...]
    once: bool


class Op(NamedTuple):
    """One step of a backward pass, on own part or fetched stage `first`: `own`, `fetched`, `hold` (as `fetched`, its
    shares of dq to be added by the next `release`), and `add`: the returned partials of stages `first` to `last`."""

    kind: Literal["own", "fetched", "hold", "release", "add"]
    first: int
    last: int = 0


class Program(NamedTuple):
    """A backward pass, which `fetches` the keys again or uses kept keys."""

    ops: tuple[Op, ...]
    own: tuple[OwnPart, ...]
    fetches: bool


class Returns(Protocol):
    """Adds returned partials to own keys."""

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        """Take the partials of stages `first` to `last` and add them to `total`, dK and dV (2, B, S_local, Hkv, D)."""
        ...


class SumTypes(NamedTuple):
    """The types of the running sums. `by_rows`: out and dq are contiguous by row. `at_once`: shares of fetched keys are
    contiguous and few enough to be added in one pass over memory. `zeroed`: dK and dV begin as zeros, since partials
    may be added before each own key has its share."""

    out: torch.dtype
    dq: torch.dtype
    dkv: torch.dtype
    by_rows: bool = False
    at_once: bool = False
    zeroed: bool = False


class HeadOrder(NamedTuple):
    """Index tensors between the model's order of heads and the plan's; None where they agree."""

    inner: torch.Tensor | None
    inner_kv: torch.Tensor | None
    outer: torch.Tensor | None
    outer_kv: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How calls with tensors of one shape, type and device run.

    `stages[0]` are the own keys. `backward` fetches the keys again; `backward_kept` uses those that forward kept, if it
    `keeps` them. `every_row_sees`: each query sees a key. `pairs`: buffers hold K, then V (2, B, n, Hkv, D), and calls
    take both apart. `places`: of tokens in padded blocks. `alone`: the one call on all own tokens and heads, if nothing
    else is computed or sent.
    """

    kernel: Kernel
    stages: tuple[StageCalls, ...]
    backward: Program
    exchange: ExchangePlan
    frame: Frame
    pack: Pack | None
    partial_dtype: torch.dtype
    sums: SumTypes
    returns: Returns
    heads: HeadOrder | None = None
    backward_kept: Program | None = None
    keeps: bool = False
    every_row_sees: bool = False
    pairs: bool = False
    places: Places | None = None
    alone: Call | None = None


def one_late(num_stages: int, num_own: int) -> tuple[Op, ...]:
    """Own keys first; returned partials are added one stage late, which gives the readers one stage of time to return
    them; the second half of the own heads, if there are two, hides the return of the last."""
    ops = [Op("own", 0)]
    for index in range(num_stages):
        ops.append(Op("fetched", index))
        if index:
            ops.append(Op("add", index - 1, index - 1))
    if num_own > 1:
        ops.append(Op("own", 1))
    if num_stages:
        ops.append(Op("add", num_stages - 1, num_stages - 1))
    return tuple(ops)


@dataclass(eq=False)
class RingPlans:
    """A schedule, and a rank's plans and tables of it; shared by rings with the same schedule, cp_rank and options."""

    schedule: Schedule
    calls: LRUCache = field(default_factory=lambda: LRUCache(NUM_CALL_PLANS))
    tables: LRUCache = field(default_factory=lambda: LRUCache(NUM_CALL_PLANS))
    kernels: dict[tuple[torch.device, torch.dtype, int, int], Kernel] = field(default_factory=dict)

    @cached_property
    def in_blocks(self) -> Schedule:
        """The schedule in whole blocks of 128 tokens, padded if something cuts them."""
        reason = next(cut_blocks(self.schedule.sparse, self.schedule.layout), "")
        if not reason:
            return self.schedule
        whole = padded(self.schedule)
        level = logging.DEBUG if self.schedule.for_one_call else logging.INFO
        sizes = self.schedule.layout.seq_len, whole.layout.seq_len
        logger.log(level, "%d tokens are padded to %d in whole blocks, and masked: %s", *sizes, reason)
        return whole

    def of_call(self, plan: CallPlan) -> CallPlan:
        """`plan` as it runs in one pass; `chosen_blocks` replaces its tables by the call's own."""
        return plan

    @property
    def num_bytes(self) -> int:
        """Device memory of its tables, in bytes."""
        return sum(blocks.num_bytes for blocks in self.tables.values())


class PlanCache(LRUCache):
    """The plans of one owner's rings, least recently used last, and the routes of content. Not for several threads."""

    def __init__(self) -> None:
        super().__init__(MOST_PLANS)
        self.routes = LRUCache(NUM_ROUTES)

    def of(self, key: Hashable, schedule: Callable[[], Schedule]) -> RingPlans:
        """The plans of `key`, which stands for schedule, rank and options; planned on a miss."""

        def planned() -> RingPlans:
            plans = RingPlans(schedule())
            while len(self) >= NUM_PLANS and self.num_bytes > KEPT_BYTES:
                self._values.popitem(last=False)
            return plans

        return self.get(key, planned)

    @property
    def num_bytes(self) -> int:
        """Device memory of all tables, in bytes."""
        return sum(plans.num_bytes for plans in self.values())
