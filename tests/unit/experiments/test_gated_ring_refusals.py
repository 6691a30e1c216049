"""What gated attention over a ring refuses, and that an error in the middle of it comes out as it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ring.attention.layouts.layout import contiguous, zigzag
from elastic_ring.errors import ElasticRingError, GroupAborted, PeerFailed
from experiments.gated_ring import GatedRing
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread
from tests.unit.attention.test_attention_api import BreakingGroup, FakeRing
from tests.unit.experiments.gated_cases import LENGTH, make_module, sample, step


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    ("good_waits", "kind"),
    [(0, PeerFailed), (3, GroupAborted), (5, PeerFailed), *((n, GroupAborted) for n in (9, 13, 18, 26, 33))],
)
def test_an_error_in_any_wait_comes_out_as_it_is_and_keeps_its_buffer(
    rings: ThreadRings, good_waits: int, kind: type[ElasticRingError]
) -> None:
    """Rank 1 fails: in sums, choices, chosen blocks, window, and in the backward pass of each, back to the shares.

    Its peers are released by gloo itself, once nothing keeps its sockets open.
    """
    layout, tensors = zigzag(LENGTH, 3), sample(batch=1)
    groups: list[Any] = rings.groups(3, fresh=True)

    def steps(ring: GatedRing, own: list[torch.Tensor]) -> None:
        for _ in range(2):
            step(make_module(), own, ring)

    def work(cp_rank: int) -> None:
        error: Exception = kind("the ring is closed", cp_rank=cp_rank)
        group = groups[cp_rank]
        if cp_rank == 1:
            group = BreakingGroup(group, good_waits, error)
        ring: Any = GatedRing(layout, cp_rank, group)
        own = [layout.scatter(tensor, cp_rank, 1) for tensor in tensors]
        with pytest.raises(kind if cp_rank == 1 else RuntimeError) as caught:
            steps(ring, own)
        if cp_rank == 1:
            assert caught.value is error
            error.__traceback__ = None
        del caught
        gc.collect()
        if cp_rank == 1:
            assert group.pending is not None
            assert group.pending() is not None
            group.group = None
        del group, ring
        groups[cp_rank] = None
        gc.collect()

    in_threads(3, work)


def test_a_ring_that_cannot_be_is_refused() -> None:
    layout: Any = contiguous(8, 2)
    group: Any = FakeRing(0, 2)
    with pytest.raises(ValueError, match="needs a group of as many ranks"):
        GatedRing(layout, 0, None)
    with pytest.raises(ValueError, match="cp_rank=2: the layout has ranks 0 to 1"):
        GatedRing(layout, 2, group)
    with pytest.raises(ValueError, match="this process is rank 0"):
        GatedRing(layout, 1, group)
    with pytest.raises(ValueError, match="the group has 3 ranks"):
        GatedRing(layout, 0, FakeRing(0, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ahead=0"):
        GatedRing(layout, 0, group, ahead=0)


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    """The group of these rings can send nothing."""
    group: Any = FakeRing(0, 2)
    made, ring = make_module(), GatedRing(contiguous(16, 2), 0, group)
    x, q, k, v, _ = sample(8)
    with pytest.raises(ValueError, match="S_local=7"):
        made(x[:, :7], q[:, :7], k[:, :7], v[:, :7], ring=ring)
    with pytest.raises(ValueError, match=r"x must be \(B, S, 12\)"):
        made(x[:, :7], q, k, v, ring=ring)
    with pytest.raises(ValueError, match="num_heads=4"):
        made(x, q[:, :, :2], k, v, ring=ring)
    with pytest.raises(ValueError, match="device meta: gated attention over a ring runs on CPUs"):
        made(x.to("meta"), q.to("meta"), k.to("meta"), v.to("meta"), ring=ring)
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        made(x, q, k, v[:, :, :1], ring=ring)
