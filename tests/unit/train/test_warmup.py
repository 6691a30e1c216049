"""A warm-up on one rank runs every kernel shape that a real ring asks for, so that nothing is compiled in a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from elastic_ring.attention.kernels import verify
from elastic_ring.attention.kernels.adapters import flex
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import KERNELS, named
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.lowering.device_blocks import on_device
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Dense, Window
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.padded_blocks import padded
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.warmup import NullProcessGroup, warm_up_lengths
from elastic_ring.config import StepConfig
from elastic_ring.data.loader import slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.startup import warm
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.startup.warm import kinds_of_layers
from elastic_ring.train.task import TrainingTask, attention_of
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.sparse.block_cases import FAMILIES
from tests.unit.sparse.test_flex_masks import compiled_shape

HEADS = (4, 2, 8)
FLEX_HEADS = (6, 2, 16)


def flex_task() -> TrainingTask:
    """Of a run on sinks and a window, which documents cut anywhere."""
    config = ModelConfig(64, 1, 96, *FLEX_HEADS, 96)
    step = StepConfig(steps=1, global_batch=1, context_tokens=4096, param_dtype="bfloat16")
    pattern = parse_pattern("sinks:64+window:512")
    return TrainingTask(partial(Transformer, config), StdlibText(4096), step, OptimConfig(), pattern=pattern)


@pytest.fixture(scope="module")
def rings() -> ThreadRings:
    return ThreadRings()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counting(seen: set[Any]) -> Kernel:
    """The CPU's kernel, which notes what FlexAttention would be compiled for."""
    kernel = named("aten-cpu")

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.add(("forward", q.shape, k.shape, options["causal"]))
        return kernel.forward(q, k, v, **options)

    def backward(dout: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **options: Any) -> Any:
        seen.add(("backward", q.shape, k.shape, options["causal"]))
        return kernel.backward(dout, q, k, *rest, **options)

    return replace(kernel, forward=forward, backward=backward)


def train(attention: Any, layout: Layout, cp_rank: int) -> None:
    shapes = [(1, layout.num_tokens(cp_rank), num, HEADS[2]) for num in (HEADS[0], HEADS[1], HEADS[1])]
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(cp_rank)) for shape in shapes)
    for x in (q, k, v):
        x.requires_grad_()
    attention(q, k, v).sum().backward()


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("cp", "hops_per_stage"), [(1, None), (2, None), (4, 1), (4, 2), (4, 3)])
def test_a_dense_ring_meets_only_warmed_up_lengths(
    rings: ThreadRings, name: str, cp: int, hops_per_stage: int | None
) -> None:
    layout = make_layout(name, 8 * 9 + 3, cp)
    warmed: set[Any] = set()
    met: set[Any] = set()

    def made(seen: set[Any]) -> Any:
        return lambda cp_rank, group: RingAttention(
            plan(Pattern(), layout), cp_rank, group, RingOptions(backend=counting(seen), hops_per_stage=hops_per_stage)
        )

    num_ran = warm_up_lengths(
        lambda cp_rank, group: [made(warmed)(cp_rank, group)], layout, HEADS, torch.float32, torch.device("cpu")
    )
    assert 1 <= num_ran <= cp
    groups = rings.groups(cp) if cp > 1 else [None]
    in_threads(cp, lambda cp_rank: train(made(met)(cp_rank, groups[cp_rank]), layout, cp_rank))
    assert met == warmed


def test_ranks_that_bring_nothing_new_are_left_out() -> None:
    layout = make_layout("zigzag", 16 * 8, 8)
    seen: set[Any] = set()

    def attentions(cp_rank: int, group: Any) -> list[Any]:
        return [RingAttention(plan(Pattern(), layout), cp_rank, group, RingOptions(backend=counting(seen)))]

    num_ran = warm_up_lengths(attentions, layout, HEADS, torch.float32, torch.device("cpu"))
    assert num_ran < 8
    assert len({each for each in seen if each[0] == "forward"}) == 3  # own, all queries on half, half on all


