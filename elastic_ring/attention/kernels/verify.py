"""The self-test of kernels on this device: out, lse and gradients of small cases of each cover, against the fp64
reference.

Results are cached per process. Passes are also cached on disk if a folder is given; the key has the versions and the
device. Backward passes have been silently wrong before, so no kernel is used untested. Code shared with a kernel under
test must not enter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from elastic_ring.attention.kernels.adapters import reference
from elastic_ring.attention.kernels.block_tables import (
    BLOCK_TOKENS,
    FIRST_MASK,
    BlockTables,
    packed,
    tables_apart,
    tables_between,
)
from elastic_ring.attention.kernels.kernel import Cover, Documents, Kernel
from elastic_ring.attention.layouts.rows import Span
from elastic_ring.attention.merge import Accumulator, accumulate_dtype, lse_for_backward
from elastic_ring.files import replace_file

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
CASES_VERSION = 3
"""Raise it with the cases: a pass of older cases proves less."""
SPARSE_HALF_TOLERANCE = 2e-2
"""For half-precision kernels over tables: gradients pass through buffers of 16 bits."""


@lru_cache(maxsize=256)
def self_test(
    kernel: Kernel,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 32,
    head_ratio: int = 2,
    cache_dir: Path | None = None,
) -> str | None:
    """None if out, lse, dq, dk and dv agree with the fp64 reference, else a text with the difference or the error.

    The keys are split into parts, so that backward gets the merged out and lse as in a ring; `head_ratio` query heads
    share a K/V head. A deterministic kernel runs twice and must repeat bitwise. `cache_dir` stores passes only.
    Raises: torch.OutOfMemoryError.
    """
    if cache_dir is None:
        return warm_up_kernels(kernel, device, dtype, head_dim, head_ratio)
    case = (
        kernel.deterministic,
        kernel.covers,
        str(dtype),
        head_dim,
        head_ratio,
        *([kernel.softcap] * bool(kernel.softcap)),
    )
    where = ""
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {torch.version.cuda}"
    key = repr((kernel.name, kernel.version(), torch.__version__, where, case, CASES_VERSION)).encode()
    proof = cache_dir / f"kernel-{hashlib.sha256(key).hexdigest()[:24]}.json"
    if proof.exists():
        return None
    failure = warm_up_kernels(kernel, device, dtype, head_dim, head_ratio)
    if failure is None:
        try:
            proof.parent.mkdir(parents=True, exist_ok=True)
            replace_file(proof, json.dumps({"backend": kernel.name, "version": kernel.version()}).encode())
        except OSError as error:  # e.g. another user's folder; the next process runs the test again
            logger.warning("the passed self-test of %s is not kept: %s", kernel.name, error)
    return failure


def warm_up_kernels(kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, head_ratio: int) -> str | None:
    """Run the self-test without caches; this also loads and compiles the kernels on `device`.

    Raises torch.OutOfMemoryError: a full GPU is no failure of the kernel, and falling back to another kernel would
    change the results bitwise.
    """
    try:
        # The first call may run inside activation checkpointing, which must not count tensors that this test saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            for case in _cases(kernel, device, dtype, head_dim, head_ratio):
                results = _kernel_results(kernel, case)
                again = _kernel_results(kernel, case) if kernel.deterministic else results
                expected = _reference_results(case, head_dim**-0.5, kernel.softcap)
                if (failure := disagreement(results, again, expected, case.tolerance, case.of)) is not None:
                    return failure
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        ImportError,
        NotImplementedError,
        TypeError,
        ValueError,
        AssertionError,
        AttributeError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _reference_results(case: _Case, scale: float, softcap: float) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of the reference: one sequence and query head at a time, because it stores all scores and
    other workers may train on this GPU."""
    q, k, v, dout = case.inputs
    (num_sequences, _, num_heads, _), group = q.shape, q.size(2) // k.size(2)
    heads: list[list[torch.Tensor]] = []
    for head in range(num_heads):
        mine, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        seen = case.seen if case.seen.size(0) == 1 else case.seen[mine]
        each = [
            reference.attention(q[s, :, mine], k[s, :, shared], v[s, :, shared], dout[s, :, mine], seen, scale, softcap)
            for s in (slice(n, n + 1) for n in range(num_sequences))
        ]
        heads.append([torch.cat(parts) for parts in zip(*each, strict=True)])
    out, lse, dq, dk, dv = (torch.cat(parts, dim=2) for parts in zip(*heads, strict=True))
    return [out, lse, dq, *(grad.unflatten(2, (-1, group)).sum(3) for grad in (dk, dv))]


