"""Times of hops as a device's events tell them: read when they are over, none where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from elastic_ring.attention.comm.ledger import EVENT_STEPS, HopEvents, HopLedger, HopTally


@dataclass
class Mark:
    """What a CUDA event says: when the device passed it (ms), and whether it has yet."""

    at_ms: float
    passed: bool = True

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Mark) -> float:
        assert self.passed, "asked of what is not over, CUDA raises"
        assert end.passed
        return end.at_ms - self.at_ms


def exchange(latency_ms: float, exposed_ms: float = 0.0, passed: bool = True) -> HopEvents:
    return HopEvents("forward", 1, Mark(1.0), Mark(1.0 + latency_ms, passed), Mark(5.0), Mark(5.0 + exposed_ms))


def times_of(*events: HopEvents) -> list[float | None]:
    """Latency in the mean and at the 99th percentile, and the time exposed."""
    figures = HopTally(True, 1, events=list(events)).figures()
    return [figures["hop_latency_mean_s"], figures["hop_latency_p99_s"], figures["exposed_hop_wait_s"]]


def test_mean_and_99th_percentile_are_over_the_exchanges_and_what_is_exposed_adds_up() -> None:
    many = times_of(*(exchange(float(ms), 0.5) for ms in range(1, 201)))
    assert many == [pytest.approx(0.1005), pytest.approx(0.198), pytest.approx(0.1)]
    assert times_of(exchange(1.0), exchange(3.0))[1] == pytest.approx(0.003), "of few the longest"


def test_what_is_not_over_is_left_out_and_not_waited_for() -> None:
    untaken = HopEvents("forward", 1, Mark(1.0))
    assert times_of(exchange(1.0), exchange(9.0, passed=False), untaken)[1] == pytest.approx(0.001)
    assert times_of(untaken) == times_of() == [None] * 3


def told(on_gpu: bool, step: int, *events: HopEvents) -> tuple[HopTally, dict[str, Any]]:
    tally = HopTally(on_gpu, step)
    for _ in range(2):
        ledger = HopLedger()
        tally.watch(ledger)
        ledger.sent_bytes["forward", 1] += 100
        ledger.wait_s["forward", 1] += 0.25
        ledger.events += events if ledger.keep_events else ()
        tally.add(ledger)
    return tally, tally.figures()


def test_on_a_gpu_one_step_of_ten_is_watched_and_the_hosts_clock_is_no_answer() -> None:
    event = exchange(2.0, 1.0)
    watched = [step for step in range(3 * EVENT_STEPS) if told(True, step, event)[0].is_watched]
    assert watched == [1, EVENT_STEPS + 1, 2 * EVENT_STEPS + 1]
    _, figures = told(True, 1, event)
    assert figures == {
        "hop_bytes": 200,
        "far_hop_bytes": 0,
        "exposed_hop_wait_s": pytest.approx(0.002),
        "hop_latency_mean_s": pytest.approx(0.002),
        "hop_latency_p99_s": pytest.approx(0.002),
    }
    unmeasured = {"exposed_hop_wait_s": None, "hop_latency_mean_s": None, "hop_latency_p99_s": None}
    nothing = {"hop_bytes": 200, "far_hop_bytes": 0, **unmeasured}
    assert told(True, 2, event)[1] == nothing
    assert told(True, 1)[1] == nothing, "a ring of one has no hops"


def test_on_a_cpu_the_hosts_wait_is_measured_in_every_step_and_no_latency() -> None:
    for step in (0, 1, 2):
        assert told(False, step, exchange(2.0))[1] == {
            "hop_bytes": 200,
            "far_hop_bytes": 0,
            "exposed_hop_wait_s": 0.5,
            "hop_latency_mean_s": None,
            "hop_latency_p99_s": None,
        }
