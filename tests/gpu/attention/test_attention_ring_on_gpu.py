"""The CPU ring's promises, kept on a GPU: exactness against fp64, bytes by hop, repeatable bits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from elastic_ring.attention.kernels.registry import covering, select
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.attention.layouts.layout import contiguous, make_layout, zigzag
from elastic_ring.attention.merge import eager_add_, eager_merge_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from tests.gpu.gpu_rings import run_latents_on, run_on_gpu
from tests.unit.attention.attention_rings import Case, relative_error, whole_attention
from tests.unit.attention.test_attention_bytes import check_bytes

CASES = [
    Case(cp=cp, seq_len=4096, num_heads=heads, num_kv_heads=kv, head_dim=dim, batch=batch, dtype=torch.bfloat16)
    for (cp, batch), (heads, kv), dim in itertools.product([(2, 1), (4, 2)], [(8, 8), (8, 2)], [64, 128])
] + [
    Case(cp=4, seq_len=4096, num_heads=10, num_kv_heads=2, head_dim=128, batch=1, dtype=torch.bfloat16),
    Case(cp=4, seq_len=1531, document_starts=(0, 40, 700), head_dim=128, dtype=torch.bfloat16),
    Case(cp=3, seq_len=1024, causal=False, head_dim=64, dtype=torch.float16),
    Case(cp=4, seq_len=1024, layout_name="contiguous", head_dim=64, batch=1, dtype=torch.bfloat16),
]


def _name(case: Case) -> str:
    return f"cp{case.cp}-b{case.batch}-{case.num_heads}:{case.num_kv_heads}-d{case.head_dim}"


@pytest.mark.parametrize("hops_per_stage", [None, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_half_precision_error_is_at_most_a_quarter_above_that_of_the_single_kernel(case, hops_per_stage):
    ring = run_on_gpu(case, hops_per_stage=hops_per_stage, deterministic=False)
    single = run_on_gpu(dataclasses.replace(case, cp=1), deterministic=False)
    want = whole_attention(case, [tensor.cuda() for tensor in case.tensors()])
    ratios = [
        relative_error(ours, exact.cpu()) / relative_error(alone, exact.cpu())
        for ours, alone, exact in zip(ring.tensors, single.tensors, want, strict=True)
    ]
    # The bound is bf16's; half of fp16's error is the rounding of the result, which a sum of parts has twice.
    assert max(ratios) <= (1.25 if case.dtype == torch.bfloat16 else 1.3), ratios


@pytest.mark.parametrize("case", [CASES[6], CASES[-3]], ids=["gqa", "documents"])
@pytest.mark.parametrize("hops_per_stage", [None, 1])
def test_moved_bytes_equal_the_schedules_hop_by_hop(case, hops_per_stage):
    outcome = run_on_gpu(case, hops_per_stage=hops_per_stage)
    check_bytes(case, outcome.ledgers, partial_itemsize=case.dtype.itemsize)


@pytest.mark.parametrize("case", [CASES[5], CASES[7], CASES[-3]], ids=["mha", "gqa", "documents"])
def test_deterministic_calls_repeat_every_bit(case):
    first = run_on_gpu(case, deterministic=True)
    for _ in range(3):
        again = run_on_gpu(case, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first.tensors, again.tensors, strict=True))


@pytest.mark.parametrize("backend", [b for b in covering("causal") if "cuda" in b.devices], ids=lambda b: b.name)
@pytest.mark.parametrize("head_ratio", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_installed_backend_passes_its_self_test(backend, head_ratio, head_dim):
    refusal = backend.refusal("cuda", torch.bfloat16, head_dim, False)
    if refusal is not None:
        pytest.skip(refusal)
    assert self_test(backend, device="cuda", dtype=torch.bfloat16, head_dim=head_dim, head_ratio=head_ratio) is None


@pytest.mark.parametrize("head_ratio", [1, 4])
def test_a_deterministic_backend_is_found(head_ratio):
    assert select("cuda", torch.bfloat16, 128, True, head_ratio=head_ratio).deterministic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_merge_is_its_eager_twin(dtype):
    from elastic_ring.attention import fused_merge

    torch.manual_seed(0)
    out, part = (torch.randn(2, 301, 5, 128, device="cuda").to(dtype) for _ in range(2))
    lse, part_lse = (3 * torch.randn(2, 5, 301, device="cuda").transpose(1, 2) for _ in range(2))
    lse[0, :7], part_lse[0, 3:11] = -torch.inf, -torch.inf
    twin = out.clone(), lse.clone()
    fused_merge.merge_all_(out[:, 3:], lse[:, 3:], [(part[:, 3:], part_lse[:, 3:])])
    eager_merge_(twin[0][:, 3:], twin[1][:, 3:], part[:, 3:], part_lse[:, 3:])
    torch.testing.assert_close(lse, twin[1], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out, twin[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_fused_add_is_its_eager_twin_bit_for_bit(dtype, num_parts):
    from elastic_ring.attention import fused_merge

    torch.manual_seed(0)
    total = torch.randn(2, 300, 3, 64, device="cuda").to(dtype)
    parts = [torch.randn(2, 300, 3, 64, device="cuda").bfloat16() for _ in range(num_parts)]
    twin = total.clone()
    fused_merge.add_(total[:, 10:], [part[:, 10:] for part in parts])
    eager_add_(twin[:, 10:], [part[:, 10:] for part in parts])
    assert torch.equal(total, twin)


SEQ_LEN = 96


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_one_rank_of_attention_is_the_same_on_gpu_and_cpu(num_kv_heads, causal):
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


# --------------------------------------------------------------------------------------------- hops that carry latents


HEADS, ROTATED, VALUE, RANK = 8, 64, 128, 512


@pytest.mark.parametrize(("sparse", "key"), [(False, 128), (True, 64)], ids=["dense", "blocks"])
def test_a_ring_on_latents_is_as_exact_as_a_ring_of_one_and_repeats(sparse, key):
    torch.manual_seed(0)
    shapes = [(1, 2048, HEADS, key + ROTATED), (1, 2048, 1, RANK + ROTATED), (HEADS * (key + VALUE), RANK)]
    values = [torch.randn(shape) * scale for shape, scale in zip([*shapes, shapes[0]], (1, 1, 0.05, 1), strict=True)]
    values[3][..., VALUE:] = 0  # of values' padding
    tensors = [x.bfloat16() for x in values]
    kernel = select(torch.device("cuda"), torch.bfloat16, key + ROTATED, True, cover="tables") if sparse else None

    def run(cp: int) -> tuple[list[torch.Tensor], int]:
        layout = zigzag(2048, cp) if cp > 1 else contiguous(2048, 1)
        pattern = SparsePattern((BigBird(3, 1, 0),), 128)
        schedule = plan_sparse(pattern, layout, HEADS, 1) if sparse else plan(Pattern(), layout)
        found, ledgers = run_latents_on("cuda", schedule, tensors, kernel=kernel)
        received = sum(size for (way, _), size in ledgers[0].received_bytes.items() if way == "forward")
        assert received == schedule.received_bytes(0, (RANK + ROTATED) // 2, 2, kv_heads=1)
        return found, received

    alone, _ = run(1)
    (found, received), (again, _) = run(4), run(4)
    assert received > 0
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    assert all(relative_error(got, want) < 0.02 for got, want in zip(found, alone, strict=True))
