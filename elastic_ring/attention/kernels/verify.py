"""Self-tests of kernels on this device: out, lse and gradients of two tiles against the fp64 reference.

Results are cached per process. Passes are also cached on disk if a folder is given; the key has the versions and the
device. Block-sparse kernels have cases of their own in `sparse_verify`, by the same measure.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from elastic_ring.attention.kernels.adapters import aten_cpu, reference
from elastic_ring.attention.kernels.backend import Backend, Backward, Forward
from elastic_ring.attention.merge import Accumulator, lse_for_backward

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@lru_cache(maxsize=256)
def self_test(
    backend: Backend,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 32,
    head_ratio: int = 2,
    cache_dir: Path | None = None,
) -> str | None:
    """None if out, lse, dq, dk and dv agree with the fp64 reference, else a text with the difference or the error.

    The keys are split into a full and a causal tile, so that backward gets the merged out and lse as in a ring;
    `head_ratio` query heads share a K/V head. A deterministic backend runs twice on the GPU and must repeat bitwise.
    `cache_dir` stores passes only. Raises: torch.OutOfMemoryError.
    """
    return proved(
        backend.name, backend.version(), (backend.deterministic, str(dtype), head_dim, head_ratio), device, cache_dir,
        lambda: warm_up_kernels(backend, device, dtype, head_dim, head_ratio),
    )  # fmt: skip


def proved(
    name: str, version: str | None, case: tuple[object, ...], device: str, cache_dir: Path | None,
    test: Callable[[], str | None],
) -> str | None:  # fmt: skip
    """What `test` finds of kernel `name`; None at once where `cache_dir` has a proof of this `case`."""
    if cache_dir is None:
        return test()
    proof = cache_dir / f"kernel-{_key(name, version, case, device)}.json"
    if proof.exists():
        return None
    failure = test()
    if failure is None:
        try:
            proof.parent.mkdir(parents=True, exist_ok=True)
            scratch = proof.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({"backend": name, "version": version}))
            scratch.replace(proof)
        except OSError as error:  # e.g. another user's folder; the next process runs the test again
            logger.warning("that %s passed its test is not kept: %s", name, error)
    return failure


def _key(name: str, version: str | None, case: tuple[object, ...], device: str) -> str:
    where = ""
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {torch.version.cuda}"
    return hashlib.sha256(repr((name, version, torch.__version__, where, case)).encode()).hexdigest()[:24]


def warm_up_kernels(backend: Backend, device: str, dtype: torch.dtype, head_dim: int, head_ratio: int) -> str | None:
    """Run the self-test without caches; this also loads and compiles the kernels on `device`.

    Raises torch.OutOfMemoryError: a full GPU is no failure of the kernel, and falling back to another kernel would
    change the results bitwise.
    """

    def test() -> str | None:
        inputs = _sample(device, dtype, head_dim, head_ratio)
        found = _two_tiles(backend.forward, backend.backward, *inputs)
        again = found
        if device != "cpu" and backend.deterministic:
            again = _two_tiles(backend.forward, backend.backward, *inputs)
        q, k, v, dout = inputs
        wanted = reference.attention(q, k, v, dout, _seen(q, k), head_dim**-0.5)
        return disagreement(found, again, wanted, TOLERANCE[dtype])

    return told(test)


@lru_cache(maxsize=16)
def masked_self_test(dtype: torch.dtype, head_dim: int) -> str | None:
    """As `self_test`, of a full and a masked tile on the CPU, with grouped heads: what sparse rings there run."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 40, 4, head_dim), (1, 56, 2, head_dim), (1, 56, 2, head_dim), (1, 40, 4, head_dim)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.rand(40, 24, generator=generator) < 0.3
    mask[:, 0] = True
    scale = head_dim**-0.5
    total = Accumulator(q)
    tiles = [(slice(0, 32), None), (slice(32, 56), mask)]
    for keys, own in tiles:
        total.add((0, 40), *aten_cpu.forward(q, k[:, keys], v[:, keys], causal=False, scale=scale, mask=own))
    shares = [
        aten_cpu.backward(dout, q, k[:, keys], v[:, keys], total.out, total.lse, causal=False, scale=scale, mask=own)
        for keys, own in tiles
    ]
    found = [total.out, total.lse, shares[0][0] + shares[1][0], *(torch.cat([s[i] for s in shares], 1) for i in (1, 2))]
    seen = torch.cat([torch.ones(40, 32, dtype=torch.bool), mask], dim=1)
    wanted = reference.attention(q, k, v, dout, seen[None], scale)
    exact = torch.float64 if dtype == torch.float64 else torch.float32  # 16-bit inputs are computed in fp32
    return disagreement(found, found, wanted, TOLERANCE[exact], " of a masked tile")


