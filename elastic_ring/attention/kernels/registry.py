"""The table of attention backends with their capabilities, and the selection of one for a call.

A backend is two functions over one tile in (B, S, H, D) layout. No hops, ranks or process groups in this file.
A backend that fails its self-test is skipped with a warning.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from elastic_ring.attention.kernels.adapters import (
    aten_cpu,
    aten_flash,
    cudnn,
    flash_attn2,
    flash_attn4,
    flex,
    reference,
)
from elastic_ring.attention.kernels.backend import Backend
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.errors import RunFailed

__all__ = ["BACKENDS", "Backend", "select", "self_test"]

logger = logging.getLogger(__name__)

_ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="flash-attn-4",
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=256,
        deterministic=False,
        forward=flash_attn4.forward,
        backward=flash_attn4.backward,
        deterministic_backward=flash_attn4.deterministic_backward,
        min_capability=(9, 0),
        head_dim_multiple=8,
        keeps_type=True,
        writes_gradients=True,
        tile_tokens=flash_attn4.TILE_TOKENS,
        package="flash-attn-4",
    ),
    Backend(
        name="cudnn",
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=128,
        deterministic=False,
        forward=cudnn.forward,
        backward=cudnn.backward,
        min_capability=(8, 0),
        head_dim_multiple=8,
        keeps_type=True,
    ),
    Backend(
        name="flash-attn-2",
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=256,
        deterministic=False,
        forward=flash_attn2.forward,
        backward=flash_attn2.backward,
        deterministic_backward=flash_attn2.deterministic_backward,
        min_capability=(8, 0),
        head_dim_multiple=8,
        keeps_type=True,
        writes_gradients=True,
        package="flash-attn",
    ),
    Backend(
        name="aten-flash",
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=256,
        deterministic=False,
        forward=aten_flash.forward,
        backward=aten_flash.backward,
        deterministic_backward=aten_flash.deterministic_backward,
        min_capability=(8, 0),
        head_dim_multiple=8,
        keeps_type=True,
    ),
    Backend(
        name="flex",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        max_head_dim=256,
        deterministic=True,
        forward=flex.forward,
        backward=flex.backward,
        min_capability=(8, 0),
        head_dim_multiple=16,
        keeps_type=True,
        by_length=True,
        graphable=False,
    ),
    Backend(
        name="aten-cpu",
        devices=("cpu",),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        deterministic=True,
        forward=aten_cpu.forward,
        backward=aten_cpu.backward,
    ),
    Backend(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        deterministic=True,
        forward=reference.forward,
        backward=reference.backward,
    ),
)
"""In order of preference."""


def select(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    pin: str | None = None,
    *,
    head_ratio: int = 2,
    cache_dir: Path | None = None,
    backends: tuple[Backend, ...] = BACKENDS,
) -> Backend:
    """The first backend that supports such calls and passes its self-test; `pin` restricts the choice to one name.

    `head_ratio` is the number of query heads per K/V head. With `deterministic` the bitwise repeatable form is
    returned. Test results are cached per process, passes also in `cache_dir`. Raises `ValueError` if `pin` is unknown
    or no candidate supports the call, and `RunFailed` if candidates exist but none passes.
    """
    return _select(torch.device(device), dtype, head_dim, deterministic, pin, head_ratio, cache_dir, backends)


@lru_cache(maxsize=128)
def _select(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    pin: str | None,
    head_ratio: int,
    cache_dir: Path | None,
    backends: tuple[Backend, ...],
) -> Backend:
    """Cached, because every attention call needs it and a failed self-test should be logged only once."""
    if pin is not None:
        chosen = [backend for backend in backends if backend.name == pin]
        if not chosen:
            raise ValueError(f"backend={pin!r}: unknown; choose one of {', '.join(b.name for b in backends)}")
        refusal = chosen[0].refusal(device, dtype, head_dim, deterministic)
        if refusal is not None:
            raise ValueError(f"backend={pin!r} {refusal}; leave backend out to have one chosen")
        backends = (chosen[0],)
    able = [backend for backend in backends if backend.refusal(device, dtype, head_dim, deterministic) is None]
    if not able:
        raise ValueError(f"no attention backend: {dtype}, head_dim={head_dim} on {device.type}; use another type")
    for backend in able:
        if deterministic and not backend.deterministic:
            assert backend.deterministic_backward is not None
            backend = replace(backend, deterministic=True, backward=backend.deterministic_backward)
        failure = self_test(
            backend, device=device.type, dtype=dtype, head_dim=head_dim, head_ratio=head_ratio, cache_dir=cache_dir
        )
        if failure is None:
            return backend
        logger.warning("attention backend %s fails its self-test, passed over: %s", backend.name, failure)
    tried = ", ".join(backend.name for backend in able)
    raise RunFailed(f"no attention backend passes its self-test for {dtype} on {device.type}; tried {tried}")
