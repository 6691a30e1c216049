"""Fetched keys by stages: what is posted and computed in which order, and in how few messages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.lowering import blocks as lowered
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from tests.gpu.gpu_rings import CopyWork, ProcessGroups, ThreadGroup, run_sparse_on
from tests.unit.sparse.block_cases import BlockCase, block_case, check_exact, grouped_case

REFERENCE = named("reference-sparse")


@dataclass
class ToldGroup(ThreadGroup):
    """Notes in its thread's story what is posted together, of which kind, and breaks where it is told to."""

    stories: dict[int, list[str]] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    thread: int = 0
    num_open: int = 0
    breaks: bool = False

    def _start_coalescing(self) -> None:
        super()._start_coalescing()
        self.thread, self.kinds, self.num_open = threading.get_ident(), [], self.num_open + 1

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> None:
        if self.breaks:
            raise RuntimeError("a peer is gone")
        super().send(tensors, dst, tag)
        self.kinds.append(tag % 2)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> None:
        super().recv(tensors, src, tag)
        self.kinds.append(tag % 2)

    def _end_coalescing(self) -> CopyWork:
        self.num_open -= 1
        (kind,) = set(self.kinds)
        self.stories.setdefault(self.thread, []).append("post partials" if kind else "post keys")
        return super()._end_coalescing()


def told(
    monkeypatch: pytest.MonkeyPatch, case: BlockCase, stories: dict[int, list[str]] | None = None, **options: Any
) -> tuple[list[list[str]], list[ToldGroup]]:
    """What each rank's kernels and exchange did, in order, and the groups."""
    links, stories = ProcessGroups(case.layout.cp), {} if stories is None else stories
    groups = [ToldGroup(links, rank, stories=stories) for rank in range(case.layout.cp)]
    links.groups = lambda: groups  # type: ignore[method-assign, assignment, return-value]

    def note(what: str, tables: Any) -> None:
        which = "own" if tables.all_keys else "fetched"
        stories.setdefault(threading.get_ident(), []).append(f"{what} {which}")

    def forward(q: Any, k: Any, v: Any, tables: Any, scale: float) -> Any:
        note("forward", tables)
        return REFERENCE.forward(q, k, v, tables, scale)

    def backward(*arguments: Any, **places: Any) -> Any:
        note("backward", places["tables"])
        return REFERENCE.backward(*arguments, **places)

    kernel = replace(REFERENCE, forward=forward, backward=backward)
    found, _ = run_sparse_on("cpu", case, links, kernel=kernel, **options)
    check_exact(case, found)
    return [stories[group.thread] for group in groups], groups


FORWARD = [
    "post keys",
    "post keys",
    "forward own",
    "forward fetched",
    "post keys",
    "forward fetched",
    "forward fetched",
]


def test_two_stages_are_posted_before_any_kernel_and_the_next_in_place_of_what_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (story, *_), _ = told(monkeypatch, block_case("bigbird", 4, "zigzag"), stage_bytes=1)
    backward = [
        "post keys",
        "post keys",
        "backward own",
        "backward fetched",
        "post keys",
        "post partials",
        "backward fetched",
        "post partials",
        "backward fetched",
        "post partials",
    ]
    assert story == FORWARD + backward  # of a rank that fetches in every hop


