"""Layouts partition the sequence; schedules cover every visible pair once and fetch no key too many."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.attention.layouts.layout import Layout, contiguous, make_layout, zigzag
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import Schedule, plan


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """The two named layouts, and any partition dealt to the ranks at random."""
    seq_len = draw(st.integers(1, 60))
    cp = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "dealt"]))
    if kind != "dealt":
        return make_layout(kind, seq_len, cp)
    cuts = sorted(draw(st.sets(st.integers(0, seq_len), max_size=12)) | {0, seq_len})
    segments: list[list[tuple[int, int]]] = [[] for _ in range(cp)]
    for segment in pairwise(cuts):
        segments[draw(st.integers(0, cp - 1))].append(segment)
    return Layout("dealt", seq_len, tuple(tuple(own) for own in segments))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    layout = draw(layouts())
    starts = sorted(draw(st.sets(st.integers(0, layout.seq_len - 1), max_size=8)) | {0})
    return plan(Pattern(draw(st.booleans()), tuple(starts)), layout)


def visible(schedule: Schedule) -> np.ndarray:
    """(query, key) -> bool by position, from the definition."""
    seq_len = schedule.layout.seq_len
    at = np.arange(seq_len)
    document = np.searchsorted(np.array(schedule.pattern.document_starts), at, side="right")
    seen = document[:, None] == document[None, :]
    return seen & (at[:, None] >= at[None, :]) if schedule.pattern.causal else seen


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_visible_pair_is_in_exactly_one_tile_and_no_other_pair_is(schedule):
    positions = [schedule.layout.positions(r).numpy() for r in range(schedule.cp)]
    count = np.zeros((schedule.layout.seq_len,) * 2, dtype=int)
    for cp_rank, hops in enumerate(schedule.hops):
        for index, hop in enumerate(hops):
            assert hop.source == (cp_rank - index) % schedule.cp
            for tile in hop.tiles:
                queries = positions[cp_rank][slice(*tile.q)]
                keys = positions[hop.source][slice(*tile.k)]
                assert queries.size
                assert keys.size
                block = np.ones((queries.size, keys.size), dtype=int)
                if tile.causal:
                    assert (queries == keys).all()
                    block = np.tril(block)
                count[np.ix_(queries, keys)] += block
    assert (count == visible(schedule)).all()


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_a_hop_fetches_exactly_the_keys_that_some_query_of_the_rank_needs(schedule):
    seen = visible(schedule)
    positions = [schedule.layout.positions(r).numpy() for r in range(schedule.cp)]
    for cp_rank, hops in enumerate(schedule.hops):
        assert hops[0].fetch == ((),)
        for index, hop in enumerate(hops[1:], start=1):
            needed = np.flatnonzero(seen[np.ix_(positions[cp_rank], positions[hop.source])].any(axis=0))
            fetched = [i for start, stop in hop.fetch[0] for i in range(start, stop)]
            assert fetched == needed.tolist()
            assert hop.num_fetched_tokens() == needed.size
            for before, after in pairwise(hop.fetch[0]):
                assert before[1] < after[0]
            for tile in hop.tiles:
                start, stop = hop.in_buffer(tile.k)
                assert fetched[start:stop] == list(range(*tile.k))
            assert schedule.requested(hop.source, index) == hop.fetch


@settings(max_examples=200, deadline=None)
@given(schedules(), st.sampled_from([2, 4, 8]))
def test_the_bytes_of_a_hop_are_those_of_its_ranges(schedule, itemsize):
    per_token = 2 * 3 * 5 * 16
    partial_size = 8 if itemsize == 8 else 4
    for cp_rank, hops in enumerate(schedule.hops):
        for index, hop in enumerate(hops):
            pulled = sum(stop - start for start, stop in hop.fetch[0])
            served = sum(stop - start for start, stop in schedule.requested(cp_rank, index)[0])
            for side, keys, partials in (("received", pulled, served), ("sent", served, pulled)):
                expected = {"forward": keys * itemsize, "backward": keys * itemsize + partials * partial_size}
                for direction, num_bytes in expected.items():
                    found = schedule.hop_bytes(
                        cp_rank,
                        index,
                        16,
                        itemsize,
                        direction,
                        batch=3,
                        kv_heads=5,
                        side=side,  # type: ignore[arg-type]
                    )
                    assert found == per_token * num_bytes


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(0, 2))
def test_scatter_and_gather_are_inverse_and_agree_with_positions(layout, dim):
    shape = [2, 2, 2]
    shape[dim] = layout.seq_len
    whole = torch.arange(float(np.prod(shape))).reshape(shape)
    slices = [layout.scatter(whole, r, dim) for r in range(layout.cp)]
    for cp_rank, local in enumerate(slices):
        assert local.size(dim) == layout.num_tokens(cp_rank)
        assert torch.equal(local, whole.index_select(dim, layout.positions(cp_rank)))
    assert torch.equal(layout.gather(slices, dim), whole)


@given(st.integers(1, 200), st.integers(1, 8))
def test_named_layouts_split_unevenly_like_numpy(seq_len, cp):
    flat = [chunk.tolist() for chunk in np.array_split(np.arange(seq_len), cp)]
    assert [contiguous(seq_len, cp).positions(r).tolist() for r in range(cp)] == flat
    chunks = [chunk.tolist() for chunk in np.array_split(np.arange(seq_len), 2 * cp)]
    assert [zigzag(seq_len, cp).positions(r).tolist() for r in range(cp)] == [
        chunks[r] + chunks[2 * cp - 1 - r] for r in range(cp)
    ]


def test_zigzag_fetches_half_a_slice_from_later_ranks_and_halves_the_queries_from_earlier_ones():
    schedule = plan(Pattern(), zigzag(64, 4))
    for cp_rank, hops in enumerate(schedule.hops):
        assert [len(hop.tiles) for hop in hops] == [1, 1, 1, 1]
        for hop in hops[1:]:
            (tile,) = hop.tiles
            earlier = hop.source < cp_rank
            assert tile.k == ((0, 8) if earlier else (0, 16))
            assert tile.q == ((0, 16) if earlier else (8, 16))


def test_zigzag_gives_every_rank_the_same_causal_work():
    schedule = plan(Pattern(), zigzag(64, 4))
    pairs = [
        sum(
            (tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0] + tile.causal) / (1 + tile.causal)
            for hop in hops
            for tile in hop.tiles
        )
        for hops in schedule.hops
    ]
    assert pairs == [64 * 65 / 2 / 4] * 4


def test_only_a_document_that_reaches_over_is_fetched():
    schedule = plan(Pattern(True, (0, 16, 32, 48)), contiguous(64, 4))
    assert all(not hop.fetch[0] and not hop.tiles for hops in schedule.hops for hop in hops[1:])
    schedule = plan(Pattern(True, (0, 13, 18)), contiguous(32, 2))
    assert schedule.hops[1][1].fetch == (((13, 16),),)
    assert schedule.hops[0][1].fetch == ((),)


def test_a_schedule_is_hashable_and_equal_by_content():
    first, again = (plan(Pattern(True, (0, 5)), zigzag(40, 3)) for _ in range(2))
    assert again == first
    assert again.hops == first.hops
    assert hash(again) == hash(first)
    assert plan(Pattern(False, (0, 5)), zigzag(40, 3)) != first


def test_planning_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from elastic_ring.attention.layouts.layout import zigzag\n"
        "from elastic_ring.attention.patterns.sparse import Pattern\n"
        "from elastic_ring.attention.plan.schedule import plan\n"
        "print(plan(Pattern(), zigzag(64, 4)).hop_bytes(0, 1, 1, 2, 'forward', kv_heads=1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64"]


def own_layout(*segments: tuple[tuple[int, int], ...]) -> Layout:
    return Layout("own", 8, segments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern(True, ()), "position 0"),
        (lambda: Pattern(True, (3, 9)), "position 0"),
        (lambda: Pattern(True, (0, 9, 4)), "4 follows 9"),
        (lambda: Pattern(True, (0, 4, 4)), "4 follows 4"),
        (lambda: plan(Pattern(True, (0, 20)), zigzag(20, 2)), "inside the sequence of 20 tokens"),
        (lambda: own_layout(((0, 4),), ((5, 8),)), "position 4 is held by no rank or two"),
        (lambda: own_layout(((0, 4),), ((3, 8),)), "position 3 is held by no rank or two"),
        (lambda: own_layout(((0, 4),), ((4, 7),)), "cover 7 of 8"),
        (lambda: own_layout(((4, 8), (0, 4))), "must ascend"),
        (lambda: make_layout("ziczac", 8, 2), "choose one of contiguous, zigzag"),
        (lambda: make_layout("zigzag", 0, 2), "seq_len=0"),
        (lambda: make_layout("zigzag", 8, 0), "cp=0"),
    ],
)
def test_wrong_documents_and_layouts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
