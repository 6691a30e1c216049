"""The one table of attention backends: what each can do, which one a call gets, and the proof that it works.

A backend is two functions over one tile in (B, S, H, D) layout. Nothing about hops, ranks or process
groups may enter. A backend that fails its self-test is passed over with a warning, never in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from elastic_ring.attention.kernels import aten_cpu, reference
from elastic_ring.attention.merge import Accumulator, lse_for_backward
from elastic_ring.errors import RunFailed

logger = logging.getLogger(__name__)

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Backend:
    """A kernel and what it can do.

    `forward(q, k, v, *, causal, scale) -> (out, lse)`: q, out (B, Sq, H, D); k, v (B, Sk, Hkv, D); lse
    (B, Sq, H), natural log, fp32 or fp64. `backward(dout, q, k, v, out, lse, *, causal, scale) ->
    (dq, dk, dv)` takes the *merged* out and lse, so that shares of different tiles add up exactly.
    `causal` tiles are square. `max_head_dim` None means no limit.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    sparse: bool
    deterministic: bool
    forward: Forward = field(repr=False)
    backward: Backward = field(repr=False)

    def refusal(self, device: str, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
        """Why this backend cannot serve such a call, or None when it can."""
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, not {head_dim}"
        if deterministic and not self.deterministic:
            return "is not deterministic"
        return None


_ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="aten-cpu",
        devices=("cpu",),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        sparse=False,
        deterministic=True,
        forward=aten_cpu.forward,
        backward=aten_cpu.backward,
    ),
    Backend(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=_ALL_DTYPES,
        max_head_dim=None,
        sparse=False,
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
    backends: tuple[Backend, ...] = BACKENDS,
) -> Backend:
    """The first backend that can serve such calls and passes its self-test; `pin` names the only candidate.

    Raises `ValueError` when `pin` is unknown or cannot serve the call, or nothing can, and `RunFailed` when
    candidates exist but none passes.
    """
    kind = torch.device(device).type
    if pin is not None:
        chosen = [backend for backend in backends if backend.name == pin]
        if not chosen:
            raise ValueError(f"backend={pin!r}: unknown; choose one of {', '.join(b.name for b in backends)}")
        refusal = chosen[0].refusal(kind, dtype, head_dim, deterministic)
        if refusal is not None:
            raise ValueError(f"backend={pin!r} {refusal}; leave backend out to have one chosen")
        backends = (chosen[0],)
    able = [backend for backend in backends if backend.refusal(kind, dtype, head_dim, deterministic) is None]
    if not able:
        raise ValueError(f"no attention backend: {dtype}, head_dim={head_dim} on {kind}; use another type")
    for backend in able:
        failure = self_test(backend, device=kind, dtype=dtype, head_dim=head_dim)
        if failure is None:
            return backend
        logger.warning("attention backend %s fails its self-test, passed over: %s", backend.name, failure)
    tried = ", ".join(backend.name for backend in able)
    raise RunFailed(f"no attention backend passes its self-test for {dtype} on {kind}; tried {tried}")


@lru_cache(maxsize=128)
def self_test(
    backend: Backend, *, device: str = "cpu", dtype: torch.dtype = torch.float32, head_dim: int = 32
) -> str | None:
    """None when out, lse, dq, dk and dv agree with the fp64 reference, else what disagrees and by how much.

    The keys come in two tiles, a full and a causal one, so that the merged out and lse go into backward as
    they do in a ring; grouped heads are used. Cached: a kernel is asked once per process, device and type.
    """
    inputs = _sample(device, dtype, head_dim)
    try:
        found = _two_tiles(backend.forward, backend.backward, *inputs)
    except (RuntimeError, ImportError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    wanted = _two_tiles(reference.forward, reference.backward, *(x.double() for x in inputs))
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        worst = ((got.double() - want).norm() / want.norm()).item()
        if not worst <= _TOLERANCE[dtype]:
            return f"{name} differs by {worst:.2e} relative, allowed {_TOLERANCE[dtype]:.0e}"
    return None


_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _sample(device: str, dtype: torch.dtype, head_dim: int) -> list[torch.Tensor]:
    """q, k, v, dout of two sequences: 48 queries that see 16 earlier keys fully and 48 causally."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 48, 4, head_dim), (2, 64, 2, head_dim), (2, 64, 2, head_dim), (2, 48, 4, head_dim)]
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def _two_tiles(forward: Forward, backward: Backward, *inputs: torch.Tensor) -> list[torch.Tensor]:
    q, k, v, dout = inputs
    scale = q.size(-1) ** -0.5
    tiles = [(slice(0, 16), False), (slice(16, 64), True)]
    total = Accumulator(q)
    for keys, causal in tiles:
        total.add((0, q.size(1)), *forward(q, k[:, keys], v[:, keys], causal=causal, scale=scale))
    out, lse = total.out.to(q.dtype), lse_for_backward(total.lse)
    shares = [backward(dout, q, k[:, keys], v[:, keys], out, lse, causal=causal, scale=scale) for keys, causal in tiles]
    dq = sum((share[0].to(total.out.dtype) for share in shares), torch.zeros_like(total.out))
    dk, dv = (torch.cat([share[i].to(total.out.dtype) for share in shares], dim=1) for i in (1, 2))
    return [out, lse, dq, dk, dv]
