"""On a GPU the exchange of a ring and its kernels run on streams of their own: whatever these do first, nothing is read
before it is there or overwritten while it is needed. Shown on a model of streams, with the product's own passes,
exchanges, plans and buffers; the model is checked by leaving out one wait at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from elastic_ring.attention import ring as ring_module
from elastic_ring.attention.comm.exchange import HopBuffers, HopExchange
from elastic_ring.attention.comm.messages import HopMessages
from elastic_ring.attention.kernels.kernel import DENSE, Kernel
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.lowering import blocks, rectangles
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import Case
from tests.unit.attention.stream_model import BESIDE, KERNELS, Graph, ModelledGroup, Streams
from tests.unit.sparse.block_cases import BlockCase, block_case, grouped_case


class ModelledExchange(HopExchange):
    """The product's, whose stream beside the kernels' is the model's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.streams: Streams = self._buffers.streams  # type: ignore[attr-defined]
        self._messages.streams = self.streams  # type: ignore[attr-defined]

    def _wait_for_kernels(self) -> None:
        self.streams.run("waits for kernels", stream=BESIDE, after=[self.streams.last[KERNELS]])

    @contextmanager
    def _beside(self, *, after_kernels: bool = False) -> Iterator[None]:
        if after_kernels:
            self._wait_for_kernels()
        with self.streams.on(BESIDE):
            yield


class ModelledBuffers(HopBuffers):
    """A storage that is outgrown is free for any kernel at once, as the allocator gives it out again."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def get(self, name: str, slot: int, *about: Any) -> torch.Tensor:
        before = dict(self._storages)
        found = super().get(name, slot, *about)
        for key, storage in before.items():
            if self._storages[key] is not storage:
                self.streams.run("another's use of a storage that was outgrown", writes=[storage])
        return found


class Host:
    """Launches what a pass launches, of the rank whose turn it is."""

    def __init__(self) -> None:
        self.streams: Streams | None = None
        self.kernel = replace(
            named("reference-sparse"), forward=self.forward, backward=self.backward, writes_gradients=True
        )
        self.dense_kernel = Kernel(
            "modelled",
            DENSE,
            ("cpu",),
            (torch.float64,),
            None,
            True,
            self.forward,
            self.backward,
            keeps_type=True,
            writes_gradients=True,
        )

    def run(self, *args: Any, **options: Any) -> None:
        assert self.streams is not None
        self.streams.run(*args, **options)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.run("forward", reads=[k, v])
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(self, dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **more: Any) -> Any:
        places = {name: more[name] for name in ("dk", "dv") if name in more}
        self.run("backward", reads=[k, v], writes=list(places.values()))
        return torch.zeros_like(q), places.get("dk", torch.zeros_like(k)), places.get("dv", torch.zeros_like(v))

    def gather_rows_(self, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        self.run("gathers", reads=[k, v], writes=[packed])

    def add_(self, total: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.run("adds what came", reads=parts)

    def add_placed_(self, total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
        self.run("adds what came", reads=[inbox])


@dataclass(frozen=True)
class Call:
    case: BlockCase
    stage_bytes: int
    keep_keys: bool | None = None
    hosts: tuple[str, ...] | None = None


Transition = tuple[Streams, ModelledGroup, ModelledBuffers]


def each_rank(cp: int, host: Host, graph: Graph) -> Iterator[Transition]:
    for rank in range(cp):
        host.streams = streams = Streams(graph, rank)
        yield streams, ModelledGroup(streams, cp), ModelledBuffers(streams)


@contextmanager
def slices(case: Any, streams: Streams) -> Iterator[list[torch.Tensor]]:
    """q, k, v and dout of a rank; once it is done with them, their memory is another's."""
    q, k, v, dout = (case.layout.scatter(x, streams.rank, 1).contiguous() for x in case.tensors())
    streams.run("makes k and v", writes=[k, v])
    yield [q, k, v, dout]
    streams.run("another's use of k and v", writes=[k, v])


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be forwarded before they have arrived: NCCL's own stream keeps the order."""
    between_hosts = RingAttention._between_hosts
    monkeypatch.setattr(RingAttention, "_between_hosts", lambda self, plan, on_gpu: between_hosts(self, plan, True))


