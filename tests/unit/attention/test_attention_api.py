"""`ring_attention` used alone, what it refuses, what an observer sees, and what a lost peer leads to."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ring.attention import api
from elastic_ring.attention.api import ring_attention
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import contiguous, make_layout, zigzag
from elastic_ring.attention.lowering import rectangles
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import GroupAborted, PeerFailed
from tests.unit.attention.attention_rings import (
    Case,
    check_close,
    in_threads,
    relative_error,
    train_alone,
    whole_attention,
)
from tests.unit.sparse.pattern_cases import AHEAD, SparseCase, masked_attention


class FakeRing:
    """Only rank and size: enough for checks that must fail before anything is sent."""

    def __init__(self, cp_rank: int, cp: int) -> None:
        self._cp_rank, self._cp = cp_rank, cp

    def rank(self) -> int:
        return self._cp_rank

    def size(self) -> int:
        return self._cp

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        raise AssertionError("sent before the mistake was found")

    recv = send


@pytest.mark.parametrize("as_layout", [False, True])
def test_ring_attention_alone_trains_on_stock_groups(rings, as_layout):
    case = Case(cp=3, seq_len=41, document_starts=(0, 11))
    options: dict[str, Any] = {"layout": case.layout} if as_layout else {"seq_len": 41}
    found = train_alone(
        case, rings.groups(3), lambda group, *qkv: ring_attention(*qkv, group=group, document_starts=[0, 11], **options)
    )
    check_close(found, whole_attention(case))


@pytest.mark.parametrize("causal", [True, False])
def test_a_pattern_alone_trains_on_stock_groups_also_where_it_is_not_causal(rings, causal):
    rule, sees = AHEAD["sinks and window"]
    case = SparseCase((rule,), (sees,), make_layout("zigzag", 41, 3), (0, 11), causal=causal)
    options: dict[str, Any] = {"seq_len": 41, "document_starts": [0, 11], "causal": causal}
    patterns: list[Any] = ["sinks:3+window:5,ahead=4", rule, [rule] * 4]
    for options["pattern"] in patterns:
        found = train_alone(case, rings.groups(3), lambda group, *qkv: ring_attention(*qkv, group=group, **options))
        check_close(found, masked_attention(case))


def test_a_pattern_that_does_not_fit_the_call_is_refused_before_a_message():
    q, kv = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
    for pattern, causal, said in (
        ("bigbird", False, "bigbird does not say which later keys"),
        ("window:4", False, "window:4 does not say"),
        ("topk:2", False, "topk:2 does not say"),
        ("window:4;dense@0", True, "names layers"),
        ([1], True, "give a short form"),
        (5, True, "pattern=5: give a short form"),
        ([Dense(), Window(4), Dense()], True, "rules for 3 heads, the call has 4"),
    ):
        with pytest.raises(ValueError, match=said):
            ring_attention(q, kv, kv, group=FakeRing(0, 2), pattern=pattern, causal=causal)  # type: ignore[arg-type]


def test_the_length_is_inferred_when_all_ranks_hold_equally_many(rings):
    case = Case(cp=4, seq_len=20, layout_name="contiguous")
    call = lambda group, *qkv: ring_attention(*qkv, group=group, layout="contiguous")  # noqa: E731
    check_close(train_alone(case, rings.groups(4), call), whole_attention(case))


def test_a_broadcast_gradient_and_a_strided_input_are_taken(rings):
    case = Case(cp=2, seq_len=16, num_kv_heads=4)
    groups, tensors = rings.groups(2), case.tensors()

    def work(cp_rank: int) -> torch.Tensor:
        qkv = torch.stack([case.layout.scatter(tensor, cp_rank, 1) for tensor in tensors[:3]], dim=3)
        qkv.requires_grad_()
        ring_attention(*qkv.unbind(3), group=groups[cp_rank]).sum().backward()
        assert qkv.grad is not None
        return qkv.grad

    grads = case.layout.gather(in_threads(2, work), 1)
    want = whole_attention(case, [*tensors[:3], torch.ones_like(tensors[3])])
    for i in range(3):
        assert relative_error(grads[..., i, :], want[1 + i]) <= 1e-12


def test_one_process_needs_no_hops_and_the_default_group_is_found():
    case = Case(cp=1, seq_len=12)
    q, k, v, _ = case.tensors()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        out = ring_attention(q, k, v, group=None)
    finally:
        dist.destroy_process_group()
    assert relative_error(out, whole_attention(case)[0]) <= 1e-12


def _tensors(num_heads: int = 4, num_kv_heads: int = 2, length: int = 8, **options: Any) -> list[torch.Tensor]:
    return [torch.zeros(1, length, n, 8, **options) for n in (num_heads, num_kv_heads, num_kv_heads)]


WRONG: dict[str, tuple[list[torch.Tensor], dict[str, Any], str]] = {
    "three dims": ([x[0] for x in _tensors()], {}, r"\(B, S_local, heads, D\)"),
    "k unlike v": ([*_tensors()[:2], torch.zeros(1, 8, 1, 8)], {}, "k and v must have the same shape"),
    "q unlike k": ([torch.zeros(1, 7, 4, 8), *_tensors()[1:]], {}, "agree in B, S_local and D"),
    "heads": (_tensors(num_heads=3), {}, "3 query heads do not divide among 2 K/V heads"),
    "no kv heads": (_tensors(num_kv_heads=0), {}, "heads and D must be at least 1"),
    "dtypes": ([_tensors()[0].double(), *_tensors()[1:]], {}, "cast them to one type"),
    "integers": (_tensors(dtype=torch.int64), {}, "use float64, float32, bfloat16 or float16"),
    "devices": ([torch.zeros(1, 8, 4, 8, device="meta"), *_tensors()[1:]], {}, "move them to one device"),
    "length": (_tensors(), {"seq_len": 20}, "S_local=8: layout zigzag of 20 tokens over cp=2 gives cp_rank 1 10"),
    "too short": (_tensors(length=0), {"seq_len": 1}, "seq_len=1 is shorter than cp=2"),
    "empty": (_tensors(length=0), {}, "seq_len=0 is shorter than cp=2"),
    "documents": (_tensors(), {"document_starts": (0, 9, 4)}, "ascending order"),
    "first document": (_tensors(), {"document_starts": ()}, "must start at position 0"),
    "document outside": (_tensors(), {"document_starts": (0, 16)}, "inside the sequence of 16 tokens"),
    "layout": (_tensors(), {"layout": "stripes"}, "choose one of contiguous, zigzag"),
    "layout of another cp": (_tensors(), {"layout": zigzag(16, 4)}, "layout is for cp=4, but the group has 2 ranks"),
    "layout of another length": (_tensors(), {"layout": zigzag(16, 2), "seq_len": 12}, "leave seq_len out"),
    "no tensor": ([None, *_tensors()[1:]], {}, "q is a NoneType: give a tensor"),  # type: ignore[list-item]
    "causal": (_tensors(), {"causal": "no"}, "causal='no': must be True or False"),
    "seq_len": (_tensors(), {"seq_len": 16.0}, "seq_len=16.0: a whole number of tokens"),
    "scale": (_tensors(), {"scale": float("nan")}, "scale=nan: must be a finite number"),
    "scale as text": (_tensors(), {"scale": "x"}, "scale='x': must be a finite number"),
    "backend": (_tensors(), {"backend": "flesh"}, "choose one of flash-attn-4, .*, aten-cpu, reference"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_users_mistake_is_named_before_anything_is_sent(name):
    tensors, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(*tensors, group=FakeRing(1, 2), **options)


def test_a_slice_of_another_length_or_rank_is_named():
    layout, x = make_layout("zigzag", 63, 2), torch.zeros(1, 63, 4, 8)
    for tensor, cp_rank, named in (
        (x[:, 1:], 0, "has 62 of the layout's 63 tokens along dim=1"),
        (x, 2, "cp_rank=2: layout zigzag has ranks 0 to 1"),
        (x, -1, "cp_rank=-1"),
    ):
        with pytest.raises(ValueError, match=named):
            layout.scatter(tensor, cp_rank, 1)
    slices = [layout.scatter(x, cp_rank, 1) for cp_rank in (0, 1)]
    with pytest.raises(ValueError, match="1 slices: layout zigzag has cp=2 ranks"):
        layout.gather(slices[:1], 1)
    with pytest.raises(ValueError, match=r"the slice of cp_rank 0 has shape .*: layout zigzag gives it 31 tokens"):
        layout.gather(slices[::-1], 1)


def test_no_default_group_and_a_foreign_group_are_named():
    with pytest.raises(ValueError, match="init_process_group"):
        ring_attention(*_tensors(), group=None)
    with pytest.raises(ValueError, match="not a process group that this rank is a member of"):
        ring_attention(*_tensors(), group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cp_rank", "group", "message"),
    [
        (0, None, "needs a group of as many ranks"),
        (4, FakeRing(0, 4), "ranks 0 to 3"),
        (0, FakeRing(0, 3), "the group has 3 ranks"),
        (0, FakeRing(1, 4), "this process is rank 1"),
    ],
)
def test_a_group_that_does_not_fit_the_schedule_is_refused(cp_rank, group, message):
    with pytest.raises(ValueError, match=message):
        RingAttention(plan(Pattern(), contiguous(16, 4)), cp_rank, group)


def test_the_observer_sees_every_hop_of_every_call_in_order(rings):
    case = Case(cp=3, seq_len=24)
    groups, tensors = rings.groups(3), case.tensors()
    seen: list[list[tuple[str, int, int]]] = [[] for _ in range(3)]

    def work(cp_rank: int) -> None:
        stamps = seen[cp_rank]
        ring = RingAttention(
            case.schedule, cp_rank, groups[cp_rank], RingOptions(observer=lambda *stamp: stamps.append(stamp))
        )
        q, k, v, dout = (case.layout.scatter(tensor, cp_rank, 1) for tensor in tensors)
        q.requires_grad_()
        for _ in range(2):
            ring(ring(q, k, v), k, v).backward(dout)
            ring.reset_calls()

    in_threads(3, work)
    hops = range(3)
    once = [("forward", call, hop) for call in (0, 1) for hop in hops]
    once += [("backward", call, hop) for call in (1, 0) for hop in hops]
    assert seen == [once * 2] * 3


class BreakingGroup:
    """A real group; after `good_waits` waits the next one raises, as when the control thread aborts."""

    def __init__(self, group: Any, good_waits: int, error: Exception) -> None:
        self.group, self.good_waits, self.error = group, good_waits, error
        self.rank, self.size = group.rank, group.size
        self.pending: weakref.ref[torch.Tensor] | None = None

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        return BreakingWork(self, tensors[0], self.group.send(tensors, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return BreakingWork(self, tensors[0], self.group.recv(tensors, src, tag))


class BreakingWork:
    def __init__(self, group: BreakingGroup, tensor: torch.Tensor, work: Any) -> None:
        self.group, self.tensor, self.work = group, weakref.ref(tensor), work

    def wait(self) -> Any:
        if self.group.good_waits == 0:
            self.group.pending = self.tensor
            raise self.group.error
        self.group.good_waits -= 1
        return self.work.wait()


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("kind", [PeerFailed, GroupAborted])
@pytest.mark.parametrize("good_waits", range(12))
def test_an_error_in_any_wait_comes_out_as_it_is_keeps_its_buffer_and_lets_the_group_close(rings, kind, good_waits):
    """Rank 1 fails. Its peers are released by gloo itself, since nothing keeps rank 1's sockets open."""
    case = Case(cp=3, seq_len=24)
    tensors = case.tensors()
    groups: list[Any] = rings.groups(3, fresh=True)

    def step(ring: RingAttention, phases: list[str]) -> None:
        q, k, v, dout = (case.layout.scatter(tensor, ring.cp_rank, 1) for tensor in tensors)
        phases.append("forward")
        out = ring(q.requires_grad_(), k, v)
        phases.append("backward")
        out.backward(dout)
        phases.append("next forward")
        ring(q, k, v)

    def work(cp_rank: int) -> str:
        error: Exception = kind("the ring is closed", cp_rank=cp_rank)
        group = groups[cp_rank]
        if cp_rank == 1:
            group = BreakingGroup(group, good_waits, error)
        ring = RingAttention(case.schedule, cp_rank, group)
        phases: list[str] = []
        with pytest.raises(kind if cp_rank == 1 else RuntimeError) as caught:
            step(ring, phases)
        if cp_rank == 1:
            assert caught.value is error
            error.__traceback__ = None
        # What is left of the call is only what the ring itself holds on to.
        del caught
        gc.collect()
        pending = None
        if cp_rank == 1:
            pending = group.pending
            group.group = None
        del group
        ring.group = groups[cp_rank] = None
        assert pending is None or pending() is not None
        return phases[-1]

    # Rank 1 waits for two hops of keys and two sends in forward; in backward partials come and go as well.
    assert in_threads(3, work)[1] == ("forward" if good_waits < 4 else "backward")


