"""The schedule is a function of the step; the optimizer is AdamW over plain shards, decayed by full shape."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import (
    BALANCE_SCALE,
    OptimConfig,
    check_optimizer,
    check_schedule,
    learning_rate,
    make_optimizer,
    make_own_optimizer,
)
from elastic_ring.train.wrap import check_own_optimizer
from tests.unit.train.tiny_task import EXPERTS, make_task

CONFIG = OptimConfig(peak_lr=1.0, min_lr=0.1, warmup_steps=4, total_steps=24)


def test_a_schedule_that_is_planned_again_keeps_its_past_and_rises_from_its_last_rate() -> None:
    config = OptimConfig(peak_lr=1.0, min_lr=0.1, schedule="linear", warmup_steps=2, total_steps=4)
    longer = replace(config, total_steps=10, replanned=(4, 6))
    rates = [learning_rate(step, longer) for step in range(12)]
    assert rates[:6] == [learning_rate(step, config) for step in range(6)], "the last rate is kept between the two"
    assert rates[6:] == pytest.approx([0.55, 1.0, 0.55, 0.1, 0.1, 0.1])
    cut = replace(config, total_steps=5, replanned=(4, 3))
    assert [learning_rate(step, cut) for step in (2, 3, 4)] == pytest.approx([0.55, 1.0, 0.1]), "half decayed"
    for wrong in ((4,), (4, 10), (4, 0), (0, 4)):
        with pytest.raises(ValueError, match="leave it to --extend --replan"):
            replace(longer, replanned=wrong)


def test_the_rate_rises_to_the_peak_and_falls_to_the_minimum() -> None:
    rates = [learning_rate(step, CONFIG) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:24] == sorted(rates[3:24], reverse=True)
    assert len(set(rates[3:24])) == 21
    assert rates[13] == pytest.approx(0.55)
    assert rates[23:] == pytest.approx([0.1] * 17)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        ({"schedule": "wsd", "decay_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"schedule": "wsd"}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        ({"schedule": "wsd", "decay_steps": 5}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
    ],
)
def test_schedules_by_name(settings: dict[str, Any], expected: list[float]) -> None:
    """Two steps of warm-up, five more, and one beyond the end."""
    config = OptimConfig(peak_lr=1.0, min_lr=0.0, warmup_steps=2, total_steps=7, **settings)
    assert [learning_rate(step, config) for step in range(8)] == pytest.approx(expected)


def test_a_schedule_of_ones_own_decides_every_rate_and_must_give_one() -> None:
    assert [learning_rate(step, CONFIG, lambda step: 0.5**step) for step in range(3)] == [1.0, 0.5, 0.25]
    check_schedule(lambda step: 0.1, CONFIG, 100)
    for wrong in (math.nan, -1.0, None, "1e-3", True):
        with pytest.raises(ValueError, match=r"lr_schedule gives .* for step 7: must be a finite number of 0 or more"):
            check_schedule(lambda step, wrong=wrong: wrong if step == 7 else 0.1, CONFIG, 10)  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"lr_schedule and OptimConfig schedule='wsd' are both given"):
        check_schedule(lambda step: 0.1, OptimConfig(schedule="wsd"), 10)


@pytest.mark.parametrize(
    ("settings", "first", "last"),
    [
        ({"warmup_steps": 0, "total_steps": 1}, 0.1, 0.1),
        ({"warmup_steps": 5, "total_steps": 5}, 0.2, 1.0),
        ({"warmup_steps": 0, "total_steps": 5, "min_lr": 1.0}, 1.0, 1.0),
    ],
)
def test_the_ends_of_short_schedules(settings: dict[str, Any], first: float, last: float) -> None:
    config = OptimConfig(**{"peak_lr": 1.0, "min_lr": 0.1, **settings})
    assert learning_rate(0, config) == pytest.approx(first)
    assert learning_rate(config.total_steps - 1, config) == pytest.approx(last)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peak_lr": 0.0}, "peak_lr=0.0"),
        ({"peak_lr": float("nan")}, "peak_lr=nan"),
        ({"min_lr": 1.0}, "min_lr=1.0"),
        ({"warmup_steps": 2000}, "warmup_steps=2000"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"max_skipped": -1}, "max_skipped=-1"),
        ({"schedule": "step"}, "schedule='step'"),
        ({"schedule": "wsd", "decay_steps": 1001}, "decay_steps=1001"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"OptimConfig {named}: must be"):
        OptimConfig(**settings)


def shards() -> list[tuple[str, torch.Tensor]]:
    """A rank's flat shards of a matrix, a norm, and a matrix of which it holds no row."""
    return [("matrix", torch.ones(6)), ("norm", torch.ones(3)), ("empty", torch.ones(0, 4))]