def both_passes(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> tuple[Graph, list[list[str]]]:
    """Forward and backward of each call on every rank, all calls over the same buffers; and what each rank posted."""
    host, graph = Host(), Graph()
    monkeypatch.setattr(ring_module, "HopExchange", ModelledExchange)
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(blocks, "add_placed_", host.add_placed_)
    monkeypatch.setattr(blocks, "gather_rows_", host.gather_rows_)
    posted = []
    for streams, group, buffers in each_rank(calls[0].case.layout.cp, host, graph):
        for call in calls:
            ring = RingAttention(
                call.case.schedule,
                streams.rank,
                group,
                RingOptions(
                    kernel=host.kernel,
                    coalesced=True,
                    buffers=buffers,
                    stage_bytes=call.stage_bytes,
                    keep_keys=call.keep_keys,
                    hosts=call.hosts,
                ),
            )
            with slices(call.case, streams) as (q, k, v, dout):
                out, lse, index, keys = ring.run_forward(q, k, v, 1.0)
                ring.run_backward(dout, (q, k, v, out, lse), 1.0, index, keys)
            streams.run("another's use of kept keys", writes=[] if keys is None else [keys])
        posted.append(group.labels)
    return graph, posted


TWO_HOSTS = ("a",) * 4 + ("b",) * 4
EVERY_HOP = 1  # bytes: a stage holds no more than a hop
CASES = {
    "one stage": [Call(block_case("bigbird", 4, "zigzag"), 2**40)],
    "a stage a hop": [Call(block_case("bigbird", 4, "zigzag"), EVERY_HOP)],
    "ranks that fetch nothing": [Call(block_case("bigbird", 4, "contiguous"), EVERY_HOP)],
    "a longer ring": [Call(block_case("bigbird", 8, "contiguous"), EVERY_HOP)],
    "groups of heads": [Call(block_case("heads in turn", 4, "contiguous", num_kv_heads=4), EVERY_HOP)],
    "groups of several sizes": [Call(grouped_case("groups of 1, 2, 1 and 2", 4, "zigzag"), EVERY_HOP)],
    "kept keys": [Call(block_case("window", 4, "zigzag"), 2**40, keep_keys=True)],
    "two hosts": [Call(block_case("bigbird", 8, "zigzag"), EVERY_HOP, hosts=TWO_HOSTS)] * 2,
    "calls one after another": [
        Call(block_case("window", 4, "contiguous"), 2**40),
        Call(block_case("bigbird", 4, "contiguous"), EVERY_HOP),
        Call(block_case("longnet with rows that see nothing", 4, "contiguous"), EVERY_HOP),
        Call(block_case("window", 4, "contiguous"), 2**40, keep_keys=True),
        Call(grouped_case("longnet and a window, 8 heads", 4, "zigzag"), 2**40, keep_keys=True),
        Call(block_case("heads in turn", 4, "contiguous", batch=2), EVERY_HOP),  # outgrows the buffers
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_no_stream_is_ahead_of_another_and_none_waits_for_itself(name, monkeypatch):
    graph, posted = both_passes(CASES[name], monkeypatch)
    assert graph.races() == set()
    assert graph.never_begins() == []
    assert graph.unmatched() == []
    assert all(posted)


def without_waiting_for_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = HopMessages.wait_sent

    def sloppy(self: Any, kind: int, index: int) -> None:
        if self.streams.current != BESIDE:
            wait(self, kind, index)

    monkeypatch.setattr(HopMessages, "wait_sent", sloppy)


def without_waiting_for_kernels(monkeypatch: pytest.MonkeyPatch, where: Callable[[Any], bool]) -> None:
    wait = ModelledExchange._wait_for_kernels

    def sloppy(self: Any) -> None:
        if not where(self):
            wait(self)

    monkeypatch.setattr(ModelledExchange, "_wait_for_kernels", sloppy)


def with_all_partials_early(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = HopExchange.swap_partials

    def sloppy(self: Any, index: int, partials: torch.Tensor) -> None:
        with self._beside():
            swap(self, index, partials)

    monkeypatch.setattr(HopExchange, "swap_partials", sloppy)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what is sent is not waited for": without_waiting_for_what_is_sent,
    "the pass does not wait for what came before": lambda patch: without_waiting_for_kernels(
        patch, lambda exchange: not exchange._messages.posted
    ),
    "keys are received while kernels read them": lambda patch: without_waiting_for_kernels(
        patch, lambda exchange: bool(exchange._messages.posted)
    ),
    "partials leave before they are made": with_all_partials_early,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_the_model_sees_a_wait_that_is_missing(name, monkeypatch):
    MISTAKES[name](monkeypatch)
    graph, _ = both_passes(CASES["calls one after another"], monkeypatch)
    assert graph.races() != set()


def test_the_model_sees_two_ranks_that_wait_for_each_other(monkeypatch):
    """One that posts partials before keys, and one that posts them after."""
    graph = Graph()
    groups = [ModelledGroup(Streams(graph, rank), 2) for rank in range(2)]
    for group, tags in zip(groups, ((0, 1), (1, 0)), strict=True):
        for tag in tags:
            group._start_coalescing()
            sends = (group.rank() == 0) == (tag == 0)
            (group.send if sends else group.recv)([torch.zeros(1)], 1 - group.rank(), tag)
            group._end_coalescing()
    assert graph.never_begins() != []


@pytest.mark.parametrize("name", ["one stage", "a stage a hop", "kept keys"])
def test_no_stream_waits_twice_for_an_operation(name, monkeypatch):
    """Each wait takes the host as long as a kernel's launch."""
    graph, _ = both_passes(CASES[name], monkeypatch)
    assert most_waits(graph) == 1


def most_waits(graph: Graph) -> int:
    """For one operation by one stream, of all the most."""
    waits = [(label, before[1]) for label, before in zip(graph.labels, graph.before, strict=True) if "waits" in label]
    arrivals = [each for each in waits if graph.labels[each[1]].endswith("are there")]
    return max(arrivals.count(each) for each in arrivals)


# ------------------------------------------------------------ dense rings


@dataclass(frozen=True)
class DenseCall:
    case: Case
    hops_per_stage: int | None = None
    hosts: tuple[str, ...] | None = None


def dense_passes(calls: list[DenseCall], monkeypatch: pytest.MonkeyPatch) -> Graph:
    host, graph = Host(), Graph()
    monkeypatch.setattr(rectangles, "add_", host.add_)
    for streams, group, buffers in each_rank(calls[0].case.cp, host, graph):
        for call in calls:
            ring = RingAttention(
                call.case.schedule,
                streams.rank,
                group,
                RingOptions(
                    backend=host.dense_kernel,
                    coalesced=True,
                    buffers=buffers,
                    hops_per_stage=call.hops_per_stage,
                    hosts=call.hosts,
                ),
            )
            with slices(call.case, streams) as (q, k, v, dout):
                out, lse, index, _ = ring.run_forward(q, k, v, 1.0)
                ring.run_backward(dout, (q, k, v, out, lse), 1.0, index)
    return graph


DENSE_CASES = {
    "a stage a hop": [DenseCall(Case(5, 100), 1)],
    "one stage": [DenseCall(Case(4, 64), 3)],
    "two hops a stage": [DenseCall(Case(6, 96), 2)],
    "ranks that fetch nothing": [DenseCall(Case(5, 100, layout_name="contiguous"), 1)],
    "two hosts": [DenseCall(Case(8, 128), 1, TWO_HOSTS), DenseCall(Case(8, 128, causal=False), 1, TWO_HOSTS)],
    "documents": [DenseCall(Case(4, 64, layout_name="contiguous", document_starts=(0, 20, 40)), 1)],
    "calls one after another": [
        DenseCall(Case(4, 64, batch=1), 3),
        DenseCall(Case(4, 64), 1),
        DenseCall(Case(4, 128, causal=False), 1),
        DenseCall(Case(4, 64, layout_name="contiguous"), 1),
    ],
}


@pytest.mark.parametrize("name", DENSE_CASES)
def test_nor_in_a_dense_ring(name, monkeypatch):
    graph = dense_passes(DENSE_CASES[name], monkeypatch)
    assert graph.races() == set()
    assert graph.never_begins() == []
    assert graph.unmatched() == []
    assert graph.messages
    assert most_waits(graph) == 1


def test_the_model_sees_a_dense_ring_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(HopMessages, "_wait", lambda self, message: None)
    assert dense_passes(DENSE_CASES["a stage a hop"], monkeypatch).races() != set()


def test_a_stages_kernels_do_not_wait_for_the_partials_of_the_one_before(monkeypatch):
    """They leave behind these kernels, which have a whole stage to hide them."""
    graph = dense_passes([DenseCall(Case(5, 100, causal=False), 1)], monkeypatch)
    mine = [(index, label) for index, label in enumerate(graph.labels) if label.startswith("rank 0, ")]
    arrive = [index for index, label in mine if label.endswith("partials are there")]
    run = [index for index, label in mine if label.endswith("backward")]
    reach = [set[int]()] * len(graph.labels)
    for index, before in enumerate(graph.before):
        reach[index] = set(before).union(*(reach[earlier] for earlier in before))
    # The own keys' kernel, and then one for each of four stages, each of which returns partials.
    assert (len(run), len(arrive)) == (5, 4)
    for stage in range(2, 5):
        waits_for = [number for number, index in enumerate(arrive, start=1) if index in reach[run[stage]]]
        assert waits_for == list(range(1, stage - 1)), stage