def test_inference_saves_nothing_and_needs_no_gradients(rings):
    case = Case(cp=2, seq_len=10)
    groups, (q, k, v, _) = rings.groups(2), case.tensors()

    def work(cp_rank: int) -> torch.Tensor:
        with torch.no_grad():
            slices = [case.layout.scatter(x, cp_rank, 1).requires_grad_() for x in (q, k, v)]
            out = ring_attention(*slices, group=groups[cp_rank])
        assert out.grad_fn is None
        return out

    outs = in_threads(2, work)
    assert relative_error(make_layout("zigzag", 10, 2).gather(outs, 1), whole_attention(case)[0]) <= 1e-12


class TagLog:
    """A group that notes the tags of what is sent. `fails`: at the first receive, or when it is waited for."""

    def __init__(self, group: Any) -> None:
        self._group, self.tags, self.fails = group, [], ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.tags.append(tag)
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self.fails == "post":
            raise GroupAborted("planted")
        return self if self.fails == "wait" else self._group.recv(tensors, src, tag)

    def wait(self) -> None:
        raise GroupAborted("planted")


def test_calls_on_one_group_have_tags_of_their_own_and_one_plan(rings, monkeypatch):
    case = Case(cp=2, seq_len=16)
    groups, (q, k, v, _) = [TagLog(group) for group in rings.groups(2)], case.tensors()
    planned: list[int] = []
    real = rectangles.traffic
    monkeypatch.setattr(rectangles, "traffic", lambda *a, **b: planned.append(1) or real(*a, **b))

    def work(cp_rank: int) -> list[set[int]]:
        slices = [case.layout.scatter(x, cp_rank, 1).requires_grad_() for x in (q, k, v)]
        tags = []
        for _ in range(3):
            groups[cp_rank].tags.clear()
            ring_attention(*slices, group=groups[cp_rank]).sum().backward()
            tags.append(set(groups[cp_rank].tags))
        return tags

    for tags in in_threads(2, work):
        assert all(tags)
        assert tags[0].isdisjoint(tags[1] | tags[2])
        assert tags[1].isdisjoint(tags[2])
    assert len(planned) == 2, "once for each rank, not for each call"


