"""Block-sparse attention of whole sequences on one GPU: which kernel runs it, the proof that it is right, routing.

`BlockSparseAttention` is to a GPU and cp = 1 what `SparseRingAttention` is to rings on CPUs. A kernel is used
only after its outputs and gradients agreed with an fp64 softmax on a small case, because sparse backward passes
have been silently wrong before. No hops in here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

import torch

from elastic_ring.attention.checks import check_tensors
from elastic_ring.attention.kernels import block_sparse
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockTables, tables_for, tables_of
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.errors import RunFailed

log = logging.getLogger(__name__)

Run = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, BlockTables, float], tuple[torch.Tensor, torch.Tensor]
]


@dataclass(frozen=True)
class SparseKernel:
    """`deterministic` says that equal calls give equal bits, gradients included; the self-test checks it."""

    name: str
    run: Run
    deterministic: bool
    head_dims: tuple[int, ...]
    package: str | None = None

    def refusal(self, head_dim: int, dtype: torch.dtype, deterministic: bool) -> str | None:
        """Why it cannot serve such calls, or None when it can."""
        if deterministic and not self.deterministic:
            return "has no deterministic sparse backward on this device"
        if head_dim not in self.head_dims:
            return f"takes head_dim {', '.join(map(str, self.head_dims))}, not {head_dim}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {dtype}"
        if self.package is not None:
            try:
                metadata.version(self.package)
            except metadata.PackageNotFoundError:
                return f"needs {self.package}, which is not installed"
        return None


KERNELS = (
    SparseKernel("flash-attn-4-sparse", block_sparse.flash, False, (64, 128), "flash-attn-4"),
    SparseKernel("flex-sparse", block_sparse.flex, True, (64, 128)),
)
"""In order of preference."""


@lru_cache(maxsize=32)
def select_sparse(head_dim: int, dtype: torch.dtype, deterministic: bool, pin: str | None = None) -> SparseKernel:
    """The first kernel that can serve such calls and passes its self-test; `pin` names the only candidate.

    Raises `ValueError` when `pin` is unknown or cannot serve the call, and `RunFailed` when none passes.
    """
    chosen = [kernel for kernel in KERNELS if pin in (None, kernel.name)]
    if not chosen:
        raise ValueError(f"kernel={pin!r}: unknown; choose one of {', '.join(kernel.name for kernel in KERNELS)}")
    reasons = []
    for kernel in chosen:
        reason = kernel.refusal(head_dim, dtype, deterministic)
        if reason is not None and pin is not None:
            raise ValueError(f"kernel={pin!r} {reason}; leave kernel out to have one chosen")
        reason = reason or self_test(kernel, head_dim, dtype)
        if reason is None:
            return kernel
        log.warning("sparse kernel %s passed over: %s", kernel.name, reason)
        reasons.append(f"{kernel.name} {reason}")
    raise RunFailed(f"no sparse kernel serves head_dim={head_dim}, {dtype}: {'; '.join(reasons)}")


class BlockSparseAttention:
    """Causal attention over kept blocks of 128 tokens, on one GPU: static, or `top_k` blocks chosen by content.

    Content is chosen as in `adaptive`: for every block of queries and head its own block and the past blocks
    whose mean key scores highest with its mean query. Tables of a static pattern are made once for a length.
    Raises `ValueError` for a pattern that keeps blocks in part, for both or neither of `pattern` and `top_k`,
    and, when called, for a kernel that cannot serve the call.
    """

    def __init__(
        self,
        pattern: SparsePattern | None = None,
        *,
        top_k: int | None = None,
        kernel: str | None = None,
        deterministic: bool = True,
    ) -> None:
        if (pattern is None) == (top_k is None):
            raise ValueError(f"pattern={pattern}, top_k={top_k}: give one of them")
        if top_k is not None and top_k < 2:
            raise ValueError(f"top_k={top_k}: 1 keeps only the own block; give at least 2")
        self._pattern, self._top_k = pattern, top_k
        self._kernel, self._deterministic = kernel, deterministic
        self._tables: dict[tuple[int, int, torch.device], BlockTables] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (B, S, H, D), k and v (B, S, Hkv, D) to out (B, S, H, D); B = 1 where content chooses."""
        check_tensors(q, k, v)
        if not q.is_cuda:
            raise ValueError(f"device {q.device}: block-sparse kernels run on GPUs; on a CPU use SparseRingAttention")
        kernel = select_sparse(q.size(-1), q.dtype, self._deterministic, self._kernel)
        out, _ = kernel.run(q, k, v, self._tables_for(q, k), q.size(-1) ** -0.5 if scale is None else scale)
        return out

    def _tables_for(self, q: torch.Tensor, k: torch.Tensor) -> BlockTables:
        if self._top_k is not None:
            return tables_of(choose_on_device(q.detach(), k.detach(), self._top_k), width=self._top_k - 1)
        assert self._pattern is not None
        key = (q.size(1), q.size(2), q.device)
        if key not in self._tables:
            self._tables[key] = tables_for(self._pattern, *key)
        return self._tables[key]


