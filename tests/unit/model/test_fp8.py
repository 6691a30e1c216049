"""Linear layers in 8 bits: what is rounded, what is not, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ring.config import ScalingConfig, StepConfig, check_together
from elastic_ring.data.source import StdlibText
from elastic_ring.model import fp8
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.fp8 import E4M3, LARGEST, Fp8Linear, columns, rows, scale_of, use_fp8
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.wrap import check_linears, largest_list, meta_model

STEP = StepConfig(linears="fp8", param_dtype="bfloat16")
SIZES = ModelConfig(97, 4, 64, 4, 2, 16, 96)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def task(model: Any, **more: Any) -> TrainingTask:
    return TrainingTask(model, StdlibText(64), STEP, OptimConfig(), language_model_loss, **more)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_numbers_of_a_row_are_off_by_a_sixteenth_at_most_and_scales_are_powers_of_two_that_use_the_range() -> None:
    x = drawn(64, 96) * torch.logspace(-6, 6, 64, base=10.0).bfloat16()[:, None]
    numbers, scale = rows(x)
    assert numbers.dtype == E4M3
    assert torch.equal(scale.frexp().mantissa, torch.full_like(scale, 0.5)), "a power of two"
    assert bool(((numbers.float() * scale - x.float()).abs() <= x.float().abs() / 16 + scale * 2**-10).all())
    most = numbers.float().abs().amax(dim=1)
    assert bool((most > LARGEST / 2 - 32).all())
    turned, of_columns = columns(x)
    again, of_rows = rows(x.t().contiguous())
    assert torch.equal(turned.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(of_columns, of_rows)


def test_a_scale_is_the_least_power_of_two_that_fits_and_nothing_makes_it_zero() -> None:
    found = scale_of(torch.tensor([LARGEST, 449.0, 896.0, 897.0, 224.0, 0.0, math.inf]))
    assert found[:5].tolist() == [1.0, 2.0, 2.0, 4.0, 0.5]
    assert found[5] > 0
    assert math.isinf(found[6])


def test_a_product_and_its_gradients_are_those_of_a_linear_layer_within_the_roundings_of_8_bits() -> None:
    linear = nn.Linear(96, 64, dtype=torch.bfloat16)
    x, slope = drawn(2, 32, 96).requires_grad_(), drawn(2, 32, 64, seed=1)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    linear.__class__ = Fp8Linear
    out = linear(x)
    out.backward(slope)
    assert x.grad is not None
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    of_weight = torch.einsum("bso,bsi->oi", slope.double(), x.detach().double())
    assert relative(out.detach(), exact.detach()) < 0.05
    assert relative(x.grad, slope.double() @ linear.weight.detach().double()) < 0.05
    assert relative(linear.weight.grad, of_weight) < 4e-3, "the gradient of the weight is not of 8 bits"
    assert relative(linear.bias.grad, slope.double().sum((0, 1))) < 4e-3
    again = linear(x)
    assert torch.equal(out, again)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so_in_its_row_alone(bad: float) -> None:
    layer, x = Fp8Linear(32, 16, bias=False, dtype=torch.bfloat16), drawn(8, 32)
    x[3, 5] = bad
    out = layer(x)
    assert not torch.isfinite(out[3]).any()
    assert torch.isfinite(out[[0, 1, 2, 4, 5, 6, 7]]).all()


def test_layers_but_the_first_and_the_last_compute_in_8_bits_and_keep_names_values_and_gradients() -> None:
    with torch.device("meta"):
        model, plain = Transformer(SIZES), Transformer(SIZES)
    assert use_fp8(largest_list(model)) == {32, 64, 96}
    kinds = [{type(module) for module in block.modules() if isinstance(module, nn.Linear)} for block in model.blocks]
    assert kinds == [{nn.Linear}, {Fp8Linear}, {Fp8Linear}, {nn.Linear}]
    assert not isinstance(model.head, Fp8Linear)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_warm_up_meets_the_widths_of_the_models_own_layers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    met, own = set(), fp8.rows
    monkeypatch.setattr(fp8, "rows", lambda x: met.add(x.size(1)) or own(x))  # type: ignore[func-returns-value]
    fp8.warm_up(
        torch.device("cpu"), torch.bfloat16, use_fp8(largest_list(meta_model(task(partial(Transformer, SIZES)))))
    )
    assert met == {32, 64, 96}


def test_models_that_cannot_compute_in_8_bits_are_refused_by_name() -> None:
    check_linears(task(partial(Transformer, SIZES)))
    with pytest.raises(ValueError, match=r"none of the model's 2 layers would compute in 8 bits"):
        check_linears(task(partial(Transformer, replace(SIZES, num_layers=2))))
    narrow = replace(SIZES, width=36, num_heads=1, num_kv_heads=1, head_dim=36, ffn_width=100)
    with pytest.raises(ValueError, match="multiples of 16"):
        check_linears(task(partial(Transformer, narrow)))
    experts = replace(SIZES, num_experts=4, experts_per_token=2, expert_width=32)
    with pytest.raises(ValueError, match="this one has experts"):
        check_linears(task(partial(Transformer, experts)))
    with pytest.raises(ValueError, match="adapters on a frozen base"):
        check_linears(task(partial(Transformer, SIZES), frozen=object()))


def test_settings_that_do_not_go_together_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"linears='fp8' and param_dtype='float32'.*set param_dtype='bfloat16'"):
        StepConfig(linears="fp8")
    with pytest.raises(ValueError, match=r"linears='fp8' and device='cpu'.*an H100 or newer; leave linears out"):
        check_together(ScalingConfig(), STEP, ())
