"""The systems that `bench_ring` compares: the ring of this repository, the kernel alone, and the peers."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.attention_ringflash import RingFlashAttention
from benchmarks.peers.attention_systems import Prepared, Problem, System, Tensors, through_autograd
from benchmarks.peers.attention_torch_cp import TorchContextParallel
from benchmarks.peers.attention_ulysses import Ulysses
from elastic_ring.attention.comm.exchange import HopBuffers, HopLedger
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from experiments.cuda_graphs import GraphedRing, make_graphed
from experiments.peer_exchange import PeerRing
from experiments.peer_memory import PeerMemory

CEILING = "single-GPU kernel"
OURS_NCCL, OURS_COPY_ENGINES = "ours, NCCL", "ours"
"""Training exchanges through NCCL: the bench's ratios are of that system. "ours" alone names the copy engines, as in
earlier results."""


class Ours:
    """The ring of this repository, driven through autograd as a model would."""

    layout = "zigzag"

    def __init__(
        self,
        name: str,
        backend: str | None,
        deterministic: bool,
        hops_per_stage: int | None,
        copy_engines: bool,
        *,
        graphed: bool = False,
    ) -> None:
        self.name = name
        self.graphed = graphed
        self._graphs: GraphedRing | None = None
        self._graph_bytes = 0
        self._copy_engines = copy_engines
        self._memory: PeerMemory | None = None
        self._backend = backend
        self._deterministic = deterministic
        self._hops_per_stage = hops_per_stage
        self._buffers = HopBuffers()
        self.ledger = HopLedger()

    def refusal(self, problem: Problem) -> str | None:
        return None

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        schedule = plan(Pattern(), make_layout(self.layout, problem.num_tokens, problem.cp))
        memory = _peer_memory(cp_rank, problem.cp) if self._copy_engines and problem.cp > 1 else None
        kind: Any = RingAttention if memory is None else partial(PeerRing, memory=memory)
        ring = kind(
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
        self._memory = memory
        self.close()
        if self.graphed:
            q, k = (torch.zeros_like(x) for x in tensors[:2])
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved() - self._buffers.num_bytes
            self._graphs = make_graphed(ring, q, k, k.clone())
            torch.cuda.empty_cache()
            self._graph_bytes = torch.cuda.memory_reserved() - self._buffers.num_bytes - before
        return Prepared(through_autograd(self._graphs or ring, tensors), close=self.close)

    def close(self) -> None:
        """Drop the graphs: destroying a process group waits for the graphs that use it."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._graph_bytes = None, 0

    def kept_bytes(self) -> int:
        """Bytes of the buffers that stay between passes."""
        return self._buffers.num_bytes + self._graph_bytes + (self._memory.num_bytes if self._memory is not None else 0)


@cache
def _peer_memory(cp_rank: int, cp: int) -> PeerMemory:
    """One for all rings of a process: they run one after another."""
    memory = PeerMemory(cp_rank, cp, torch.device("cuda", cp_rank))
    memory.connect(dist.group.WORLD)
    return memory


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
        "ours-nccl": [Ours(OURS_NCCL, pin, deterministic, None, False)],
        "ours": [Ours(OURS_COPY_ENGINES, pin, deterministic, None, True)],
        "ours-hops": [Ours("ours, hop by hop", pin, deterministic, 1, True)],
        "ours-gather": [Ours("ours, gathered", pin, deterministic, 10**6, True)],
        "ours-graphed": [Ours("ours, NCCL, graphed", pin, deterministic, None, False, graphed=True)],
        "ours-nccl-hops": [Ours("ours, NCCL, hop by hop", pin, deterministic, 1, False)],
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