def choose_on_device(q: torch.Tensor, k: torch.Tensor, top_k: int) -> torch.Tensor:
    """Bool (H, n, n), queries first, for q (1, S, H, D) and k (1, S, Hkv, D): as `adaptive.choose_blocks`, but
    without a host read; among equal scores any block may win."""
    if q.size(0) != 1 or q.size(1) % BLOCK_TOKENS:
        raise ValueError(
            f"q of shape {tuple(q.shape)}: content chooses for one sequence of a multiple of {BLOCK_TOKENS} tokens"
        )
    mean_q, mean_k = (x[0].unflatten(0, (-1, BLOCK_TOKENS)).mean(1, dtype=torch.float32) for x in (q, k))
    num_blocks = len(mean_q)
    scores = torch.einsum("ihd,jhd->hij", mean_q, mean_k.repeat_interleave(q.size(2) // k.size(2), dim=1))
    past = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=q.device).tril(-1)
    best = scores.masked_fill(~past, -math.inf).topk(min(top_k - 1, num_blocks), dim=-1).indices
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=q.device).scatter_(-1, best, True)
    return chosen & past


@lru_cache(maxsize=32)
def self_test(kernel: SparseKernel, head_dim: int, dtype: torch.dtype) -> str | None:
    """None when out, lse, dq, dk, dv of a small sparse case agree with an fp64 softmax, else what disagrees.

    Five blocks, heads that keep different ones, a key block that no later query sees, grouped K/V heads. A
    kernel that claims to be deterministic runs twice and must repeat every bit.
    """
    length, heads, kv_heads = 5 * BLOCK_TOKENS, 4, 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)
    kept = torch.rand(heads, 5, 5, generator=generator) < 0.5
    kept[:, :, 1] = False
    kept = (kept | torch.eye(5, dtype=torch.bool)).tril().cuda()
    scale = head_dim**-0.5
    try:
        found = _passes(kernel.run, q, k, v, dout, tables_of(kept), scale)
        again = _passes(kernel.run, q, k, v, dout, tables_of(kept), scale) if kernel.deterministic else found
    except (RuntimeError, ImportError, NotImplementedError, TypeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    wanted = _reference(q, k, v, dout, kept, scale)
    for name, got, repeated, want in zip(("out", "lse", "dq", "dk", "dv"), found, again, wanted, strict=True):
        worst = ((got.double() - want).norm() / want.norm()).item()
        if not worst <= 2e-2:
            return f"{name} of a sparse case differs by {worst:.2e} relative, allowed 2e-02"
        if not torch.equal(got, repeated):
            return f"{name} is not the same in a second run, though the kernel claims to be deterministic"
    return None


def _passes(
    run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, tables: BlockTables, scale: float
) -> list[torch.Tensor]:
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out, lse = run(leaves[0], leaves[1], leaves[2], tables, scale)
        grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), lse, *grads]


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, kept: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of one masked fp64 softmax, by autograd."""
    mask = kept.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2).tril()
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wide = [x.repeat_interleave(q.size(2) // k.size(2), dim=2) for x in leaves[1:]]
        scores = (torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide[0]) * scale).masked_fill(~mask, -math.inf)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide[1])
        grads = torch.autograd.grad(out, leaves, dout.double())
    return [out.detach(), scores.detach().logsumexp(-1).transpose(1, 2), *grads]
