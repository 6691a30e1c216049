"""The squared norm of a gradient in fp64, on its device; squares of finite fp32 numbers cannot overflow fp64."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

PIECE_ELEMENTS = 16 << 20


def squared_norm(flat: Tensor) -> Tensor:
    """The fp64 sum of squares of a flat fp32 tensor, 0-dim; equal tensors give equal bits."""
    fused = _triton_kernel() if flat.is_cuda and flat.numel() else None
    return eager_squared_norm(flat) if fused is None else fused.squares(flat)


def eager_squared_norm(flat: Tensor) -> Tensor:
    """As `squared_norm`, in parts, because the fp64 copy of a part takes twice its memory."""
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in flat.split(PIECE_ELEMENTS)]
    return torch.stack(parts).sum()


@lru_cache(maxsize=1)
def _triton_kernel() -> ModuleType | None:
    try:
        from elastic_ring.state.device import squares_kernel as device_squares_kernel
    except ImportError:
        return None
    return device_squares_kernel
