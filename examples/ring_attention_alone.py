"""Ring attention in a training loop of one's own: no Ray, no trainer, only a process group.

torchrun --nproc-per-node 2 examples/ring_attention_alone.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from elastic_ring import ring_attention
from elastic_ring.attention.layouts.layout import make_layout

SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 512, 4, 2, 32

dist.init_process_group("gloo")
cp_rank, cp = dist.get_rank(), dist.get_world_size()
layout = make_layout("zigzag", SEQ_LEN, cp)

# Every rank makes the same global tensors here to have something to compare with; a real loop makes only its slice.
torch.manual_seed(0)
whole = [torch.randn(1, SEQ_LEN, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
q, k, v = (layout.scatter(tensor, cp_rank, dim=1).requires_grad_() for tensor in whole)

out = ring_attention(q, k, v, group=dist.group.WORLD, seq_len=SEQ_LEN, layout=layout)
out.square().sum().backward()  # gradients of all keys and values come home to their owners

whole_q, whole_k, whole_v = (tensor.transpose(1, 2).requires_grad_() for tensor in whole)
expected = F.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True, enable_gqa=True)
expected.square().sum().backward()
for name, ours, theirs in (("out", out, expected), ("dk", k.grad, whole_k.grad), ("dv", v.grad, whole_v.grad)):
    assert ours is not None and theirs is not None  # noqa: PT018
    mine = layout.scatter(theirs.transpose(1, 2), cp_rank, dim=1)
    torch.testing.assert_close(ours, mine, rtol=1e-4, atol=1e-4)
    print(f"rank {cp_rank} of {cp}: {name} {tuple(ours.shape)} differs by {(ours - mine).abs().max():.1e} at most")
dist.destroy_process_group()