def test_decay_follows_the_dimensions_of_the_whole_parameter() -> None:
    own = shards()
    optimizer = make_optimizer(own, CONFIG, {"matrix": 2, "norm": 1, "empty": 2})
    for _, tensor in own:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    values = dict(own)
    decayed = 1.0 - learning_rate(0, CONFIG) * CONFIG.weight_decay
    torch.testing.assert_close(values["matrix"], torch.full((6,), decayed))
    assert torch.equal(values["norm"], torch.ones(3))
    with pytest.raises(ValueError, match="no entry for norm, empty"):
        make_optimizer(own, CONFIG, {"matrix": 2})


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_a_bias_that_balances_moves_by_the_same_step_whatever_the_size_of_its_gradient(scale: float) -> None:
    own = [("ffn.balance_bias", torch.zeros(3)), ("matrix", torch.ones(6))]
    optimizer = make_optimizer(own, CONFIG, {"ffn.balance_bias": 1, "matrix": 2})
    for _ in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group.get("lr_scale", 0.0)
        own[0][1].grad, own[1][1].grad = torch.tensor([3.0, -0.5, 0.0]) * scale, torch.ones(6)
        optimizer.step()
    torch.testing.assert_close(own[0][1], torch.tensor([-3.0, 3.0, 0.0]) * 1e-3 * BALANCE_SCALE, rtol=1e-6, atol=0)
    assert torch.equal(own[1][1], torch.ones(6)), "its group has another scale"
    with pytest.raises(ValueError, match=r"ffn\.balance_bias moves by a rule of the built-in AdamW"):
        make_own_optimizer(lambda named: torch.optim.Adagrad(tensors_of(named)), own)
    task = make_task(optimizer=lambda named: torch.optim.SGD(tensors_of(named), lr=0.1))
    task = replace(task, model=partial(Transformer, EXPERTS))
    with pytest.raises(ValueError, match=r"balance_bias moves by a rule of the built-in AdamW"):
        check_own_optimizer(task)


Named = list[tuple[str, torch.Tensor]]


def tensors_of(named: Named) -> list[torch.Tensor]:
    return [tensor for _, tensor in named]


@pytest.mark.parametrize(
    "make",
    [
        lambda named: make_optimizer(named, CONFIG, {name: 2 for name, _ in named}),
        lambda named: torch.optim.SGD(tensors_of(named), lr=0.1, momentum=0.9, nesterov=True),
        lambda named: torch.optim.RMSprop(tensors_of(named), lr=0.1),
        lambda named: torch.optim.Adagrad(tensors_of(named), lr=0.1),
    ],
    ids=["AdamW", "SGD", "RMSprop", "Adagrad"],
)
def test_an_elementwise_optimizer_gives_on_shards_the_bits_of_the_whole(make: Any) -> None:
    torch.manual_seed(0)
    whole, grad = torch.randn(7, 5), torch.randn(7, 5)
    pieces = [whole[:3].clone(), whole[3:].clone(), torch.ones(0, 5)]
    for tensors, grads in (([whole], [grad]), (pieces, [grad[:3], grad[3:], grad[:0]])):
        named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
        optimizer = make(named)
        check_optimizer(optimizer, named)
        for _ in range(3):
            for tensor, own in zip(tensors, grads, strict=True):
                tensor.grad = own.clone()
            optimizer.step()
    assert torch.equal(torch.cat(pieces), whole)


def test_an_optimizer_that_factors_its_statistics_steps_on_each_slice_for_itself() -> None:
    torch.manual_seed(0)
    """torch's fails on a tensor without elements, which a rank of a large ring may have."""
    own = [("rows", torch.randn(3, 5)), ("no rows", torch.ones(0, 5)), ("norm", torch.ones(4))]
    before = [tensor.clone() for _, tensor in own]
    optimizer = make_own_optimizer(lambda named: torch.optim.Adafactor(tensors_of(named), lr=0.1), own)
    for _, tensor in own:
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in own)
    assert [torch.equal(a, b) for a, (_, b) in zip(before, own, strict=True)] == [False, True, False]


class DerivedMuon(torch.optim.Muon):
    """A user's own kind of an optimizer that is refused."""


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda named: torch.optim.Muon(tensors_of(named)), "optimizer Muon computes with whole matrices"),
        (lambda named: DerivedMuon(tensors_of(named)), "optimizer Muon computes with whole matrices"),
        (lambda named: torch.optim.LBFGS(tensors_of(named)), "optimizer LBFGS computes the gradient several times"),
        (lambda named: torch.optim.SGD([torch.ones(2)], lr=0.1), "has other parameters than the shards"),
        (lambda named: named, r"optimizer returned a list: it must return a torch\.optim\.Optimizer"),
    ],
    ids=["Muon", "a kind of Muon", "LBFGS", "other tensors", "no optimizer"],
)
def test_what_cannot_work_on_slices_is_refused_by_name_before_anything_starts(make: Any, told: str) -> None:
    named = [("matrix", torch.ones(4, 3))]
    with pytest.raises(ValueError, match=told):
        check_optimizer(make(named), named)
    task = make_task(optimizer=make)
    task = replace(task, model=partial(torch.nn.Linear, 3, 4, bias=False))
    with pytest.raises(ValueError, match=told):
        check_own_optimizer(task)


def test_an_optimizer_that_reads_values_when_it_is_made_is_left_to_the_workers() -> None:
    def reads(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors_of(named), lr=float(named[0][1].abs().max()))

    check_own_optimizer(make_task(optimizer=reads))


def test_groups_keep_the_given_order() -> None:
    named = [(f"p{index}", torch.zeros(index + 1)) for index in range(5)]
    optimizer = make_optimizer(named, CONFIG, {name: 2 - index % 2 for index, (name, _) in enumerate(named)})
    sizes = [[tensor.numel() for tensor in group["params"]] for group in optimizer.param_groups]
    assert sizes == [[1, 3, 5], [2, 4]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [CONFIG.weight_decay, 0.0]
