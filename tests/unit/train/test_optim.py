"""The schedule is a function of the step; the optimizer is AdamW over plain shards, decayed by full shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ring.train.optim import OptimConfig, learning_rate, make_optimizer

CONFIG = OptimConfig(peak_lr=1.0, min_lr=0.1, warmup_steps=4, total_steps=24)


def test_the_rate_rises_to_the_peak_and_falls_to_the_minimum() -> None:
    rates = [learning_rate(step, CONFIG) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:24] == sorted(rates[3:24], reverse=True)
    assert len(set(rates[3:24])) == 21
    assert rates[13] == pytest.approx(0.55)
    assert rates[23:] == pytest.approx([0.1] * 17)


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


def test_a_step_on_shards_is_bitwise_the_step_on_the_whole() -> None:
    torch.manual_seed(0)
    whole, grad = torch.randn(7, 5), torch.randn(7, 5)
    pieces = [whole[:3].clone(), whole[3:].clone()]
    ndims = {"matrix": 2}
    for tensors, grads in (([whole], [grad]), (pieces[:1], [grad[:3]]), (pieces[1:], [grad[3:]])):
        optimizer = make_optimizer([("matrix", tensors[0])], CONFIG, ndims)
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, CONFIG)
            tensors[0].grad = grads[0].clone()
            optimizer.step()
    assert torch.equal(torch.cat(pieces), whole)


def test_groups_keep_the_given_order() -> None:
    named = [(f"p{index}", torch.zeros(index + 1)) for index in range(5)]
    optimizer = make_optimizer(named, CONFIG, {name: 2 - index % 2 for index, (name, _) in enumerate(named)})
    sizes = [[tensor.numel() for tensor in group["params"]] for group in optimizer.param_groups]
    assert sizes == [[1, 3, 5], [2, 4]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [CONFIG.weight_decay, 0.0]