def test_what_came_back_is_added_last_and_own_heads_are_left_to_hide_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in one pass over memory. Keys that others wait for have been posted before any partials are."""
    stories = halved(monkeypatch, block_case("bigbird", 4, "contiguous"))
    assert stories[0] == [  # fetches nothing
        "post keys",
        "post keys",
        "forward own",
        "post keys",
        "post keys",
        "post keys",
        "backward own",
        "post keys",
        "post partials",
        "post partials",
        "post partials",
        "backward own",
        "add 3",
    ]
    assert stories[3] == [  # serves nobody
        *FORWARD,
        "post keys",
        "post keys",
        "backward own",
        "backward fetched",
        "post keys",
        "post partials",
        "backward fetched",
        "post partials",
        "backward fetched",
        "post partials",
        "backward own",
    ]


def test_with_many_stages_who_fetches_nothing_more_computes_what_is_left_before_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stories = halved(monkeypatch, block_case("bigbird", 8, "contiguous"))
    backward = ["post keys", "post keys", "backward own", *["post keys", "post partials"] * 3]
    assert stories[0][-len(backward) - 12 :] == [
        *backward,
        "backward own",
        *["add 1", "post keys", "post partials"] * 2,
        "add 1",
        "post partials",
        "add 1",
        "post partials",
        "add 3",
    ]


def halved(monkeypatch: pytest.MonkeyPatch, case: BlockCase) -> list[list[str]]:
    """As `told`, a hop a stage, where running own keys in two halves pays; and of how many hops what came is added."""
    monkeypatch.setattr(lowered, "LINK_BYTES_PER_S", 1.0)
    monkeypatch.setattr(lowered, "SPARSE_BACKWARD_FLOPS", 1.0)
    add, notes = lowered.add_placed_, dict[int, int]()

    def note(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
        thread = threading.get_ident()
        notes[thread] = notes.get(thread, 0) + 1
        if notes[thread] % 2:  # dK, then dV
            stories.setdefault(thread, []).append(f"add {len(places)}")
        add(total, inbox, places)

    stories: dict[int, list[str]] = {}
    monkeypatch.setattr(lowered, "add_placed_", note)
    return told(monkeypatch, case, stories, stage_bytes=1)[0]


@pytest.mark.slow
def test_half_of_the_own_heads_run_behind_the_last_partials_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    case = block_case("bigbird", 4, "zigzag")
    one = ["post keys", "forward own", "forward fetched", "post keys", "backward own", "backward fetched"]
    assert told(monkeypatch, case)[0] == [[*one, "post partials"]] * 4
    monkeypatch.setattr(lowered, "LINK_BYTES_PER_S", 1.0)  # but there is little to compute meanwhile
    assert told(monkeypatch, case)[0] == [[*one, "post partials"]] * 4
    monkeypatch.setattr(lowered, "SPARSE_BACKWARD_FLOPS", 1.0)
    assert told(monkeypatch, case)[0] == [[*one, "post partials", "backward own"]] * 4


@pytest.mark.slow
def test_kept_keys_are_run_first_and_own_ones_in_one_call_behind_the_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered, "HALVING_S", 0)
    case = block_case("window", 4, "zigzag")
    want = ["post keys", "forward own", "forward fetched", "backward fetched", "post partials", "backward own"]
    assert told(monkeypatch, case, keep_keys=True)[0] == [want] * 4


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    "case",
    [
        block_case("heads in turn", 4, "zigzag", num_kv_heads=4, batch=2),
        grouped_case("longnet and a window, 8 heads", 4, "zigzag", batch=2),
        grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag", batch=2),
    ],
    ids=["two groups", "eight groups", "groups of two sizes"],
)
def test_a_hop_is_one_message_a_direction_whatever_its_heads_and_sequences(
    case: BlockCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_sizes = {len(group.kv_heads) for group in case.schedule.groups}
    assert len(case.schedule.groups) > len(all_sizes)
    for stage_bytes, by_size in ((1, False), (2**40, True)):  # where hops lie together, one for each size of groups
        _, groups = told(monkeypatch, case, stage_bytes=stage_bytes)
        num_sent, num_messages = 0, 0
        for rank, group in enumerate(groups):
            num_sent += sum(what == "send" for what, _, _ in group.log)
            assert all(size % (2 * 2 * case.head_dim) == 0 for _, _, (size,) in group.log), "whole rows"
            for hop in case.schedule.hops[rank][1:]:
                pairs = zip(case.schedule.groups, hop.fetch, strict=True)
                sizes = {len(group.kv_heads) for group, ranges in pairs if ranges}
                num_messages += len(sizes) if by_size else bool(sizes)
        assert num_sent == 3 * num_messages  # keys twice, and partials
        assert 0 < num_messages <= 12 * (len(all_sizes) if by_size else 1)


def test_what_was_begun_together_is_ended_even_if_posting_fails() -> None:
    case = block_case("bigbird", 2, "zigzag")
    group = ToldGroup(ProcessGroups(2), 0, breaks=True)
    ring = RingAttention(case.schedule, 0, group, RingOptions(kernel=REFERENCE.name, coalesced=True))
    q, k, v, _ = (case.layout.scatter(tensor, 0, 1) for tensor in case.tensors())
    with group.links.baton, pytest.raises(RuntimeError, match="a peer is gone"):
        ring(q, k, v)
    assert group.num_open == 0
    assert ring.options.abandoned
