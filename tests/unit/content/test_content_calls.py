"""Calls whose blocks content chooses: kept for backward, forgotten after, and over when a peer is lost on the way."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from elastic_ring.attention import layers
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import contiguous, zigzag
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.blocks import _KEPT_PAIRS, any_partly
from elastic_ring.attention.patterns.content import TopK
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.routing import router
from elastic_ring.attention.routing.router import Router
from elastic_ring.errors import GroupAborted
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from tests.gpu.gpu_rings import ProcessGroups, run_content_on
from tests.unit.attention.attention_rings import in_threads, one_thread
from tests.unit.attention.test_recomputation import CONFIG
from tests.unit.content.content_cases import make_case, routed, run_content, schedule_of

# ------------------------------------------------------------ kept for backward

PATTERN = '{"block": 128, "groups": [{"layers": [1], "rule": "dense"}, {"rule": "%s"}]}'


def train(
    text: str, cp: int, kernel: str | None, group: Any, cp_rank: int, way: str
) -> tuple[list[torch.Tensor], HopLedger]:
    """Loss and gradients of one sequence's slice under activation checkpointing, and what was sent for them."""
    num_tokens = 128 * 4 * cp
    layout = zigzag(num_tokens, cp)
    attention: Any = PatternedAttention(
        parse_pattern(PATTERN % text), layout, cp_rank, group, RingOptions(kernel=kernel)
    )
    if way == "run again":
        attention.recomputation = noop_context_fn
    model = Transformer(replace(CONFIG, offload_activations=way == "offloaded"))
    initialise_module(model, Initialiser(0, CONFIG.num_layers))
    tokens = torch.randint(64, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    mine = layout.scatter(tokens, cp_rank, 1)
    positions = layout.positions(cp_rank).unsqueeze(0)
    loss, _ = model(mine, positions=positions, document_ids=mine, attention=attention, targets=mine)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], attention.ledger


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "text"),
    [(None, "topk:2"), ("reference-sparse", "topk:2"), ("reference-sparse", "topk:2,fetch_all=1")],
    ids=["tiles", "blocks", "all fetched"],
)
def test_backward_under_checkpointing_neither_chooses_nor_sends_again_and_no_bit_changes(rings, kernel, text, cp):
    found = {}
    for way in ("kept", "offloaded", "run again"):
        groups = rings.groups(cp) if cp > 1 else [None]

        def work(cp_rank: int, groups: Any = groups, way: str = way) -> Any:
            return train(text, cp, kernel, groups[cp_rank], cp_rank, way)

        found[way] = in_threads(cp, work)
    for kept, again in zip(found["kept"] + found["offloaded"], 2 * found["run again"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept[0], again[0], strict=True))
        once, twice = (sum(routed(ledger.sent_bytes).values()) for ledger in (kept[1], again[1]))
        assert (once > 0) == (cp > 1)
        assert 2 * once == twice
        forward, forward_again = (
            sum(num for (way, _), num in ledger.sent_bytes.items() if way == "forward")
            for ledger in (kept[1], again[1])
        )
        assert 2 * forward == forward_again


# ------------------------------------------------------------ forgotten after


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(("kernel", "unit", "num_calls"), [(None, 2, 1000), ("reference-sparse", 128, 30)])
def test_calls_fill_no_cache_and_leave_nothing_behind(kernel, unit, num_calls, monkeypatch):
    """A static layer beside them is planned once and stays planned; the plans of a chosen one die with its call."""
    text = f"topk:3,unit={unit};bigbird:2,0,0,unit={unit}@1"
    pattern = replace(parse_pattern(text), block=unit)
    layout = contiguous(6 * unit, 1)
    generator, plans, planned = torch.Generator().manual_seed(0), PlanCache(), [0, 0]

    def counted(pattern: SparsePattern, *rest: Any) -> Schedule:
        planned[pattern.for_one_call] += 1
        return plan_sparse(pattern, *rest)

    monkeypatch.setattr(layers, "plan_sparse", counted)

    def call() -> tuple[weakref.ref[Any], int]:
        q, k, v = (torch.randn(1, 6 * unit, 1, 4, generator=generator).requires_grad_() for _ in range(3))
        attention = PatternedAttention(pattern, layout, 0, None, RingOptions(kernel=kernel), plans=plans)
        chosen = attention.layer(0)(q, k, v)
        schedule = schedule_of(attention)
        attention.layer(1)(chosen, k, v).sum().backward()
        return weakref.ref(schedule), hash(schedule.pattern.heads)

    with one_thread():
        call()
        before = any_partly.cache_info()
        kept = (len(plans), plans.num_bytes, len(plans.routes), _KEPT_PAIRS.num_kept)
        calls = [call() for _ in range(num_calls)]
        gc.collect()
    after = any_partly.cache_info()
    assert len({choice for _, choice in calls}) > num_calls // 20, "the choices were all the same: no test of this"
    assert (after.currsize, after.misses) == (before.currsize, before.misses)
    assert planned == [1, num_calls + 1]
    assert not any(schedule() is not None for schedule, _ in calls)
    assert (len(plans), plans.num_bytes, len(plans.routes), _KEPT_PAIRS.num_kept) == kept


# ------------------------------------------------------------ a peer is lost, or the group is aborted


