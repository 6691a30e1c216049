"""Fused scales on a GPU have the bits of torch's operators, and products in 8 bits repeat theirs."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ring.model import fp8

SHAPES = [(33, 64), (8192, 2048), (200, 14_336), (130, 28_688)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_scales_and_numbers_have_the_bits_of_the_reference(shape: tuple[int, int]) -> None:
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


def test_products_and_gradients_repeat_their_bits_and_are_near_those_of_fp64() -> None:
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