def test_a_retry_takes_no_message_of_the_call_that_failed(rings):
    """Rank 1 has sent its keys when both ranks fail; the retry has other keys."""
    case = Case(cp=2, seq_len=16)
    groups = [TagLog(group) for group in rings.groups(2, fresh=True)]
    (q, k, v, _), sent = case.tensors(), threading.Event()

    def work(cp_rank: int) -> torch.Tensor:
        slices = [case.layout.scatter(x, cp_rank, 1) for x in (q, k, v)]
        assert cp_rank == 1 or sent.wait(30)
        groups[cp_rank].fails = ("post", "wait")[cp_rank]
        with pytest.raises(GroupAborted):
            ring_attention(slices[0], slices[1] + 9, slices[2] + 9, group=groups[cp_rank])
        groups[cp_rank].fails = ""
        sent.set()
        return ring_attention(*slices, group=groups[cp_rank])

    outs = in_threads(2, work)
    assert groups[1].tags, "nothing stale was sent"
    assert relative_error(case.layout.gather(outs, 1), whole_attention(case)[0]) <= 1e-12


def test_what_calls_keep_for_a_group_ends_with_the_group():
    gc.collect()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    alive, before = weakref.ref(group), len(api._CALLS)
    q, k, v, _ = Case(cp=1, seq_len=8).tensors()
    ring_attention(q.requires_grad_(), k, v, group=group).sum().backward()
    assert len(api._CALLS) == before + 1
    del group
    gc.collect()
    assert alive() is None
    assert len(api._CALLS) == before


