"""How much a run asks its autoscaler for, against an autoscaler that grants a request as a whole or not at all."""

from __future__ import annotations

import itertools

import pytest

from elastic_ring.control.capacity.scaling import TRY_AGAIN_S, Ask, next_ask, outstanding, sizes


def test_only_whole_rings_with_and_without_spares_are_of_use() -> None:
    assert sizes(1, 3, 4, 2) == (4, 6, 8, 10, 12, 14)
    assert sizes(2, 2, 2, 0) == (4,)


def _converged(limit: int, wanted: tuple[int, ...], num_here: int = 0) -> tuple[int, int]:
    """(workers that have room, requests) once the requests do not change any more, where `limit` may be granted."""
    ask, num_asks = Ask(), 0
    for second in range(19):
        is_refused = ask.num_workers > limit
        if not is_refused:
            num_here = max(num_here, ask.num_workers)
        after = next_ask(ask, wanted, num_here, is_refused, float(second))
        num_asks += after.num_workers != ask.num_workers
        ask = after
    return num_here, num_asks


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_requests_reach_the_most_that_the_cluster_can_become(spares: int) -> None:
    wanted = sizes(1, 9, 4, spares)
    for limit in range(60):
        useful = max((number for number in wanted if number <= limit), default=0)
        num_here, num_asks = _converged(limit, wanted)
        assert num_here == useful
        assert num_asks <= 8, "halves, not single steps"


def test_a_large_fleet_is_found_in_few_requests() -> None:
    wanted = sizes(1, 1000, 2, 4)
    found = [_converged(limit, wanted)[0] for limit in (3, 999, 1733, 2004)]
    assert found == [2, 998, 1732, 2004]


def test_a_refused_request_is_tried_again_later_by_a_little_more_than_there_is() -> None:
    wanted = (2, 4, 6, 8)
    ask = next_ask(Ask(), wanted, 2, False, 0.0)
    assert ask.num_workers == 8
    ask = next_ask(ask, wanted, 2, True, 1.0)
    assert (ask.num_workers, ask.refused) == (6, 8)
    ask = next_ask(ask, wanted, 2, True, 2.0)
    assert (ask.num_workers, ask.refused) == (4, 6)
    ask = next_ask(ask, wanted, 2, True, 3.0)
    assert (ask.num_workers, ask.refused) == (2, 4)
    assert next_ask(ask, wanted, 2, False, 2.9 + TRY_AGAIN_S) == ask
    trial = next_ask(ask, wanted, 2, False, 3.0 + TRY_AGAIN_S)
    assert trial == Ask(4, is_trial=True)
    assert next_ask(trial, wanted, 2, True, 30.0) == Ask(2, 4, 30.0)
    assert next_ask(trial, wanted, 2, False, 90.0) == trial, "its nodes are on their way"
    assert next_ask(trial, wanted, 4, False, 90.0) == Ask(8)


def test_what_the_cluster_loses_for_good_is_found_too() -> None:
    """Eight were here; only four are allowed now."""
    ask = next_ask(Ask(8), (2, 4, 6, 8), 4, True, 5.0)
    assert ask == Ask(6, 8, 5.0)
    assert next_ask(ask, (2, 4, 6, 8), 4, True, 6.0) == Ask(4, 6, 6.0)


def test_a_request_is_withdrawn_when_nothing_is_wanted_and_lowered_with_what_is_wanted() -> None:
    asks = list(
        itertools.accumulate(
            [(2, 4), (2,), ()], lambda ask, wanted: next_ask(ask, wanted, 4, False, 0.0), initial=Ask()
        )
    )
    assert [ask.num_workers for ask in asks] == [0, 4, 2, 0]


def test_nothing_is_outstanding_once_all_that_is_asked_for_is_placed() -> None:
    """A request that stays would hold a node that the run has left."""
    assert [outstanding(Ask(4), placed) for placed in (0, 2, 3, 4, 6)] == [4, 4, 4, 0, 0]
    assert outstanding(Ask(2, refused=4), 2) == 0
    assert outstanding(Ask(4, is_trial=True), 4) == 4
    assert outstanding(Ask(), 0) == 0
