"""What a graphed ring refuses, and when its gradients would be of another call: nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ring.attention.comm.exchange import HopBuffers, HopLedger
from elastic_ring.attention.kernels.registry import KERNELS, named
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.content import Chosen
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.recomputation import Result
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import PeerFailed
from experiments.cuda_graphs import FORGETFUL, NUM_WARM_UPS, GraphedRing, _capture, _Passes, capturing, make_graphed
from experiments.peer_exchange import PeerRing
from experiments.peer_memory import PeerMemory


def _ring(**options: Any) -> RingAttention:
    return RingAttention(plan(Pattern(), make_layout("contiguous", 64, 1)), 0, None, RingOptions(**options))


def _sparse_ring(**options: Any) -> RingAttention:
    schedule = plan_sparse(SparsePattern((BigBird(1, 0, 0, 0, 16),)), make_layout("contiguous", 64, 1), 2, 2)
    return RingAttention(schedule, 0, None, RingOptions(**options))


def _tensors() -> list[torch.Tensor]:
    return [torch.randn(1, 64, 2, 16) for _ in range(3)]


def test_tensors_on_a_cpu_are_refused_by_their_device() -> None:
    with pytest.raises(ValueError, match="device cpu: CUDA graphs are of GPUs"):
        make_graphed(_ring(), *_tensors())


@pytest.mark.parametrize("make", [_ring, _sparse_ring])
def test_a_ring_that_is_watched_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="leave observer out"):
        make_graphed(make(observer=lambda *_: None), *_tensors())
    with pytest.raises(ValueError, match="keep_events=True"):
        make_graphed(make(ledger=HopLedger(keep_events=True)), *_tensors())


def test_a_ring_by_copy_engines_is_refused() -> None:
    ring = PeerRing(_ring().schedule, 0, None, RingOptions(), PeerMemory(0, 1, torch.device("cuda", 0)))
    with pytest.raises(ValueError, match="leave memory out"):
        make_graphed(ring, *_tensors())


def test_a_kernel_that_forgets_tensors_of_its_own_is_refused() -> None:
    assert {kernel.name for kernel in KERNELS} >= FORGETFUL
    forgetful = replace(named("aten-cpu"), name="flex")
    with pytest.raises(ValueError, match="kernel flex keeps tensors of its own"):
        make_graphed(_ring(backend=forgetful), *_tensors())


def test_blocks_that_content_chose_for_one_call_are_refused() -> None:
    pattern = SparsePattern((Chosen(4, np.array([[-1], [0], [0], [1]], dtype=np.int32).tobytes(), 16),))
    schedule = plan_sparse(pattern, make_layout("contiguous", 64, 1), 2, 2)
    with pytest.raises(ValueError, match="content chose for one call"):
        make_graphed(RingAttention(schedule, 0, None), *_tensors())


@pytest.mark.parametrize("make", [_ring, _sparse_ring])
def test_what_a_call_refuses_a_capture_refuses(make: Any) -> None:
    q, k, v = _tensors()
    with pytest.raises(ValueError, match="S_local=32"):
        make_graphed(make(), q[:, :32], k[:, :32], v[:, :32])
    if make is _sparse_ring:
        with pytest.raises(ValueError, match="the schedule is for 2 and"):
            make_graphed(make(), q, k[:, :, :1], v[:, :, :1])


def test_what_is_held_is_what_the_buffers_are_just_now() -> None:
    buffers = HopBuffers()
    rings = [_ring(buffers=buffers), _sparse_ring(buffers=buffers)]
    for size in (4, 8):
        made = buffers.get("keys", 0, (2, size), torch.float32, torch.device("cpu"))
        assert all([x.data_ptr() for x in ring.options.buffers.shared_buffers()] == [made.data_ptr()] for ring in rings)


def test_a_group_that_works_on_the_host_is_refused() -> None:
    class Gloo:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    schedule = plan(Pattern(), make_layout("contiguous", 64, 1))
    with pytest.raises(ValueError, match="works through Gloo; a CUDA graph holds NCCL"):
        make_graphed(RingAttention(schedule, 0, cast(Any, Gloo())), *_tensors())
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"works through .*Gloo"):
            make_graphed(RingAttention(schedule, 0, dist.group.WORLD), *_tensors())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("broken", [True, False])
def test_what_went_wrong_in_a_capture_is_what_is_raised(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(_: Any, **options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            if broken:
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(KeyError, match="the first") as found, capturing(None):
        raise KeyError("the first")
    assert found.value.__cause__ is None
    if broken:
        with pytest.raises(RuntimeError, match="previous error"), capturing(None):
            pass


@dataclass
class _Graph:
    num_resets: int = 0

    def pool(self) -> int:
        return 0

    def reset(self) -> None:
        self.num_resets += 1


@pytest.mark.parametrize("fails_at", [1, NUM_WARM_UPS + 1], ids=["a warm-up", "the capture of backward"])
def test_a_capture_that_fails_tells_why_and_leaves_no_graph_of_forward(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's part is left out: what is shown is what Python does round it."""
    graphs: list[_Graph] = []

    @contextmanager
    def nothing(*_: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(_Graph()) or graphs[-1])
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: SimpleNamespace(wait_stream=lambda other: None))
    ring, calls = _ring(), []

    def run_backward(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == fails_at:
            raise PeerFailed("rank 1 is gone")
        return RingAttention.run_backward(ring, *arguments)

    monkeypatch.setattr(ring, "run_backward", run_backward)
    q, k, v = _tensors()
    with pytest.raises(PeerFailed, match="rank 1 is gone"):
        _capture(ring, (q, k, v), 0.25)
    assert len(calls) == fails_at
    assert [graph.num_resets for graph in graphs] == [1, 0]


class _Eager(_Passes):
    """Passes without graphs, into memory of their own, of which torch notices nothing, as of a graph's: what is tested
    is what surrounds them."""

    def __init__(self) -> None:
        q, k, v = _tensors()
        out, dout, *grads = (torch.zeros(1, 64, 2, 16) for _ in range(5))
        super().__init__((q, k, v), out, dout, (grads[0], grads[1], grads[2]))
        self.ring, self.result = _ring(), Result(self.out, self.out, 0)
        self.forward, self.backward = _Replayed(self._run_forward), _Replayed(self._run_backward)

    def _run_forward(self) -> None:
        self.result = self.ring.run_forward(*self.inputs, 0.25)
        self.out.data.copy_(self.result.out)

    def _run_backward(self) -> None:
        saved = (*self.inputs, self.out, self.result.lse)
        for own, found in zip(self.grads, self.ring.run_backward(self.dout, saved, 0.25, 0), strict=True):
            own.data.copy_(found)


@dataclass
class _Replayed:
    run: Callable[[], None]
    num_resets: int = 0
    broken: bool = False

    def replay(self) -> None:
        with torch.no_grad():
            self.run()

    def reset(self) -> None:
        self.num_resets += 1
        if self.broken:
            raise RuntimeError("broken")


def _graphed() -> GraphedRing:
    return GraphedRing(_Eager())


def test_a_call_copies_its_arguments_and_its_gradients_are_those_of_the_ring() -> None:
    graphed, dout = _graphed(), torch.randn(1, 64, 2, 16)
    for _ in range(2):
        leaves = [x.requires_grad_() for x in _tensors()]
        want = _ring()(*leaves)
        found = graphed(*leaves)
        assert torch.equal(found, want)
        grads = torch.autograd.grad(found, leaves, dout)
        assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True))