class DiesAfter:
    """A group whose rank is gone, sockets and all, when it would send once more."""

    def __init__(self, groups: list[Any], cp_rank: int, num_sends: int) -> None:
        self._groups, self._cp_rank, self._left = groups, cp_rank, num_sends

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self._left == 0:
            self._groups[self._cp_rank] = None
            raise SystemExit("killed")
        self._left -= 1
        return self._groups[self._cp_rank].send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._groups[self._cp_rank].recv(tensors, src, tag)

    def rank(self) -> int:
        return self._cp_rank

    def size(self) -> int:
        return len(self._groups)


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize("num_sends", [0, 1, 2])
@pytest.mark.parametrize("kernel", [None, "reference-sparse"], ids=["tiles", "blocks"])
def test_a_peer_that_is_lost_while_choosing_raises_on_the_others(rings, kernel, num_sends):
    """Before it told anybody its sums, before it told its choices, and before it told them to the second peer."""
    case = make_case("contiguous", 3, 128 * 9, text="topk:2", block=128, dtype=torch.float32)
    groups = rings.groups(3, fresh=True)

    def work(cp_rank: int) -> str:
        q, k, v, _ = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        group = DiesAfter(groups, 1, num_sends) if cp_rank == 1 else groups[cp_rank]
        attention: Any = PatternedAttention(case.pattern, case.layout, cp_rank, group, RingOptions(kernel=kernel))
        if cp_rank == 1:
            with pytest.raises(SystemExit):
                attention(q, k, v)
            del attention
            gc.collect()
            return "lost"
        with pytest.raises(RuntimeError) as caught:
            attention(q, k, v)
        kept = attention.options.abandoned
        # Where the peer is gone before anything could be posted to it, nothing is under way.
        assert kept or caught.traceback[-1].name != "_wait", "what the group may still write to is kept"
        groups[cp_rank] = None
        return "survived"

    assert in_threads(3, work) == ["survived", "lost", "survived"]


def test_choices_read_after_an_abort_are_never_planned_with():
    """On a GPU an aborted exchange ends without a word and leaves nonsense: whoever asks is told before it is used."""
    asked = []

    def check() -> None:
        asked.append(True)
        raise GroupAborted("generation 1/0 was aborted")

    x = torch.randn(1, 24, 1, 4)
    attention = PatternedAttention(parse_pattern("topk:2,unit=4"), contiguous(24, 1), 0, None, RingOptions(check=check))
    with pytest.raises(GroupAborted):
        attention(x, x, x)
    assert asked == [True]


# ------------------------------------------------------------ as on GPUs


class NoReads(TorchDispatchMode):
    """Refuses what would have a host wait for a device to look at a value."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(f"aten.{name}." in str(func) for name in self.READS), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", ["topk:3", "topk:2,causal=0+bigbird:1,1,0"])
def test_messages_go_out_as_two_operations_and_the_host_reads_once(rings, text, monkeypatch):
    """Over groups that move nothing before an operation's end, as NCCL does; equal to what gloo's groups give."""
    case = make_case("zigzag", 4, 128 * 16, text=text, block=128, dtype=torch.bfloat16)
    reads: list[int] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (reads.append(x.numel()), real(x))[1])
    links = ProcessGroups(4)
    groups = links.groups()
    rules = case.heads

    def route(cp_rank: int, groups: Any, coalesced: bool) -> Any:
        q, k, *_ = (case.layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        ledger = HopLedger()
        options = RingOptions(ledger=ledger, coalesced=coalesced)
        router = Router(case.layout, cp_rank, groups[cp_rank], case.documents, options)
        with NoReads():
            return router(rules, q, k, 0), routed(ledger.sent_bytes)

    def as_on_a_gpu(cp_rank: int) -> Any:
        with links.baton:
            return route(cp_rank, groups, True)

    found = in_threads(4, as_on_a_gpu)
    assert [group.num_operations for group in groups] == [2] * 4
    assert len(reads) == 4
    over_gloo = rings.groups(4)
    assert in_threads(4, lambda cp_rank: route(cp_rank, over_gloo, False)) == found


@pytest.mark.slow
def test_a_ring_whose_messages_are_operations_agrees_with_one_of_gloo(rings):
    case = make_case("zigzag", 2, 128 * 12, text="topk:3+bigbird:1,1,0", block=128)
    want, used = run_content(case, rings.groups(2), kernel="reference-sparse")
    links = ProcessGroups(2)
    groups = links.groups()
    links.groups = lambda: groups  # type: ignore[method-assign]
    found, by_operations = run_content_on("cpu", case, links, kernel="reference-sparse")
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert [ring.schedule for ring in by_operations] == [schedule_of(each) for each in used]
    assert [group.num_operations for group in groups] == [5] * 2  # sums, choices, keys twice, partials once


def test_ranking_in_strips_changes_nothing(rings, monkeypatch):
    case = make_case("zigzag", 2, text="topk:3,unit=4")
    whole = [schedule_of(each) for each in run_content(case, rings.groups(2))[1]]
    monkeypatch.setattr(router, "_STRIP_ELEMENTS", 200)
    strips = [schedule_of(each) for each in run_content(case, rings.groups(2))[1]]
    assert whole == strips


def test_the_observer_hears_that_choosing_begins(rings):
    heard: list[Any] = []
    case = make_case("contiguous", 1)
    run_content(case, [None], observer=lambda *what: heard.append(what))
    assert heard == [("forward", 0, 0), ("forward", 0, 0), ("backward", 0, 0)]
    assert TopK(3, True, 4) in case.heads
