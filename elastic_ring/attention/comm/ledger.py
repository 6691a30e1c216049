"""Counts the bytes and times of a ring's hops. No sending and no waiting may enter."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from elastic_ring.attention.comm.packing import WireError
from elastic_ring.attention.plan.schedule import Direction

Way = Literal["forward", "backward", "routing"]


@dataclass
class HopLedger:
    """Bytes and waits by (direction, hop), counted from the tensors that were sent, not from the plan.

    `wait_s` is time spent waiting for a hop's messages: latency that no computation hid. On a GPU the host does not
    wait; with `keep_events` every exchange stores its CUDA events here, which `HopTally` reads. Routing messages
    (content-chosen blocks), which no schedule plans, are counted as a third way, by distance on the ring.
    """

    sent_bytes: dict[tuple[Way, int], int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[tuple[Way, int], int] = field(default_factory=lambda: defaultdict(int))
    far_sent_bytes: dict[tuple[Direction, int], int] = field(default_factory=lambda: defaultdict(int))
    """The part of `sent_bytes` to ranks on other hosts, if the ring knows hosts."""
    wait_s: dict[tuple[Way, int], float] = field(default_factory=lambda: defaultdict(float))
    keep_events: bool = False
    events: list[HopEvents] = field(default_factory=list, repr=False)
    wire_error: WireError | None = None
    """Measured on the first keys that crossed in 8 bits."""

    def clear(self) -> None:
        self.sent_bytes.clear()
        self.received_bytes.clear()
        self.far_sent_bytes.clear()
        self.wait_s.clear()
        self.events.clear()

    @contextmanager
    def waiting(self, way: Way, hop: int) -> Iterator[None]:
        """Time the block's wait for a hop's messages, also if it raises."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s[way, hop] += time.perf_counter() - begun

    @property
    def all_sent_bytes(self) -> int:
        """Bytes sent for hops and for routing."""
        return sum(self.sent_bytes.values())


@dataclass
class HopEvents:
    """CUDA events of one exchange: when it was free to start, had arrived, and the kernels began and ended
    waiting for it. `arrived` is None until the exchange was taken."""

    direction: Direction
    hop: int
    free: Any
    arrived: Any = None
    requested: Any = None
    received: Any = None

    def latency_s(self) -> float:
        """From free to start until arrived. Call after the device is synchronized."""
        return float(self.free.elapsed_time(self.arrived)) / 1e3

    def exposed_s(self) -> float:
        """How long the kernels' stream was stalled waiting for it."""
        return float(self.requested.elapsed_time(self.received)) / 1e3

    @property
    def is_over(self) -> bool:
        """Whether the device has passed all four events; does not wait."""
        marks = (self.free, self.arrived, self.requested, self.received)
        return all(mark is not None and mark.query() for mark in marks)


EVENT_STEPS = 10
"""On a GPU hop times are measured in one step of so many; not in the first, which is cold."""


class HopFigures(TypedDict):
    """K/V exchange of a step, as `StepMetrics` has it."""

    hop_bytes: int
    far_hop_bytes: int
    exposed_hop_wait_s: float | None
    hop_latency_mean_s: float | None
    hop_latency_p99_s: float | None


@dataclass
class HopTally:
    """Totals over the hops of one rank's sequences in one step. With `on_gpu` the host waits for no hop: events of some
    steps are kept and read after a later synchronization."""

    on_gpu: bool
    step: int
    num_bytes: int = 0
    num_far_bytes: int = 0
    events: list[HopEvents] = field(default_factory=list, repr=False)
    _host_wait_s: float = 0.0

    @property
    def is_watched(self) -> bool:
        return self.on_gpu and self.step % EVENT_STEPS == 1

    def watch(self, ledger: HopLedger) -> None:
        """Before a sequence."""
        ledger.keep_events = self.is_watched

    def add(self, ledger: HopLedger) -> None:
        """After its backward pass."""
        self.num_bytes += ledger.all_sent_bytes
        self.num_far_bytes += sum(ledger.far_sent_bytes.values())
        self._host_wait_s += sum(ledger.wait_s.values())
        self.events += ledger.events

    def figures(self) -> HopFigures:
        """The step's figures over the completed events, None where not measured. The 99th percentile is the nearest
        rank; the kernels' wait is for all exchanges together. Does not wait."""
        over = [event for event in self.events if event.is_over]
        latencies = sorted(event.latency_s() for event in over)
        host_wait_s = None if self.on_gpu else self._host_wait_s
        return {
            "hop_bytes": self.num_bytes,
            "far_hop_bytes": self.num_far_bytes,
            "exposed_hop_wait_s": math.fsum(event.exposed_s() for event in over) if over else host_wait_s,
            "hop_latency_mean_s": math.fsum(latencies) / len(latencies) if over else None,
            "hop_latency_p99_s": latencies[math.ceil(0.99 * len(latencies)) - 1] if over else None,
        }