def test_gradients_of_leaves_and_their_views_accumulate_as_the_rings_do() -> None:
    """Whoever accumulates takes a gradient over as it is, where nobody else has it: it must not be the graph's own."""
    graphed, ring, dout = _graphed(), _ring(), torch.randn(1, 64, 2, 16)
    for attend in (graphed, ring):
        torch.manual_seed(0)
        q, k, v = (x.requires_grad_() for x in _tensors())
        flat = torch.randn(64 * 2 * 16, requires_grad=True)
        for step in range(2):
            attend(q, k, v).backward(dout * (step + 1))
            attend(flat.view(1, 64, 2, 16), k, v).backward(dout)
        found = [q.grad, k.grad, v.grad, flat.grad]
        if attend is graphed:
            of_graphs = found
    for got, want in zip(of_graphs, found, strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_that_are_not_copied_are_still_no_leafs_own() -> None:
    passes, dout = _Eager(), torch.randn(1, 64, 2, 16)
    graphed, leaves = GraphedRing(passes, copy_grads=False), [x.requires_grad_() for x in _tensors()]
    out = graphed(*leaves)
    handed = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert [x.data_ptr() for x in handed] == [x.data_ptr() for x in passes.grads]
    del handed
    out.backward(dout)
    for leaf, own in zip(leaves, passes.grads, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, own)
        assert leaf.grad.data_ptr() != own.data_ptr()


def test_backward_twice_gives_two_results() -> None:
    graphed, leaves = _graphed(), [x.requires_grad_() for x in _tensors()]
    out, dout = graphed(*leaves), torch.randn(1, 64, 2, 16)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, 2 * dout)
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, two)


