"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): heads instead of tokens, by all-to-all, around one kernel call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ring.attention.kernels.backend import Backend
from jobs.peers.attention_systems import Pass, Problem


class Ulysses:
    layout = "contiguous"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = f"Ulysses {backend.name}"

    def refusal(self, problem: Problem) -> str | None:
        for count, what in ((problem.num_heads, "query"), (problem.num_kv_heads, "K/V")):
            if count % problem.cp:
                return f"{count} {what} heads do not divide by {problem.cp} ranks"
        return self._backend.refusal("cuda", torch.bfloat16, problem.head_dim, False)

    def prepare(self, problem: Problem, cp_rank: int, group: Any) -> Pass:
        backend, scale, cp = self._backend, problem.head_dim**-0.5, problem.cp

        @torch.no_grad()
        def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            whole_q, whole_k, whole_v = (_to_heads(x, cp, group) for x in (q, k, v))
            whole_out, lse = backend.forward(whole_q, whole_k, whole_v, causal=True, scale=scale)
            out = _to_tokens(whole_out, cp, group)
            whole_dout = _to_heads(dout, cp, group)
            grads = backend.backward(whole_dout, whole_q, whole_k, whole_v, whole_out, lse, causal=True, scale=scale)
            dq, dk, dv = (_to_tokens(grad, cp, group) for grad in grads)
            return out, dq, dk, dv

        return run


def _to_heads(x: Tensor, cp: int, group: Any) -> Tensor:
    """(1, S_local, H, D) to (1, S, H / cp, D)."""
    _, length, heads, dim = x.shape
    packed = x.view(length, cp, heads // cp, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return received.view(1, cp * length, heads // cp, dim)


def _to_tokens(x: Tensor, cp: int, group: Any) -> Tensor:
    """(1, S, H / cp, D) to (1, S_local, H, D)."""
    _, length, heads, dim = x.shape
    packed = x.contiguous().view(cp, length // cp, heads, dim)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return received.transpose(0, 1).reshape(1, length // cp, heads * cp, dim)
