"""ring-flash-attn's zigzag ring, as published, over FlashAttention-2.

Driven as its own benchmark does (zhuzilin/ring-flash-attention, `benchmark/benchmark_kvpacked_func.py`): contiguous
(B, S_local, H, D) leaves that exist before the clock starts, one call and its backward in a pass. Where flash-attn 2 is
not installed, torch's aten runs the same kernels and the system's name says so.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.attention_systems import Prepared, Problem, Tensors, through_autograd


class RingFlashAttention:
    layout = "zigzag"

    def __init__(self) -> None:
        shimmed = "" if _has_flash_attn_2() else " (aten FA2)"
        self.name = f"ring-flash-attn zigzag{shimmed}"

    def refusal(self, problem: Problem) -> str | None:
        installed = "ring_flash_attn" in sys.modules or importlib.util.find_spec("ring_flash_attn") is not None
        return None if installed else "ring-flash-attn is not installed"

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        if not _has_flash_attn_2():
            sys.modules["flash_attn.flash_attn_interface"] = _shim()
        zigzag = _import_without_adapters("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func

        return Prepared(through_autograd(lambda q, k, v: zigzag(q, k, v, causal=True, group=group), tensors))


def _has_flash_attn_2() -> bool:
    """flash-attn-4 alone leaves a `flash_attn` package without this module."""
    if "flash_attn.flash_attn_interface" in sys.modules:
        return not hasattr(sys.modules["flash_attn.flash_attn_interface"], "is_stand_in")
    try:
        return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _import_without_adapters(module: str) -> Any:
    """A module of ring_flash_attn without its package's own imports, which ask for old transformers."""
    if "ring_flash_attn" not in sys.modules:
        spec = importlib.util.find_spec("ring_flash_attn")
        assert spec is not None
        package = types.ModuleType("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["ring_flash_attn"] = package
    return importlib.import_module(f"ring_flash_attn.{module}")


def _shim() -> types.ModuleType:
    module: Any = types.ModuleType("flash_attn.flash_attn_interface")

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Any = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, None

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Any = None,
        deterministic: bool = False,
    ) -> None:
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            None,
            None,
            q.size(1),
            k.size(1),
            0.0,
            causal,
            random,
            random,
            scale=softmax_scale,
        )
        for target, grad in zip((dq, dk, dv), found, strict=True):
            target.copy_(grad)

    module.is_stand_in = True
    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    stand_in: types.ModuleType = module
    return stand_in
