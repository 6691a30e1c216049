"""Peers that benchmarks compare with compute what they claim to: real processes over gloo, against dense attention."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ring.attention.kernels import reference
from elastic_ring.attention.kernels.table import BACKENDS
from jobs.peers.attention_systems import Problem
from jobs.peers.attention_ulysses import Ulysses

PROBLEM = Problem(64, 4, 2, 8, 2)


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (PROBLEM.num_heads, PROBLEM.num_kv_heads, PROBLEM.num_kv_heads, PROBLEM.num_heads)
    return [torch.randn(1, 64, num, 8, generator=generator, dtype=torch.float64) for num in heads]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    backend = next(backend for backend in BACKENDS if backend.name == "reference")
    run = Ulysses(backend).prepare(PROBLEM, rank, dist.group.WORLD)
    found = run(*(x.chunk(2, dim=1)[rank].contiguous() for x in _whole()))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ulysses_through_autograd_is_dense_attention(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    q, k, v, dout = _whole()
    out, lse = reference.forward(q, k, v, causal=True, scale=8**-0.5)
    wanted = (out, *reference.backward(dout, q, k, v, out, lse, causal=True, scale=8**-0.5))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for number, want in enumerate(wanted):
        torch.testing.assert_close(torch.cat([part[number] for part in parts], dim=1), want, rtol=1e-12, atol=1e-12)
