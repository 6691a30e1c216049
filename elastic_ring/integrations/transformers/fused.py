"""Layers of transformers' models with Liger's kernels: norms, gated feed-forward layers and rotary embedding.

Modules of one model are changed, never a class or a module of transformers: other models of the process stay as they
are. Each call decides by its tensors, and runs transformers' own code where Liger's kernels do not fit (CPUs, fp64,
the meta device).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from elastic_ring.model import liger

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
    kind = NORMS.get(model_type)
    if kind is None:
        return
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = partial(_norm, module, kind)
        elif name.endswith("MLP"):
            _fuse_feed_forward(module)
        elif name.endswith("Attention"):
            _fuse_rope(module)


def _norm(module: Any, kind: NormKind, x: Tensor) -> Any:
    if not liger.fits(x, module.weight):
        return type(module).forward(module, x)
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return liger.rms_norm(x, module.weight, eps, **kind._asdict())


def _fuse_feed_forward(module: Any) -> None:
    from transformers.activations import ACT2FN

    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    for name, gated in (("silu", liger.silu_mul), ("gelu_pytorch_tanh", liger.gelu_mul)):
        if type(activation) is type(ACT2FN[name]):
            module.forward = partial(_feed_forward, module, gated)


def _feed_forward(module: Any, gated: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Any:
    if not liger.fits(x):
        return type(module).forward(module, x)
    if hasattr(module, "gate_up_proj"):
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(gated(gate, up))


def _fuse_rope(module: Any) -> None:
    """Give the module a forward of its own, which finds another function under the name of transformers'."""
    forward = inspect.unwrap(type(module).forward)
    own = forward.__globals__.get(ROPE)
    if own is None or ROPE not in forward.__code__.co_names:
        return
    names = {**forward.__globals__, ROPE: partial(_rope, own)}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(changed, module)


def _rope(own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    if options or not liger.fits(q, k) or not liger.fits(cos, sin) or cos.dim() != 3:
        return own(q, k, cos, sin, **options)
    return liger.rope(q, k, cos.float(), sin.float())  # products in fp32, rounded once