@pytest.mark.thinned(num=3)
@pytest.mark.parametrize(
    "family", ["bigbird", "window", "local and dense heads", "strided", "longnet with rows that see nothing"]
)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_sparse_ring_meets_only_warmed_up_block_numbers(rings: ThreadRings, family: str, cp: int) -> None:
    layout = make_layout("zigzag", 128 * 4 * cp, cp)
    pattern = SparsePattern(FAMILIES[family], 128)
    warmed: set[Any] = set()
    met: set[Any] = set()

    def made(seen: set[Any], cp_rank: int, group: Any) -> RingAttention:
        """The reference kernel, noting what FlexAttention would be compiled for."""

        def note(q: Tensor, k: Tensor, tables: Any) -> None:
            seen.add(compiled_shape(tables, q.size(2), k.size(2)))

        def forward(q: Tensor, k: Tensor, v: Tensor, tables: Any, scale: float) -> Any:
            note(q, k, tables)
            return named("reference-sparse").forward(q, k, v, tables, scale)

        def backward(dout: Tensor, q: Tensor, k: Tensor, *rest: Any, **places: Any) -> Any:
            note(q, k, places["tables"])
            return named("reference-sparse").backward(dout, q, k, *rest, **places)

        kernel = replace(named("reference-sparse"), forward=forward, backward=backward)
        return RingAttention(
            plan_sparse(pattern, layout, HEADS[0], HEADS[1]), cp_rank, group, RingOptions(kernel=kernel)
        )

    num_ran = warm_up_lengths(
        lambda cp_rank, group: [made(warmed, cp_rank, group)], layout, HEADS, torch.float32, torch.device("cpu")
    )
    assert num_ran == cp
    groups = rings.groups(cp)
    in_threads(cp, lambda cp_rank: train(made(met, cp_rank, groups[cp_rank]), layout, cp_rank))
    assert met == warmed


def test_a_start_with_packed_documents_compiles_flex_attention_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 times that forward and backward, own and fetched keys, each rank and each packing took apart."""
    seen: set[Any] = set()

    def compiled(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float, *, or_fail: bool) -> Any:
        """Notes what torch.compile guards."""
        lists = (getattr(mask, name) for name in flex._LISTS)
        closure = inspect.getclosurevars(mask.mask_mod).nonlocals.values()
        tensors = (q, k, v, *lists, *(x for x in closure if isinstance(x, Tensor)))
        seen.add((torch.is_grad_enabled(), *((x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors)))
        out = 0.0 * (q + k.sum() + v.sum())
        return out, out.sum(-1).float()

    monkeypatch.setattr(flex, "masked", compiled)
    kernel = replace(named("flex-sparse"), devices=("cpu",))
    monkeypatch.setattr(verify, "disagreement", lambda *_: None)
    assert verify.warm_up_kernels(kernel, "cpu", torch.bfloat16, 16, 3) is None
    assert len(seen) == 4
    monkeypatch.setattr(warm, "RingOptions", partial(RingOptions, kernel=kernel))
    task, (num_heads, num_kv_heads, head_dim) = flex_task(), FLEX_HEADS
    warm.warm_up_attention(task, torch.device("cpu"), FLEX_HEADS, 2)
    layout = Layouts(task).of_pass(2, "cpu", 1)
    for starts in ((0, 1700, 2049, 3100), (0, *range(97, 4096, 97))):
        sample = Sample(np.zeros(task.step.context_tokens + 1, dtype=np.int64), starts)
        for cp_rank in range(2):
            piece = slice_sample(sample, layout, cp_rank, sample_id=0, index_in_batch=0)
            group: Any = NullProcessGroup(cp_rank, 2)
            attention = attention_of(task, piece, layout, cp_rank, group, RingOptions(kernel=kernel))
            shapes = [(1, layout.num_tokens(cp_rank), num, head_dim) for num in (num_heads, num_kv_heads, num_kv_heads)]
            q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
            attention(q, k, v).sum().backward()
    assert len(seen) == 5


@pytest.mark.filterwarnings("default")  # torch looks for a gradient of what is no leaf
def test_torch_compiles_flex_attention_once_for_both_passes_and_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own count; what it runs here is no kernel, so that results say nothing."""
    counter = CompileCounter()
    traced = torch.compile(flex._by_token(), backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda fullgraph: traced)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # refuses gradients on a CPU
    monkeypatch.setattr(flex, "LEAST", 8)
    for starts in ((0,), (0, 77), (0, 100, 300)):
        schedule = padded(plan_sparse(SparsePattern((Window(200),), 128, starts), make_layout("zigzag", 450, 2), 2, 1))
        for cp_rank in range(2):
            blocks = on_device(schedule, cp_rank, torch.device("cpu"))
            for tables in (blocks.own, *(call.tables for stage in blocks.stages for call in stage.calls)):
                q, dout = torch.randn(2, 1, 128 * tables.num_q_blocks, 2, 16)
                k, v = torch.randn(2, 1, 128 * tables.num_k_blocks, 1, 16)
                out, lse = flex.sparse_forward(q, k, v, tables, 0.25)
                flex.sparse_backward(dout, q, k, v, out, lse, tables=tables, scale=0.25)
    assert counter.frame_count == 1


def test_the_kernels_that_are_compiled_by_length_say_so() -> None:
    assert [kernel.name for kernel in KERNELS if kernel.by_length] == ["flex", "flex-sparse"]


def test_one_layer_of_each_kind_is_warmed_up() -> None:
    assert kinds_of_layers(None) == (0,)
    assert kinds_of_layers(parse_pattern("sinks:64+window:512")) == (0,)
    dense, near = LayerGroup((Dense(),), (0, 3)), LayerGroup((FAMILIES["window"][0],))
    assert kinds_of_layers(LayerPatterns((dense, near))) == (0, 1)
