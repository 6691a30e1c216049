"""torch's own context parallelism over cuDNN attention, K/V rotated by all-to-all or all-gather.

Driven as torch's tutorial does (https://docs.pytorch.org/tutorials/unstable/context_parallel.html): the context is
entered once and shards its buffers itself, tensors are (B, H, S, D), and a pass calls `scaled_dot_product_attention`
and its backward inside it. Where K/V heads are shared a pass also repeats them, as torchtitan's models do, because the
context does not support grouped heads.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.attention_systems import Prepared, Problem, Tensors, through_autograd
from elastic_ring.attention.layouts.layout import Layout, make_layout

_PLAIN_ATTENTION = F.scaled_dot_product_attention


class TorchContextParallel:
    layout = "zigzag"

    def __init__(self, rotate: str) -> None:
        self._rotate = rotate
        self.name = f"torch context_parallel cuDNN {rotate}"

    def refusal(self, problem: Problem) -> str | None:
        try:
            from torch.distributed.tensor.experimental import context_parallel  # noqa: F401
        except ImportError as error:
            return f"this torch has no context_parallel: {error}"
        return None

    def prepare(self, problem: Problem, cp_rank: int, group: Any, tensors: Tensors) -> Prepared:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        layout = make_layout(self.layout, problem.num_tokens, problem.cp)
        buffers = [_whole(x, layout, group).transpose(1, 2).contiguous() for x in tensors]
        mesh = DeviceMesh.from_group(group, tensors[0].device.type)
        with ExitStack() as entering:
            if tensors[0].is_cuda:
                entering.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
            entering.enter_context(
                context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
            )
            if not torch.equal(buffers[0], tensors[0].transpose(1, 2)):
                raise RuntimeError("torch's context_parallel no longer shards in head-tail order, which is our zigzag")
            context = entering.pop_all()
        repeat = problem.num_heads // problem.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if repeat > 1:
                k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def select() -> None:
            set_rotate_method(self._rotate)
            if F.scaled_dot_product_attention is _PLAIN_ATTENTION:
                raise RuntimeError("context_parallel was left before its passes ended: they would not communicate")

        run = through_autograd(attend, (buffers[0], buffers[1], buffers[2], buffers[3]))
        return Prepared(run, results=_tokens_first, select=select, close=context.close)


def _whole(x: Tensor, layout: Layout, group: Any) -> Tensor:
    """The whole sequence (1, S, H, D) from every rank's share."""
    parts = [torch.empty_like(x) for _ in range(layout.cp)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return layout.gather(parts, 1)


def _tokens_first(found: Tensors) -> Tensors:
    out, dq, dk, dv = (x.transpose(1, 2) for x in found)
    return out, dq, dk, dv