def test_what_lies_in_the_inputs_already_is_not_copied_in_any_step() -> None:
    graphed = _graphed()
    for _ in range(2):
        q, k, v = (x.requires_grad_() for x in _tensors())
        with torch.no_grad():
            for own, given in zip(graphed.inputs, (q, k, v), strict=True):
                own.copy_(given)
        before = [x._version for x in graphed.inputs]
        own_q, own_k, own_v = (x.requires_grad_() for x in graphed.inputs)
        out = graphed(own_q, own_k, own_v)
        assert [x._version for x in graphed.inputs] == before
        assert torch.equal(out, _ring()(q, k, v))
        out.sum().backward()


def test_arguments_in_each_others_places_are_refused() -> None:
    graphed = _graphed()
    q, k, v = graphed.inputs
    with pytest.raises(ValueError, match="q overlaps the buffer of another argument"):
        graphed(k, q, v)


def test_other_tensors_than_were_captured_are_refused_by_name() -> None:
    graphed, (q, k, v) = _graphed(), _tensors()
    with pytest.raises(ValueError, match=r"k \(1, 32, 2, 16\) .* captured was \(1, 64, 2, 16\)"):
        graphed(q, k[:, :32], v)
    with pytest.raises(ValueError, match=r"v \(1, 64, 2, 16\) torch.bfloat16"):
        graphed(q, k, v.bfloat16())


def test_gradients_are_of_the_newest_call_and_of_no_other() -> None:
    graphed, leaves = _graphed(), [x.requires_grad_() for x in _tensors()]
    out = graphed(*leaves)
    with torch.no_grad():
        graphed(*_tensors())
    with pytest.raises(ValueError, match=r"call 1 has lost its results to 1 later one"):
        out.sum().backward()


def test_a_result_that_another_layer_saved_is_not_replaced_unseen() -> None:
    """No gradient comes back to the ring itself, whose check would not run."""
    graphed, weight = _graphed(), torch.randn(16, 16, requires_grad=True)
    first = graphed(*_tensors()) @ weight
    graphed(*_tensors())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["q", "out"])
def test_what_backward_reads_and_somebody_changed_gives_no_gradients(name: str) -> None:
    graphed, leaves = _graphed(), [x.requires_grad_() for x in _tensors()]
    out = graphed(*leaves)
    with torch.no_grad():
        (out if name == "out" else graphed.inputs[0]).mul_(2)
    with pytest.raises(ValueError, match=f"^{name} of a graphed ring changed before its backward"):
        out.sum().backward()


def test_closing_lets_go_of_both_graphs_whatever_one_says_and_of_each_once() -> None:
    passes = _Eager()
    passes.forward.broken = True
    graphed = GraphedRing(passes)
    with pytest.raises(RuntimeError, match="broken"):
        graphed.close()
    graphed.close()
    assert (passes.forward.num_resets, passes.backward.num_resets) == (1, 1)
    for ask in (lambda: graphed(*_tensors()), lambda: graphed.inputs):
        with pytest.raises(ValueError, match="closed: make another"):
            ask()


@dataclass
class _Event:
    """Of a device: over after so many questions. What is behind it, on which stream, is for a GPU to show."""

    num_questions: int
    num_records: int = 0

    def record(self, _: Any) -> None:
        self.num_records += 1

    def query(self) -> bool:
        self.num_questions -= 1
        return self.num_questions < 0


def test_a_replay_under_way_is_waited_for_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    passes = _Eager()
    passes.over = event = _Event(10**9)
    graphed = GraphedRing(passes)
    graphed(*(x.requires_grad_() for x in _tensors())).sum().backward()
    assert event.num_records == 2  # behind each replay
    with pytest.raises(PeerFailed, match="a rank did not replay with this one"):
        graphed.close(timeout_s=0.01)
    assert passes.forward.num_resets == 0
    event.num_questions = 3
    graphed.close()
    assert (passes.forward.num_resets, passes.backward.num_resets) == (1, 1)


def test_an_error_that_ends_a_with_is_told_with_what_was_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = _Eager()
    passes.forward.broken = True

    def block() -> None:
        with GraphedRing(passes):
            raise KeyError("the first")

    with pytest.raises(KeyError, match="the first") as found:
        block()
    assert found.value.__notes__ == ["a graphed ring was not closed: broken"]


def test_with_closes() -> None:
    passes = _Eager()
    with GraphedRing(passes) as graphed:
        graphed(*_tensors())
    assert (passes.forward.num_resets, passes.backward.num_resets) == (1, 1)
