"""Requests to the autoscaler over a coordinator's end: the next one renews or withdraws them."""

from __future__ import annotations

import pytest

from elastic_ring.config import ScalingConfig
from elastic_ring.runtime.coordinator import services
from elastic_ring.runtime.coordinator.inbox import DemandNoted
from elastic_ring.runtime.coordinator.services import DemandKeeper, Wish
from elastic_ring.runtime.driver.room import autoscaler_of


class Granting:
    """An autoscaler that refuses nothing; the real one is in `tests/ray`."""

    def __init__(self) -> None:
        self.asked = list[int]()

    def ask(self, num_workers: int) -> None:
        self.asked.append(num_workers)

    def is_refused(self, num_workers: int) -> bool:
        return False


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Granting:
    granting = Granting()
    monkeypatch.setattr(services, "autoscaler_of", lambda run, scaling: granting)
    monkeypatch.setattr(services, "LOOK_S", 0.01)
    return granting


def keep(wish: Wish, *, goes_on: bool) -> list[DemandNoted]:
    """What is noted by a coordinator that opens with this wish, looks, and ends."""
    told: list[DemandNoted] = []
    keeper = DemandKeeper("run", ScalingConfig(dp=2, cp=1), told.append, tuple)
    keeper._wish = wish
    keeper.open(goes_on=goes_on)
    keeper._thread.join(0.2)
    keeper.close(10.0)
    return told


def test_a_new_coordinator_renews_what_the_one_before_asked_for_and_withdraws_it_in_the_end(autoscaler):
    told = keep(Wish((1, 2), 1, 1), goes_on=True)
    assert autoscaler.asked == [2, 0]
    assert told[0].text == "asks the autoscaler for 2 worker(s): there is room for 1"


def test_a_new_coordinator_withdraws_at_once_what_is_placed_by_now(autoscaler):
    keep(Wish((1, 2), 2, 2), goes_on=True)
    assert autoscaler.asked == [0], "else an idle node would be held until the request lapses"


def test_members_of_whole_rings_need_a_gpu_each_and_standbys_none_also_after_a_change_of_dp():
    autoscaler = autoscaler_of("run", ScalingConfig(dp=1, cp=2, device="cuda", resources_per_worker={"CPU": 1.0}))
    with_gpu = [sum("GPU" in bundle for bundle in autoscaler.bundles(number)) for number in (1, 2, 3, 4, 5)]
    assert with_gpu == [0, 2, 2, 2, 2]
    autoscaler.most_rings = 2
    assert [sum("GPU" in bundle for bundle in autoscaler.bundles(number)) for number in (3, 4, 5)] == [2, 4, 4]
    assert len(autoscaler.bundles(5)) == 5


def test_nothing_is_asked_for_where_nobody_asked_and_all_is_there(autoscaler):
    assert keep(Wish((1, 2), 2, 2), goes_on=False) == []
    assert autoscaler.asked == []
