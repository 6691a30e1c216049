"""The systems that `jobs.bench_ring` compares: the ring of this repository, the kernel alone, and the peers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.exchange import HopBuffers, HopLedger
from elastic_ring.attention.graphed import GraphedRing, make_graphed
from elastic_ring.attention.kernels.table import BACKENDS, Backend
from elastic_ring.attention.layout import make_layout
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.peer_memory import PeerMemory
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.schedule import plan
from jobs.peers.attention_ringflash import RingFlashAttention
from jobs.peers.attention_systems import Pass, Problem, System
from jobs.peers.attention_torch_cp import TorchContextParallel
from jobs.peers.attention_ulysses import Ulysses

CEILING = "single-GPU kernel"


class Ours:
    """The ring of this repository, driven through autograd as a model would."""

    layout = "zigzag"

    def __init__(
        self, name: str, backend: str | None, deterministic: bool, hops_per_stage: int | None, copy_engines: bool,
        *, graphed: bool = False,
    ) -> None:  # fmt: skip
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

    def prepare(self, problem: Problem, cp_rank: int, group: Any) -> Pass:
        schedule = plan(Pattern(), make_layout(self.layout, problem.num_tokens, problem.cp))
        memory = _peer_memory(cp_rank, problem.cp) if self._copy_engines and problem.cp > 1 else None
        ring = RingAttention(
            schedule, cp_rank, group if problem.cp > 1 else None, backend=self._backend, memory=memory,
            deterministic=self._deterministic, hops_per_stage=self._hops_per_stage, ledger=self.ledger,
            buffers=self._buffers,
        )  # fmt: skip

        self._memory = memory
        self.close()
        if self.graphed:
            shape = (1, problem.num_tokens // problem.cp, problem.num_heads, problem.head_dim)
            q = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
            k = q[:, :, : problem.num_kv_heads].contiguous()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved() - self._buffers.num_bytes
            self._graphs = make_graphed(ring, q, k, k.clone())
            torch.cuda.empty_cache()
            self._graph_bytes = torch.cuda.memory_reserved() - self._buffers.num_bytes - before
        attend = self._graphs or ring

        def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, dout)
            return out.detach(), grads[0], grads[1], grads[2]

        return run

    def close(self) -> None:
        """After a problem: the end of the group would wait for its graphs."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._graph_bytes = None, 0

    def kept_bytes(self) -> int:
        """Buffers that stay between passes."""
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

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def refusal(self, problem: Problem) -> str | None:
        return None

    def prepare(self, problem: Problem, cp_rank: int, group: Any) -> Pass:
        scale = problem.head_dim**-0.5

        @torch.no_grad()
        def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            out, lse = self._backend.forward(q, k, v, causal=True, scale=scale)
            return out, *self._backend.backward(dout, q, k, v, out, lse, causal=True, scale=scale)

        return run


def make_systems(wanted: list[str], backend: Backend, pin: str | None, deterministic: bool) -> list[System]:
    cudnn = next(b for b in BACKENDS if b.name == "cudnn")
    systems: dict[str, list[System]] = {
        "ours": [Ours("ours", pin, deterministic, None, True)],
        "ours-hops": [Ours("ours, hop by hop", pin, deterministic, 1, True)],
        "ours-gather": [Ours("ours, gathered", pin, deterministic, 10**6, True)],
        "ours-nccl": [Ours("ours, NCCL", pin, deterministic, None, False)],
        "ours-graphed": [Ours("ours, NCCL, graphed", pin, deterministic, None, False, graphed=True)],
        "ours-nccl-hops": [Ours("ours, NCCL, hop by hop", pin, deterministic, 1, False)],
        "ceiling": [Ceiling(backend)],
        "ulysses-fa4": [Ulysses(next(b for b in BACKENDS if b.name == "flash-attn-4"))],
        "ulysses-cudnn": [Ulysses(cudnn)],
        "torch-cp": [TorchContextParallel("alltoall"), TorchContextParallel("allgather")],
        "ring-flash-attn": [RingFlashAttention()],
    }
    unknown = [name for name in wanted if name not in systems]
    if unknown:
        raise ValueError(f"--systems {','.join(unknown)}: unknown; choose from {','.join(systems)}")
    return [system for name in wanted for system in systems[name]]