def test_layers_and_sequences_share_rings_and_plans_and_no_two_calls_share_tags(rings, monkeypatch):
    groups, layout = [TagLog(group) for group in rings.groups(2)], zigzag(32, 2)
    q = torch.randn(1, 32, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made: list[int] = []
    tiled: list[int] = []
    real = RingAttention.__init__
    monkeypatch.setattr(RingAttention, "__init__", lambda self, *a, **b: made.append(1) or real(self, *a, **b))
    tiles = rectangles.tiles
    monkeypatch.setattr(rectangles, "tiles", lambda *a: tiled.append(1) or tiles(*a))

    def work(cp_rank: int) -> list[set[int]]:
        x, plans, tags = layout.scatter(q, cp_rank, 1).requires_grad_(), PlanCache(), []
        for _ in range(2):
            attention = PatternedAttention(
                parse_pattern("window:20;dense@1,3"), layout, cp_rank, groups[cp_rank], plans=plans
            )
            for layer in range(4):
                groups[cp_rank].tags.clear()
                attention.layer(layer)(x, x, x).sum().backward()
                tags.append(set(groups[cp_rank].tags))
        assert len(plans) == 2
        return tags[:4]

    for tags in in_threads(2, work):
        assert all(tags)
        assert sum(map(len, tags)) == len(set().union(*tags))
    assert len(made) == 2 * 2 * 2, "for each rank, sequence and kind of layer"
    assert len(tiled) == 2, "for each rank"
