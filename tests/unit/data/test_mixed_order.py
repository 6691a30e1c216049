"""The order over a prepared corpus: exactly once, in proportion, and unchanged in the past when sources grow."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.data.sampling.mixed_order import BlockOrder, MixedOrder, Mixture, Numbering, Stage, Version, floor_sum

SEEDS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 120), st.integers(0, 120))
def test_the_floor_sum_is_the_sum(num: int, modulus: int, step: int, begin: int) -> None:
    assert floor_sum(num, modulus, step, begin) == sum((step * i + begin) // modulus for i in range(num))


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
def test_each_source_has_had_its_share_at_any_time(seed: int, weights: list[float]) -> None:
    mixture = Mixture(seed, weights)
    seen = [0] * len(weights)
    for index in range(600):
        assert mixture.counts(index) == tuple(seen)
        seen[mixture.source(index)] += 1
    for num in (600, 10**6, 10**12):
        counts = mixture.counts(num)
        assert sum(counts) == num
        for count, weight in zip(counts, weights, strict=True):
            # A few sequences, and what rounding the weight to 2**-32 makes of the whole.
            assert abs(count - num * weight / sum(weights)) < 8 + num / 2**31


def test_weights_that_say_nothing_are_refused() -> None:
    for weights in ((), (1.0, 0.0), (1.0, -1.0), (1.0, 1e-12)):
        with pytest.raises(ValueError, match="weights="):
            Mixture(0, weights)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 90), st.integers(1, 9), st.integers(1, 5))
def test_an_epoch_uses_each_sequence_once(seed: int, num: int, block: int, window: int) -> None:
    order = BlockOrder(seed, 0, [Stage(0, num)], block=block, window=window)
    epochs = [[order.sequence(i) for i in range(e * num, (e + 1) * num)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num))] * 3
    assert [order.sequence(i) for i in range(num)] == epochs[0]  # also once the caches hold others


def test_epochs_seeds_and_sources_differ() -> None:
    def first(seed: int, source: int, epoch: int) -> tuple[int, ...]:
        order = BlockOrder(seed, source, [Stage(0, 64)], block=4, window=4)
        return tuple(order.sequence(epoch * 64 + i) for i in range(64))

    assert len({first(seed, source, epoch) for seed in (0, 1) for source in (0, 1) for epoch in (0, 1)}) == 8


def test_few_blocks_are_in_use_at_a_time_and_each_once_an_epoch() -> None:
    block, window = 8, 4
    order = BlockOrder(3, 0, [Stage(0, 800)], block=block, window=window)
    used = np.array([order.sequence(i) for i in range(800)]) // block
    for begin in range(0, 800, block * window):
        assert len(set(used[begin : begin + block * window])) == window
    # Mixed: neighbours in the run are seldom neighbours in the source.
    assert sum(one == other for one, other in pairwise(used)) < 800 / window * 1.5


GROWTH = st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.lists(st.integers(0, 60), max_size=4))


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), GROWTH, st.integers(0, 3))
def test_a_source_that_grows_changes_no_past_and_uses_each_sequence_once(
    seed: int, block: int, window: int, growth: tuple[list[int], list[int]], tail: int
) -> None:
    sizes = np.cumsum([num * block for num in growth[0]]).tolist()
    firsts = [0, *np.cumsum(growth[1]).tolist()]
    stages = [Stage(first, num) for first, num in zip(firsts, sizes, strict=False)]
    stages[-1] = Stage(stages[-1].first, stages[-1].num_sequences + tail % block)  # the last may end within a block
    whole = BlockOrder(seed, 0, stages, block=block, window=window)
    horizon = stages[-1].first + 3 * stages[-1].num_sequences
    run = [whole.sequence(i) for i in range(horizon)]
    for known in range(1, len(stages)):
        before = BlockOrder(seed, 0, stages[:known], block=block, window=window)
        assert [before.sequence(i) for i in range(stages[known].first)] == run[: stages[known].first]
    there = 0
    for stage in stages:  # nothing is used before it is there
        assert all(sequence < max(there, stages[0].num_sequences) for sequence in run[: stage.first])
        there = stage.num_sequences
    # Epochs follow each other; within each nothing comes twice, and the last has everything.
    begin = 0
    while begin < horizon:
        seen: set[int] = set()
        while begin < horizon and run[begin] not in seen:
            seen.add(run[begin])
            begin += 1
        if begin < horizon:
            present = [stage.num_sequences for stage in stages if stage.first <= begin]
            assert len(seen) <= present[-1]
    counts = Counter(run)
    assert set(counts) == set(range(stages[-1].num_sequences))


def test_a_source_that_grows_within_an_epoch_is_used_exactly_once() -> None:
    stages = [Stage(0, 20), Stage(7, 32), Stage(25, 47)]
    order = BlockOrder(5, 0, stages, block=4, window=2)
    run = [order.sequence(i) for i in range(94)]
    assert sorted(run[:47]) == list(range(47))
    assert sorted(run[47:]) == list(range(47))
    assert max(run[:7]) < 20
    assert max(run[:25]) < 32


def test_ids_keep_their_sequences_when_sources_grow() -> None:
    versions = [Version(0, (3, 2)), Version(5, (3, 6)), Version(9, (10, 7))]
    numbering = Numbering(versions)
    places = [numbering.place(sample_id) for sample_id in range(numbering.num_sequences)]
    assert places[:5] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert sorted(places) == [(0, i) for i in range(10)] + [(1, i) for i in range(7)]
    assert [numbering.sample_id(*place) for place in places] == list(range(17))
    assert [Numbering(versions[:2]).place(sample_id) for sample_id in range(9)] == places[:9]


def test_steps_of_a_growing_mixture_change_no_past_and_keep_the_proportion() -> None:
    versions = [Version(0, (16, 8)), Version(3, (32, 40)), Version(11, (64, 43))]
    orders = [MixedOrder(9, 6, (3.0, 1.0), versions[: known + 1], block=8, window=2) for known in range(len(versions))]
    steps = [orders[-1].sample_ids(step) for step in range(40)]
    for known, version in enumerate(versions[1:]):
        past = range(version.first_step)
        assert [orders[known].sample_ids(step) for step in past] == steps[: version.first_step]
    numbering = Numbering(versions)
    sources = [numbering.place(sample_id)[0] for ids in steps for sample_id in ids]
    assert abs(sources.count(0) - 0.75 * len(sources)) < 3
    used = Counter(sample_id for ids in steps for sample_id in ids if numbering.place(sample_id)[0] == 0)
    assert len(used) == 64
    assert set(used.values()) == {2, 3, 4}  # 180 in all; what was there in the beginning came more often
    assert MixedOrder(9, 6, (3.0, 1.0), versions, block=8, window=2).sample_ids(17) == steps[17]


def test_a_planted_duplicate_makes_the_check_fail() -> None:
    """The counts above notice a batch that comes twice."""
    order = MixedOrder(1, 4, (1.0,), [Version(0, (40,))], block=4, window=2)
    steps = [order.sample_ids(step) for step in range(10)]
    assert set(Counter(sample_id for ids in steps for sample_id in ids).values()) == {1}
    steps[7] = steps[3]
    assert set(Counter(sample_id for ids in steps for sample_id in ids).values()) != {1}


def test_what_cannot_be_ordered_is_refused() -> None:
    def order(seed: int = 0, batch: int = 1, versions: tuple[Version, ...] = (Version(0, (8,)),)) -> MixedOrder:
        return MixedOrder(seed, batch, (1.0,) * len(versions[0].num_sequences), versions, block=4, window=2)

    with pytest.raises(ValueError, match=r"global_batch=9.*only 8 sequences"):
        order(batch=9)
    with pytest.raises(ValueError, match="global_batch=0"):
        order(batch=0)
    with pytest.raises(ValueError, match="seed=-1"):
        order(seed=-1)
    with pytest.raises(ValueError, match="source 1: nothing of it is complete yet"):
        order(versions=(Version(0, (8, 0)),))
    with pytest.raises(ValueError, match="step=-1"):
        order().sample_ids(-1)
