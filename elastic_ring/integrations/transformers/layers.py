"""Layers of transformers' models: experts by one function for every family, and Liger's kernels for norms, gated
feed-forward layers and rotary embedding.

Modules of one model are changed, never a class or a module of transformers: other models of the process stay as they
are. Each call of a fused layer decides by its tensors, and runs transformers' own code where Liger's kernels do not fit
(CPUs, fp64, the meta device).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic_ring.experts.compute import Order, grouped_linear
from elastic_ring.experts.exchange import run_experts
from elastic_ring.model import liger

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

    def products(weights: Mapping[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
        inner = module._apply_gate(_linear(module, weights, "gate_up_proj", rows, ends))
        return _linear(module, weights, "down_proj", inner, ends)

    order = Order.of(chosen, module.num_experts)
    return order.gather(run_experts(module, order, order.spread(hidden), products), weights)


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


def has_balancing_loss(config: Any) -> bool:
    """Whether transformers would add one to the loss."""
    return bool(getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0))


def top_k_of(config: Any) -> int:
    """How many experts a token takes; 0 without experts."""
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
    sizes: list[tuple[int, int, int]] = []
    for name, module in expert_modules(model):
        # The width of the feed-forward layer beside the experts that takes every token; 0 where there is none.
        block = model.get_submodule(name.rpartition(".")[0])
        shared: list[Any] = [part for part_name, part in block.named_children() if part_name.startswith("shared")]
        shared_width = sum(int(part.down_proj.weight.size(1)) for part in shared if hasattr(part, "down_proj"))
        width = module.down_proj.size(-2 if module.is_transposed else -1)
        sizes.append((module.num_experts, width, shared_width))
    if not sizes:
        return NO_EXPERTS
    kind = f"model_type={config.model_type!r}"
    top_k = next(module.experts_per_token for _, module in expert_modules(model))
    if not isinstance(top_k, int) or top_k < 1 or len(set(sizes)) != 1:
        raise ValueError(f"{kind}: its layers have unlike experts, or {TOP_K[0]} is not a number; choose another model")
    (number, width, shared_width), *_ = sizes
    return ExpertSizes(number, top_k, width, shared_width, int(config.num_hidden_layers) - len(sizes))


# ------------------------------------------------------------ Liger's kernels

ROPE = "apply_rotary_pos_emb"
"""The function of transformers' modelling files that rotates q and k."""


class NormKind(NamedTuple):
    """How a family's RMSNorm computes: arguments of `liger.rms_norm`."""

    offset: float = 0.0
    casting: str = "llama"
    in_place: bool = True


# Gemma and OLMo 2 multiply by the weight in fp32. Where a norm's result goes into a residual sum, the gradient of that
# sum is read by others too.
_GEMMA = NormKind(offset=1.0, casting="gemma", in_place=False)
NORMS = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "granite": NormKind(),
    "llama": NormKind(),
    "mistral": NormKind(),
    "olmo2": NormKind(casting="gemma", in_place=False),
    "phi3": NormKind(),
    "qwen2": NormKind(),
    "qwen3": NormKind(),
    "smollm3": NormKind(),
}
"""Model types whose layers are known: others keep transformers' own code."""


def fuse_layers(model: nn.Module, model_type: str) -> None:
    """Have the layers of this model use Liger's kernels where a call's tensors allow it."""
    from transformers.activations import ACT2FN

    norm_kind = NORMS.get(model_type)
    if norm_kind is None:
        return
    gated = {type(ACT2FN["silu"]): liger.silu_mul, type(ACT2FN["gelu_pytorch_tanh"]): liger.gelu_mul}
    module: Any
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_norm, module, norm_kind)
        elif name.endswith("MLP"):
            activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
            if type(activation) in gated:
                module.forward = partial(_feed_forward, module, gated[type(activation)])
        elif name.endswith("Attention"):
            # A forward of its own, which reads another function under the name of transformers'.
            forward = inspect.unwrap(type(module).forward)
            own = forward.__globals__.get(ROPE)
            if own is None or ROPE not in forward.__code__.co_names:
                continue
            names = {**forward.__globals__, ROPE: partial(_rope, own)}
            changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            changed.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(changed, module)


def _norm(module: Any, kind: NormKind, x: Tensor) -> Any:
    if not liger.fits(x, module.weight):
        return type(module).forward(module, x)
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return liger.rms_norm(x, module.weight, eps, **kind._asdict())


def _feed_forward(module: Any, gated: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Any:
    if not liger.fits(x):
        return type(module).forward(module, x)
    if hasattr(module, "gate_up_proj"):
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(gated(gate, up))


def _rope(own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    if options or not liger.fits(q, k) or not liger.fits(cos, sin) or cos.dim() != 3:
        return own(q, k, cos, sin, **options)
    return liger.rope(q, k, cos.float(), sin.float())  # products in fp32, rounded once
