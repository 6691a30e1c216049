"""The systems that `bench_ring` compares: the ring of this repository, the kernel alone, and the peers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.attention_ringflash import RingFlashAttention
from benchmarks.peers.attention_systems import Prepared, Problem, System, Tensors, through_autograd
from benchmarks.peers.attention_torch_cp import TorchContextParallel
from benchmarks.peers.attention_ulysses import Ulysses
from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention

CEILING = "single-GPU kernel"
OURS_NCCL = "ours, NCCL"
"""The bench's ratios are of this system. "ours" alone names copy engines in earlier results."""


class Ours:
    """The ring of this repository, driven through autograd as a model would."""

    layout = "zigzag"

    def __init__(
        self,
        name: str,
        backend: str | None,
        deterministic: bool,
        hops_per_stage: int | None,
    ) -> None:
        self.name = name
        self._backend = backend
        self._deterministic = deterministic
        self._hops_per_stage = hops_per_stage
        self._buffers = HopBuffers()
        self.ledger = HopLedger()

    def refusal(self, problem: Problem) -> str | None:
        return None

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        schedule = plan(Pattern(), make_layout(self.layout, problem.num_tokens, problem.cp))
        ring = RingAttention(
            schedule,
            cp_rank,
            group if problem.cp > 1 else None,
            RingOptions(
                backend=self._backend,
                deterministic=self._deterministic,
                hops_per_stage=self._hops_per_stage,
                ledger=self.ledger,
                buffers=self._buffers,
            ),
        )
        return Prepared(through_autograd(ring, tensors))

    def kept_bytes(self) -> int:
        """Bytes of the buffers that stay between passes."""
        return self._buffers.num_bytes


class Ceiling:
    """The kernel alone on one rank's tokens: causal attention of S_local tokens on every GPU at once."""

    name = CEILING
    layout = "contiguous"

    def __init__(self, backend: Kernel) -> None:
        self._backend = backend

    def refusal(self, problem: Problem) -> str | None:
        return None

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        q, k, v, dout = tensors
        scale = problem.head_dim**-0.5

        @torch.no_grad()
        def run() -> Tensors:
            out, lse = self._backend.forward(q, k, v, causal=True, scale=scale)
            dq, dk, dv = self._backend.backward(dout, q, k, v, out, lse, causal=True, scale=scale)
            return out, dq, dk, dv

        return Prepared(run)


def make_systems(wanted: list[str], backend: Kernel, pin: str | None, deterministic: bool) -> list[System]:
    cudnn = named("cudnn")
    systems: dict[str, list[System]] = {
        "ours-nccl": [Ours(OURS_NCCL, pin, deterministic, None)],
        "ours-nccl-hops": [Ours("ours, NCCL, hop by hop", pin, deterministic, 1)],
        "ours-nccl-gather": [Ours("ours, NCCL, gathered", pin, deterministic, 10**6)],
        "ceiling": [Ceiling(backend)],
        "ulysses-fa4": [Ulysses(named("flash-attn-4"))],
        "ulysses-cudnn": [Ulysses(cudnn)],
        "torch-cp": [TorchContextParallel("alltoall"), TorchContextParallel("allgather")],
        "torch-cp-alltoall": [TorchContextParallel("alltoall")],
        "torch-cp-allgather": [TorchContextParallel("allgather")],
        "ring-flash-attn": [RingFlashAttention()],
    }
    unknown = [name for name in wanted if name not in systems]
    if unknown:
        raise ValueError(f"--systems {','.join(unknown)}: unknown; choose from {','.join(systems)}")
    return list({system.name: system for name in wanted for system in systems[name]}.values())
