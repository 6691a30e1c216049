"""The registry of attention kernels, dense and sparse, and the selection of one for a call.

A kernel is two functions over one call in (B, S, H, D) layout. No hops, ranks or process groups in this file.
A kernel that fails its self-test is skipped with a warning.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from elastic_ring.attention.kernels.adapters import aten, flash_attn, flex, reference
from elastic_ring.attention.kernels.kernel import DENSE, CoverKind, Kernel
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.errors import RunFailed

logger = logging.getLogger(__name__)

_ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)
_PACKED: tuple[CoverKind, ...] = (*DENSE, "documents")
_TABLES: tuple[CoverKind, ...] = ("tables", "masked_tables")
_on_gpu = partial(
    Kernel,
    covers=DENSE,
    devices=("cuda",),
    dtypes=_HALF,
    max_head_dim=256,
    deterministic=False,
    min_capability=(8, 0),
    head_dim_multiple=8,
    keeps_type=True,
)
_exact = partial(Kernel, dtypes=_ALL_DTYPES, max_head_dim=None, deterministic=True)
_over_tables = partial(
    Kernel,
    covers=_TABLES,
    devices=("cuda",),
    dtypes=_HALF,
    max_head_dim=None,
    head_dims=(64, 128),
    keeps_type=True,
    capped_covers=_TABLES,
)

KERNELS: tuple[Kernel, ...] = (
    _on_gpu(
        "flash-attn-4",
        forward=flash_attn.flash4_forward,
        backward=flash_attn.flash4_backward,
        deterministic_backward=flash_attn.flash4_deterministic_backward,
        min_capability=(9, 0),
        covers=_PACKED,
        writes_gradients=True,
        tile_tokens=flash_attn.TILE_TOKENS,
        package="flash-attn-4",
        capped_covers=DENSE,
    ),
    _on_gpu("cudnn", forward=aten.cudnn_forward, backward=aten.cudnn_backward, max_head_dim=128),
    _on_gpu(
        "flash-attn-2",
        forward=flash_attn.flash2_forward,
        backward=flash_attn.flash2_backward,
        deterministic_backward=flash_attn.flash2_deterministic_backward,
        writes_gradients=True,
        package="flash-attn",
        capped_covers=DENSE,
    ),
    _on_gpu(
        "aten-flash",
        forward=aten.flash_forward,
        backward=aten.flash_backward,
        deterministic_backward=aten.flash_deterministic_backward,
        covers=_PACKED,
    ),
    _on_gpu(
        "flex",
        forward=flex.forward,
        backward=flex.backward,
        dtypes=(*_HALF, torch.float32),
        deterministic=True,
        head_dim_multiple=16,
        by_length=True,
        capped_covers=DENSE,
    ),
    _exact(
        "aten-cpu",
        forward=aten.cpu_forward,
        backward=aten.cpu_backward,
        covers=(*DENSE, "mask"),
        devices=("cpu",),
    ),
    _exact(
        "reference",
        forward=reference.forward,
        backward=reference.backward,
        covers=(*_PACKED, "mask"),
        devices=("cpu", "cuda"),
        capped_covers=(*_PACKED, "mask"),
    ),
    _over_tables(
        "flash-attn-4-sparse",
        forward=flash_attn.sparse_forward,
        backward=flash_attn.sparse_backward,
        deterministic=False,
        writes_gradients=True,
        package="flash-attn-4",
    ),
    _over_tables(
        "flex-sparse",
        forward=flex.sparse_forward,
        backward=flex.sparse_backward,
        deterministic=True,
        by_length=True,
    ),
    _exact(
        "reference-sparse",
        forward=reference.sparse_forward,
        backward=reference.sparse_backward,
        covers=_TABLES,
        capped_covers=_TABLES,
        devices=("cpu", "cuda"),
        writes_gradients=True,
        only_by_name=True,
    ),
)
"""In order of preference."""

_ALWAYS_TESTED: tuple[CoverKind, ...] = (*_PACKED, "mask", "tables")


_SELECTED: dict[tuple[object, ...], Kernel] = {}
"""The kernels of earlier calls: every ring selects, and a failed self-test is logged only once."""


def covering(cover: CoverKind) -> tuple[Kernel, ...]:
    """The kernels to choose from for calls of this kind."""
    return tuple(kernel for kernel in KERNELS if cover in kernel.covers and not kernel.only_by_name)


def named(name: str) -> Kernel:
    """The kernel of that name."""
    return next(kernel for kernel in KERNELS if kernel.name == name)


def sparse_form(backend: Kernel | str | None) -> str | None:
    """The name of the kernel over tables of a dense kernel's family; None if there is none."""
    name = f"{backend.name if isinstance(backend, Kernel) else backend}-sparse"
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
    softcap: float = 0.0,
    cache_dir: Path | None = None,
    kernels: tuple[Kernel, ...] | None = None,
) -> Kernel:
    """The first kernel that supports calls of such a `cover` and passes its self-test; `pin` restricts the choice to
    one name.

    `head_ratio` is the number of query heads per K/V head, with which it is tested. With `deterministic` the bitwise
    repeatable form is returned, with `softcap` the capped one, tested with a cap of at most 1 for scores of about 1.
    Test results are cached per process, passes also in `cache_dir`. `kernels` replaces the registry. Raises
    `ValueError` if `pin` is unknown or cannot serve the call, or no dense kernel supports it, and `RunFailed` if none
    passes.
    """
    device = torch.device(device)
    key = (device, dtype, head_dim, deterministic, pin, cover, head_ratio, softcap, cache_dir, kernels)
    if key in _SELECTED:
        return _SELECTED[key]
    dense, setting = cover in DENSE, "kernel" if cover in _TABLES else "backend"
    able = [kernel for kernel in kernels or KERNELS if cover in kernel.covers]
    chosen = [kernel for kernel in able if (not kernel.only_by_name if pin is None else kernel.name == pin)]
    if not chosen:
        raise ValueError(f"{setting}={pin!r}: unknown; choose one of {', '.join(kernel.name for kernel in able)}")
    reasons, failed = {}, []
    for kernel in chosen:
        if (
            refusal := kernel.refusal(device, dtype, head_dim, deterministic, cover=cover, softcap=softcap)
        ) is not None:
            if pin is not None:
                raise ValueError(f"{setting}={pin!r} {refusal}; leave {setting} out to have one chosen")
            if cover in _TABLES:
                logger.warning("sparse kernel %s passed over: %s", kernel.name, refusal)
            reasons[kernel.name] = refusal
            continue
        kernel = kernel.repeatable() if deterministic else kernel
        # Masks of blocks are compiled apart, so they are tested only where they are needed.
        tested = kernel.capped(min(softcap, 1.0))
        tested = replace(tested, covers=tuple(each for each in tested.covers if each in (cover, *_ALWAYS_TESTED)))
        failure = self_test(
            tested, device=device.type, dtype=dtype, head_dim=head_dim, head_ratio=head_ratio, cache_dir=cache_dir
        )
        if failure is None:
            _SELECTED[key] = kernel = kernel.capped(softcap)
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
        capped = f", softcap={softcap:g}" if softcap else ""
        repeatable = ", deterministic=True" if deterministic else ""
        raise ValueError(
            f"no attention backend: {dtype}, head_dim={head_dim}{capped}{repeatable} on {device.type}: "
            + "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        )
    raise RunFailed(
        f"no attention backend passes its self-test for {dtype} on {device.type}; tried {', '.join(failed)}"
    )
