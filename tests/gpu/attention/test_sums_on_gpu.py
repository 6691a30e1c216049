"""One GPU's fused sums and scales: the same bits as their eager twins, however often they run. No rank, no ring."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ring.attention.merge import eager_merge_all_, eager_own_gradients, merge_all_, own_gradients
from elastic_ring.model import fp8
from elastic_ring.state import device_sums
from elastic_ring.state.device_sums import eager_squared_norm, squared_norm

NUM_REPEATS = 300


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_merge_has_the_same_bits_every_time(head_dim, num_parts):
    """Several warps read the lse that one of them overwrites: without a barrier a late one reads the new value."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(1, 2048, 12, head_dim, device="cuda", generator=generator).bfloat16()
        return out, torch.randn(1, 12, 2048, device="cuda", generator=generator).transpose(1, 2)

    (out, lse), *parts = (drawn() for _ in range(1 + num_parts))
    parts[-1][1][:, ::5] = float("-inf")
    wanted, wanted_lse = out.clone(), lse.clone()
    eager_merge_all_(wanted, wanted_lse, parts)
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    for _ in range(NUM_REPEATS):
        merged, merged_lse = out.clone(), lse.clone()
        merge_all_(merged, merged_lse, parts)
        first = first or (merged, merged_lse)
        assert torch.equal(merged, first[0])
        assert torch.equal(merged_lse, first[1])
    assert first is not None
    torch.testing.assert_close(first[0].float(), wanted.float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(first[1], wanted_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_lie_each_in_their_own_way_are_merged_as_by_their_eager_twin(dtype):
    """Cut from runs of different lengths, of two sequences, heads or rows first, onto rows that saw nothing before."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def drawn(start: int, length: int, heads_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, 5, length) if heads_first else (2, length, 5)
        out = torch.randn(2, length, 5, 96, device="cuda", generator=generator).bfloat16()
        lse = torch.randn(shape, device="cuda", generator=generator)
        return out[:, start : start + 300], (lse.transpose(1, 2) if heads_first else lse)[:, start : start + 300]

    out, lse = drawn(100, 700, heads_first=True)
    whole = torch.zeros(2, 700, 5, 96, device="cuda", dtype=dtype)
    whole[:, 100:400] = out
    lse[:, ::7] = float("-inf")
    whole[:, 100:400:7] = 0.0
    parts = [drawn(0, 300, True), drawn(13, 900, False), drawn(40, 341, True)]
    parts[1][1][:, ::5] = float("-inf")
    for num_parts in (1, 2, 3):
        found, wanted = whole.clone(), whole.clone()
        found_lse, wanted_lse = lse.clone(), lse.clone()
        merge_all_(found[:, 100:400], found_lse, parts[:num_parts])
        eager_merge_all_(wanted[:, 100:400], wanted_lse, parts[:num_parts])
        allowed = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.float(), wanted.float(), rtol=allowed, atol=1e-6)
        torch.testing.assert_close(found_lse, wanted_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradients_are_weighed_as_by_their_eager_twin_with_the_same_bits_every_time(head_dim):
    """Of tensors cut from others, heads or rows first, with queries that see none of the part or nothing at all."""
    check_own_gradients("cuda", head_dim)


def check_own_gradients(device: str, head_dim: int) -> None:
    generator = torch.Generator(device).manual_seed(0)
    dout, own = (
        torch.randn(2, 700, 5, head_dim, device=device, generator=generator).bfloat16()[:, first : first + 301]
        for first in (0, 13)
    )
    out = torch.randn(2, 5, 301, head_dim, device=device, generator=generator).bfloat16().transpose(1, 2)
    lse = torch.randn(2, 700, 5, device=device, generator=generator)[:, 7:308]
    own_lse = torch.randn(2, 5, 384, device=device, generator=generator).transpose(1, 2)[:, :301] - 1.0
    own[:, ::7], own_lse[:, ::7], lse[:, ::35] = 0.0, float("-inf"), float("inf")
    weighted, dlse = own_gradients(dout, own, own_lse, out, lse)
    assert weighted.dtype == torch.bfloat16
    assert dlse.stride(1) == 1
    assert not weighted[:, ::7].any()
    for _ in range(20):
        again, again_dlse = own_gradients(dout, own, own_lse, out, lse)
        assert torch.equal(again, weighted)
        assert torch.equal(again_dlse, dlse)
    wanted, wanted_dlse = eager_own_gradients(dout, own, own_lse, out, lse)
    torch.testing.assert_close(weighted.float(), wanted.float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(dlse, wanted_dlse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_words", [1, 7, 4096, 5_000_003, 2 * device_sums.PIECE_WORDS + 3])
def test_a_digest_in_one_pass_is_the_eager_one(num_words):
    words = torch.randint(-(2**62), 2**62, (num_words,), device="cuda", dtype=torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device="cuda")
    device_sums.eager_sums(words, sums)
    wanted = sums.tolist()
    _, first, second = map(int, torch.frombuffer(bytearray(device_sums.device_digests([words])[0]), dtype=torch.int64))
    assert [first, second] == wanted


@pytest.mark.parametrize("num_elements", [1, 1000, 16_384, 5_000_003])
def test_a_squared_norm_in_one_pass_is_the_eager_one_and_has_the_same_bits_every_time(num_elements):
    flat = torch.randn(num_elements, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0)) * 1e15
    found = [float(squared_norm(flat)) for _ in range(20)]
    assert found == found[:1] * 20
    wanted = float(eager_squared_norm(flat.cpu()))  # by way of a root
    assert found[0] == pytest.approx(wanted, rel=1e-11)
    for odd in (float("inf"), float("nan")):
        flat[num_elements // 2] = odd
        assert not torch.isfinite(squared_norm(flat))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_sent_are_gathered_as_by_their_eager_twin(head_dim, dtype):
    from elastic_ring.attention import fused_merge
    from elastic_ring.attention.comm.packing import eager_gather_rows_

    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 301, 3, head_dim, generator=generator).to("cuda", dtype) for _ in range(2))
    for num_rows in (0, 1, 500, 903):
        rows = torch.randint(903, (num_rows,), generator=generator).int().cuda()
        buffers = [torch.full((num_rows + 7, 2, 2, head_dim), 5.0, device="cuda", dtype=dtype) for _ in range(2)]
        fused_merge.gather_rows_(buffers[0][3 : 3 + num_rows], k, v, rows)
        eager_gather_rows_(buffers[1][3 : 3 + num_rows], k, v, rows)
        assert torch.equal(*buffers)


# -------------------------------------------------------------------------------------------------- products in 8 bits


SHAPES = [(33, 64), (8192, 2048), (200, 14_336), (130, 28_688)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_scales_and_numbers_have_the_bits_of_the_reference(shape):
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    x *= torch.logspace(-8, 8, shape[0], device="cuda").bfloat16()[:, None]
    x[1], x[2, 3], x[4, 5] = 0.0, math.nan, math.inf
    for found, wanted in (
        (fp8.rows(x), fp8.eager_rows(x)),
        (fp8.columns(x[5:]), fp8.eager_rows(x[5:].t().contiguous())),
    ):
        numbers, scale = (each.contiguous() for each in found)
        finite = ~wanted[0].float().isnan()
        assert torch.equal(scale, wanted[1])
        assert torch.equal(numbers.float().isnan(), ~finite)
        assert torch.equal(numbers.float()[finite], wanted[0].float()[finite])


def test_products_and_gradients_repeat_their_bits_and_are_near_those_of_fp64():
    torch.manual_seed(0)
    layer = fp8.Fp8Linear(1024, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    x, slope = (torch.randn(1, 8192, width, device="cuda").bfloat16() for width in (1024, 2048))
    x.requires_grad_()
    found = []
    for _ in range(20):
        out = layer(x)
        found.append((out.detach(), *torch.autograd.grad(out, (x, layer.weight), slope)))
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))
    weight = layer.weight.detach().double()
    of_weight = slope[0].double().t() @ x.detach()[0].double()
    exact = (x.detach().double() @ weight.t(), slope.double() @ weight, of_weight)
    for got, wanted, bound in zip(found[0], exact, (0.05, 0.05, 4e-3), strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < bound
