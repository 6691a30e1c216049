"""What rings keep between calls: schedules, call plans, kernels and device tables, within bounds, on an object that a
worker's generation, a group or a single ring owns and drops. Nothing planned for one sequence's documents outlives it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.lowering.call_plan import CallPlan
from elastic_ring.attention.patterns.caches import LRUCache
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_blocks import cut_blocks
from elastic_ring.attention.routing.router import NUM_ROUTES

logger = logging.getLogger(__name__)

NUM_CALL_PLANS = 16
"""Shapes of tensors whose call plans are kept for each schedule."""

NUM_PLANS = 8
"""Schedules whose plans an owner keeps whatever they weigh."""

MOST_PLANS = 32
"""Schedules whose plans an owner keeps while their tables fit into `KEPT_BYTES`."""

KEPT_BYTES = 1 << 29
"""Device memory, in bytes, that the tables of more than `NUM_PLANS` schedules may take together."""


@dataclass(eq=False)
class RingPlans:
    """A schedule, and what a rank derived from it; shared by rings with the same schedule, cp_rank and options."""

    schedule: Schedule
    calls: LRUCache = field(default_factory=lambda: LRUCache(NUM_CALL_PLANS))
    tables: LRUCache = field(default_factory=lambda: LRUCache(NUM_CALL_PLANS))
    kernels: dict[tuple[torch.device, torch.dtype, int, int], Kernel] = field(default_factory=dict)

    @cached_property
    def in_blocks(self) -> Schedule:
        """The schedule in whole blocks of 128 tokens, padded where something cuts them."""
        why = next(cut_blocks(self.schedule.sparse, self.schedule.layout), "")
        if not why:
            return self.schedule
        whole = padded(self.schedule)
        level = logging.DEBUG if self.schedule.for_one_call else logging.INFO
        sizes = self.schedule.layout.seq_len, whole.layout.seq_len
        logger.log(level, "%d tokens are padded to %d in whole blocks, and masked: %s", *sizes, why)
        return whole

    def of_call(self, plan: CallPlan) -> CallPlan:
        """`plan` as it runs in one pass; another where a call has tables of its own (`chosen_blocks`)."""
        return plan

    @property
    def num_bytes(self) -> int:
        """Device memory of its tables, in bytes."""
        return sum(blocks.num_bytes for blocks in self.tables.values())


class PlanCache(LRUCache):
    """The plans of one owner's rings, the last ones used, and those of content routing. Not for several threads."""

    def __init__(self) -> None:
        super().__init__(MOST_PLANS)
        self.routes = LRUCache(NUM_ROUTES)

    def of(self, key: Hashable, schedule: Callable[[], Schedule]) -> RingPlans:
        """The plans of `key`, which stands for the schedule, the rank and the options; planned where there are none."""
        return self.get(key, lambda: self._beside_others(RingPlans(schedule())))

    def _beside_others(self, plans: RingPlans) -> RingPlans:
        while len(self) >= NUM_PLANS and self.num_bytes > KEPT_BYTES:
            self._values.popitem(last=False)
        return plans

    @property
    def num_bytes(self) -> int:
        """Device memory of all tables, in bytes."""
        return sum(plans.num_bytes for plans in self.values())