def disagreement(
    results: list[torch.Tensor], again: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, of: str = ""
) -> str | None:
    """The first of out, lse, dq, dk, dv that differs from `expected` by more than `tolerance`, relative, or between two
    runs; None if all agree."""
    for name, got, repeated, want in zip(("out", "lse", "dq", "dk", "dv"), results, again, expected, strict=True):
        if not torch.equal(got.isinf(), want.isinf()):
            return f"{name}{of} is infinite elsewhere than where a query sees nothing"
        difference = (got.double() - want).masked_fill(want.isinf(), 0.0)
        worst = (difference.norm() / want.masked_fill(want.isinf(), 0.0).norm()).item()
        if not worst <= tolerance:
            return f"{name}{of} differs by {worst:.2e} relative, allowed {tolerance:.0e}"
        if not torch.equal(got, repeated):
            return f"{name}{of} is not the same in a second run, though the kernel claims to be deterministic"
    return None


# ------------------------------------------------------------ cases


class _Case(NamedTuple):
    """q, k, v, dout; (H or 1, Sq, Sk) bool, the keys that each query sees; and the calls with their slices of the keys.
    With `exact` the merged out is not rounded to the inputs' type."""

    inputs: list[torch.Tensor]
    seen: torch.Tensor
    calls: Sequence[tuple[slice, Cover]]
    tolerance: float
    of: str = ""
    exact: bool = False


def _cases(kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, head_ratio: int) -> Iterator[_Case]:
    def inputs(seed: int, batch: int, num_queries: int, num_keys: int) -> list[torch.Tensor]:
        """q, k, v, dout for two K/V heads."""
        generator = torch.Generator().manual_seed(seed)
        queries, keys = (batch, num_queries, 2 * head_ratio, head_dim), (batch, num_keys, 2, head_dim)
        shapes = (queries, keys, keys, queries)
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]

    if "causal" in kernel.covers:
        # On a GPU the lengths exceed the kernels' blocks of 128 tokens and are not multiples of them.
        rows, before = (48, 16) if device == "cpu" else (448, 200)
        seen = torch.ones(1, rows, rows + before, dtype=torch.bool, device=device).tril(before)
        calls: list[tuple[slice, Cover]] = [(slice(0, before), "full"), (slice(before, rows + before), "causal")]
        yield _Case(inputs(0, 2, rows, rows + before), seen, calls, TOLERANCE[dtype])
    if "documents" in kernel.covers:
        lengths = torch.tensor([0, 5, 1, 26, 16] if device == "cpu" else [0, 130, 1, 317, 64], device=device)
        cuts, number = lengths.cumsum(0).int(), torch.arange(len(lengths) - 1, device=device)
        number = number.repeat_interleave(lengths[1:])
        num_rows = number.numel()
        seen = (number[:, None] == number[None, :]).tril()[None]
        packed_calls: list[tuple[slice, Cover]] = [(slice(0, num_rows), Documents(cuts, int(lengths.max())))]
        yield _Case(inputs(0, 1, num_rows, num_rows), seen, packed_calls, TOLERANCE[dtype], " of packed documents")
    if "mask" in kernel.covers:
        mask = torch.rand(40, 24, generator=torch.Generator().manual_seed(0)) < 0.3
        mask[:, 0] = True
        mask = mask.to(device)
        seen = torch.cat([torch.ones(40, 32, dtype=torch.bool, device=device), mask], dim=1)[None]
        tolerance = TOLERANCE[accumulate_dtype(dtype)]  # 16-bit inputs are computed in fp32
        calls = [(slice(0, 32), "full"), (slice(32, 56), mask)]
        yield _Case(inputs(0, 1, 40, 56), seen, calls, tolerance, " of a masked tile", exact=True)
    if "tables" in kernel.covers:
        tolerance = max(TOLERANCE[dtype], SPARSE_HALF_TOLERANCE if dtype.itemsize == 2 else 0.0)
        cases = [_whole_tables(2 * head_ratio, device), _ring_tables(device)]
        if "masked_tables" in kernel.covers:
            cases += [_masked_tables(2 * head_ratio, 2, device), _masked_tables(1, 4, device)]
        for seed, (seen, of_tables) in enumerate(cases):
            # As in plans with varying numbers of blocks, which kernels compiled by length pad to one number.
            calls = [(keys, replace(each, all_rows=False, all_keys=False)) for keys, each in of_tables]
            yield _Case(inputs(seed, 2, seen.size(1), seen.size(2)), seen, calls, tolerance, " of a sparse case")


def _whole_tables(num_heads: int, device: str) -> tuple[torch.Tensor, list[tuple[slice, BlockTables]]]:
    """A whole sequence with different blocks per head, and one key block that no later query sees.

    On a GPU a row and a column keep more than 16 blocks: there torch 2.11 once read lists of two widths wrongly.
    """
    num = 5 if device == "cpu" else 18
    kept = torch.rand(num_heads, num, num, generator=torch.Generator().manual_seed(0)) < 0.5
    kept[:, -1, :] = kept[:, :, 0] = True
    kept[:, :, 1] = False
    kept = (kept | torch.eye(num, dtype=torch.bool)).tril()
    tables = tables_between(np.ones((num_heads, num), dtype=bool), kept.tril(-1).numpy(), torch.device(device))
    return as_tokens(kept.to(device)), [(slice(0, num * BLOCK_TOKENS), tables)]


