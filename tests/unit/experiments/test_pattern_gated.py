"""Gated attention sees the past only, trains its gates and all three views, and is each view where one gate is open."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from experiments.gated import GatedSparseAttention
from tests.unit.attention.attention_rings import one_thread

LENGTH, BLOCK, HEADS, DIM, WIDTH = 32, 4, 4, 8, 12


def module(**sizes: Any) -> GatedSparseAttention:
    made = GatedSparseAttention(WIDTH, HEADS, **{"block": BLOCK, "top_k": 3, "window": 6, **sizes}).double()
    return made


def sample(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, LENGTH, WIDTH), (2, LENGTH, HEADS, DIM), (2, LENGTH, 2, DIM), (2, LENGTH, 2, DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def only(made: GatedSparseAttention, view: int) -> GatedSparseAttention:
    with torch.no_grad():
        bias = torch.full((HEADS, 3), -math.inf, dtype=torch.float64)
        bias[:, view] = math.inf
        made.gates.bias.copy_(bias.flatten())
    return made


def softmax_over(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    shares = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v)


def test_each_view_is_a_softmax_of_its_own() -> None:
    x, q, k, v = sample()
    at = torch.arange(LENGTH)
    with one_thread():
        near = (at[:, None] >= at[None]) & (at[:, None] - at[None] < 6)
        torch.testing.assert_close(only(module(), 2)(x, q, k, v), softmax_over(q, k, v, near))
        made = only(module(), 1)
        torch.testing.assert_close(made(x, q, k, v), softmax_over(q, k, v, made.selected(q, k)))
        means = [t.unflatten(1, (-1, BLOCK)).mean(2) for t in (k, v)]
        past = torch.arange(LENGTH // BLOCK)[None] < (at // BLOCK)[:, None]
        compressed = only(module(), 0)(x, q, k, v)
        torch.testing.assert_close(compressed, softmax_over(q, *means, past))
        assert (compressed[:, :BLOCK] == 0).all()


def test_a_ragged_last_block_changes_nothing_before_it() -> None:
    """31 tokens in blocks of 4: the last block has three, whose mean only its own choice reads."""
    tensors = sample()
    short = [tensor[:, :31] for tensor in tensors]
    with one_thread():
        whole, found = module()(*tensors), module()(*short)
        torch.testing.assert_close(found[:, :28], whole[:, :28])
        assert torch.equal(module().selected(*short[1:3])[:, :, :28], module().selected(*tensors[1:3])[:, :, :28, :31])
        mean_q = short[1][:, 28:].mean(1)
        mean_k = short[2][:, :28].unflatten(1, (-1, BLOCK)).mean(2).repeat_interleave(2, dim=2)
        best = torch.einsum("bhd,bjhd->bhj", mean_q, mean_k).topk(2).indices.sort(-1).values
        row = module().selected(*short[1:3])[:, :, 30, :28].unflatten(-1, (-1, BLOCK)).all(-1)
        assert torch.equal(row.nonzero()[:, 2].view(2, HEADS, 2), best)


def test_with_the_first_query_no_output_depends_on_any_later_token() -> None:
    cut = 13
    tensors, other = sample(), sample(1)
    later = [torch.cat([a[:, :cut], b[:, cut:]], dim=1) for a, b in zip(tensors, other, strict=True)]
    with one_thread():
        made = module(first_query=True)
        torch.testing.assert_close(made(*later)[:, :cut], made(*tensors)[:, :cut], rtol=0, atol=0)


def test_no_output_depends_on_a_later_token() -> None:
    tensors = sample()
    with one_thread():
        before = module()(*tensors)
        cut = 13
        later = [torch.cat([a[:, :cut], b[:, cut:]], dim=1) for a, b in zip(tensors, sample(1), strict=True)]
        # The choice of a block's rows reads the whole block of queries, so rows of that block may move.
        start = cut // BLOCK * BLOCK
        torch.testing.assert_close(module()(*later)[:, :start], before[:, :start], rtol=0, atol=0)


def test_gates_and_all_three_views_get_gradients() -> None:
    x, q, k, v = (t.requires_grad_() for t in sample())
    made = module()
    with one_thread():
        made(x, q, k, v).square().sum().backward()
        assert made.gates.weight.grad is not None
        moved = made.gates.weight.grad.unflatten(0, (HEADS, 3)).abs().sum((0, 2))
    assert (moved > 0).all()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (q, k, v))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k=0: must be at least 1"):
        module(top_k=0)
    x, q, k, v = sample()
    with pytest.raises(ValueError, match=r"x must be \(B, S, 12\) with q's B and S"):
        module()(x[:, :31], q, k, v)
    with pytest.raises(ValueError, match="q has 2 heads, the gates are for num_heads=4"):
        module()(x, q[:, :, :2], k, v)
