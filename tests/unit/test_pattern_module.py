"""The module gives on a ring what it gives alone; the factory picks by density and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elastic_ring.attention.choice import Sizes
from elastic_ring.attention.module import RingSelfAttention, Setup, set_up
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.rules import Sinks, Window
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention
from tests.unit.attention_rings import ThreadRings, in_threads, one_thread, relative_error

SIZES = Sizes(4, 2, 8, 8)


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


def train(rings: ThreadRings, setup: Setup, cp: int) -> list[torch.Tensor]:
    """out over the whole sequence, and the weights' gradients summed over the ranks."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 1300, 32, generator=generator, dtype=torch.float64)
    layout = setup.choice.schedule.layout

    def work(cp_rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        module = RingSelfAttention(32, 4, 2, dtype=torch.float64)
        with torch.no_grad():
            for index, weight in enumerate(module.parameters()):
                seeded = torch.Generator().manual_seed(index)
                weight.copy_(torch.randn(weight.shape, generator=seeded, dtype=torch.float64) * 0.2)
        group = rings.groups(cp)[cp_rank] if cp > 1 else None
        positions = layout.positions(cp_rank)[None, :, None, None].double()
        out = module(layout.scatter(x, cp_rank, 1), setup.attention(cp_rank, group), lambda h: h * positions.cos())
        out.square().sum().backward()
        return out.detach(), [weight.grad for weight in module.parameters() if weight.grad is not None]

    rings.groups(cp)
    results = in_threads(cp, work)
    grads = [torch.stack(parts).sum(0) for parts in zip(*(grads for _, grads in results), strict=True)]
    return [layout.gather([out for out, _ in results], 1), *grads]


@pytest.mark.parametrize("max_density", [1.0, 0.6])
def test_the_module_and_its_weights_gradients_do_not_depend_on_the_ring(rings: ThreadRings, max_density: float) -> None:
    alone = train(rings, set_up(1300, 1, SIZES, max_density=max_density), 1)
    for cp in (2, 3):
        for got, want in zip(train(rings, set_up(1300, cp, SIZES, max_density=max_density), cp), alone, strict=True):
            assert relative_error(got, want) <= 1e-12


def test_the_factory_is_dense_unless_less_is_asked_for() -> None:
    dense, sparse = set_up(65536, 8, Sizes(8, 2)), set_up(65536, 8, Sizes(8, 2), max_density=0.1)
    assert (dense.kernel, sparse.kernel) == ("dense", "sparse-cpu")
    assert dense.pattern.density(65536) == 1.0
    assert sparse.pattern.density(65536) <= 0.1
    assert sparse.choice.best.work_max_over_mean <= 1.05
    for setup, word in ((dense, "max_density"), (sparse, "LongNet from")):
        assert word in setup.why
        assert setup.choice.best.layout.name in setup.why
    assert isinstance(set_up(64, 1, SIZES).attention(0, None), RingAttention)


def test_a_given_pattern_is_kept_and_runs_sparse() -> None:
    pattern = SparsePattern((Sinks(128) | Window(256),))
    setup = set_up(4096, 1, Sizes(2, 1), pattern=pattern)
    assert setup.pattern == pattern
    assert "as given" in setup.why
    assert isinstance(setup.attention(0, None), SparseRingAttention)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the second must divide the first"):
        RingSelfAttention(32, 4, 3)
    with pytest.raises(ValueError, match="give head_dim"):
        RingSelfAttention(30, 4)
    with pytest.raises(ValueError, match="give a pattern of your own"):
        set_up(4096, 2, SIZES, max_density=0.001)
    assert RingSelfAttention(30, 4, head_dim=8, device="meta").qkv.weight.shape == (96, 30)
