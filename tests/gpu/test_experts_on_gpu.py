"""Experts on GPUs: grouped products repeat to the bit; a rank that dies between two exchanges changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring import CheckpointConfig
from elastic_ring.experts import compute
from elastic_ring.experts.compute import Order, grouped_linear, product_kind
from tests.gpu.test_durable_on_gpu import SMALL, own_ray, run
from tests.ray.conftest import bits

__all__ = ["own_ray"]

EXPERTS = replace(SMALL, num_experts=5, experts_per_token=2, expert_width=32, shared_width=32)


def test_a_grouped_product_and_its_gradients_repeat_a_hundred_times() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    order = Order.of(torch.rand(4096, 64, device="cuda").topk(8).indices % 61, 64)  # the last three have no rows
    weight = torch.randn(64, 768, 1024, dtype=torch.bfloat16, device="cuda")
    assert product_kind(order.spread(tokens), weight) == "grouped"
    first = None
    for _ in range(100):
        leaves = [tokens.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = order.gather(
            grouped_linear(order.spread(leaves[0]), leaves[1], order.ends), torch.rand(4096, 8, device="cuda") * 0 + 0.5
        )
        found = [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))
    assert first is not None
    rows = order.spread(tokens)
    torch.testing.assert_close(
        grouped_linear(rows, weight, order.ends), compute._loop(rows, weight, order.ends), rtol=2e-2, atol=0.5
    )
    assert not first[2][61:].any()


@pytest.mark.parametrize("cut", [1, 20, 47])
def test_products_of_some_experts_have_the_bits_that_they_have_among_all(cut: int) -> None:
    """As rows come in parts (`experts.exchange`)."""
    torch.manual_seed(0)
    order = Order.of(torch.rand(4096, 64, device="cuda").topk(8).indices % 61, 64)
    rows = torch.randn(order.rows.numel(), 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(64, 768, 1024, dtype=torch.bfloat16, device="cuda")
    slope, end = torch.randn(rows.size(0), 768, dtype=torch.bfloat16, device="cuda"), int(order.ends[cut - 1])

    def computed(some: slice, experts: slice, ends: torch.Tensor) -> list[torch.Tensor]:
        leaves = [rows[some].clone().requires_grad_(), weight[experts].clone().requires_grad_()]
        out = grouped_linear(*leaves, ends)
        return [out.detach(), *torch.autograd.grad(out, leaves, slope[some])]

    first = computed(slice(0, end), slice(0, cut), order.ends[:cut])
    last = computed(slice(end, None), slice(cut, None), order.ends[cut:] - end)
    whole = computed(slice(None), slice(None), order.ends)
    for parts, expected in zip(zip(first, last, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_ring_of_two_gpus_that_loses_a_rank_before_an_exchange_of_experts_changes_no_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": EXPERTS,
        "experts": "send",
        "checkpoint_config": CheckpointConfig(every_steps=0),
    }
    calm = run(tmp_path, "calm", "cuda", cp=2, **settings).summary
    faults = "kill@step=3,phase=dispatch,hop=3,rank=1; kill@step=6,phase=combine,hop=1,rank=0"
    settings |= {"spares": 2, "copies": "1", "copy_every_steps": 1, "faults": faults}
    killed = run(tmp_path, "killed", "cuda", cp=2, **settings).summary
    assert len(killed["recoveries"]) == 2
    assert bits(killed) == bits(calm)
