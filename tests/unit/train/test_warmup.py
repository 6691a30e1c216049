"""A warm-up on one rank runs every kernel shape that a real ring asks for, so that nothing is compiled in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import KERNELS, named
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.warmup import warm_up_lengths
from elastic_ring.train.startup.warm import kinds_of_layers
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.sparse.block_cases import FAMILIES
from tests.unit.sparse.compiled_shapes import compiled_shape

HEADS = (4, 2, 8)


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
            note(q, k, rest[3])
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


def test_the_kernels_that_are_compiled_by_length_say_so() -> None:
    assert [kernel.name for kernel in KERNELS if kernel.by_length] == ["flex", "flex-sparse"]


def test_one_layer_of_each_kind_is_warmed_up() -> None:
    assert kinds_of_layers(None) == (0,)
    assert kinds_of_layers(parse_pattern("sinks:64+window:512")) == (0,)
    dense, near = LayerGroup((Dense(),), (0, 3)), LayerGroup((FAMILIES["window"][0],))
    assert kinds_of_layers(LayerPatterns((dense, near))) == (0, 1)
