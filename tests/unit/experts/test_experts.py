"""Experts: each token goes to those that it chose, with gradients that repeat to the bit; loads even out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring.config import ScalingConfig, StepConfig, check_together
from elastic_ring.experts import compute
from elastic_ring.experts.compute import Order, grouped_linear, product_kind
from elastic_ring.experts.exchange import Cut, SliceExperts, all_parts, cut_counts
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.feed_forward import MoE
from elastic_ring.model.init import Initialiser, initialise_module

CONFIG = ModelConfig(17, 1, 16, 2, 1, 8, 23, num_experts=5, experts_per_token=2, expert_width=8, shared_width=8)


def layer(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    made = MoE(config)
    initialise_module(made, Initialiser(0))
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(20)
        made.balance_bias.copy_(torch.tensor([0.1, -3.0, 0.0, 0.2, 0.0]))  # nobody takes the second expert
    return made.to(dtype)


def token_by_token(moe: MoE, x: Tensor) -> Tensor:
    """The same in the plainest way."""
    rows = []
    for token in x.flatten(0, 1):
        scores = (moe.router.weight @ token).sigmoid()
        chosen = (scores + moe.balance_bias).topk(moe.experts_per_token).indices
        total = scores[chosen].sum()
        out = torch.zeros_like(token)
        for expert in chosen.tolist():
            gate, up = (moe.experts.gate_up[expert] @ token).chunk(2)
            out = out + scores[expert] / total * (moe.experts.down[expert] @ (F.silu(gate) * up))
        rows.append(out)
    assert moe.shared is not None
    return torch.stack(rows).view_as(x) + moe.shared(x)


def test_a_layer_computes_what_each_token_computes_alone_gradients_too() -> None:
    moe, x = layer(dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    slope, found = torch.randn(2, 9, 16, dtype=torch.float64), []
    params = [param for name, param in moe.named_parameters() if name != "balance_bias"]
    for made in (moe(x), token_by_token(moe, x)):
        found.append((made, *torch.autograd.grad(made, [x, *params], slope)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_loop_and_repeats_to_the_bit(dtype: torch.dtype) -> None:
    """One expert has no row; its gradient is zero."""
    order = Order.of(torch.tensor([[0, 3], [3, 1], [0, 1], [3, 0]]), 4)
    assert order.load.tolist() == [3, 2, 0, 3]
    assert order.rows[order.back].tolist() == list(range(8))
    rows, weight, found = torch.randn(8, 16, dtype=dtype), torch.randn(4, 24, 16, dtype=dtype), []
    assert product_kind(rows, weight) == "grouped"
    for product in (grouped_linear, grouped_linear, compute._loop):
        leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = product(*leaves, order.ends)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))
    assert not found[0][2][2].any()
    for ours, expected in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda rows, weight, ends: compute._loop(rows, weight, ends) * 1.01, "is off by 0.01"),
        (lambda rows, weight, ends: torch.mm(rows, weight[0]), r"no grouped product .* a loop takes its place"),
    ],
    ids=["a wrong one", "one that fails"],
)
def test_where_the_grouped_product_does_not_pass_its_self_test_the_loop_serves_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: Any, told: str
) -> None:
    monkeypatch.setattr(compute, "_grouped", broken)
    rows, weight, ends = torch.randn(2, 8), torch.randn(2, 8, 8), torch.tensor([1, 2], dtype=torch.int32)
    compute._serves.cache_clear()
    try:
        assert product_kind(rows, weight) == "loop"
        torch.testing.assert_close(grouped_linear(rows, weight, ends), compute._loop(rows, weight, ends))
    finally:
        compute._serves.cache_clear()
    assert re.search(told, caplog.text)


def test_shapes_that_grouped_kernels_do_not_read_and_no_row_at_all_go_through_the_loop() -> None:
    ends = torch.tensor([0, 2], dtype=torch.int32)
    rows, weight = torch.randn(2, 3), torch.randn(2, 5, 3)
    assert product_kind(rows, weight) == "loop"
    torch.testing.assert_close(grouped_linear(rows, weight, ends), rows @ weight[1].mT)
    assert grouped_linear(torch.empty(0, 8), torch.randn(2, 8, 8), 0 * ends).shape == (0, 8)


def test_a_bias_gets_the_excess_of_its_experts_load_once_and_slices_add_up() -> None:
    moe, x = layer(), torch.randn(1, 12, 16)
    expected = moe.choose(x[0])[0].load.float()
    for parts in ([x], [x[:, :5], x[:, 5:]]):
        moe.zero_grad()
        for part in parts:
            again = torch.utils.checkpoint.checkpoint(moe, part.requires_grad_(), use_reentrant=False)
            again.square().sum().backward()
        torch.testing.assert_close(moe.balance_bias.grad, expected - expected.mean())
    assert float(moe.router.weight.grad.abs().sum()) > 0


def test_biases_even_out_the_load() -> None:
    """A router whose scores prefer few experts; the bias alone moves."""
    config = replace(CONFIG, num_experts=8)
    torch.manual_seed(0)
    moe = MoE(config)
    initialise_module(moe, Initialiser(0))
    tokens = torch.randn(4096, 16) + 1.0
    with torch.no_grad():
        moe.router.weight.normal_(0.0, 0.05)

    def largest() -> float:
        load = moe.choose(tokens)[0].load.float()
        return float(load.max() / load.mean())

    before, step = largest(), torch.optim.AdamW([moe.balance_bias], lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0)
    for _ in range(200):
        moe.zero_grad()
        moe.choose(tokens)[1].sum().backward()
        step.step()
    assert before > 2.0
    assert largest() < 1.1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"experts_per_token": 6}, "experts_per_token=6: a token takes 1 to num_experts=5 experts"),
        ({"expert_width": 0}, "expert_width=0: give the inner width of one expert"),
        ({"num_dense_layers": 1}, "num_dense_layers=1 of num_layers=1"),
        ({"num_experts": 0}, "experts_per_token=2: says how experts are, and num_experts=0"),
        ({"num_experts": -1}, "num_experts=-1: must be a whole number of at least 0"),
    ],
)
def test_experts_that_do_not_fit_are_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        partial(replace, CONFIG)(**settings)


def test_experts_that_tokens_are_sent_to_do_not_wait_in_host_memory() -> None:
    with pytest.raises(ValueError, match=r"experts='send' and cpu_offload='all'.*take experts='auto', or cpu_offload"):
        check_together(ScalingConfig(cpu_offload="all"), StepConfig(experts="send"), ())


def test_parts_have_whole_experts_where_they_fit_and_cuts_of_those_that_do_not() -> None:
    """Rows of three sources for two ranks with three experts each, at most ten at a time."""
    counts = torch.tensor([[4, 0, 1, 9, 2, 0], [2, 0, 3, 9, 0, 0], [3, 0, 6, 7, 1, 0]])
    parts = all_parts(counts, 2, 10)
    assert [ranks[0] for ranks in parts] == [[Cut(0, 0, 9)], [Cut(2, 0, 10)], []]
    assert [ranks[1] for ranks in parts] == [[Cut(0, 0, 10)], [Cut(0, 10, 20)], [Cut(0, 20, 25), Cut(1, 0, 3)]]
    by_rank = counts.view(3, 2, 3)
    for rank in range(2):
        of_parts = [cut_counts(by_rank[:, rank], ranks[rank]) for ranks in parts]
        assert all(int(rows.sum()) <= 10 for rows in of_parts)
        assert torch.equal(sum(rows.sum(1) for rows in of_parts), by_rank[:, rank].sum(1))
    assert cut_counts(by_rank[:, 1], parts[1][1]).tolist() == [[0], [8], [2]]
    weight = torch.randn(3, 2, requires_grad=True)
    spans = [(ranks[1][0].expert, ranks[1][-1].expert + 1) for ranks in parts]
    assert spans == [(0, 1), (0, 1), (0, 2)]
    given = [torch.randn(stop - first, 2) for first, stop in spans]
    (found,) = torch.autograd.grad(SliceExperts.apply(weight, spans), weight, given)
    assert torch.equal(found[:2], torch.stack([given[0][0] + given[1][0] + given[2][0], given[2][1]]))
    assert not found[2].any()
