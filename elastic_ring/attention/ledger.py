"""What the hops of a ring moved and how long they took. No sending and no waiting may enter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.attention.schedule import Direction


@dataclass
class HopLedger:
    """What really moved, by (direction, hop): counted from the tensors handed over, never from the plan.

    `wait_s` is the time spent waiting for a hop's messages, that is, the latency no compute has hidden.
    On a GPU nothing waits on the host; with `keep_events` every exchange leaves its device events here
    instead, and `device_times` reads them. Where content chooses blocks, what ranks tell each other before the
    hops is counted apart, by how far it went round the ring: it is no part of what a schedule plans.
    """

    sent_bytes: dict[tuple[Direction, int], int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[tuple[Direction, int], int] = field(default_factory=lambda: defaultdict(int))
    wait_s: dict[tuple[Direction, int], float] = field(default_factory=lambda: defaultdict(float))
    routing_sent_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    routing_received_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    routing_wait_s: float = 0.0
    keep_events: bool = False
    events: list[HopEvents] = field(default_factory=list, repr=False)

    def clear(self) -> None:
        self.sent_bytes.clear()
        self.received_bytes.clear()
        self.wait_s.clear()
        self.routing_sent_bytes.clear()
        self.routing_received_bytes.clear()
        self.routing_wait_s = 0.0
        self.events.clear()

    @property
    def all_sent_bytes(self) -> int:
        """Of hops and of routing."""
        return sum(self.sent_bytes.values()) + sum(self.routing_sent_bytes.values())

    @property
    def all_wait_s(self) -> float:
        """For hops and for routing."""
        return sum(self.wait_s.values()) + self.routing_wait_s


@dataclass
class HopEvents:
    """CUDA events of one exchange: when it was free to start, had arrived, and the kernels began and ended
    waiting for it. `arrived` is None until the exchange was taken."""

    direction: Direction
    hop: int
    free: Any
    arrived: Any = None
    wanted: Any = None
    had: Any = None

    def latency_s(self) -> float:
        """From free to start until arrived. Call after the device is synchronized."""
        return float(self.free.elapsed_time(self.arrived)) / 1e3

    def exposed_s(self) -> float:
        """How long the kernels' stream stood still for it."""
        return float(self.wanted.elapsed_time(self.had)) / 1e3
