"""Running gradients of queries: whatever shares come first, nothing is cleared that is written and nothing is left
uncleared that is read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.attention.layouts.rows import Span
from elastic_ring.attention.merge import Accumulator, GradientSum, eager_merge_, lse_for_backward, own_gradients

SHAPE = (2, 6, 4, 3)
ALL = slice(None)


@pytest.fixture(autouse=True)
def _memory_that_nobody_wrote_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def share_of(rows: tuple[int, int], heads: slice, seed: int) -> torch.Tensor:
    num_heads = len(range(*heads.indices(SHAPE[2])))
    shape = (SHAPE[0], rows[1] - rows[0], num_heads, SHAPE[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def span(rows: tuple[int, int], heads: slice) -> Span:
    return Span(*rows, None if heads == ALL else (heads.start, heads.stop))


some_heads = st.sampled_from([ALL, slice(0, 2), slice(2, 4), slice(1, 2), slice(3, 4)])
some_rows = st.sampled_from([(0, 6), (0, 6), (0, 3), (3, 6), (2, 4)])


@settings(deadline=None, max_examples=200)
@given(shares=st.lists(st.tuples(some_rows, some_heads), max_size=6), by_rows=st.booleans())
def test_shares_of_any_rows_and_heads_add_up(shares, by_rows):
    total, wanted = GradientSum(torch.zeros(SHAPE), by_rows=by_rows), torch.zeros(SHAPE)
    for seed, (rows, heads) in enumerate(shares):
        share = share_of(rows, heads, seed)
        total.add(
            span(rows, heads), share.transpose(1, 2).contiguous().transpose(1, 2)
        )  # heads before rows, as from kernels
        wanted[:, slice(*rows), heads] += share
    assert torch.equal(total.total, wanted)
    assert total.total.is_contiguous() or not by_rows


def test_halves_of_the_heads_are_copied_and_clear_nothing(monkeypatch):
    cleared: list[torch.Size] = []
    zero_ = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda x: (cleared.append(x.shape), zero_(x))[1])
    total = GradientSum(torch.zeros(SHAPE), torch.bfloat16)
    for heads in (slice(0, 2), slice(2, 4)):
        total.add(span((0, 6), heads), share_of((0, 6), heads, 0).bfloat16())
    assert torch.isfinite(total.total).all()
    assert not cleared
    other = GradientSum(torch.zeros(SHAPE), torch.bfloat16)
    other.add(Span(0, 6, (0, 2)), share_of((0, 6), slice(0, 2), 0).bfloat16())
    other.add(Span(0, 3), share_of((0, 3), ALL, 1).bfloat16())
    assert torch.isfinite(other.total).all()
    assert cleared == [torch.Size((2, 6, 2, 3))]


ROWS = [(0, 6), (2, 6), (3, 6)]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[:2], ROWS, [(0, 3), (3, 6)], [(0, 6)] * 3], ids=str)
@pytest.mark.parametrize("batch", [2, 5])
def test_what_is_deferred_is_added_in_one_pass_and_rounded_once(rows, batch):
    """A short total of halves of the heads, the second behind the deferred shares, as a ring's backward makes it."""
    own, *shares = (
        torch.randn(batch, stop - start, *SHAPE[2:], generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, (start, stop) in enumerate([(0, 6), *rows])
    )
    total = GradientSum(torch.zeros(own.shape, dtype=torch.bfloat16), torch.bfloat16, at_once=True)
    total.add(Span(0, 6, (0, 2)), own[:, :, :2])
    for run, share in zip(rows, shares, strict=True):
        total.add(Span(*run), share)
    total.add(Span(0, 6, (2, 4)), own[:, :, 2:])
    wanted, rounded_each_time = own.float(), own.clone()
    for (start, stop), share in zip(rows, shares, strict=True):
        wanted[:, start:stop] += share.float()
        rounded_each_time[:, start:stop] += share
    assert torch.equal(total.total, wanted.bfloat16())
    assert torch.equal(total.total, wanted.bfloat16())  # and not added again
    most = max(sum(start <= row < stop for start, stop in rows) for row in range(6))
    assert torch.equal(rounded_each_time, wanted.bfloat16()) == (most == 1)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[:2], ROWS, [(0, 3), (3, 6)], [(0, 6)] * 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_deferred_results_are_merged_as_one_by_one_and_rounded_once(rows, dtype):
    """Those that see nothing weigh nothing, first or later."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)

    def part(num_rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.randn(2, 4, num_rows, generator=generator, dtype=torch.float64).to(exact).transpose(1, 2)
        lse[:, hidden::3] = -math.inf
        return torch.randn(2, num_rows, 4, 3, generator=generator, dtype=torch.float64).to(dtype), lse

    own, parts = part(6, 1), [part(stop - start, place) for place, (start, stop) in enumerate(rows)]
    total = Accumulator(own[0], dtype, at_once=True)
    total.add(Span(0, 6), own[0].clone(), own[1].clone())
    for run, each in zip(rows, parts, strict=True):
        total.add(Span(*run), *each)
    out, lse = own[0].to(exact), own[1].clone()
    for (start, stop), each in zip(rows, parts, strict=True):
        eager_merge_(out[:, start:stop], lse[:, start:stop], *each)
    assert total.out.dtype == dtype
    for _ in range(2):  # and not merged again
        # A CPU's exp differs in the last bit by where in a vector a value lies, and so by strips.
        torch.testing.assert_close(total.out, out.to(dtype), rtol=4 * torch.finfo(exact).eps, atol=1e-7)
        torch.testing.assert_close(total.lse, lse, rtol=4 * torch.finfo(exact).eps, atol=1e-7)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, n, H, D) and lse (B, n, H) of plain softmax over the keys that `seen` (n, m) leaves."""
    scores = torch.einsum("bnhd,bmhd->bnhm", q, k).masked_fill(~seen[None, :, None], -math.inf)
    high = scores.detach().amax(-1, keepdim=True).clamp(min=-1e9)
    weights = torch.exp(scores - high)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnhm,bmhd->bnhd", weights / total.clamp(min=1e-30), v)
    some = total[..., 0] > 0
    # Not as log(0): its gradient times nothing would be NaN, which no kernel gives.
    lse = torch.where(some, high[..., 0] + torch.log(torch.where(some, total[..., 0], 1.0)), -math.inf)
    return out, lse


def test_shares_of_kernels_that_know_only_their_own_keys_add_up_to_the_gradients_of_all():
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 6, 4, 3, generator=generator, dtype=torch.float64) for _ in range(4))
    seen = torch.rand(6, 6, generator=generator) < 0.6
    seen[1, :2], seen[2, 2:], seen[3] = False, False, False  # nothing of one part, of the others, of any
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attended(*leaves, seen)
    wanted = torch.autograd.grad(out, leaves, dout)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for keys in (slice(0, 2), slice(2, 5), slice(5, 6)):
        own_leaves = [x.clone().requires_grad_() for x in (q, k[:, keys], v[:, keys])]
        own = attended(*own_leaves, seen[:, keys])
        detached = (x.detach() for x in (*own, out))
        given = own_gradients(dout, *detached, lse_for_backward(lse.detach()))
        shares = torch.autograd.grad(own, own_leaves, given)
        dq += shares[0]
        dk[:, keys] = shares[1]
        dv[:, keys] = shares[2]
    for found, want in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
