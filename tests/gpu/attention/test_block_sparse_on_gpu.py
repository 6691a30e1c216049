"""Block-sparse kernels on a GPU: right for every family of whole blocks, refused by name for what they cannot."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ring.attention.kernels.adapters import reference
from elastic_ring.attention.kernels.registry import covering, select
from elastic_ring.attention.kernels.verify import as_tokens, self_test
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.blocks import block_kinds
from elastic_ring.attention.patterns.families import BigBird, Hierarchical, Profile
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule, Strided, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from experiments.block_sparse import BlockSparseAttention, choose_on_device
from experiments.head_rules import longnet, mixed
from tests.gpu.attention.test_sparse_ring_on_gpu import usable

KERNELS = covering("tables")
LENGTH = 1536
PATTERNS: dict[str, tuple[Rule, ...]] = {
    "dense": (Dense(),),
    "strided": (Strided(4, 2),),
    "bigbird": (BigBird(2, 1, 2),),
    "hierarchical": (Hierarchical(2),),
    "profile": (Profile((0, 1, 4)),),
    "dilated": tuple(rule | BigBird(2, 0, 0) for rule in longnet(4, (512, 1536), (1, 4), unit_tokens=128)),
    "mix of heads": mixed((3, BigBird(2, 0, 0)), (1, Dense())),
    "dilated, rows that see nothing": longnet(4, (512, 1536), (1, 4), unit_tokens=128),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_passes_its_self_test(kernel, head_dim):
    usable(kernel, head_dim)
    assert self_test(kernel, device="cuda", dtype=torch.bfloat16, head_dim=head_dim) is None


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_outputs_and_gradients_are_those_of_a_masked_softmax(kernel, name):
    usable(kernel)
    pattern = SparsePattern(PATTERNS[name])
    q, k, v, dout = sample()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = BlockSparseAttention(pattern, kernel=kernel.name, deterministic=False)(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    kept = torch.stack([torch.from_numpy(block_kinds(rule, LENGTH, 128) != 0) for rule in pattern.rules(4)]).cuda()
    wanted = reference.attention(q, k, v, dout, as_tokens(kept), 128**-0.5)
    for part, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), (wanted[0], *wanted[2:]), strict=True):
        assert ((got.double() - want).norm() / want.norm()).item() < 6e-3, part


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_packed_documents_of_a_trained_length_agree_in_one_sequence_after_another(kernel):
    """Far more blocks than a self-test has; the second sequence's tables have the shapes of the first one's."""
    usable(kernel, 64)
    for starts in ((0, 9216, 20608), (0, 4992, 31872)):
        for name, difference in differences(kernel.name, BigBird(3, 1, 0, unit_tokens=512), 32768, starts).items():
            assert difference < 2e-2, (starts, name, difference)


def differences(
    kernel: str, rule: Rule, length: int, starts: tuple[int, ...], device: str = "cuda", dtype: Any = torch.bfloat16
) -> dict[str, float]:
    """Relative, of out, dq, dk and dv to a masked softmax in fp32, for packed documents in two heads of 64."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, dout = (torch.randn(1, length, 2, 64, generator=generator).to(device, dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = RingOptions(kernel=kernel, deterministic=False)
    layout, patterns = make_layout("contiguous", length, 1), LayerPatterns((LayerGroup((rule,)),))
    out = PatternedAttention(patterns, layout, 0, None, options, document_starts=starts)(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    wanted = [torch.zeros_like(x, dtype=torch.float32) for x in found]
    for first, last in pairwise((*starts, length)):
        for row in range(first, last, 1024):
            end = min(row + 1024, last)
            exact = [x.float().requires_grad_() for x in (q[:, row:end], k[:, first:end], v[:, first:end])]
            rows, keys = np.arange(row, end)[:, None] - first, np.arange(end - first)[None, :]
            seen = torch.from_numpy(rule.sees(rows, keys) & (keys <= rows)).to(device)
            scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], exact[1]) / 8
            part = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), exact[2])
            wanted[0][:, row:end] = part.detach()
            dq, dk, dv = torch.autograd.grad(part, exact, dout[:, row:end].float())
            wanted[1][:, row:end] = dq
            wanted[2][:, first:end] += dk
            wanted[3][:, first:end] += dv
    pairs = zip(("out", "dq", "dk", "dv"), found, wanted, strict=True)
    return {name: float((got.detach().float() - want).norm() / want.norm()) for name, got, want in pairs}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_content_keeps_the_own_block_and_at_most_top_k_and_trains(kernel):
    usable(kernel)
    q, k, v, dout = sample()
    kept = choose_on_device(q, k, 4) | torch.eye(LENGTH // 128, dtype=torch.bool, device="cuda")
    counts = kept.sum(-1)[0].tolist()
    assert counts == [min(4, row + 1) for row in range(LENGTH // 128)]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = BlockSparseAttention(top_k=4, kernel=kernel.name, deterministic=False)(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = reference.attention(q, k, v, dout, as_tokens(kept), 128**-0.5)
    for got, want in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        assert ((got.double() - want).norm() / want.norm()).item() < 6e-3


def test_a_kernel_without_a_deterministic_backward_is_refused_by_name():
    with pytest.raises(ValueError, match="'flash-attn-4-sparse' has no deterministic sparse backward"):
        select("cuda", torch.bfloat16, 128, True, "flash-attn-4-sparse", cover="tables")
    assert select("cuda", torch.bfloat16, 128, True, cover="tables").name == "flex-sparse"


def test_blocks_in_part_are_refused_with_a_way_out():
    q, k, v, _ = sample()
    with pytest.raises(ValueError, match=r"window:200: keeps blocks of 128 tokens in part"):
        BlockSparseAttention(SparsePattern((Window(200),)))(q, k, v)


def sample() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, LENGTH, heads, 128) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
