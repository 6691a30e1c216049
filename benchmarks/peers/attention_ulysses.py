"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): heads instead of tokens, by all-to-all, around one kernel call.

The all-to-alls and the packing around them belong to the method and are timed, as in DeepSpeed's
`DistributedAttention`; leaves exist before the clock starts. Through autograd, as a model drives it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.peers.attention_systems import Prepared, Problem, Tensors, through_autograd
from elastic_ring.attention.kernels.kernel import Kernel


class Ulysses:
    layout = "contiguous"

    def __init__(self, backend: Kernel) -> None:
        self._backend = backend
        self.name = f"Ulysses {backend.name}"

    def refusal(self, problem: Problem) -> str | None:
        for count, what in ((problem.num_heads, "query"), (problem.num_kv_heads, "K/V")):
            if count % problem.cp:
                return f"{count} {what} heads do not divide by {problem.cp} ranks"
        return self._backend.refusal("cuda", torch.bfloat16, problem.head_dim, False)

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        backend, scale, cp = self._backend, problem.head_dim**-0.5, problem.cp

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _Ulysses.apply(q, k, v, backend, scale, cp, group)
            return out

        return Prepared(through_autograd(attend, tensors))


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, backend: Kernel, scale: float, cp: int, group: Any
    ) -> Tensor:
        whole = [_to_heads(x, cp, group) for x in (q, k, v)]
        out, lse = backend.forward(*whole, causal=True, scale=scale)
        ctx.save_for_backward(*whole, out, lse)
        ctx.backend, ctx.scale, ctx.cp, ctx.group = backend, scale, cp, group
        return _to_tokens(out, cp, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        whole_dout = _to_heads(dout, ctx.cp, ctx.group)
        grads = ctx.backend.backward(whole_dout, *ctx.saved_tensors, causal=True, scale=ctx.scale)
        return (*(_to_tokens(grad, ctx.cp, ctx.group) for grad in grads), None, None, None, None)


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
