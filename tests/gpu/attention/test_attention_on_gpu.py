"""The fp64 reference, which every GPU kernel will be held against, gives the CPU's results on a GPU."""

from __future__ import annotations

import pytest
import torch

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention

SEQ_LEN = 96


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_one_rank_of_attention_is_the_same_on_gpu_and_cpu(num_kv_heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads)
    tensors = [torch.randn(1, SEQ_LEN, h, 16, dtype=torch.float64) for h in heads]
    schedule = plan(Pattern(causal=causal, document_starts=(0, 40)), make_layout("zigzag", SEQ_LEN, 1))
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (t.detach().to(device).requires_grad_() for t in tensors)
        out = RingAttention(schedule, 0, None, RingOptions(backend="reference"))(q, k, v)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-12, atol=1e-12)
