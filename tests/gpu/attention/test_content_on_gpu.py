"""The promises of `test_pattern_content.py` in whole blocks, kept on a GPU; the host reads once a call, or never."""

from __future__ import annotations

import warnings

import pytest
import torch

from elastic_ring.attention.kernels.registry import covering
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.routing.router import Router
from tests.gpu.attention.test_sparse_ring_on_gpu import ALLOWED, usable
from tests.gpu.gpu_rings import run_content_on
from tests.unit.attention.attention_rings import relative_error
from tests.unit.content.content_cases import check_choice, make_case
from tests.unit.sparse.block_cases import masked_reference

BLOCKS = {"block": 128, "head_dim": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize("heads", [4, 2], ids=["grouped", "each"])
@pytest.mark.parametrize("text", ["topk:3", "topk:3,causal=0+bigbird:2,0,0", "topk:3,fetch_all=1"])
@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("kernel", covering("tables"), ids=lambda kernel: kernel.name)
def test_a_ring_makes_the_choice_of_the_definition_and_agrees_with_the_masked_softmax(kernel, cp, text, heads):
    usable(kernel)
    case = make_case("zigzag", cp, 128 * 16, text=text, num_heads=heads, num_kv_heads=2, **BLOCKS)
    found, used = run_content_on("cuda", case, kernel=kernel.name, deterministic=False)
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, masked_reference(case, "cuda"), strict=True):
        assert torch.isfinite(got).all(), name
        assert relative_error(got, want.cpu()) < ALLOWED, name
    if "fetch_all" not in text:
        for ring in used:
            check_choice(case, ring.schedule)


@pytest.mark.parametrize("text", ["topk:4", "topk:4,causal=0"])
def test_choosing_waits_for_the_device_once(text):
    case = make_case("contiguous", 1, 128 * 32, text=text, **BLOCKS)
    q, k = (tensor.cuda() for tensor in case.tensors()[:2])
    route = Router(contiguous(128 * 32, 1), 0, None, case.documents, RingOptions())
    first = route(case.heads, q, k, 0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            again = route(case.heads, q, k, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == first
    assert sum("synchronizing" in str(each.message) for each in heard) == 1


@pytest.mark.parametrize("kernel", covering("tables"), ids=lambda kernel: kernel.name)
def test_with_all_keys_fetched_neither_pass_waits_for_the_device(kernel):
    usable(kernel)
    case = make_case("contiguous", 1, 128 * 32, text="topk:4,fetch_all=1", **BLOCKS)
    q, k, v, dout = (tensor.cuda() for tensor in case.tensors())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = RingOptions(kernel=kernel.name, deterministic=False)
    attention = PatternedAttention(case.pattern, case.layout, 0, None, options)
    first = torch.autograd.grad(attention(*leaves), leaves, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = torch.autograd.grad(attention(*leaves), leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(again, first, strict=True):
        assert relative_error(got.cpu(), want.cpu()) < ALLOWED
