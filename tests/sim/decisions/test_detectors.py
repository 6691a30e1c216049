"""A wait for data is found once it is long, once while it lasts, and again after it was over."""

from __future__ import annotations

from elastic_ring.control.decisions.detectors import DATA_LIMIT, DATA_STEPS, DataWatch


def found(watch: DataWatch, wait_s: float, num_steps: int = DATA_STEPS) -> int:
    return sum(watch.observe(1.0, wait_s) for _ in range(num_steps))


def test_a_wait_is_found_once_until_it_is_over() -> None:
    watch = DataWatch()
    assert found(watch, 0.5, DATA_STEPS - 1) == 0, "one slow read at the start is no finding"
    assert found(watch, 0.5) == 1
    assert watch.share == 0.5
    assert found(watch, DATA_LIMIT - 0.05) == found(watch, 0.5) == 0, "it was not over"
    assert found(watch, 0.0) == 0
    assert found(watch, 0.5) == 1
