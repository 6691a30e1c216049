"""The self-test of block-sparse kernels: outputs and gradients of small cases against an fp64 softmax.

Sparse backward passes have been silently wrong before, so no kernel is used untested. Code shared with a kernel under
test must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from elastic_ring.attention.kernels.adapters.reference import attention
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, tables_apart, tables_between, tables_of
from elastic_ring.attention.kernels.verify import TOLERANCE, disagreement, proved, told
from elastic_ring.attention.merge import accumulate_dtype, lse_for_backward, merge_

if TYPE_CHECKING:
    from elastic_ring.attention.kernels.sparse_registry import SparseKernel


@lru_cache(maxsize=64)
def self_test(
    kernel: SparseKernel,
    head_dim: int,
    head_ratio: int,
    dtype: torch.dtype,
    device: str = "cuda",
    cache_dir: Path | None = None,
) -> str | None:
    """None if out, lse, dq, dk, dv of small sparse cases agree with an fp64 softmax, else a description of the
    disagreement.

    The cases: a whole sequence of five blocks with different blocks per head, one key block that no later query sees,
    and grouped K/V heads; and one rank's part of a ring, see `_ring_case`. A kernel that claims to be deterministic
    runs twice and must give the same bits. `cache_dir` stores passes only. Raises: `torch.OutOfMemoryError`.
    """
    return proved(
        kernel.name, kernel.version(), (kernel.deterministic, str(dtype), head_dim, head_ratio), device, cache_dir,
        lambda: told(lambda: warm_up_kernels(kernel, head_dim, head_ratio, dtype, device)),
    )  # fmt: skip


def warm_up_kernels(
    kernel: SparseKernel, head_dim: int, head_ratio: int, dtype: torch.dtype, device: str
) -> str | None:
    """The uncached self-test, which also loads and compiles the kernels on `device`. `head_ratio`: query heads per K/V
    head."""
    # The first call may run inside activation checkpointing, which must not count tensors that this test saves.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        for case in (_whole_case, _ring_case):
            (q, k, v, dout), kept, run = case(head_dim, head_ratio, dtype, device)
            found = run(kernel, q, k, v, dout, head_dim**-0.5)
            again = run(kernel, q, k, v, dout, head_dim**-0.5) if kernel.deterministic else found
            wanted = attention(q, k, v, dout, kept, head_dim**-0.5)
            tolerance = max(TOLERANCE[dtype], SPARSE_HALF_TOLERANCE if dtype.itemsize == 2 else 0.0)
            failure = disagreement(found, again, wanted, tolerance, " of a sparse case")
            if failure is not None:
                return failure
    return None


SPARSE_HALF_TOLERANCE = 2e-2
"""Of half-precision kernels: gradients pass through buffers of 16 bits."""
_Case = tuple[list[torch.Tensor], torch.Tensor, Callable[..., list[torch.Tensor]]]


def _whole_case(head_dim: int, head_ratio: int, dtype: torch.dtype, device: str) -> _Case:
    generator = torch.Generator().manual_seed(0)
    shapes = _shapes(2, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS, head_ratio, head_dim)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    kept = torch.rand(2 * head_ratio, 5, 5, generator=generator) < 0.5
    kept[:, :, 1] = False
    kept = (kept | torch.eye(5, dtype=torch.bool)).tril().to(device)

    def run(kernel: SparseKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
            scale: float) -> list[torch.Tensor]:  # fmt: skip
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            out, lse = kernel.run(leaves[0], leaves[1], leaves[2], tables_of(kept), scale)
            grads = torch.autograd.grad(out, leaves, dout)
        return [out.detach(), lse.detach(), *grads]

    return inputs, as_tokens(kept), run


def _ring_case(head_dim: int, head_ratio: int, dtype: torch.dtype, device: str) -> _Case:
    """Three query blocks, their own keys and four fetched blocks, with K and V interleaved as in a ring's buffers.

    Out and lse are merged before gradients are taken, and gradients are written to a ring's interleaved buffers. The
    first query block sees no key at all, the second no fetched key, the third not its own block. No query sees the own
    keys of the first and the third block, nor one of the fetched blocks. All heads share their tables.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = _shapes(2, 3 * BLOCK_TOKENS, 7 * BLOCK_TOKENS, head_ratio, head_dim)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    own, earlier = np.array([[False, True, False]]), np.zeros((1, 3, 3), dtype=bool)
    earlier[0, 2, 1] = True
    fetched = np.zeros((1, 3, 4), dtype=bool)
    fetched[0, 2] = (True, False, True, True)
    place = torch.device(device)
    tables = (tables_between(own, earlier, place), tables_apart([fetched], [np.arange(fetched.shape[2])], place))
    diagonal = np.zeros_like(earlier)
    diagonal[:, range(3), range(3)] = own
    kept = torch.from_numpy(np.concatenate([earlier | diagonal, fetched], axis=2)).to(device)
    spans = (slice(0, 3 * BLOCK_TOKENS), slice(3 * BLOCK_TOKENS, 7 * BLOCK_TOKENS))

    @torch.no_grad()
    def run(kernel: SparseKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
            scale: float) -> list[torch.Tensor]:  # fmt: skip
        keys = [(k[:, spans[0]], v[:, spans[0]]), side_by_side(k[:, spans[1]], v[:, spans[1]])]
        parts = [kernel.forward(q, *pair, each, scale) for pair, each in zip(keys, tables, strict=True)]
        out, lse = (x.to(accumulate_dtype(dtype)).contiguous() for x in parts[0])
        merge_(out, lse, *parts[1])
        merged, shares = (out.to(dtype), lse_for_backward(lse)), []
        for pair, each in zip(keys, tables, strict=True):
            places = {}
            if kernel.writes_gradients:  # NaN reveals a key, seen or not, whose gradient is not written
                unwritten = side_by_side(*(torch.full_like(x, math.nan) for x in pair))
                places = dict(zip(("dk", "dv"), unwritten, strict=True))
            shares.append((*kernel.backward(dout, q, *pair, *merged, each, scale, **places), *places.values()))
        dk, dv = (torch.cat([share[i] for share in shares], dim=1) for i in (-2, -1))
        return [out, lse, shares[0][0].to(out.dtype) + shares[1][0].to(out.dtype), dk, dv]

    return inputs, as_tokens(kept, num_own_keys=3), run


def side_by_side(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of k and v (B, n, Hkv, D) as views of one buffer (n * Hkv, B, 2, D)."""
    both = torch.stack([k, v], dim=3).permute(1, 2, 0, 3, 4).contiguous()
    return both[:, :, :, 0].permute(2, 0, 1, 3), both[:, :, :, 1].permute(2, 0, 1, 3)


def _shapes(batch: int, num_queries: int, num_keys: int, head_ratio: int, head_dim: int) -> list[tuple[int, ...]]:
    """Shapes of q, k, v, dout for two K/V heads."""
    queries, keys = (batch, num_queries, 2 * head_ratio, head_dim), (batch, num_keys, 2, head_dim)
    return [queries, keys, keys, queries]


def as_tokens(kept: torch.Tensor, num_own_keys: int | None = None) -> torch.Tensor:
    """Block mask (H, n, m) to token mask (H, Sq, Sk), causal on the first `num_own_keys` key blocks (default: all)."""
    mask = kept.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2)
    own = BLOCK_TOKENS * (kept.size(2) if num_own_keys is None else num_own_keys)
    mask[:, :, :own] = mask[:, :, :own].tril()
    return mask
