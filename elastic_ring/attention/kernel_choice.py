"""Which kernel serves a pattern on a device, by its registered name, and why the preferred ones do not.

Reads the registries of dense backends and of block-sparse kernels and, where the device is present, runs the self-tests
that a call would run. Planning of hops and choice of layouts must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from elastic_ring.attention.block_kernels import KERNELS
from elastic_ring.attention.block_proof import self_test as sparse_self_test
from elastic_ring.attention.choice import Sizes
from elastic_ring.attention.kernels.block_tables import check_documents, check_whole_blocks
from elastic_ring.attention.kernels.table import BACKENDS, select
from elastic_ring.attention.rules import Dense
from elastic_ring.attention.sparse import SparsePattern

Kind = Literal["dense", "blocks", "tiles"]
""""dense": the dense ring and its backends. "blocks": whole blocks of 128 tokens in a block-sparse kernel. "tiles":
gathered tiles on CPUs."""

TILES = "sparse-cpu"


@dataclass(frozen=True)
class SelectedKernel:
    kind: Kind
    name: str
    why: str


def choose_kernel(
    pattern: SparsePattern, seq_len: int, sizes: Sizes, device: torch.device | str, dtype: torch.dtype,
    deterministic: bool,
) -> SelectedKernel:  # fmt: skip
    """The kernel of a call with `pattern` on `device`. If the device is absent no self-test runs, and `why` says so.

    Falls back to the CPU tiles where no GPU kernel takes the pattern. Raises: `ValueError` if no dense backend can
    serve the call, `RunFailed` if none passes its self-test.
    """
    device = torch.device(device)
    here = device.type == "cpu" or torch.cuda.is_available()
    untested = "" if here else f"; no {device.type} device is here, so that it was not tested"
    if set(pattern.heads) == {Dense()}:
        name, passed_over = _dense(sizes, device, dtype, deterministic, here)
        because = _because("every pair is kept, so the dense ring and its kernels serve", passed_over)
        return SelectedKernel("dense", name, because + untested)
    if device.type == "cpu":
        return SelectedKernel("tiles", TILES, "gathered tiles skip the rest")
    try:
        check_documents(pattern.document_starts)
        for rule in dict.fromkeys(pattern.heads):
            check_whole_blocks(rule, seq_len)
    except ValueError as error:
        return SelectedKernel("tiles", TILES, f"tiles on CPUs, because no kernel of GPUs takes the pattern: {error}")
    passed_over = []
    for kernel in KERNELS:
        reason = kernel.refusal(sizes.head_dim, dtype, deterministic, device.type)
        if reason is None and here:
            reason = sparse_self_test(kernel, sizes.head_dim, sizes.num_heads // sizes.num_kv_heads, dtype, device.type)
        if reason is None:
            because = _because("the pattern keeps whole blocks", passed_over)
            return SelectedKernel("blocks", kernel.name, because + untested)
        passed_over.append(f"{kernel.name} {reason}")
    return SelectedKernel("tiles", TILES, _because("tiles on CPUs, because no kernel of GPUs serves", passed_over))


def _dense(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, deterministic: bool, here: bool
) -> tuple[str, list[str]]:
    """(name, why each preferred backend does not serve)."""
    passed_over: list[str] = []
    chosen = None
    if here:
        head_ratio = sizes.num_heads // sizes.num_kv_heads
        chosen = select(device, dtype, sizes.head_dim, deterministic, head_ratio=head_ratio).name
    for backend in BACKENDS:
        if device.type not in backend.devices:
            continue
        candidate = backend if here else replace(backend, min_capability=None)
        reason = candidate.refusal(device, dtype, sizes.head_dim, deterministic)
        if backend.name == chosen or (chosen is None and reason is None):
            return backend.name, passed_over
        passed_over.append(f"{backend.name} {reason or 'fails its self-test'}")
    raise ValueError(f"no attention backend: {dtype}, head_dim={sizes.head_dim} on {device.type}; use another type")


def _because(reason: str, passed_over: list[str]) -> str:
    return "; ".join([reason, *(f"not {each}" for each in passed_over)])
