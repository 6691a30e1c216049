"""Experts of transformers' models: one function for every family, and what a family's experts are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.experts.compute import Order, grouped_linear
from elastic_ring.experts.exchange import balancing_loss, run_experts

NOISE = ("router_jitter_noise", "input_jitter_noise")
BESIDE_BIAS = 7
TOP_K = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True)
class ExpertSizes:
    """Experts as `ModelConfig` has them."""

    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    num_dense_layers: int = 0


NO_EXPERTS = ExpertSizes()


def compute(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts of transformers' interface: hidden (T, width), chosen and weights (T, k) to (T, width)."""
    order = Order.of(chosen, module.num_experts)
    return order.gather(run_experts(module, order, order.spread(hidden), partial(_products, module)), weights)


def _products(module: Any, weights: Mapping[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
    inner = module._apply_gate(_linear(module, weights, "gate_up_proj", rows, ends))
    return _linear(module, weights, "down_proj", inner, ends)


def _linear(module: Any, weights: Mapping[str, Tensor], name: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight = weights[name]
    if module.is_transposed:
        weight = weight.mT
    if not module.has_bias:
        return grouped_linear(rows, weight, ends)
    # A bias is the weight of an input that is 1: its gradient is summed in a product, in an order that repeats. Seven
    # zeros beside it keep rows aligned.
    bias = weights[f"{name}_bias"]
    ones = nn.functional.pad(rows.new_ones(rows.size(0), 1), (0, BESIDE_BIAS))
    return grouped_linear(
        torch.cat([rows, ones], dim=1),
        torch.cat([weight, nn.functional.pad(bias.unsqueeze(2), (0, BESIDE_BIAS))], dim=2),
        ends,
    )


def mark(model: nn.Module, config: Any) -> None:
    """Have a model's experts say what `experts.exchange` asks of a layer."""
    for _, module in expert_modules(model):
        module.experts_per_token = _top_k(config)
        module.width, module.exchange, module.meter = int(config.hidden_size), None, None


def has_balancing_loss(config: Any) -> bool:
    """Whether transformers would add one to the loss."""
    return bool(getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0))


def balancing(config: Any, logits: Any, attention: Any, num_targets: Tensor) -> Tensor:
    """This rank's part of the balancing loss, with the config's coefficient."""
    part = balancing_loss(tuple(logits), _top_k(config), getattr(attention, "group", None), num_targets)
    return float(config.router_aux_loss_coef) * part


def _top_k(config: Any) -> int:
    return next((value for name in TOP_K if (value := getattr(config, name, None))), 0)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the experts of each layer, as `compute` is called with them."""
    for name, module in model.named_modules():
        if hasattr(module, "num_experts") and hasattr(module, "down_proj") and hasattr(module, "_apply_gate"):
            yield name, module


def check_experts(model: nn.Module, config: Any, *, adds_loss: bool = True) -> None:
    """Raises ValueError for experts that this function does not compute, and for results that depend on how a batch is
    cut. `adds_loss`: the model's loss can have a balancing loss beside it."""
    kind = f"model_type={config.model_type!r}"
    for name in NOISE:
        if getattr(config, name, 0.0):
            raise ValueError(
                f"{kind} {name}={getattr(config, name)}: routers have no noise here, because a step that runs again "
                "must choose the same experts; set it to 0.0"
            )
    if has_balancing_loss(config) and not adds_loss:
        raise ValueError(f"{kind} output_router_logits=True: its balancing loss is not computed here; set it to False")
    if getattr(config, "expert_capacity", None) or getattr(config, "capacity_factor", None):
        raise ValueError(
            f"{kind} has a capacity of its experts: which tokens are dropped would depend on the number of ranks; set "
            "expert_capacity and capacity_factor to None"
        )
    for name, module in expert_modules(model):
        if not getattr(module, "has_gate", True):
            raise ValueError(f"{kind}: {name} has no gate, which experts here have; choose another model")
        if getattr(module, "has_post_expert_norm", False):
            raise ValueError(f"{kind}: {name} has a norm behind each expert; choose another model")


def expert_sizes(model: nn.Module, config: Any) -> ExpertSizes:
    """Read off the module; all zero for a model without experts. Raises ValueError where layers differ, or nothing says
    how many experts a token takes."""
    found = [
        (module.num_experts, module.down_proj.size(-2 if module.is_transposed else -1), _shared_width(model, name))
        for name, module in expert_modules(model)
    ]
    if not found:
        return NO_EXPERTS
    kind = f"model_type={config.model_type!r}"
    top_k = next(module.experts_per_token for _, module in expert_modules(model))
    if not isinstance(top_k, int) or top_k < 1 or len(set(found)) != 1:
        raise ValueError(f"{kind}: its layers have unlike experts, or {TOP_K[0]} is not a number; choose another model")
    (number, width, shared), *_ = found
    return ExpertSizes(number, top_k, width, shared, int(config.num_hidden_layers) - len(found))


def _shared_width(model: nn.Module, experts: str) -> int:
    """The width of the feed-forward layer beside the experts that takes every token; 0 where there is none."""
    block = model.get_submodule(experts.rpartition(".")[0])
    beside: list[Any] = [part for name, part in block.named_children() if name.startswith("shared")]
    return sum(int(part.down_proj.weight.size(1)) for part in beside if hasattr(part, "down_proj"))
