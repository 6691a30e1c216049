"""The registry of attention kernels, dense and sparse, and the selection of one for a call.

A kernel is two functions over one call in (B, S, H, D) layout. No hops, ranks or process groups in this file.
A kernel that fails its self-test is skipped with a warning.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

import torch

from elastic_ring.attention.kernels.adapters import (
    aten_cpu,
    aten_flash,
    block_reference,
    block_sparse,
    cudnn,
    flash_attn2,
    flash_attn4,
    flex,
    reference,
)
from elastic_ring.attention.kernels.kernel import DENSE, CoverKind, Kernel
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.errors import RunFailed

logger = logging.getLogger(__name__)

_ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="flash-attn-4",
        covers=DENSE,
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
    Kernel(
        name="cudnn",
        covers=DENSE,
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
    Kernel(
        name="flash-attn-2",
        covers=DENSE,
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
    Kernel(
        name="aten-flash",
        covers=DENSE,
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
    Kernel(
        name="flex",
        covers=DENSE,
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
    Kernel(
        name="aten-cpu",
        covers=(*DENSE, "mask"),
        devices=("cpu",),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        deterministic=True,
        forward=aten_cpu.forward,
        backward=aten_cpu.backward,
    ),
    Kernel(
        name="reference",
        covers=DENSE,
        devices=("cpu", "cuda"),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        deterministic=True,
        forward=reference.forward,
        backward=reference.backward,
    ),
    Kernel(
        name="flash-attn-4-sparse",
        covers=("tables",),
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=None,
        head_dims=(64, 128),
        deterministic=False,
        forward=block_sparse.flash_forward,
        backward=block_sparse.flash_backward,
        whole=block_sparse.flash,
        keeps_type=True,
        writes_gradients=True,
        package="flash-attn-4",
    ),
    Kernel(
        name="flex-sparse",
        covers=("tables",),
        devices=("cuda",),
        dtypes=_HALF,
        max_head_dim=None,
        head_dims=(64, 128),
        deterministic=True,
        forward=block_sparse.flex_forward,
        backward=block_sparse.flex_backward,
        whole=block_sparse.flex,
        keeps_type=True,
        by_length=True,
    ),
    Kernel(
        name="reference-sparse",
        covers=("tables",),
        devices=("cpu", "cuda"),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        deterministic=True,
        forward=block_reference.forward,
        backward=block_reference.backward,
        whole=block_reference.whole,
        writes_gradients=True,
        only_by_name=True,
    ),
)
"""In order of preference."""


def covering(cover: CoverKind) -> tuple[Kernel, ...]:
    """The kernels to choose from for calls of this kind."""
    return tuple(kernel for kernel in KERNELS if cover in kernel.covers and not kernel.only_by_name)


def named(name: str) -> Kernel:
    """The kernel of that name."""
    return next(kernel for kernel in KERNELS if kernel.name == name)


def sparse_form(backend: str | None) -> str | None:
    """The name of the kernel over tables in a dense kernel's family; None if there is none."""
    name = f"{backend}-sparse"
    return name if any(kernel.name == name for kernel in covering("tables")) else None


def select(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    pin: str | None = None,
    *,
    cover: CoverKind = "causal",
    head_ratio: int = 2,
    cache_dir: Path | None = None,
    kernels: tuple[Kernel, ...] | None = None,
) -> Kernel:
    """The first kernel that supports calls of such a `cover` and passes its self-test; `pin` restricts the choice to
    one name.

    `head_ratio` is the number of query heads per K/V head, with which it is tested. With `deterministic` the bitwise
    repeatable form is returned. Test results are cached per process, passes also in `cache_dir`. `kernels` replaces the
    registry. Raises `ValueError` if `pin` is unknown or cannot serve the call, or no dense kernel supports it, and
    `RunFailed` if none passes.
    """
    return _select(torch.device(device), dtype, head_dim, deterministic, pin, cover, head_ratio, cache_dir, kernels)


@lru_cache(maxsize=128)
def _select(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool,
    pin: str | None,
    cover: CoverKind,
    head_ratio: int,
    cache_dir: Path | None,
    kernels: tuple[Kernel, ...] | None,
) -> Kernel:
    """Cached, because every ring needs it and a failed self-test should be logged only once."""
    dense, setting = cover in DENSE, "kernel" if cover == "tables" else "backend"
    able = [kernel for kernel in kernels or KERNELS if cover in kernel.covers]
    chosen = [kernel for kernel in able if (not kernel.only_by_name if pin is None else kernel.name == pin)]
    if not chosen:
        raise ValueError(f"{setting}={pin!r}: unknown; choose one of {', '.join(kernel.name for kernel in able)}")
    reasons, failed = {}, []
    for kernel in chosen:
        if (refusal := kernel.refusal(device, dtype, head_dim, deterministic)) is not None:
            if pin is not None:
                raise ValueError(f"{setting}={pin!r} {refusal}; leave {setting} out to have one chosen")
            if not dense:
                logger.warning("sparse kernel %s passed over: %s", kernel.name, refusal)
            reasons[kernel.name] = refusal
            continue
        kernel = kernel.repeatable() if deterministic else kernel
        failure = self_test(
            kernel, device=device.type, dtype=dtype, head_dim=head_dim, head_ratio=head_ratio, cache_dir=cache_dir
        )
        if failure is None:
            return kernel
        logger.warning("attention kernel %s fails its self-test, passed over: %s", kernel.name, failure)
        reasons[kernel.name] = failure
        failed.append(kernel.name)
    if not dense:
        raise RunFailed(
            f"no sparse kernel serves head_dim={head_dim}, {head_ratio} query heads per K/V head, {dtype}: "
            + "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        )
    if not failed:
        raise ValueError(f"no attention backend: {dtype}, head_dim={head_dim} on {device.type}; use another type")
    raise RunFailed(
        f"no attention backend passes its self-test for {dtype} on {device.type}; tried {', '.join(failed)}"
    )
