"""Time in which a host did not run is told from training, and from work that keeps the GIL."""

from __future__ import annotations

import pytest

from elastic_ring.runtime.worker.stall_watchdog import PauseWatch


class Host:
    """A clock, and a CPU clock, that the test moves."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0

    def watch(self) -> PauseWatch:
        return PauseWatch(lambda: self.now, lambda: self.cpu)


@pytest.mark.parametrize("beats_first", [True, False])
def test_a_host_that_stands_still_for_100_s_is_seen_whichever_thread_wakes_first(beats_first: bool) -> None:
    host = Host()
    watch = host.watch()
    host.now = host.cpu = 2.0
    watch.beat()
    host.now = 102.0
    if beats_first:
        watch.beat()
    assert watch.within_s(1.0) == pytest.approx(100.0)
    assert watch.within_s(52.0) == pytest.approx(50.0), "of a step that began meanwhile"
    watch.beat()
    assert watch.within_s(1.0) == pytest.approx(100.0), "once"
    host.now = 103.0
    assert watch.within_s(102.5) == 0.0


def test_a_busy_machine_and_a_compiler_that_keeps_the_gil_are_no_pause() -> None:
    host = Host()
    watch = host.watch()
    host.now = 4.0
    watch.beat()
    host.now, host.cpu = 64.0, 30.0
    watch.beat()
    assert watch.within_s(0.0) == 0.0
