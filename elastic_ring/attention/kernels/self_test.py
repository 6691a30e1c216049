"""The proof that a backend works here: out, lse and gradients against the fp64 reference, on a small ring of tiles.

A pass is remembered for the process, and on disk when a folder is given, under everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache
from pathlib import Path

import torch

from elastic_ring.attention.kernels import reference
from elastic_ring.attention.kernels.backend import Backend, Backward, Forward
from elastic_ring.attention.merge import Accumulator, lse_for_backward

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@lru_cache(maxsize=256)
def self_test(
    backend: Backend,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 32,
    group: int = 2,
    cache_dir: Path | None = None,
) -> str | None:
    """None when out, lse, dq, dk and dv agree with the fp64 reference, else what disagrees and by how much.

    The keys come in two tiles, a full and a causal one, so that the merged out and lse go into backward as
    they do in a ring; `group` query heads share a K/V head. A backend that claims to be deterministic is
    run twice on the GPU and must repeat every bit. Only a pass is kept in `cache_dir`. Raises torch.OutOfMemoryError.
    """
    proof = None if cache_dir is None else cache_dir / f"kernel-{_key(backend, device, dtype, head_dim, group)}.json"
    if proof is not None and proof.exists():
        return None
    failure = rehearse(backend, device, dtype, head_dim, group)
    if failure is None and proof is not None:
        try:
            proof.parent.mkdir(parents=True, exist_ok=True)
            scratch = proof.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({"backend": backend.name, "version": backend.version()}))
            scratch.replace(proof)
        except OSError as error:  # another user's folder or file: the next process tests for itself
            logger.warning("that %s passed its test is not kept: %s", backend.name, error)
    return failure


def _key(backend: Backend, device: str, dtype: torch.dtype, head_dim: int, group: int) -> str:
    where = ""
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {torch.version.cuda}"
    parts = (backend.name, backend.version(), backend.deterministic, torch.__version__, where, dtype, head_dim, group)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def rehearse(backend: Backend, device: str, dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """The test itself, remembered nowhere: it also loads (and compiles) the kernels on `device`.

    Raises torch.OutOfMemoryError: a GPU that is full says nothing of the kernel, and another one would give other bits.
    """
    try:
        inputs = _sample(device, dtype, head_dim, group)
        found = _two_tiles(backend.forward, backend.backward, *inputs)
        again = found
        if device != "cpu" and backend.deterministic:
            again = _two_tiles(backend.forward, backend.backward, *inputs)
        wanted = _two_tiles(reference.forward, reference.backward, *(x.double() for x in inputs))
        return _disagreement(found, again, wanted, _TOLERANCE[dtype])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ImportError, NotImplementedError, TypeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _disagreement(
    found: list[torch.Tensor], again: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float
) -> str | None:
    for name, got, repeated, want in zip(("out", "lse", "dq", "dk", "dv"), found, again, wanted, strict=True):
        worst = ((got.double() - want).norm() / want.norm()).item()
        if not worst <= tolerance:
            return f"{name} differs by {worst:.2e} relative, allowed {tolerance:.0e}"
        if not torch.equal(got, repeated):
            return f"{name} is not the same in a second run, though the backend claims to be deterministic"
    return None


def _sample(device: str, dtype: torch.dtype, head_dim: int, group: int) -> list[torch.Tensor]:
    """q, k, v, dout of two sequences: queries that see a stretch of earlier keys fully and their own causally.

    On a GPU long enough to cross the kernels' blocks of 128, and not a multiple of them.
    """
    rows, before = (48, 16) if device == "cpu" else (448, 200)
    generator = torch.Generator().manual_seed(0)
    heads, length = 2 * group, rows + before
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
