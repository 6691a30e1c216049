"""The registry of block-sparse kernels, and the selection of one for a call.

A kernel is used only after it passed `sparse_verify.self_test`. Communication and block tables must not enter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from elastic_ring.attention.kernels.adapters import block_reference, block_sparse
from elastic_ring.attention.kernels.backend import version_of
from elastic_ring.attention.kernels.block_tables import BlockTables
from elastic_ring.attention.kernels.sparse_verify import self_test
from elastic_ring.errors import RunFailed

log = logging.getLogger(__name__)

_Pair = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockTables, float], _Pair]
"""q (B, Sq, H, D), k and v (B, Sk, Hkv, D), tables, scale to out (B, Sq, H, D) and natural-log lse (B, Sq, H)."""
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(dout, q, k, v, out, lse, tables, scale) to dq, dk, dv, from the merged out and lse; see `writes_gradients`."""


@dataclass(frozen=True)
class SparseKernel:
    """One block-sparse kernel. `run` is differentiable and takes whole sequences; `forward` and `backward` take any
    range of keys.

    `deterministic`: equal calls give bitwise equal results, gradients included; the self-test checks it. `keeps_type`:
    gradients have the inputs' dtype, so sending them in a wider one would only add bytes. `by_length`: the kernel is
    compiled for each number of query blocks and of key blocks. `writes_gradients`: backward takes output tensors `dk`
    and `dv` of the inputs' dtype, whose rows may be strided.
    """

    name: str
    run: Run
    forward: Run
    backward: Backward
    deterministic: bool
    head_dims: tuple[int, ...] | None = (64, 128)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cuda",)
    package: str | None = None
    keeps_type: bool = True
    by_length: bool = False
    writes_gradients: bool = False

    def refusal(self, head_dim: int, dtype: torch.dtype, deterministic: bool, device: str = "cuda") -> str | None:
        """Why the kernel cannot serve such calls; None if it can."""
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}"
        if deterministic and not self.deterministic:
            return "has no deterministic sparse backward on this device"
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"takes head_dim {', '.join(map(str, self.head_dims))}, not {head_dim}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(str(each).removeprefix('torch.') for each in self.dtypes)}, not {dtype}"
        if self.package is not None and self.version() is None:
            return f"needs {self.package}, which is not installed"
        return None

    def version(self) -> str | None:
        """The version of `package` (None if it is not installed), or of torch for a kernel without a package."""
        return version_of(self.package)


KERNELS = (
    SparseKernel(
        "flash-attn-4-sparse", block_sparse.flash, block_sparse.flash_forward, block_sparse.flash_backward, False,
        package="flash-attn-4", writes_gradients=True,
    ),
    SparseKernel(
        "flex-sparse", block_sparse.flex, block_sparse.flex_forward, block_sparse.flex_backward, True, by_length=True
    ),
)  # fmt: skip
"""In order of preference."""

REFERENCE = SparseKernel(
    "reference-sparse", block_reference.whole, block_reference.forward, block_reference.backward, True, None,
    (torch.float64, torch.float32, torch.bfloat16, torch.float16), ("cpu", "cuda"), keeps_type=False,
    writes_gradients=True,
)  # fmt: skip
"""Materializes all scores in fp64. Used only when named by `pin`."""


@lru_cache(maxsize=64)
def select_sparse(
    head_dim: int,
    head_ratio: int,
    dtype: torch.dtype,
    deterministic: bool,
    pin: str | None = None,
    device: str = "cuda",
    cache_dir: Path | None = None,
) -> SparseKernel:
    """The first kernel that can serve calls with `head_ratio` query heads per K/V head and passes its self-test with
    that ratio; `pin` names the only candidate, `cache_dir` stores passed tests.

    Raises: `ValueError` if `pin` is unknown or cannot serve the call, `RunFailed` if no kernel passes.
    """
    chosen = [kernel for kernel in (*KERNELS, REFERENCE) if pin == kernel.name or (pin is None and kernel in KERNELS)]
    if not chosen:
        names = ", ".join(kernel.name for kernel in (*KERNELS, REFERENCE))
        raise ValueError(f"kernel={pin!r}: unknown; choose one of {names}")
    reasons = []
    for kernel in chosen:
        reason = kernel.refusal(head_dim, dtype, deterministic, device)
        if reason is not None and pin is not None:
            raise ValueError(f"kernel={pin!r} {reason}; leave kernel out to have one chosen")
        reason = reason or self_test(kernel, head_dim, head_ratio, dtype, device, cache_dir)
        if reason is None:
            return kernel
        log.warning("sparse kernel %s passed over: %s", kernel.name, reason)
        reasons.append(f"{kernel.name} {reason}")
    raise RunFailed(
        f"no sparse kernel serves head_dim={head_dim}, {head_ratio} query heads per K/V head, {dtype}:"
        f" {'; '.join(reasons)}"
    )


def sparse_form(backend: str | None) -> str | None:
    """The name of the sparse kernel in a dense backend's family; None if there is none."""
    name = f"{backend}-sparse"
    return name if any(kernel.name == name for kernel in KERNELS) else None