def told(test: Callable[[], str | None]) -> str | None:
    """What `test` finds, or the error that the kernel meets. Raises `torch.OutOfMemoryError`: a full GPU says nothing
    about the kernel."""
    try:
        return test()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ImportError, NotImplementedError, TypeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def disagreement(
    found: list[torch.Tensor], again: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float, of: str = ""
) -> str | None:
    """The first of out, lse, dq, dk, dv that differs from `wanted` by more than `tolerance`, relative, or between two
    runs; None if all agree."""
    for name, got, repeated, want in zip(("out", "lse", "dq", "dk", "dv"), found, again, wanted, strict=True):
        if not torch.equal(got.isinf(), want.isinf()):
            return f"{name}{of} is infinite elsewhere than where a query sees nothing"
        difference = (got.double() - want).masked_fill(want.isinf(), 0.0)
        worst = (difference.norm() / want.masked_fill(want.isinf(), 0.0).norm()).item()
        if not worst <= tolerance:
            return f"{name}{of} differs by {worst:.2e} relative, allowed {tolerance:.0e}"
        if not torch.equal(got, repeated):
            return f"{name}{of} is not the same in a second run, though the kernel claims to be deterministic"
    return None


def length_classes(tile_tokens: tuple[int, ...], group: int) -> tuple[int, ...]:
    """One length, in tokens, for each class that kernels with these tile sizes compile separately, ascending.

    A tile's rows may be tokens, or tokens times the `group` query heads of a K/V head.
    """
    edges = {tokens // rows for tokens in tile_tokens for rows in (1, group) if tokens >= rows}
    return (*sorted(edges), max(edges) + 64) if edges else ()


def warm_up_variants(backend: Backend, device: str, dtype: torch.dtype, head_dim: int, group: int) -> int:
    """Compile the kernels for documents of any length: run forward and backward of full and causal tiles of each
    length class. Returns the number of tiles.

    The order is random per process, so that processes of a node compile different variants first and load the others
    from the cache on disk. A failed tile is only logged, because the run may not need it. Raises
    torch.OutOfMemoryError.
    """
    lengths = length_classes(backend.tile_tokens, group)
    tiles = [(rows, keys, False) for rows in lengths for keys in lengths] + [(rows, rows, True) for rows in lengths]
    random.Random(os.getpid()).shuffle(tiles)
    for num_rows, num_keys, causal in tiles:
        shapes = ((2, num_rows, 2 * group, head_dim), (2, num_keys, 2, head_dim))
        q, k = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        try:
            out, lse = backend.forward(q, k, k, causal=causal, scale=1.0)
            backend.backward(q, q, k, k, out.to(dtype), lse, causal=causal, scale=1.0)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            kind = "causal" if causal else "full"
            logger.warning("%s fails for %s tiles of %d x %d: %s", backend.name, kind, num_rows, num_keys, error)
    return len(tiles)


def _sample(device: str, dtype: torch.dtype, head_dim: int, head_ratio: int) -> list[torch.Tensor]:
    """q, k, v, dout for a batch of 2: queries that see earlier keys fully and their own keys causally.

    On a GPU the lengths exceed the kernels' blocks of 128 tokens and are not multiples of them.
    """
    rows, before = (48, 16) if device == "cpu" else (448, 200)
    generator = torch.Generator().manual_seed(0)
    heads, length = 2 * head_ratio, rows + before
    queries, keys = (2, rows, heads, head_dim), (2, length, 2, head_dim)
    shapes = (queries, keys, keys, queries)
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def _two_tiles(forward: Forward, backward: Backward, *inputs: torch.Tensor) -> list[torch.Tensor]:
    q, k, v, dout = inputs
    scale = q.size(-1) ** -0.5
    before = k.size(1) - q.size(1)
    tiles = [(slice(0, before), False), (slice(before, k.size(1)), True)]
    total = Accumulator(q)
    for keys, causal in tiles:
        total.add((0, q.size(1)), *forward(q, k[:, keys], v[:, keys], causal=causal, scale=scale))
    out, lse = total.out.to(q.dtype), lse_for_backward(total.lse)
    shares = [backward(dout, q, k[:, keys], v[:, keys], out, lse, causal=causal, scale=scale) for keys, causal in tiles]
    dq = sum((share[0].to(total.out.dtype) for share in shares), torch.zeros_like(total.out))
    dk, dv = (torch.cat([share[i].to(total.out.dtype) for share in shares], dim=1) for i in (1, 2))
    return [out, lse, dq, dk, dv]


def _seen(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(1, Sq, Sk): every earlier key, and the own keys causally."""
    before = k.size(1) - q.size(1)
    return torch.ones(1, q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril(before)
