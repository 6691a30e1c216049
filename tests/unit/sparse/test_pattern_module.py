"""The module gives on a ring what it gives alone; the factory picks by density and says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ring.attention import block_proof, sparse_ring
from elastic_ring.attention.block_kernels import REFERENCE, SparseKernel
from elastic_ring.attention.choice import Sizes, choose, in_whole_blocks
from elastic_ring.attention.families import BigBird
from elastic_ring.attention.module import RingSelfAttention, Setup, set_up
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.rules import Sinks, Window
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread, relative_error

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
    assert (dense.kernel, dense.kind) == ("aten-cpu", "dense")
    assert (sparse.kernel, sparse.kind) == ("sparse-cpu", "tiles")
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


def on_gpus(seq_len: int = 4096, head_dim: int = 128, **settings: Any) -> Setup:
    """As planned where no GPU is: nothing is tested."""
    return set_up(seq_len, 2, Sizes(8, 2, head_dim), device="cuda", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names what would be tested on this device")
def test_the_factory_names_the_kernel_of_gpus_and_why_the_ones_before_it_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The packages of flash-attn are on no machine without a GPU.
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    blocks = SparsePattern((BigBird(4, 1, 2),))
    fast, repeatable = (on_gpus(pattern=blocks, deterministic=flag) for flag in (False, True))
    assert (fast.kernel, fast.kind) == ("flash-attn-4-sparse", "blocks")
    assert (repeatable.kernel, repeatable.kind) == ("flex-sparse", "blocks")
    assert "not flash-attn-4-sparse has no deterministic sparse backward on this device" in repeatable.why
    assert "not tested" in repeatable.why
    dense = on_gpus()
    assert (dense.kernel, dense.kind) == ("flash-attn-4", "dense")
    wide = on_gpus(head_dim=512 - 8, dtype=torch.float32, deterministic=False)
    assert wide.kernel == "reference"
    assert "not flash-attn-4 takes torch.bfloat16" in wide.why
    asked = on_gpus(65536, max_density=0.2)
    assert asked.kind == "blocks"
    assert asked.pattern.density(65536) <= 0.2


def test_what_no_kernel_of_gpus_takes_is_left_to_tiles_and_the_factory_says_so() -> None:
    in_part = on_gpus(pattern=SparsePattern((Window(200),)))
    no_layout = on_gpus(128 * 3 + 64, pattern=SparsePattern((BigBird(2, 0, 0),)))
    no_kernel = on_gpus(head_dim=80, pattern=SparsePattern((BigBird(2, 0, 0),)))
    for setup, word in ((in_part, "in part"), (no_layout, "take a multiple"), (no_kernel, "takes head_dim 64, 128")):
        assert (setup.kernel, setup.kind) == ("sparse-cpu", "tiles")
        assert word in setup.why


def test_blocks_of_gpus_are_laid_out_in_whole_blocks_only() -> None:
    setup = on_gpus(128 * 24, pattern=SparsePattern((BigBird(2, 0, 3),)))
    if setup.kind == "blocks":
        assert all(in_whole_blocks(candidate.layout) for candidate in setup.choice.candidates)
    with pytest.raises(ValueError, match="take a multiple of 256 tokens"):
        choose(SparsePattern((BigBird(2, 0, 3),)), 1000, 2, Sizes(8, 2), whole_blocks=True)


@pytest.mark.slow
def test_the_attention_that_a_setup_hands_back_runs_the_kernel_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spelled-out block kernel is the one of the table that runs here."""
    monkeypatch.setattr("elastic_ring.attention.kernel_choice.KERNELS", (REFERENCE,))
    pattern = SparsePattern((BigBird(2, 0, 1),))
    setup = on_gpus(512, 64, pattern=pattern, dtype=torch.float32)
    assert (setup.kernel, setup.kind) == ("reference-sparse", "blocks")
    ran: list[str] = []
    tested: set[int] = set()
    real, real_test = sparse_ring.select_sparse, block_proof.warm_up_kernels

    def select(*arguments: Any) -> SparseKernel:
        ran.append(real(*arguments).name)
        return real(*arguments)

    def test(kernel: Any, head_dim: int, head_ratio: int, *arguments: Any) -> str | None:
        tested.add(head_ratio)
        return real_test(kernel, head_dim, head_ratio, *arguments)

    monkeypatch.setattr(block_proof, "warm_up_kernels", test)

    monkeypatch.setattr(sparse_ring, "select_sparse", select)
    alone = set_up(512, 1, Sizes(8, 2, 64), pattern=pattern)
    q, k = torch.randn(1, 512, 8, 64), torch.randn(1, 512, 2, 64)
    blocks = replace(setup, choice=alone.choice).attention(0, None)(q, k, k)
    assert set(ran) == {"reference-sparse"}
    assert tested == {4}, "the self-test runs with the call's own ratio of query to K/V heads"
    ran.clear()
    torch.testing.assert_close(alone.attention(0, None)(q, k, k), blocks, rtol=1e-4, atol=1e-5)
    assert not ran
    dense = set_up(512, 1, Sizes(8, 2, 64))
    assert isinstance(dense.attention(0, None), RingAttention)
    with pytest.raises(ValueError, match="backend='flash-attn-4' runs on cuda, not on cpu"):
        replace(dense, kernel="flash-attn-4").attention(0, None)(q, k, k)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the second must divide the first"):
        RingSelfAttention(32, 4, 3)
    with pytest.raises(ValueError, match="give head_dim"):
        RingSelfAttention(30, 4)
    for name, size in (("width", 0), ("num_heads", -4), ("head_dim", -8)):
        with pytest.raises(ValueError, match=f"{name}={size}: must be at least 1"):
            RingSelfAttention(**{"width": 32, "num_heads": 4, name: size})
    with pytest.raises(ValueError, match="give a pattern of your own"):
        set_up(4096, 2, SIZES, max_density=0.001)
    assert RingSelfAttention(30, 4, head_dim=8, device="meta").qkv.weight.shape == (96, 30)
