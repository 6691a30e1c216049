"""torch's own context parallelism over cuDNN attention, K/V passed on by all-to-all or all-gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from jobs.peers.attention_systems import Pass, Problem


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

    def prepare(self, problem: Problem, cp_rank: int, group: Any) -> Pass:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        mesh = DeviceMesh.from_group(group, "cuda")
        repeat = problem.num_heads // problem.num_kv_heads

        def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            set_rotate_method(self._rotate)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            wide = [leaves[0], *(x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in leaves[1:])]
            # The context shards what it is given; the tensors here are shards already, so it gets a stand-in.
            stand_in = torch.zeros(1, 1, problem.num_tokens, 1, device=q.device)
            with (
                context_parallel(mesh, buffers=[stand_in], buffer_seq_dims=[2], no_restore_buffers={stand_in}),
                sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            ):
                heads_first = [x.transpose(1, 2) for x in wide]
                out = F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2], is_causal=True)
                grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
            return out.detach().transpose(1, 2), grads[0], grads[1], grads[2]

        return run