def _ring_tables(device: str) -> tuple[torch.Tensor, list[tuple[slice, BlockTables]]]:
    """One rank's part of a ring: three query blocks, their own keys and four fetched blocks.

    The first query block sees no key at all, the second no fetched key, the third not its own block. No query sees the
    own keys of the first and the third block, nor one of the fetched blocks. All heads share their tables.
    """
    own, earlier = np.array([[False, True, False]]), np.zeros((1, 3, 3), dtype=bool)
    earlier[0, 2, 1] = True
    fetched = np.zeros((1, 3, 4), dtype=bool)
    fetched[0, 2] = (True, False, True, True)
    diagonal = np.zeros_like(earlier)
    diagonal[:, range(3), range(3)] = own
    kept = torch.from_numpy(np.concatenate([earlier | diagonal, fetched], axis=2)).to(device)
    return as_tokens(kept, num_own_keys=3), [
        (slice(0, 3 * BLOCK_TOKENS), tables_between(own, earlier, torch.device(device))),
        (slice(3 * BLOCK_TOKENS, 7 * BLOCK_TOKENS), tables_apart([fetched], [np.arange(4)], torch.device(device))),
    ]


def _masked_tables(num_heads: int, cut: int, device: str) -> tuple[torch.Tensor, list[tuple[slice, BlockTables]]]:
    """Three query blocks and five key blocks in two calls, split at `cut`. Each block is kept not at all, whole, or by
    one of three masks, which differ per head. The first query block sees no key of the second call."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(3, BLOCK_TOKENS, BLOCK_TOKENS, generator=generator) < 0.3
    masks[:, :, 0] = True
    kept = torch.randint(0, FIRST_MASK + 3, (num_heads, 3, 5), generator=generator)
    kept[:, :, 0], kept[:, 0, 2:] = FIRST_MASK, 0
    of_kinds = torch.cat([torch.zeros_like(masks[:1]), torch.ones_like(masks[:1]), masks])
    seen = of_kinds[kept].transpose(2, 3).flatten(3, 4).flatten(1, 2)
    calls: list[tuple[slice, BlockTables]] = []
    for first, last in ((0, cut), (cut, 5)):
        some = kept[:, :, first:last].to(torch.int16).numpy()
        words = torch.from_numpy(packed(masks.numpy())).to(device)
        tables = tables_apart([some], [np.arange(last - first)], torch.device(device), words)
        calls.append((slice(first * BLOCK_TOKENS, last * BLOCK_TOKENS), tables))
    return seen.to(device), calls


def as_tokens(kept: torch.Tensor, num_own_keys: int | None = None) -> torch.Tensor:
    """Block mask (H, n, m) to token mask (H, Sq, Sk), causal on the first `num_own_keys` key blocks (default: all)."""
    mask = kept.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2)
    own = BLOCK_TOKENS * (kept.size(2) if num_own_keys is None else num_own_keys)
    mask[:, :, :own] = mask[:, :, :own].tril()
    return mask


@torch.no_grad()
def _kernel_results(kernel: Kernel, case: _Case) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, computed as in a ring. Over tables, fetched K and V are interleaved and gradients are
    written, as in a ring's buffers."""
    q, k, v, dout = case.inputs
    scale = q.size(-1) ** -0.5
    pairs = [(k[:, keys], v[:, keys]) for keys, _ in case.calls]
    sparse = isinstance(case.calls[0][1], BlockTables)
    pairs = [pairs[0], *(side_by_side(*pair) for pair in pairs[1:])] if sparse else pairs
    total, rows = Accumulator(q), Span(0, q.size(1))
    for pair, (_, cover) in zip(pairs, case.calls, strict=True):
        total.add(rows, *kernel.attend(q, *pair, cover, scale))
    out, lse = total.out if case.exact else total.out.to(q.dtype), lse_for_backward(total.lse)
    shares = []
    for pair, (_, cover) in zip(pairs, case.calls, strict=True):
        places = {}
        if sparse and kernel.writes_gradients:  # NaN reveals a key, seen or not, whose gradient is not written
            unwritten = side_by_side(*(torch.full_like(x, math.nan) for x in pair))
            places = dict(zip(("dk", "dv"), unwritten, strict=True))
        shares.append((*kernel.gradients(dout, q, *pair, out, lse, cover, scale, **places), *places.values()))
    exact = accumulate_dtype(q.dtype)
    dq = torch.stack([share[0].to(exact) for share in shares]).sum(0)
    return [out, total.lse, dq, *(torch.cat([share[i].to(exact) for share in shares], dim=1) for i in (-2, -1))]


def side_by_side(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of k and v (B, n, Hkv, D) as views of one buffer (n * Hkv, B, 2, D)."""
    both = torch.stack([k, v], dim=3).permute(1, 2, 0, 3, 4).contiguous()
    return both[:, :, :, 0].permute(2, 0, 1, 3), both[:, :, :, 1].permute(2, 0, 1, 3)
